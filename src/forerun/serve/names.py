"""What clients call the model, and whose pages may ask for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from forerun.core.errors import ConfigError
from forerun.models.gguf_model import SUFFIX

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.ASCII)


def names(model: str) -> tuple[str, ...]:
    """The names of a ``model`` that was given by a name or a path, the one that answers say first.

    A path goes by its last part, without the suffix of GGUF files; the path and the file's name are understood too,
    with and without that suffix. What is no path, such as a hub's id, keeps its name, and its last part is understood.
    """
    folder = Path(model).expanduser()
    local = model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(SUFFIX) or folder.is_dir()
    file = Path(os.path.abspath(folder)).name or model if local else model.rpartition("/")[2]
    usual = file.removesuffix(SUFFIX) if local else model
    return tuple(dict.fromkeys((usual, model, model.removesuffix(SUFFIX), file, file.removesuffix(SUFFIX))))


def allowed_origin(given: str) -> str:
    """An origin as browsers say it. Raises ConfigError for what is none."""
    origin = given.strip().rstrip("/").lower()
    if origin != "*" and not ORIGIN.fullmatch(origin):
        raise ConfigError(f"{given!r} is no origin: give one such as https://app.example.com, or * for any")
    return origin
