"""Folders and files: where Forerun keeps what it can make or fetch again, and who may read what it writes."""

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


def let_read(path: Path) -> None:
    """Gives a file the mode of others that this process writes: safetensors shows its own to nobody else, and a server
    may run under another name."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
