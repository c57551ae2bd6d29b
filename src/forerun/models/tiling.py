"""Which row counts give a row the same bits, for the parts of a model that torch computes.

Our own kernels add up every row in one order. torch's order depends on the shapes of a call, so calls get one of a few
row counts (``core/tiles.py``); this module finds those that agree. One layer of each kind is run on one row repeated,
and every matrix product in it once more on numbers that cancel, so that what is left shows the order of the additions
even where results are rounded to 16 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.attention.base import Attention, Backend, Metadata, Query
from forerun.attention.kernel import can_attend
from forerun.cache.states import States
from forerun.core import tiles
from forerun.core.batch import Batch, Output, Span
from forerun.core.inference import inference
from forerun.models import activations
from forerun.models.base import ModelInfo, Tiles, pad_rows
from forerun.models.formats.base import Linear
from forerun.models.formats.plain import pack
from forerun.models.parts import KernelNorm

WORK = 25e9
"""Multiplications, at most, that a layer's sizes may cost to compare, as long as there are ``FEWEST`` rows."""
FEWEST = 16
POSITION, ROWS, DISTINCT = 3, 8, 512
PRODUCTS = {
    "mm": (0, 1, -2), "addmm": (1, 2, -2), "bmm": (0, 1, -2), "baddbmm": (1, 2, -2),
    "linear": (0, 1, -1), "_linear_pointwise": (0, 1, -1),
}  # fmt: skip
"""Operations that multiply matrices: which arguments those are, and along which dimension of the second it sums."""
BY_CONTENT = ("_grouped_mm", "_scaled_grouped_mm", "nonzero", "masked_select", "unique", "_unique2", "bincount")
"""Operations whose work is shaped by values: no row count fixes it."""
UNFIXED = activations.UNSTEADY.union(BY_CONTENT)


