"""Drafters. Importing this package fills the registry."""

from forerun.speculate.draft import (
    cascade,
    heads,
    layerskip,
    merged,
    model,
    ngram,
    pattern,
    prompt_lookup,
    random,
    staged,
    suffix,
    table,
    token_recycling,
)
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs, drafters

__all__ = [
    "DraftContext",
    "Drafter",
    "DrafterConfig",
    "Needs",
    "cascade",
    "drafters",
    "heads",
    "layerskip",
    "merged",
    "model",
    "ngram",
    "pattern",
    "prompt_lookup",
    "random",
    "staged",
    "suffix",
    "table",
    "token_recycling",
]
