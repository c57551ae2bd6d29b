"""Drafters that are trained on a target's hidden states."""

from forerun.speculate.draft.heads import block, dflash, eagle, medusa, mtp

__all__ = ["block", "dflash", "eagle", "medusa", "mtp"]
