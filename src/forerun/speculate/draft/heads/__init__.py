"""Drafters that are trained on a target's hidden states."""

from forerun.speculate.draft.heads import dflash, eagle, mtp

__all__ = ["dflash", "eagle", "mtp"]
