"""Drafters. Importing this package fills the registry."""

from forerun.speculate.draft import heads, model, nested, ngram, pattern, suffix  # noqa: F401
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs, drafters

__all__ = ["DraftContext", "Drafter", "DrafterConfig", "Needs", "drafters"]
