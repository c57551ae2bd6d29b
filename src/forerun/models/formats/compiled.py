"""Linear layers that our own kernels run: memory for weights, the shared calls, and layers of several parts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from forerun import kernels
from forerun.kernels import structs
from forerun.models.formats.base import Rows

BLOCK, PAGE, LINE = 1 << 26, 1 << 21, 1 << 6
"""Bytes of an arena's block, a huge page, and a cache line."""


class Arena:
    """Memory for weights, layer after layer in the order in which they are used. Small layers share huge pages too, and
    what the kernels prefetch beyond the end of one layer is the next."""

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > len(self.free):
            with torch.inference_mode(False):  # layers are made inside and outside of it
                block = torch.empty(max(BLOCK, nbytes) + PAGE, dtype=torch.uint8)
            self.free = block[-block.data_ptr() % PAGE :]
            library = kernels.library()
            if library is not None:
                library.use_huge_pages(self.free.data_ptr(), len(self.free))
        result, self.free = self.free[:nbytes], self.free[-(-nbytes // LINE) * LINE :]
        return result


arena = Arena()


def check_weight(weight: Rows) -> None:
    """Raise ValueError for weights that the kernels would misread."""
    if len(weight.shape) != 2 or not weight.shape.numel() or weight.device.type != "cpu":
        raise ValueError(f"weights {[*weight.shape]} on {weight.device} where some [outputs, inputs] on cpu are needed")


def float_bias(bias: torch.Tensor | None, outputs: int) -> torch.Tensor | None:
    """A bias in float32. Raises ValueError for a shape that the kernels would misread."""
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"a bias {[*bias.shape]} for {outputs} outputs")
    return None if bias is None else bias.float().contiguous()


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Compiled:
    """A ``Linear`` that our kernels run."""

    exact = True
    inputs: int
    outputs: int
    kind: str
    nbytes: int
    tiles: torch.Tensor
    """Weights in the kernels' layout."""
    bias: torch.Tensor | None
    dtype: torch.dtype | None = None
    """Of activations; None: any."""
    number: int
    """Index of the weights' format in ``structs.KINDS``."""
    pointers: tuple[int, int | None, int, int]
    """Addresses of weights, bias, scales and offsets."""

    def _use(self, name: str, dtypes: Sequence[torch.dtype], form: str, *scales: torch.Tensor) -> None:
        """Choose the kernel for activations of ``dtypes``. ``scales`` are scales and offsets, if it has them."""
        if form in structs.QUANTS and not kernels.load(form):
            raise TypeError(f"no kernels for {form} here")
        self.number = structs.KINDS.index(form)
        weight, bias, more = self.tiles.data_ptr(), address(self.bias), [each.data_ptr() for each in scales]
        first, second = more or (0, 0)
        self.pointers = weight, bias, first, second
        self._name, self._dtypes = name, dtypes
        self._calls: dict[torch.dtype, Callable[..., None]] = {}
        self._before_x = (self.number, weight) if name == "linear_quants" else (weight,)
        self._after_add = (bias, *more)

    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        """Computes rows of x into memory at ``y``, rows ``stride`` numbers apart, and adds those at ``add``. Raises
        TypeError for a dtype without a kernel."""
        call = self._calls.get(x.dtype)
        if call is None:
            if x.dtype not in self._dtypes:
                raise TypeError(f"rows in {x.dtype} for weights in {self.kind}")
            call = self._calls[x.dtype] = kernels.kernel(self._name, x.dtype)
        call(*self._before_x, x.data_ptr(), y, add, *self._after_add, rows, self.outputs, self.inputs, stride,
             kernels.threads())  # fmt: skip

    def fields(self) -> structs.LinearStruct:
        """The struct that the compiled decoder reads. The layer must outlive it."""
        weight, bias, scales, offsets = self.pointers
        return structs.LinearStruct(
            kind=self.number, weight=weight, bias=bias or 0, scales=scales, offsets=offsets, outputs=self.outputs,
            inputs=self.inputs, next=0,
        )  # fmt: skip

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weights [ids, inputs], exact in float32. Raises KernelError for bad ids and weights in 8 bits."""
        ids = ids.reshape(-1).to(torch.int64).contiguous()
        result, take = torch.empty(len(ids), self.inputs, dtype=dtype), kernels.kernel("get_rows", dtype)
        take(self.number, self.pointers[0], ids.data_ptr(), result.data_ptr(), len(ids), self.outputs, self.inputs)
        return result

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        x, y, added, rows = self._prepare(x, add)
        self.run(x, y.data_ptr(), added, rows, self.outputs)
        return y

    def _prepare(self, x: torch.Tensor, add: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, int | None, int]:
        """Contiguous x, memory for y, the address of ``add``, and the number of rows. Raises ValueError for tensors
        that the kernels would misread."""
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
    """Several layers over the same inputs, their outputs concatenated: their weights have different formats."""

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
        self.next_fields: list[array[int]] = []
        """The linked structs after the first part's; the last part's come first."""
        for part in reversed(self.parts[1:]):
            self.next_fields.append(array("q", part.fields()._replace(next=self._next())))

    def _next(self) -> int:
        return self.next_fields[-1].buffer_info()[0] if self.next_fields else 0

    def fields(self) -> structs.LinearStruct:
        return self.parts[0].fields()._replace(next=self._next())

    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        offset = 0
        for part in self.parts:
            part.run(x, y + offset, None if add is None else add + offset, rows, stride)
            offset += part.outputs * x.element_size()
