"""The bundled models: a Python-code target, its draft, and heads. They are plain files of this package."""

from pathlib import Path

from forerun.core.errors import ModelError


def names() -> list[str]:
    """Names of the bundled models, sorted."""
    return sorted(config.parent.name for config in Path(__file__).parent.glob("*/config.json"))


def common_tokens() -> list[Path]:
    """Tables of common tokens, a file for a tokenizer: ``tokens`` int32 [n], the commonest first."""
    return sorted(Path(__file__).parent.glob("common_tokens/*.safetensors"))


def path(name: str) -> Path:
    """Folder of a bundled model, which transformers can load."""
    if name not in names():
        raise ModelError(
            f"no bundled model is called {name!r}; there are: {', '.join(names()) or 'none'}; a checkpoint of your own "
            "is named by its folder ('model')"
        )
    return Path(__file__).parent / name
