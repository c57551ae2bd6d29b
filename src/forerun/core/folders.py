"""Where Forerun keeps what it can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``FORERUN_CACHE``, or ``forerun`` in the user's cache folder. Raises RuntimeError where the user has no home."""
    named = os.environ.get("FORERUN_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"
