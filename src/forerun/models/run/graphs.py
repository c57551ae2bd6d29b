"""Forwards of few rows on a GPU as CUDA graphs: hundreds of kernels in one launch.

A forward's numbers, from token ids to block tables, are in one tensor of a fixed size, so that one graph serves every
batch of a bucket. It is captured when a bucket is first used; buckets share their memory. Rows of padding belong to no
sequence. Where there is no CUDA, under Triton's interpreter, the same body runs without a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from forerun.attention.base import Attention, Metadata
from forerun.attention.triton import Sizes, TritonAttention, TritonTables, lay_out, write_numbers
from forerun.core.batch import Batch, Output
from forerun.kernels import gpu
from forerun.models.run.rotary import room

log = logging.getLogger("forerun")
MOST_ROWS = 256
"""Rows above which launches cost little beside the work."""
PAGES, NODES = 64, 8
"""The smallest rooms for a sequence's pages and for a tree's depth."""


class Padded(Batch):
    """Rows whose numbers are on the device; all of them have logits."""

    def __init__(self, sizes: Sizes, device: torch.device, hidden: tuple[int, ...]) -> None:
        super().__init__([], device, hidden=hidden)
        self.num_rows = sizes.rows

    @property
    def num_logits(self) -> int:
        return self.num_rows


def bucket(sizes: Sizes) -> Sizes:
    """Sizes with room for at least these; a span has at least one row."""
    rows, nodes = room(sizes.rows), sizes.nodes and room(max(sizes.nodes, NODES))
    return Sizes(rows, rows, room(max(sizes.pages, PAGES)), nodes)


Body = Callable[[Padded, TritonTables], Output]


@dataclass
class Graph:
    """A body, captured for one bucket: its numbers on the host and on the device, and its results."""

    sizes: Sizes
    host: torch.Tensor
    numbers: torch.Tensor
    run: Callable[[], Output]
    copied: torch.cuda.Event | None

    def __call__(self, batch: Batch, tables: dict[int, list[int]]) -> Output:
        """Runs it for a batch. The results are overwritten by the next call."""
        if self.copied is not None:
            self.copied.synchronize()  # the host's numbers may still be on their way
        write_numbers(self.host.numpy(), batch, tables, self.sizes)
        self.numbers.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        return self.run()


class Graphs:
    """The graphs of one model. ``tables`` makes room for positions, and returns where what graphs read lies: if it
    moves, they are captured again."""

    def __init__(self, device: torch.device, tables: Callable[[int], tuple[int, ...]]) -> None:
        self.device, self.tables = device, tables
        self.enabled = True
        self._graphs: WeakKeyDictionary[TritonAttention, dict[object, Graph]] = WeakKeyDictionary()
        self._pool: Any = None
        self._at: tuple[int, ...] = ()

    def serves(self, batch: Batch, attention: object) -> bool:
        """Whether a graph holds this batch: few rows, all of them with logits."""
        return (
            self.enabled
            and isinstance(attention, TritonAttention)
            and 0 < batch.num_rows <= MOST_ROWS
            and batch.layers is None
            and batch.embeds is None
            and all(len(span.logits) == span.count for span in batch.spans)
        )

    def __call__(self, batch: Batch, attention: Attention, body: Body) -> Output | None:
        """The output of ``body`` for a batch that it ``serves``; None if there is no memory for a graph."""
        assert isinstance(attention, TritonAttention)
        sizes = bucket(attention.reserve(batch))
        at = self.tables(max(span.end for span in batch.spans))
        if at != self._at:
            self._graphs.clear()
            self._at = at
        graphs, key = self._graphs.setdefault(attention, {}), (sizes, batch.hidden)
        if key not in graphs:
            graph = self._capture(batch, attention, sizes, body)
            if graph is None:
                return None
            graphs[key] = graph
        output = graphs[key](batch, attention.pool.block_tables)
        attention.finish(Metadata(batch))
        hidden = {layer: rows[: batch.num_rows].clone() for layer, rows in output.hidden.items()}
        return Output(output.logits[: batch.num_rows], hidden)

    def _capture(self, batch: Batch, attention: TritonAttention, sizes: Sizes, body: Body) -> Graph | None:
        """Captures a bucket, after running its body once on this batch, which compiles its kernels. None: there is no
        memory, and from now on no graph is used."""
        began, on_gpu = perf_counter(), self.device.type == "cuda"
        with torch.inference_mode(False):
            host = torch.zeros(sum(sizes.fields().values()), dtype=torch.int32, pin_memory=on_gpu)
            numbers = host.to(self.device, copy=True)
        padded = Padded(sizes, self.device, batch.hidden)
        tables = lay_out(numbers, padded, sizes)
        write_numbers(host.numpy(), batch, attention.pool.block_tables, sizes)
        numbers.copy_(host)
        try:
            run = self._record(lambda: body(padded, tables))
        except torch.OutOfMemoryError:
            self.enabled = False
            self._graphs.clear()
            gpu.warn(
                "no GPU memory for CUDA graphs: rounds run without them, slower; lower gpu_memory_utilization or "
                "kv_cache_memory"
            )
            return None
        log.info("captured a CUDA graph of %d rows in %.1f s", sizes.rows, perf_counter() - began)
        return Graph(sizes, host, numbers, run, torch.cuda.Event() if on_gpu else None)

    def _record(self, body: Callable[[], Output]) -> Callable[[], Output]:
        """The body as a graph, where there is CUDA."""
        if self.device.type != "cuda":
            return body
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            body()
        current.wait_stream(stream)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = body()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that cannot be ended leaves its own
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise

        def replay() -> Output:
            graph.replay()
            return output

        return replay
