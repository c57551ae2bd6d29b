"""Recurrent states: what layers keep of a sequence besides keys and values.

A layer with a recurrence has one checkpoint of its state per sequence, in float32. Every layer with a state has a ring
of *records*, its inputs since the checkpoint. A forward runs the recurrence from the checkpoint over the records and
its own rows, and stores a new checkpoint after the last row that will not be rolled back. So a rollback shortens a
length, and a rejected draft costs the next round nothing (as in ReplaySSM and TensorRT-LLM).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch

from forerun.cache.pool import Recorded, zeros
from forerun.core.batch import Batch, Span

INTERVAL = 256
"""Most tokens of a prompt between kept states."""
NONE = -1
"""As a node: the checkpoint. As a row: none, the node is a record."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one layer's state."""

    width: int
    """Numbers of a record, in the model's dtype."""
    columns: int
    """How many earlier records the layer's convolution reads besides a row's own."""
    checkpoint: tuple[int, ...] = ()
    """Shape of a checkpoint in float32; () for none."""


@dataclass(slots=True)
class Run:
    """The nodes of one sequence that the recurrence runs over: its records, then its rows."""

    key: int
    slot: int
    before: list[int]
    """Each node's parent."""
    rows: list[int]
    """Each node's row in the batch."""
    settled: int
    """The node after which the new checkpoint is stored."""
    length: int
    """Entries that the new checkpoint covers."""
    first: int
    """The number of its first node."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(node, slot): the state after that node is stored in that slot, too."""


@dataclass(slots=True)
class Replay:
    """What a forward runs. Tensors are int64; records are numbered over the rings of all slots."""

    runs: list[Run]
    read: torch.Tensor
    """The records that are run again."""
    written: torch.Tensor
    """The records that rows become."""
    kept: torch.Tensor
    """The batch's rows that are ``written``."""
    taps: torch.Tensor
    """[nodes, columns + 1]: each node's inputs to the convolution, oldest first, in [the batch's rows | ``read``]."""
    fed: list[int] = field(default_factory=list)
    """The nodes that are rows of the batch, in order."""


