"""``forerun tune`` without ``--draft``: forerun-lab trains heads, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forerun.core.errors import ForerunError
from forerun.core.registry import from_lab
from forerun.tune.config import TuneConfig


class Stopped(ForerunError):
    """A run was stopped on request, and its progress is saved."""


def tune(config: TuneConfig, say: Callable[[str], None] = lambda line: None) -> Path:
    """Train and select the fastest drafter of a model; returns the folder. Raises ConfigError without forerun-lab."""
    folder: Path = from_lab("tune", "tune without --draft").tune(config, say)
    return folder
