"""Finds the row counts at which torch gives a row the same bits.

Our own kernels add up every row in one order. torch's order depends on the shapes of a call, so calls get one of a few
row counts (``core/tiles.py``); this module finds those that agree. One layer of each kind runs on one row, repeated.
Each of its matrix products also runs on pairs of numbers that cancel, other pairs in each column: what is left shows
the order of the additions, even where results are rounded to 16 bits.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forerun import kernels
from forerun.attention.base import Attention, Backend, Metadata, Query
from forerun.attention.kernel import can_attend
from forerun.cache.states import States
from forerun.core import tiles
from forerun.core.batch import Batch, Output, Span
from forerun.core.inference import inference
from forerun.models.formats.base import Linear
from forerun.models.formats.plain import pack
from forerun.models.run import activations
from forerun.models.run.base import ModelInfo, Tiles, pad_rows
from forerun.models.run.parts import KernelNorm

MAX_WORK, ALWAYS_UP_TO = 25e9, 16
"""Multiplications that comparing a layer may cost; row counts up to the second number are always compared."""
POSITION, ROWS, DISTINCT = 3, 8, 512
NUMBER = 0.7310586
"""What the probes' matrices are multiplied by."""
PRODUCTS = {
    "mm": (0, 1, -2, None), "addmm": (1, 2, -2, 0), "bmm": (0, 1, -2, None), "baddbmm": (1, 2, -2, 0),
    "linear": (0, 1, -1, 2), "_linear_pointwise": (0, 1, -1, 2),
}  # fmt: skip
"""Matrix products: the indices of both factors in the arguments, the second one's dimension that is summed, and the
index of what is added to the result, such as a bias."""
DATA_DEPENDENT = ("_grouped_mm", "_scaled_grouped_mm", "nonzero", "masked_select", "unique", "_unique2", "bincount")
"""Operations whose shapes depend on values: no row count fixes their bits."""
UNSTEADY = activations.UNSTEADY.union(DATA_DEPENDENT)


