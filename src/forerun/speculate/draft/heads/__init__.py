"""Drafters that are trained on a target's hidden states."""

from forerun.speculate.draft.heads import dflash, eagle, lookahead, medusa, mtp, parallel

__all__ = ["dflash", "eagle", "lookahead", "medusa", "mtp", "parallel"]
