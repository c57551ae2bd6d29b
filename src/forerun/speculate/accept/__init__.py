"""Acceptance rules. Importing this package fills the registry."""

from forerun.speculate.accept import block, coupled, lenient, recursive, token, traversal
from forerun.speculate.accept.base import RatioRule, Rule, RuleConfig, rules

__all__ = [
    "RatioRule",
    "Rule",
    "RuleConfig",
    "block",
    "coupled",
    "lenient",
    "recursive",
    "rules",
    "token",
    "traversal",
]
