"""A model's embedding: numbers, or the rows of a layer, which may be the output layer."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from forerun.kernels import structs
from forerun.models.formats.blocks import Blocked
from forerun.models.formats.tiled import TiledLinear


class Words(Protocol):
    """Ids int64 of any shape -> [..., width] in ``dtype``."""

    count: int
    """Tokens that have an embedding."""
    width: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    """Of memory that nothing else has a share in."""
    scale: float
    """What the numbers that ``fields`` tells of are multiplied by."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor: ...

    def fields(self) -> tuple[int, structs.LinearStruct] | None:
        """What a compiled decoder reads: the address of the numbers, or 0 and the layer; None: it cannot."""


class WordTable:
    """Numbers [tokens, width], which may be the output layer's (``shared``)."""

    scale = 1.0

    def __init__(self, numbers: torch.Tensor, *, shared: bool = False) -> None:
        self.numbers = numbers.contiguous()
        self.count, self.width = numbers.shape
        self.dtype, self.device, self.nbytes = numbers.dtype, numbers.device, 0 if shared else numbers.nbytes

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.numbers)

    def fields(self) -> tuple[int, structs.LinearStruct]:
        return self.numbers.data_ptr(), structs.NO_LAYER


class LayerRows:
    """The rows of a layer, which may be the output layer too (``shared``)."""

    scale = 1.0

    def __init__(self, layer: Blocked | TiledLinear, dtype: torch.dtype, *, shared: bool) -> None:
        self.layer = layer
        self.count, self.width, self.dtype = layer.outputs, layer.inputs, dtype
        self.device = torch.device("cpu")
        self.nbytes = 0 if shared else layer.nbytes

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer.rows(ids, self.dtype).view(*ids.shape, self.width)

    def fields(self) -> tuple[int, structs.LinearStruct]:
        return 0, self.layer.fields()


class ScaledWords:
    """Another embedding times ``scale``."""

    def __init__(self, words: Words, scale: float) -> None:
        self.words = words
        self.count, self.width = words.count, words.width
        self.dtype, self.device, self.nbytes = words.dtype, words.device, words.nbytes
        self.factor = torch.tensor(scale, dtype=torch.float32, device=words.device)
        self.scale = float(self.factor) * words.scale

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) * self.factor

    def fields(self) -> tuple[int, structs.LinearStruct] | None:
        return self.words.fields()
