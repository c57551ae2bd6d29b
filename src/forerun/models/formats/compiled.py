"""What linear layers on kernels of our own share: room for weights, calls, and layers of several parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence

import torch

from forerun import kernels
from forerun.kernels import structs
from forerun.models.formats.base import Rows

BLOCK, PAGE, LINE = 1 << 26, 1 << 21, 1 << 6
"""Bytes: of address space that layers share, of a large page, of a cache line."""


class Arena:
    """Room for weights, layer after layer in the order of their making, which is that of their use: in large pages
    however small the layers, and what the kernels ask for beyond the end of one begins the next."""

    def __init__(self) -> None:
        self.left = torch.empty(0, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > len(self.left):
            with torch.inference_mode(False):  # layers are made inside and outside of it
                block = torch.empty(max(BLOCK, nbytes) + PAGE, dtype=torch.uint8)
            self.left = block[-block.data_ptr() % PAGE :]
            result = kernels.library()
            if result is not None:
                result.advise(self.left.data_ptr(), len(self.left))
        taken, self.left = self.left[:nbytes], self.left[-(-nbytes // LINE) * LINE :]
        return taken


arena = Arena()


def kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """Raises TypeError where there is no such kernel."""
    full = f"{name}_{kernels.dtype_name(dtype)}"
    if not kernels.has(full):
        raise TypeError(f"no kernel {full} here")
    call: Callable[..., None] = getattr(kernels.library(), full)
    return call


def check_weight(weight: Rows) -> None:
    """Raise ValueError for weights that the kernels would misread."""
    if len(weight.shape) != 2 or not weight.shape.numel() or weight.device.type != "cpu":
        raise ValueError(f"weights {[*weight.shape]} on {weight.device} where some [outputs, inputs] on cpu are needed")


def wide_bias(bias: torch.Tensor | None, outputs: int) -> torch.Tensor | None:
    """In float32. Raises ValueError for a bias that the kernels would misread."""
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"a bias {[*bias.shape]} for {outputs} outputs")
    return None if bias is None else bias.float().contiguous()


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Compiled(ABC):
    """A layer that kernels of ours run; a ``Linear``."""

    __slots__ = ("bias", "dtype", "inputs", "kind", "nbytes", "number", "outputs", "pointers", "tiles")

    exact = True
    inputs: int
    outputs: int
    kind: str
    nbytes: int
    dtype: torch.dtype | None
    """That of its rows; None: any."""
    number: int
    """Of its kind in ``structs.KINDS``."""
    pointers: tuple[int, int | None, int, int]
    """To weights, bias, scales and offsets, which the layer holds."""

    @abstractmethod
    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        """Rows of x into those at the address ``y``, ``stride`` numbers apart, as those to ``add`` to them. Raises
        TypeError for a dtype without a kernel."""

    def fields(self) -> structs.LinearStruct:
        """What a compiled decoder reads; the layer must outlive it."""
        weight, bias, scales, offsets = self.pointers
        return structs.LinearStruct(self.number, weight, bias or 0, scales, offsets, self.outputs, self.inputs, 0)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weights [ids, inputs], exact in float32. Raises KernelError for ids out of range, and for weights
        in 8 bits."""
        ids = ids.reshape(-1).to(torch.int64).contiguous()
        result, at = torch.empty(len(ids), self.inputs, dtype=dtype), self.pointers[0]
        kernel("take_rows", dtype)(
            self.number, at, ids.data_ptr(), result.data_ptr(), len(ids), self.outputs, self.inputs
        )
        return result

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        x, y, added, rows = self._prepare(x, add)
        self.run(x, y.data_ptr(), added, rows, self.outputs)
        return y

    def _prepare(self, x: torch.Tensor, add: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, int | None, int]:
        """x contiguous, room for y, where ``add`` lies, and the number of rows. Raises ValueError for what the kernels
        would misread."""
        shape = x.shape
        if not shape or shape[-1] != self.inputs:
            raise ValueError(f"rows of {shape[-1] if shape else 0} numbers for a layer with {self.inputs} inputs")
        if not x.is_cpu:
            raise ValueError(f"rows on {x.device} for a layer on cpu")
        if not x.is_contiguous():
            x = x.contiguous()
        if len(shape) == 2:
            y, rows = x.new_empty(shape[0], self.outputs), shape[0]
        else:
            y, rows = x.new_empty(*shape[:-1], self.outputs), x.numel() // self.inputs
        if add is None:
            return x, y, None, rows
        if add.shape != y.shape or add.dtype is not y.dtype or not add.is_cpu or not add.is_contiguous():
            raise ValueError(f"cannot add {add.dtype} {[*add.shape]} on {add.device} to {y.dtype} {[*y.shape]}")
        return x, y, add.data_ptr(), rows


class Joined(Compiled):
    """Several layers over the same inputs, one's outputs behind the other's: their weights have different forms."""

    __slots__ = ("later", "parts")

    def __init__(self, parts: Sequence[Compiled]) -> None:
        self.parts = tuple(parts)
        self.inputs = parts[0].inputs
        if len(parts) < 2 or any(isinstance(part, Joined) or part.inputs != self.inputs for part in parts):
            raise ValueError("layers to join must be several, simple, and have the same inputs")
        self.outputs = sum(part.outputs for part in parts)
        self.kind = " and ".join(dict.fromkeys(part.kind for part in parts))
        self.nbytes = sum(part.nbytes for part in parts)
        dtypes = {part.dtype for part in parts} - {None}
        if len(dtypes) > 1:
            raise ValueError(f"layers to join have rows of {' and '.join(map(str, dtypes))}")
        self.dtype = next(iter(dtypes), None)
        self.later: list[array[int]] = []
        """What the first part's fields lead to: the last one's come first."""
        for part in reversed(self.parts[1:]):
            self.later.append(array("q", part.fields()._replace(next=self._next())))

    def _next(self) -> int:
        return self.later[-1].buffer_info()[0] if self.later else 0

    def fields(self) -> structs.LinearStruct:
        return self.parts[0].fields()._replace(next=self._next())

    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        behind = 0
        for part in self.parts:
            part.run(x, y + behind, None if add is None else add + behind, rows, stride)
            behind += part.outputs * x.element_size()
