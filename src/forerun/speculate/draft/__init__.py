"""Drafters. Importing this package fills the registry."""

from forerun.speculate.draft import model, ngram
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs, drafters

__all__ = ["DraftContext", "Drafter", "DrafterConfig", "Needs", "drafters", "model", "ngram"]
