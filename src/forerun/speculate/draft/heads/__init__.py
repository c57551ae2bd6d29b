"""Drafters that are trained on a target's hidden states."""

from forerun.speculate.draft.heads import blockwise, dflash, eagle, lookahead, medusa, mtp, parallel

__all__ = ["blockwise", "dflash", "eagle", "lookahead", "medusa", "mtp", "parallel"]
