"""Forwards of few rows on a GPU as CUDA graphs: hundreds of kernels in one launch.

A forward's numbers, from token ids to block tables, are in one tensor of a fixed size, so that one graph serves every
batch of a bucket. It is captured when a bucket is first used; buckets share their memory. Rows of padding belong to no
sequence. Where there is no CUDA, under Triton's interpreter, the same body runs without a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from forerun.attention.base import Attention, Metadata
from forerun.attention.triton import Sizes, TritonAttention, TritonTables, lay_out, write_numbers
from forerun.core.batch import Batch, Output
from forerun.kernels import gpu
from forerun.models.run.fused import RAW
from forerun.models.run.rotary import room

log = logging.getLogger("forerun")
MOST_ROWS = 256
"""Rows above which launches cost little beside the work."""
PROMPT = 16
"""Rows without logits that make a span a prompt: no graph holds it."""
PAGES, NODES = 64, 8
"""The smallest rooms for a sequence's pages and for a tree's depth."""


class Padded(Batch):
    """Rows with numbers on the device, and as many with logits: all (``scores_all``), or those in ``logit_rows``."""

    def __init__(self, sizes: Sizes, device: torch.device, hidden: tuple[int, ...], scores_all: bool = True) -> None:
        super().__init__([], device, hidden=hidden)
        self.num_rows, self._scores_all = sizes.rows, scores_all

    @property
    def scores_all(self) -> bool:
        return self._scores_all

    @property
    def num_logits(self) -> int:
        return self.num_rows


def bucket(sizes: Sizes) -> Sizes:
    """Sizes with room for at least these; a span has at least one row."""
    rows, nodes = room(sizes.rows), sizes.nodes and room(max(sizes.nodes, NODES))
    return Sizes(rows, rows, room(max(sizes.pages, PAGES)), nodes)


Body = Callable[[Padded, TritonTables], Output]
T = TypeVar("T")


class Numbers:
    """int32 [size] on the host and on the device, to which they are copied without a wait."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
            self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self.host: np.ndarray = self._pinned.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """The host's numbers may be written: those of the last copy are no longer on their way."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self) -> None:
        self.device.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@dataclass
class Graph:
    """A body, captured for one bucket: its numbers, its rows and its results."""

    sizes: Sizes
    numbers: Numbers
    padded: Padded
    run: Callable[[], Output] | None = None

    def write(self, batch: Batch, tables: dict[int, list[int]]) -> None:
        """Writes a batch's numbers."""
        self.numbers.wait()
        write_numbers(self.numbers.host, batch, tables, self.sizes)
        self.numbers.copy()
        batch.fill_in(self.padded.input_ids)

    def __call__(self, batch: Batch, tables: dict[int, list[int]]) -> Output:
        """Runs it for a batch. The results are overwritten by the next call."""
        assert self.run is not None
        self.write(batch, tables)
        if batch.embeds is not None and self.padded.embeds is not None:
            self.padded.embeds[: batch.num_rows].copy_(batch.embeds)
        return self.run()


@dataclass(frozen=True)
class Steps:
    """How a drafter feeds tokens without the host.

    Args:
        graphs: of the drafter's model, or of the target where a head drafts.
        at: the addresses of what they read of this many positions.
        forward: reads the text before a draft, as ``Model.forward``.
        body: the same for rows whose numbers are on the device; it asks the host nothing.
        size: how many logits a row has.
        state: what of an output, which has ``hidden[RAW]``, is the next step's ``embeds``; None: nothing.
    """

    graphs: Graphs
    at: Callable[[int], tuple[int, ...]]
    forward: Callable[[Batch, Attention], Output]
    body: Callable[[Padded, TritonTables], Output]
    size: int
    state: Callable[[Output], torch.Tensor] | None = None


