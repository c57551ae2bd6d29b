"""A checkpoint's weights out of its safetensors files, which are mapped: nothing is read before it is asked for, and
what has been used is let go of."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.core.errors import ModelError
from forerun.models import checkpoint, sanity
from forerun.models.architectures.shapes import Shape, shapes, unread
from forerun.models.architectures.spec import bind
from forerun.models.checkpoint import DTYPES, Tensor
from forerun.models.formats.base import Rows
from forerun.models.formats.gguf_blocks import Blocks
from forerun.models.formats.int8 import Levels
from forerun.models.latent import HeadPart
from forerun.models.prequantized import Grouped, gather
from forerun.models.weights import Read, by_heads, unstacked

log = logging.getLogger("forerun")
BASE = "model."
"""What the names of a decoder's tensors begin with, but in a checkpoint that was saved without an output layer."""
PREDICTING = "mtp."
"""As those of layers for multi-token prediction."""


class Files:
    """Safetensors files, mapped while a tensor of theirs is held. A file is never written to."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, at: Tensor) -> torch.Tensor:
        """A view; raises ModelError for a file that cannot be read."""
        if not at.numel:
            return torch.empty(at.shape, dtype=at.dtype)
        if at.file not in self._maps:
            try:
                with at.file.open("rb") as file:
                    self._maps[at.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise ModelError(f"{at.file} cannot be read: {error.strerror}") from error
        result = torch.frombuffer(self._maps[at.file], dtype=at.dtype, count=at.numel, offset=at.start)
        return result.view(at.shape)

    def release(self) -> None:
        """Give the pages back that were read; they are read again where they are asked for again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)


class CheckpointWeights:
    """The weights of a folder for a decoder of ``config``, which a description covers.

    Raises ModelError for a tensor that is missing, has another shape or no floating-point numbers, or belongs to a part
    that the config leaves out.
    """

    def __init__(self, folder: Path, config: Any, *, numbers: bool = False) -> None:
        self.numbers = numbers  # as which all of them are to be had
        scheme = getattr(config, "quantization_config", None)
        headers = checkpoint.read_headers(checkpoint.weight_files(folder), packed=scheme is not None)
        sanity.check_fit(config, headers, folder / checkpoint.CONFIG)
        self.files = Files()
        spec = bind(config)
        within, beside = spec.architecture.within, spec.architecture.beside
        known = {
            _full(name, within): tensor
            for name, tensor in headers.items()
            if tensor.kind in DTYPES and not name.startswith(beside)
        }
        if any(name.startswith(beside) and not name.startswith(PREDICTING) for name in headers):
            log.info("%s also reads pictures: that part is left out", folder)
        self.read = Read()
        self.opened: list[Grouped] = []
        """Those that hold what they have unpacked, since the last release."""
        views = {name: self.files.tensor(tensor) for name, tensor in known.items()}
        views = unstacked(views, spec)
        self.found: dict[str, Rows] = {**views} if scheme is None else gather(views, scheme, str(folder))
        by_heads(self.found, spec, folder)
        self.nbytes = sum(part.nbytes for part in self.found.values())
        _check(folder, self.found, shapes(config), config)

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def values(self, name: str) -> Rows:
        result = self.found[name]
        self.read.add(name, result.nbytes)
        held = result.weight if isinstance(result, HeadPart) else result
        if isinstance(held, Grouped):
            self.opened.append(held)
        return result

    def blocks(self, name: str) -> Blocks | Levels | None:
        result = self.values(name)
        if self.numbers:
            return None
        if isinstance(result, Blocks):
            return result
        return result.blocks() if isinstance(result, Grouped) else None

    def release(self) -> int:
        self.files.release()
        while self.opened:
            self.opened.pop().close()
        return self.read.done()


def _full(name: str, within: Iterable[str]) -> str:
    prefix = next((f"{each}." for each in within if name.startswith(f"{each}.")), "")
    name = name.removeprefix(prefix)
    return name if name.startswith((BASE, "lm_head.")) else f"{BASE}{name}"


def _check(folder: Path, result: Mapping[str, Rows], requested: Mapping[str, Shape], config: Any) -> None:
    for name in sorted(requested.keys() & result.keys()):
        if (tuple(result[name].shape) or (1,)) != requested[name]:  # one number may be of no dimension
            shapes = [*result[name].shape], [*requested[name]]
            raise ModelError(f"{folder}: {name} has shape {shapes[0]}; its config asks for {shapes[1]}")
        if not result[name].dtype.is_floating_point:
            raise ModelError(f"{folder}: {name} holds {result[name].dtype} numbers")
    missing = sorted(requested.keys() - result.keys())
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} weights, {missing[0]} among them")
    extra = sanity.misplaced(result.keys() - requested.keys() - unread(config), requested, config)
    if extra:
        raise ModelError(f"{folder} has {len(extra)} weights that its config leaves out, {extra[0]} among them")