class TiledModel(ABC):
    """A model whose layers torch computes, in calls of a few sizes where a row's bits are not to depend on others."""

    info: ModelInfo
    tiles: Tiles | None = None
    routes = False
    """Whether layers send each row by itself to experts, in calls of those sizes."""

    @property
    def row_multiple(self) -> int:
        return 1 if self.tiles is None else self.tiles.rows[0]

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows up to a call's size, where there are such."""
        return rows if self.tiles is None else pad_rows(rows, tiles.call_size(rows.shape[0], self.tiles.rows))

    def pad_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The same for those that the output layer reads."""
        return rows if self.tiles is None else pad_rows(rows, tiles.call_size(rows.shape[0], self.tiles.logits))

    @inference
    def forward(self, batch: Batch, attention: Attention) -> Output:
        """``feed`` in pieces that fit, at the present number of threads."""
        if self.tiles is None:
            return self.feed(batch, attention)
        if self.tiles.threads != torch.get_num_threads():
            self.tiles = self.find()
        return self.tiles.forward(self.feed, batch, attention)

    def find(self) -> Tiles:
        """The row counts to use at the present number of threads. Those of a model whose work depends on the values in
        its rows (mixtures of experts of transformers') are (1,): each row alone."""
        rows = tiles.measured_once(f"rows {self.signature()}", lambda: _compare(self, head=False), tiles.as_groups)
        logits = tiles.measured_once(f"logits {self.signature()}", lambda: _compare(self, head=True), tiles.as_groups)
        return Tiles(tiles.best_group(rows), tiles.best_group(logits), torch.get_num_threads())

    @abstractmethod
    def feed(self, batch: Batch, attention: Attention) -> Output:
        """One forward of as many rows as ``tiles`` allow, padded to the size that fits."""

    @abstractmethod
    def kinds(self) -> list[tuple[int, ...] | None]:
        """Layers that stand for all: one of each kind; [None] if they cannot be run alone."""

    @abstractmethod
    def signature(self) -> str:
        """All that shapes the computation: architecture, sizes, layouts."""


def steady() -> bool:
    """Whether the functions that activations are made of round alike at every place here."""
    every = list(tiles.SIZES)
    result = tiles.measured_once(
        "functions of activations", lambda: [every if activations.steady() else [1]], tiles.as_groups
    )
    return result == [every]


def ordered(info: ModelInfo, linears: Iterable[Linear], norms: Iterable[object]) -> bool:
    """Whether kernels of ours compute all of a model that has an order of additions."""
    return (
        can_attend(info.dtype, info.device, info.kv_shapes)
        and all(linear.exact for linear in linears)
        and all(isinstance(norm, KernelNorm) for norm in norms)
    )


class RowRecorder(Backend[Metadata]):
    """Stands in for attention: of each row its own values, with queries and keys added."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.blank: States | None = None

    @property
    def states(self) -> States | None:
        return self.blank

    def begin(self, batch: Batch) -> Metadata:
        """Every sequence's state is that of no tokens."""
        if self.info.state_shapes:
            count = len(batch.spans)
            self.blank = States(self.info.state_shapes, count, 1, self.info.dtype, batch.device)
            for span in batch.spans:
                self.blank.allocate(span.key)
                self.blank.lengths[span.key] = span.start
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
    """Notes which operations run, and with ``probe`` what each matrix product makes of numbers that cancel."""

    def __init__(self, *, probe: bool) -> None:
        super().__init__()
        self.probe = probe
        self.calls: list[str] = []
        self.work = 0
        """Numbers of all second operands: multiplications per row."""
        self.results: list[torch.Tensor] = []
        """[rows, numbers] of products whose first operand's rows are equal."""
        self._made: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        shapes = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in args]
        self.calls.append(f"{name} {shapes}")
        if name in PRODUCTS:
            left, right, inner = PRODUCTS[name]
            self.work += args[right].numel()
            if self.probe and args[left].shape[-1] > 1:
                twins = list(args)
                twins[left], twins[right] = self._rows(args[left]), self._matrix(args[right], inner)
                self.results.append(func(*twins, **(kwargs or {})).float().flatten(0, -2))
        return out

    def _rows(self, like: torch.Tensor) -> torch.Tensor:
        """One row repeated, the second half of its numbers being the first half again."""
        half = _numbers(like.shape[-1] // 2, 1, like.dtype)
        row = torch.cat([half, half, half[: like.shape[-1] % 2]])[:, 0]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(row)

    def _matrix(self, like: torch.Tensor, inner: int) -> torch.Tensor:
        """Of the shape and layout of ``like``, the second half along ``inner`` taking the first half back."""
        key = like.shape, inner, None if like.is_mkldnn else like.stride(), like.dtype
        if key not in self._made:
            length, others = like.shape[inner], like.shape[-3 - inner]
            half = _numbers(length // 2, min(others, DISTINCT), like.dtype)
            flat = torch.cat([half, -half, torch.zeros_like(half[: length % 2])])
            flat = flat.repeat(1, -(-others // DISTINCT))[:, :others]
            flat = flat.T if inner == -1 else flat
            if like.is_mkldnn:
                self._made[key] = pack(flat.contiguous())
            else:
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                self._made[key] = made.copy_(flat)
        return self._made[key]


def _numbers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@contextmanager
def _sizes(model: TiledModel, size: int) -> Iterator[None]:
    before, model.tiles = model.tiles, Tiles((size,), (size,), torch.get_num_threads())
    try:
        yield
    finally:
        model.tiles = before


def _batch(model: TiledModel, tokens: list[int], layers: tuple[int, ...] | None, *, head: bool) -> Batch:
    """Rows that are alike but for their tokens."""
    position = min(POSITION, model.info.max_len - 1)
    spans = [Span(row, position, [token], logits=[0] if head else []) for row, token in enumerate(tokens)]
    return Batch(spans, model.info.device, layers=layers, hidden=() if head else (model.info.num_layers,))


def _results(output: Output) -> torch.Tensor:
    hidden = [states.float() for states in output.hidden.values()]
    return torch.cat([output.logits, *hidden], 1) if output.logits.shape[0] else torch.cat(hidden, 1)


@torch.inference_mode()
def _compare(model: TiledModel, *, head: bool) -> tiles.Groups:
    groups: tiles.Groups = [list(tiles.SIZES) if steady() else [1]]
    for layers in model.kinds()[:1] if head else model.kinds():
        if _by_content(model, layers):
            return [[1]]
        agree = tiles.compare(_affordable(model, layers, head=head), _run(model, layers, head))
        groups = tiles.intersect(groups, agree)
    return groups


def _run(model: TiledModel, layers: tuple[int, ...] | None, head: bool) -> Any:
    token = 17 % model.info.vocab_size

    def run(size: int) -> torch.Tensor:
        with _sizes(model, size), Products(probe=True) as products:
            output = model.feed(_batch(model, [token] * size, layers, head=head), RowRecorder(model.info))
        return torch.cat([_results(output), *(rows for rows in products.results if rows.shape[0] == size)], 1)

    return run


def _affordable(model: TiledModel, layers: tuple[int, ...] | None, *, head: bool) -> list[int]:
    """The sizes that can be compared at a bearable cost."""
    with _sizes(model, 1), Products(probe=False) as products:
        model.feed(_batch(model, [0], layers, head=head), RowRecorder(model.info))
    sizes: list[int] = []
    for size in tiles.SIZES:
        if size <= FEWEST or products.work * (sum(sizes) + size) <= WORK:
            sizes.append(size)
    return sizes


def _by_content(model: TiledModel, layers: tuple[int, ...] | None) -> bool:
    """Whether what a layer does to a row depends on the values in others, or on where each lies. A model that
    ``routes`` calls its experts as its rows choose; the first row's results must be the same all the same."""
    size = ROWS
    generator = torch.Generator().manual_seed(0)
    calls, firsts = [], []
    with _sizes(model, 1):
        model.feed(
            _batch(model, [0], layers, head=False), RowRecorder(model.info)
        )  # what is made at the first call, is made
    for _ in range(3):
        others = torch.randint(model.info.vocab_size, (size - 1,), generator=generator).tolist()
        with _sizes(model, size), Products(probe=False) as products:
            output = model.feed(_batch(model, [0, *others], layers, head=False), RowRecorder(model.info))
        calls.append(products.calls)
        firsts.append(_results(output)[0])
    refused = activations.UNSTEADY if model.routes else UNFIXED
    named = any(call.split(" ", 1)[0] in refused for call in calls[0])
    other = not model.routes and any(other != calls[0] for other in calls)
    return named or other or not all(torch.equal(firsts[0], row) for row in firsts)
