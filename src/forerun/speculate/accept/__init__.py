"""Acceptance rules. Importing this package fills the registry."""

from forerun.speculate.accept import chains, trees
from forerun.speculate.accept.base import RatioRule, Rule, RuleConfig, rules

__all__ = ["RatioRule", "Rule", "RuleConfig", "chains", "rules", "trees"]
