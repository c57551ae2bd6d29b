"""Acceptance rules."""

from forerun.speculate.accept import coupled, token
from forerun.speculate.accept.base import Decision, RatioRule, Rule, rules

__all__ = ["Decision", "RatioRule", "Rule", "coupled", "rules", "token"]