class Graphs:
    """The graphs of a model, and of heads that draft for it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.enabled = device, True
        self._graphs: WeakKeyDictionary[object, tuple[tuple[int, ...], dict[object, Any]]] = WeakKeyDictionary()
        self._pool: Any = None

    def serves(self, batch: Batch, attention: object, *, scored: bool = True) -> bool:
        """Whether a graph holds this batch: few rows, and no prompt. ``scored``: of a body that computes logits."""
        return (
            self.enabled
            and isinstance(attention, TritonAttention)
            and 0 < batch.num_rows <= MOST_ROWS
            and batch.layers is None
            and batch.embed_rows is None
            and all((span.logits or not scored) and span.count - len(span.logits) < PROMPT for span in batch.spans)
        )

    def __call__(
        self, batch: Batch, attention: Attention, body: Body, at: Callable[[int], tuple[int, ...]]
    ) -> Output | None:
        """``body``'s output for a batch that it ``serves``; None: no memory for a graph. ``at``: see ``Steps``."""
        assert isinstance(attention, TritonAttention)
        sizes = bucket(attention.reserve(batch))
        capture = partial(self._capture, batch, attention, sizes, body)
        key = sizes, batch.hidden, batch.scores_all, batch.embeds is None
        graph = self.get(attention, key, at(max(span.end for span in batch.spans)), capture)
        if graph is None:
            return None
        output = graph(batch, attention.pool.block_tables)
        attention.finish(Metadata(batch))
        counts = {RAW: batch.num_logits}
        hidden = {layer: rows[: counts.get(layer, batch.num_rows)].clone() for layer, rows in output.hidden.items()}
        return Output(output.logits[: batch.num_logits], hidden)

    def drop(self, owner: object) -> None:
        """Frees an owner's graphs."""
        self._graphs.pop(owner, None)

    def get(self, owner: object, key: object, at: tuple[int, ...], make: Callable[[], T]) -> T:
        """What ``make`` gave for ``key``, kept while ``owner`` lives and what it reads is ``at`` these addresses."""
        if self._graphs.get(owner, (at, {}))[0] != at:
            del self._graphs[owner]
        if key not in self._graphs.get(owner, (at, {}))[1]:
            self._graphs.setdefault(owner, (at, {}))[1][key] = make()
        kept: T = self._graphs[owner][1][key]
        return kept

    def _capture(self, batch: Batch, attention: TritonAttention, sizes: Sizes, body: Body) -> Graph | None:
        """Captures a bucket after running its body once, which compiles its kernels. None: there is no memory."""
        numbers = Numbers(sum(sizes.fields().values()), self.device)
        padded = Padded(sizes, self.device, batch.hidden, batch.scores_all)
        if batch.embeds is not None:
            padded.embeds = batch.embeds.new_zeros(sizes.rows, batch.embeds.shape[1])
        tables = lay_out(numbers.device, padded, sizes)
        graph = Graph(sizes, numbers, padded)
        graph.write(batch, attention.pool.block_tables)
        graph.run = self.record(lambda: body(padded, tables), sizes.rows)
        return None if graph.run is None else graph

    def record(self, body: Callable[[], T], rows: int) -> Callable[[], T] | None:
        """A body of this many rows as a graph. None: there is no memory, and from now on no graph is used."""
        began = perf_counter()
        try:
            run = self._record(body)
        except torch.OutOfMemoryError:
            self.enabled = False
            self._graphs.clear()
            gpu.warn(
                "no GPU memory for CUDA graphs: rounds run without them, slower; lower gpu_memory_utilization or "
                "kv_cache_memory"
            )
            return None
        log.info("captured a CUDA graph of %d rows in %.1f s", rows, perf_counter() - began)
        return run

    def _record(self, body: Callable[[], T]) -> Callable[[], T]:
        """The body as a graph, where there is CUDA."""
        if self.device.type != "cuda":
            return body
        body()  # loads its kernels, which a capture cannot; on the same stream, since calls share counters
        current = torch.cuda.current_stream(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may allocate meanwhile: a server loads one model while another answers
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = body()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that cannot be ended leaves its own
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise

        def replay() -> T:
            graph.replay()
            return output

        return replay
