"""Length policies."""

from forerun.speculate.length import adaptive
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting, policies

__all__ = ["LengthPolicy", "Seconds", "Setting", "adaptive", "policies"]