class States(Recorded):
    """Slots for the states of ``count`` sequences, and for ``kept`` states that outlive theirs (``cache/prefix.py``).

    Up to ``depth`` entries after a sequence's checkpoint may be rolled back.
    """

    def __init__(
        self,
        layers: Sequence[StateShape | None],
        count: int,
        depth: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: int = 0,
    ) -> None:
        self.interval = INTERVAL
        """Distance, in tokens, of the states that a prompt keeps (``cache/prefix.py``)."""
        self.layers = list(layers)
        self.shapes = {layer: shape for layer, shape in enumerate(layers) if shape is not None}
        """Of the layers that keep a state."""
        self.columns = max(shape.columns for shape in self.shapes.values())
        self.depth = depth
        self.ring = self.columns + depth
        self.dtype, self.device = dtype, device
        self._reset(count, kept)

    def _reset(self, count: int, kept: int) -> None:
        self.count, self.max_kept = count, kept
        self.slots: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        """Entries that a sequence's checkpoint covers."""
        self.free_slots = list(range(count + kept - 1, -1, -1))
        self.kept: set[int] = set()
        """Slots of kept states."""
        self.to_store: dict[int, dict[int, int]] = {}
        """Per sequence: after how many entries its state will be stored, in which slot."""
        self.origins: dict[int, tuple[int, int]] = {}
        """Per sequence without a slot: the kept state that it will begin with, and how many entries that covers."""
        for name in ("records", "checkpoints", "addresses"):
            self.__dict__.pop(name, None)

    @cached_property
    def records(self) -> dict[int, torch.Tensor]:
        """By layer, [slots, ring, width]; entry e is at e modulo the ring."""
        slots, shapes = self.count + self.max_kept, self.shapes.items()
        return {layer: zeros((slots, self.ring, each.width), self.dtype, self.device) for layer, each in shapes}

    @cached_property
    def checkpoints(self) -> dict[int, torch.Tensor]:
        """By layer, [slots, ...]."""
        slots, shapes = self.count + self.max_kept, {layer: each.checkpoint for layer, each in self.shapes.items()}
        return {layer: zeros((slots, *each), torch.float32, self.device) for layer, each in shapes.items() if each}

    @cached_property
    def addresses(self) -> array[int]:
        """Those of every layer's records and checkpoint; 0 where there are none."""
        tensors = ((side, layer) for layer in range(len(self.layers)) for side in (self.records, self.checkpoints))
        return array("q", (side[layer].data_ptr() if layer in side else 0 for side, layer in tensors))

    @property
    def bytes_per_sequence(self) -> int:
        shapes = self.shapes.values()
        records = self.ring * sum(shape.width for shape in shapes) * self.dtype.itemsize
        return records + 4 * sum(prod(shape.checkpoint) for shape in shapes if shape.checkpoint)

    def resize(self, count: int, kept: int = 0) -> None:
        """Changes the number of slots, while none is in use."""
        if self.slots or self.kept:
            raise ValueError("states in use cannot be resized")
        self._reset(count, kept)

    def can_allocate(self, key: int) -> bool:
        return key in self.slots or len(self.slots) < self.count

    def allocate(self, key: int) -> None:
        """Gives ``key`` a slot, with the kept state that it starts from, or the state of no tokens."""
        self.slots[key] = self.free_slots.pop()
        self._clear(key, *self.origins.pop(key, (None, 0)))

    def start_from(self, key: int, slot: int, length: int) -> None:
        """Has the new sequence ``key`` start from the state of ``length`` entries in ``slot``; ``allocate`` copies."""
        self.origins[key] = slot, length

    def _clear(self, key: int, origin: int | None = None, length: int = 0) -> None:
        self.lengths[key] = length
        self._apply("fill", self.slots[key], origin, length)

    def _fill(self, slot: int, origin: int | None, length: int) -> None:
        for records in self.records.values():
            records[slot] = 0
        for numbers in self.checkpoints.values():
            numbers[slot] = 0 if origin is None else numbers[origin]
        if origin is not None:  # a checkpoint lacks the convolution's inputs, which are the last records
            self._copy_records(origin, slot, range(length - self.columns, length))

    def release(self, key: int) -> None:
        """Frees the slot of ``key``, which may be unknown."""
        slot = self.slots.pop(key, None)
        if slot is not None:
            self.free_slots.append(slot)
            del self.lengths[key]
        self.origins.pop(key, None)
        for kept in self.to_store.pop(key, {}).values():
            self.free_kept(kept)

    def allocate_kept(self) -> int | None:
        """A slot for a kept state; None: all are taken."""
        if len(self.kept) >= self.max_kept:
            return None
        slot = self.free_slots.pop()
        self.kept.add(slot)
        return slot

    def free_kept(self, slot: int) -> None:
        """Frees the slot of a kept state."""
        self.kept.remove(slot)
        self.free_slots.append(slot)

    def store_at(self, key: int, length: int, slot: int) -> None:
        """Has the next forward whose checkpoint covers ``length`` entries of ``key`` store their state in ``slot``."""
        self.to_store.setdefault(key, {})[length] = slot

    def pop_stored(self, key: int) -> list[tuple[int, int]]:
        """(length, slot) of the kept states of ``key`` that were stored since the last call."""
        pending, covered = self.to_store.get(key, {}), self.lengths.get(key, 0)
        return [(length, pending.pop(length)) for length in sorted(pending) if length <= covered]

    def keep_own(self, key: int) -> int | None:
        """Keeps the checkpoint of ``key``, which ends, in its slot; returns the slot, or None if all are taken."""
        if len(self.kept) >= self.max_kept:
            return None
        slot = self.slots.pop(key)
        del self.lengths[key]
        self.kept.add(slot)
        return slot

    def _copy_records(self, source: int, target: int, entries: Iterable[int]) -> None:
        """Records before the first entry are zeros in every slot."""
        offsets = [entry % self.ring for entry in entries if entry >= 0]
        for records in self.records.values() if offsets else ():
            records[target, offsets] = records[source, offsets]

    def truncate(self, key: int, length: int) -> int:
        """How many of the first ``length`` entries stay: all, or none where the checkpoint covers more."""
        if key not in self.slots or length >= self.lengths[key]:
            return length
        self._clear(key)  # a recurrence cannot run backwards: everything is read again
        return 0

    def fork(self, source: int, key: int) -> None:
        """Gives ``key`` a copy of the state of ``source``."""
        self.allocate(key)
        self.lengths[key] = self.lengths[source]
        self._apply("copy", self.slots[source], self.slots[key])

    def _copy(self, source: int, target: int) -> None:
        for tensor in (*self.records.values(), *self.checkpoints.values()):
            tensor[target] = tensor[source]

    def move(self, key: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves the records of entries ``sources`` to ``targets``."""
        old, new = ([entry % self.ring for entry in entries] for entries in (sources, targets))
        self._apply("move", self.slots[key], old, new)

    def _move(self, slot: int, old: list[int], new: list[int]) -> None:
        for records in self.records.values():
            records[slot, new] = records[slot, old]

    def has_nan(self, key: int) -> bool:
        """Whether the last layer's state or records hold a NaN: later layers inherit a NaN of earlier ones."""
        slot = self.slots.get(key)
        if slot is None:
            return False
        last, sides = max(self.shapes), (self.records, self.checkpoints)
        return any(bool(side[last][slot].isnan().any()) for side in sides if last in side)

    def plan(self, batch: Batch) -> Replay:
        """Plans a forward. Raises ValueError for a span that begins before its sequence's checkpoint, or has more rows
        that may be rolled back than there are records."""
        whole = batch.layers is None  # a range of layers only drafts, and commits nothing
        runs: list[Run] = []
        read: list[int] = []
        written: list[int] = []
        kept: list[int] = []
        fed: list[int] = []
        taps: list[list[int]] = []
        for span, offset in zip(batch.spans, batch.offsets):
            run = self._run(span, offset, len(taps), whole=whole)
            base, slot, first = self.lengths[span.key], run.slot, span.start + span.stored
            # Entries from base on are records to run again; from first on, this batch's rows. The convolution also
            # reads ``columns`` records before base. Taps count the batch's rows, then ``read``; entry e is begin + e.
            begin = batch.num_rows + len(read) - (base - self.columns)
            read += [slot * self.ring + entry % self.ring for entry in range(base - self.columns, first)]
            indices = {entry: offset + entry - first for entry in range(first, span.end)}
            for entry in range(base, span.end):
                path = [entry]  # in a tree, the convolution reads a node's ancestors, not what lies before it
                for _ in range(self.columns):
                    path.append(_parent(span, path[-1]))
                taps.append([indices.get(each, begin + each) for each in reversed(path)])
            fed += range(len(taps) - span.count, len(taps))
            stored = range(max(first, span.end - self.ring), span.end)  # of a long prompt, what the ring holds
            written += [slot * self.ring + entry % self.ring for entry in stored]
            kept += [indices[entry] for entry in stored]
            for length, target in self.to_store.get(span.key, {}).items():
                if base < length <= run.length:
                    run.copies.append((run.first + length - base - 1, target))
                    last = range(length - self.columns, length)
                    self._copy_records(slot, target, (entry for entry in last if entry < first))
                    written += [target * self.ring + entry % self.ring for entry in last if entry >= first]
                    kept += [indices[entry] for entry in last if entry >= first]
            runs.append(run)

        def index(numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=self.device)

        return Replay(runs, index(read), index(written), index(kept), index(taps), fed)

    def _run(self, span: Span, offset: int, node: int, *, whole: bool) -> Run:
        base, first = self.lengths[span.key], span.start + span.stored
        if first < base:
            raise ValueError(f"a forward from entry {first} on, where the state covers {base} already")
        length = span.start if span.settled is None else span.settled
        if span.parents is None:  # a chain longer than the ring: its beginning is settled
            length = max(length, span.end - self.depth)
        length = max(base, min(length, span.end)) if whole else base
        if span.end - length > self.depth:
            raise ValueError(f"{span.end - length} entries that may be taken back, where {self.depth} are kept")
        before = []
        for entry in range(base, span.end):
            parent = _parent(span, entry)
            before.append(NONE if parent < base else node + parent - base)
        rows = [NONE] * (first - base) + [*range(offset, offset + span.count)]
        return Run(span.key, self.slots[span.key], before, rows, node + length - base - 1, length, node)

    def commit(self, replay: Replay) -> None:
        """Records that a forward has stored its checkpoints."""
        for run in replay.runs:
            self.lengths[run.key] = run.length

    def check(self, keys: Sequence[int]) -> None:
        """Raises AssertionError unless exactly the sequences ``keys``, which have pages, have states."""
        if sorted(self.slots) != sorted(keys) or not {*self.lengths, *self.to_store, *self.origins} <= {*keys}:
            raise AssertionError("sequences with pages and those with states differ")
        slots = sorted([*self.slots.values(), *self.kept, *self.free_slots])
        if slots != [*range(self.count + self.max_kept)] or len(self.kept) > self.max_kept:
            raise AssertionError("the slots of states are counted wrongly")


def _parent(span: Span, entry: int) -> int:
    """The entry before this one on its path."""
    node = entry - span.start
    return entry - 1 if span.parents is None or node <= 0 else span.start + span.parents[node]
