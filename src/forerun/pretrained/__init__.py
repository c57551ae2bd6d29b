"""Bundled models: a Python-code target, its draft and a head, plain files of this package; forerun-lab adds heads."""

from functools import cache
from pathlib import Path

from forerun.core.errors import ModelError
from forerun.core.registry import from_lab, has_lab

LAB = "pretrained"
"""The part of forerun-lab that has models."""


@cache
def folders() -> dict[str, Path]:
    """The folders of the bundled models, by name. Looking for forerun-lab reads a file of every installed package."""
    homes = [Path(__file__).parent]
    if has_lab(LAB):
        homes.append(Path(from_lab(LAB, "a bundled head").__file__).parent)
    return {config.parent.name: config.parent for home in homes for config in sorted(home.glob("*/config.json"))}


def common_tokens() -> list[Path]:
    """Tables of common tokens, a file for a tokenizer: ``tokens`` int32 [n], the commonest first."""
    return sorted(Path(__file__).parent.glob("common_tokens/*.safetensors"))


def path(name: str) -> Path:
    """Folder of a bundled model, which transformers can load."""
    known = folders()
    if name not in known:
        more = "" if has_lab(LAB) else " (forerun-lab has more heads: pip install ./lab)"
        raise ModelError(
            f"no bundled model is called {name!r}; there are: {', '.join(known) or 'none'}{more}; a checkpoint of your "
            "own is named by its folder ('model')"
        )
    return known[name]
