"""Length policies."""

from forerun.speculate.length import fixed
from forerun.speculate.length.base import LengthPolicy, policies

__all__ = ["LengthPolicy", "fixed", "policies"]
