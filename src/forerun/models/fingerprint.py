"""Which weights a folder holds, without reading them all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from forerun.core.errors import ModelError
from forerun.models.checkpoint import ADAPTER
from forerun.models.gguf import parts_of
from forerun.models.lora import WEIGHTS, parse

PLACES = 64
BYTES = 4096


def files(folder: Path, lora: Sequence[str] | str | None = None) -> list[Path]:
    """What holds the weights. Raises ModelError if there are none."""
    result = parts_of(folder) if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not result:
        raise ModelError(f"{folder} has no safetensors weights")
    return result + [folder / name for folder, _ in parse(lora) for name in (ADAPTER, WEIGHTS)]


def fingerprint(folder: Path, lora: Sequence[str] | str | None = None) -> str:
    """A hash, 16 hexadecimal digits, of the sizes of a checkpoint's safetensors files, or of a GGUF file, and of
    ``PLACES`` spots of each; with LoRA adapters merged, of theirs and their weights too.

    Training changes every matrix, so it changes the fingerprint; so does another dtype. At most 256 KiB are read per
    file. Raises ModelError if the folder has no safetensors or they cannot be read.
    """
    digest = hashlib.sha256()
    paths, adapters = files(folder, lora), parse(lora)
    if adapters:
        digest.update(f"{[weight for _, weight in adapters]}\n".encode())
    try:
        for path in paths:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for index in range(PLACES):
                    file.seek(max(0, size - BYTES) * index // (PLACES - 1))
                    digest.update(file.read(BYTES))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]
