"""A model's own sampling settings: ``generation_config.json``, or a GGUF file's ``general.sampling`` keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError, ModelError
from forerun.models.files import checkpoint, gguf
from forerun.sampling.params import SamplingParams

FILE = "generation_config.json"
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Fields of ``SamplingParams`` and the GGUF keys that set them. In JSON, a key is named as its field."""


def model_settings(path: Path) -> dict[str, Any]:
    """Fields of ``SamplingParams`` that the model in this folder or GGUF file sets, as vLLM takes them.

    Raises ModelError for a file that cannot be read, and for a value that is out of range.
    """
    if gguf.is_gguf(path):
        source, metadata = str(path), gguf.open_gguf(path).metadata
        given = {name: _shortest(metadata.get(key)) for name, key in GGUF_KEYS.items()}
    else:
        source = str(path / FILE)
        given = checkpoint.read_object(path / FILE) if (path / FILE).is_file() else {}
    result = {name: given[name] for name in GGUF_KEYS if given.get(name) is not None}
    try:
        SamplingParams(**result)
    except ConfigError as error:
        raise ModelError(f"{source} has unusable sampling settings: {error}") from None
    return result


def settings_line(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _shortest(value: Any) -> Any:
    """A float32 of the file as it was written, 0.6 instead of 0.6000000238418579."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