class TiledModel(ABC):
    """A model whose layers torch computes. To be invariant, its calls have one of a few row counts."""

    info: ModelInfo
    tiles: Tiles | None = None
    routes = False
    """Whether each row is routed to experts by itself, in calls of these row counts."""

    @property
    def row_multiple(self) -> int:
        return 1 if self.tiles is None else self.tiles.rows[0]

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows padded to a call's row count."""
        return rows if self.tiles is None else pad_rows(rows, tiles.call_size(rows.shape[0], self.tiles.rows))

    def pad_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the output layer, padded likewise."""
        return rows if self.tiles is None else pad_rows(rows, tiles.call_size(rows.shape[0], self.tiles.logits))

    @inference
    def forward(self, batch: Batch, attention: Attention) -> Output:
        """``feed`` in pieces that fit; row counts are found again when the number of threads changes."""
        with kernels.all_torch_threads():
            if self.tiles is None:
                return self.feed(batch, attention)
            if self.tiles.threads != torch.get_num_threads():
                self.tiles = self.find()
            return self.tiles.forward(self.feed, batch, attention)

    def find(self) -> Tiles:
        """The row counts to use at the present number of threads. They are (1,), each row alone, where the work depends
        on values (transformers' mixtures of experts)."""
        rows, logits = (
            tiles.measured_once(_key(self, head), partial(_compare, self, head), tiles.as_groups)
            for head in (False, True)
        )
        return Tiles(tiles.best_group(rows), tiles.best_group(logits), torch.get_num_threads())

    @abstractmethod
    def feed(self, batch: Batch, attention: Attention) -> Output:
        """One forward of as many rows as ``tiles`` allow, padded to the row count that fits."""

    @abstractmethod
    def kinds(self) -> list[tuple[int, ...] | None]:
        """Layers to compare, one of each kind; [None] if layers cannot be run alone."""

    @abstractmethod
    def signature(self) -> str:
        """A text that changes with whatever shapes the computation: architecture, sizes, layouts."""


def steady() -> bool:
    """Whether the functions that activations are made of round alike at every index of a call."""
    every = list(tiles.SIZES)
    result = tiles.measured_once(
        "functions of activations", lambda: [every if activations.steady() else [1]], tiles.as_groups
    )
    return result == [every]


def ordered(info: ModelInfo, linears: Iterable[Linear], norms: Iterable[object]) -> bool:
    """Whether our kernels do all additions of a model."""
    return (
        can_attend(info.dtype, info.device, info.kv_shapes)
        and all(linear.exact for linear in linears)
        and all(isinstance(norm, KernelNorm) for norm in norms)
    )


class RowRecorder(Backend[Metadata]):
    """A stand-in for attention: each row's output is its own value, plus its query and key."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.empty: States | None = None

    @property
    def states(self) -> States | None:
        return self.empty

    def begin(self, batch: Batch) -> Metadata:
        """Gives every sequence an empty state."""
        if self.info.state_shapes:
            self.empty = States(self.info.state_shapes, len(batch.spans), 1, self.info.dtype, batch.device)
            for span in batch.spans:
                self.empty.allocate(span.key)
                self.empty.lengths[span.key] = span.start
        return Metadata(batch)

    def finish(self, metadata: Metadata) -> None:
        pass

    def run(self, query: Query, metadata: Metadata) -> torch.Tensor:
        groups = query.q.shape[1] // query.k.shape[1]
        out = query.v.repeat_interleave(groups, 1)
        width = out.shape[2]
        for part in (query.q, query.k.repeat_interleave(groups, 1)):
            for piece in part.split(width, 2):
                out[..., : piece.shape[2]] += piece
        return out.flatten(1)


class Products(TorchDispatchMode):
    """Records which operations run. With ``matrices``, also computes each matrix product of numbers that cancel, with
    nothing added, and keeps the second factors there."""

    def __init__(self, matrices: dict[Any, list[torch.Tensor]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.matrices = matrices
        self.calls: list[str] = []
        self.work = 0
        """Multiplications per row."""
        self.results: list[torch.Tensor] = []
        """The probes' results [rows, numbers], once for each shape and layout of a product."""
        self._probed: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        shapes = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in args]
        self.calls.append(f"{name} {shapes}")
        if name in PRODUCTS:
            left, right, inner, added = PRODUCTS[name]
            self.work += args[right].numel()
            key = self.calls[-1], _layout(args[left]), _layout(args[right])
            if self.matrices is not None and args[left].shape[-1] > 1 and key not in self._probed:
                self._probed.add(key)
                probe = list(args)
                probe[left] = _empty_like(args[left]).fill_(NUMBER)
                if added is not None and len(args) > added and isinstance(args[added], torch.Tensor):
                    probe[added] = torch.zeros_like(args[added])
                for matrix in self._matrices(args[right], inner):
                    probe[right] = matrix
                    self.results.append(func(*probe, **(kwargs or {})).float().flatten(0, -2))
        return out

    def _matrices(self, like: torch.Tensor, inner: int) -> list[torch.Tensor]:
        """So many that ``DISTINCT`` columns differ."""
        assert self.matrices is not None
        key = like.shape, inner, _layout(like)
        if key not in self.matrices:
            count = -(-DISTINCT // like.shape[-3 - inner])
            self.matrices[key] = [_cancelling(like, inner, seed) for seed in range(count)]
        return self.matrices[key]


def _layout(tensor: torch.Tensor) -> object:
    return tensor.dtype, None if tensor.is_mkldnn else tensor.stride()


def _cancelling(like: torch.Tensor, inner: int, seed: int) -> torch.Tensor:
    """A matrix of the shape and layout of ``like``. Along ``inner``, every column has half of its numbers twice, once
    negated, at places of its own."""
    length, others = like.shape[inner], like.shape[-3 - inner]
    generator, columns = torch.Generator().manual_seed(seed), min(others, DISTINCT)
    half = torch.randn(length // 2, columns, generator=generator).to(like.dtype)
    flat = torch.cat([half, -half, torch.zeros_like(half[: length % 2])])
    flat = flat.gather(0, torch.rand(flat.shape, generator=generator).argsort(0))
    flat = flat.repeat(1, -(-others // DISTINCT))[:, :others]
    flat = flat.T if inner == -1 else flat
    if like.is_mkldnn:
        return pack(flat.contiguous())
    return _empty_like(like).copy_(flat)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@contextmanager
def _sizes(model: TiledModel, size: int) -> Iterator[None]:
    before, model.tiles = model.tiles, Tiles((size,), (size,), torch.get_num_threads())
    try:
        yield
    finally:
        model.tiles = before


def _feed(model: TiledModel, tokens: list[int], layers: tuple[int, ...] | None, *, head: bool = False) -> torch.Tensor:
    """What the layers make of one-token sequences, in one call."""
    position = min(POSITION, model.info.max_len - 1)
    spans = [Span(row, position, [token], logits=[0] if head else []) for row, token in enumerate(tokens)]
    batch = Batch(spans, model.info.device, layers=layers, hidden=() if head else (model.info.num_layers,))
    output = model.feed(batch, RowRecorder(model.info))
    hidden = [states.float() for states in output.hidden.values()]
    return torch.cat([output.logits, *hidden], 1) if output.logits.shape[0] else torch.cat(hidden, 1)


@torch.inference_mode()
def _key(model: TiledModel, head: bool) -> str:
    """A text that changes with all that ``_compare`` depends on: shapes, layouts, and the weights' values, by what the
    compared layers make of one row."""
    with _sizes(model, 1), Products() as products:
        made = [_feed(model, [_token(model)], layers, head=head) for layers in _kinds(model, head)]
    values = hashlib.sha256(torch.cat(made, 1).cpu().numpy().tobytes()).hexdigest()
    return f"{'logits' if head else 'rows'} {model.signature()} {products.calls} {values}"


def _kinds(model: TiledModel, head: bool) -> list[tuple[int, ...] | None]:
    return model.kinds()[:1] if head else model.kinds()


def _token(model: TiledModel) -> int:
    return 17 % model.info.vocab_size


@torch.inference_mode()
def _compare(model: TiledModel, head: bool) -> tiles.Groups:
    groups: tiles.Groups = [list(tiles.SIZES) if steady() else [1]]
    for layers in _kinds(model, head):
        if _depends_on_values(model, layers):
            return [[1]]
        agree = tiles.compare(_affordable(model, layers, head=head), _run(model, layers, head))
        groups = tiles.intersect(groups, agree)
    return groups


def _run(model: TiledModel, layers: tuple[int, ...] | None, head: bool) -> Any:
    matrices: dict[Any, list[torch.Tensor]] = {}

    def run(size: int) -> torch.Tensor:
        with _sizes(model, size), Products(matrices) as products:
            made = _feed(model, [_token(model)] * size, layers, head=head)
        return torch.cat([made, *(rows for rows in products.results if rows.shape[0] == size)], 1)

    return run


def _affordable(model: TiledModel, layers: tuple[int, ...] | None, *, head: bool) -> list[int]:
    """The row counts that ``MAX_WORK`` allows to compare."""
    with _sizes(model, 1), Products() as products:
        _feed(model, [0], layers, head=head)
    sizes: list[int] = []
    for size in tiles.SIZES:
        if size <= ALWAYS_UP_TO or products.work * (sum(sizes) + size) <= MAX_WORK:
            sizes.append(size)
    return sizes


def _depends_on_values(model: TiledModel, layers: tuple[int, ...] | None) -> bool:
    """Whether a layer's work on a row depends on the values of others, or on where each is. A model that ``routes``
    chooses calls by the rows' experts, but the first row's result must not change."""
    generator = torch.Generator().manual_seed(0)
    calls, firsts = [], []
    with _sizes(model, 1):  # what is made in the first call is made here
        _feed(model, [0], layers)
    for _ in range(3):
        others = torch.randint(model.info.vocab_size, (ROWS - 1,), generator=generator).tolist()
        with _sizes(model, ROWS), Products() as products:
            firsts.append(_feed(model, [0, *others], layers)[0])
        calls.append(products.calls)
    refused = activations.UNSTEADY if model.routes else UNSTEADY
    unsteady = any(call.split(" ", 1)[0] in refused for call in calls[0])
    varying = not model.routes and any(each != calls[0] for each in calls)
    return unsteady or varying or not all(torch.equal(firsts[0], row) for row in firsts)
