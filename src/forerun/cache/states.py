"""The cache's second kind of page: what layers keep of a sequence beside keys and values.

A sequence has one checkpoint in float32 for each layer with a recurrence, and for each layer with a state a ring of
*records*, the inputs that the layer got since. A forward runs the recurrence from the checkpoint over the records that
are kept and over its own rows, and stores a new checkpoint behind those that nobody will take back. So a rollback moves
a length, and a rejected draft costs the next round nothing (ReplaySSM and TensorRT-LLM have the same idea).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch

from forerun.cache.pool import zeros
from forerun.core.batch import Batch, Span

INTERVAL = 256
"""Most tokens of a prompt between states that are kept."""
NONE = -1
"""In place of a node: the checkpoint; in place of a row: there is none."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's: ``width`` numbers of a record in the model's dtype, the first of which a convolution reads over the
    row's own record and the ``columns`` before it, and the shape of a checkpoint in float32, () for none."""

    width: int
    columns: int
    checkpoint: tuple[int, ...] = ()


@dataclass(slots=True)
class Run:
    """One sequence's rows: its slot, and for each node to run, in order, the node before it (``NONE``: the checkpoint)
    and its row in the batch (``NONE``: a record that is run again). Behind node ``settled`` the state is stored."""

    key: int
    slot: int
    before: list[int]
    rows: list[int]
    settled: int
    length: int
    """Entries that the new checkpoint covers."""
    first: int
    """The number of its first node."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(node, slot): the state behind that node is stored in that slot, too."""


@dataclass(slots=True)
class Replay:
    """A forward's rows. ``read`` [records] and ``written`` [rows] int64 are records' indices in the rings, end to end.
    ``taps`` [nodes, columns + 1] int64 has, for the nodes of all runs, the indices of their records and of those
    before, oldest first, in [the batch's rows | the records read]."""

    runs: list[Run]
    read: torch.Tensor
    written: torch.Tensor
    kept: torch.Tensor
    """The batch's rows that are ``written``."""
    taps: torch.Tensor
    fed: list[int] = field(default_factory=list)
    """The nodes that are rows of the batch, in the rows' order."""


class States:
    """Room for ``count`` sequences, and for ``kept`` states that stay when their sequences go (``cache/prefix.py``); up
    to ``depth`` entries behind a sequence's checkpoint may be taken back."""

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
        """Tokens of a prompt behind which a state is kept (``cache/prefix.py``)."""
        self.layers = list(layers)
        self.columns = max(shape.columns for shape in layers if shape is not None)
        self.depth = depth
        self.ring = self.columns + depth
        self.dtype, self.device = dtype, device
        self.changes: list[tuple[str, Any]] | None = None
        """What happened to tensors between forwards; None: nobody asks."""
        self._hold(count, kept)

    def _hold(self, count: int, kept: int) -> None:
        self.count, self.max_kept = count, kept
        self.slots: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        """Entries that a sequence's checkpoint covers."""
        self.free_slots = list(range(count + kept - 1, -1, -1))
        self.kept: set[int] = set()
        """Slots of states that stay."""
        self.to_store: dict[int, dict[int, int]] = {}
        """Per sequence: behind which of its entries the state will be stored, and in which slot."""
        self.origins: dict[int, tuple[int, int]] = {}
        """Per sequence that has none yet: the kept state that it begins with, and how many entries that covers."""
        for made in ("records", "checkpoints"):
            self.__dict__.pop(made, None)

    @cached_property
    def records(self) -> list[torch.Tensor | None]:
        """Per layer, [slots, ring, width]; entry e is at e modulo the ring."""
        every = self.count + self.max_kept
        return [
            None if shape is None else zeros((every, self.ring, shape.width), self.dtype, self.device)
            for shape in self.layers
        ]

    @cached_property
    def checkpoints(self) -> list[torch.Tensor | None]:
        """Per layer, the checkpoints [slots, ...]."""
        return [
            None
            if shape is None or not shape.checkpoint
            else zeros((self.count + self.max_kept, *shape.checkpoint), torch.float32, self.device)
            for shape in self.layers
        ]

    @property
    def bytes_per_sequence(self) -> int:
        """Of a sequence."""
        every = [shape for shape in self.layers if shape is not None]
        records = self.ring * sum(shape.width for shape in every) * self.dtype.itemsize
        return records + 4 * sum(prod(shape.checkpoint) for shape in every if shape.checkpoint)

    @property
    def nbytes(self) -> int:
        return (self.count + self.max_kept) * self.bytes_per_sequence

    def resize(self, count: int, kept: int = 0) -> None:
        """Hold ``count`` sequences and ``kept`` states instead. Only while nobody is here."""
        if self.slots or self.kept:
            raise ValueError("states in use cannot be resized")
        self._hold(count, kept)

    def can_allocate(self, key: int) -> bool:
        return key in self.slots or len(self.slots) < self.count

    def allocate(self, key: int) -> None:
        """Give ``key`` a state: that of no tokens at all, or the one that it begins with."""
        self.slots[key] = self.free_slots.pop()
        self._clear(key, *self.origins.pop(key, (None, 0)))

    def start_from(self, key: int, slot: int, length: int) -> None:
        """``key``, which comes now, will begin with the state of ``length`` entries that is kept in ``slot``."""
        self.origins[key] = slot, length

    def _clear(self, key: int, origin: int | None = None, length: int = 0) -> None:
        self.lengths[key] = length
        self._do("fill", self.slots[key], origin, length)

    def _do(self, change: str, *places: Any) -> None:
        """Change tensors, and note it."""
        if self.changes is not None:
            self.changes.append((change, places))
        self.redo(change, places)

    def redo(self, change: str, places: Any) -> None:
        """Do to these tensors what happened to another rank's."""
        ways: dict[str, Callable[..., None]] = {"fill": self._fill, "copy": self._copy, "move": self._move}
        ways[change](*places)

    def _fill(self, slot: int, origin: int | None, length: int) -> None:
        for records, numbers in zip(self.records, self.checkpoints):
            if records is not None:
                records[slot] = 0
            if numbers is not None:
                numbers[slot] = 0 if origin is None else numbers[origin]
        if origin is not None:
            self._copy_records(origin, slot, range(length - self.columns, length))

    def release(self, key: int) -> None:
        """Unknown sequences have none."""
        slot = self.slots.pop(key, None)
        if slot is not None:
            self.free_slots.append(slot)
            del self.lengths[key]
        self.origins.pop(key, None)
        for marked in self.to_store.pop(key, {}).values():
            self.free_kept(marked)

    def allocate_kept(self) -> int | None:
        """A slot for a state that stays; None: there is no room for one more."""
        if len(self.kept) >= self.max_kept:
            return None
        slot = self.free_slots.pop()
        self.kept.add(slot)
        return slot

    def free_kept(self, slot: int) -> None:
        """Give up a kept state."""
        self.kept.remove(slot)
        self.free_slots.append(slot)

    def store_at(self, key: int, length: int, slot: int) -> None:
        """Have the state behind the first ``length`` entries of ``key`` stored in ``slot`` as well, by the forward that
        settles it."""
        self.to_store.setdefault(key, {})[length] = slot

    def pop_stored(self, key: int) -> list[tuple[int, int]]:
        """(length, slot) of the marks that were stored, once."""
        marks, covered = self.to_store.get(key, {}), self.lengths.get(key, 0)
        return [(length, marks.pop(length)) for length in sorted(marks) if length <= covered]

    def keep_own(self, key: int) -> int | None:
        """``key`` goes, and its checkpoint stays where it is, if there is room; returns the slot."""
        if len(self.kept) >= self.max_kept:
            return None
        slot = self.slots.pop(key)
        del self.lengths[key]
        self.kept.add(slot)
        return slot

    def _copy_records(self, source: int, target: int, entries: Iterable[int]) -> None:
        """Those of entries before the first one are zeros wherever a sequence begins."""
        places = [entry % self.ring for entry in entries if entry >= 0]
        for records in self.records if places else ():
            if records is not None:
                records[target, places] = records[source, places]

    def truncate(self, key: int, length: int) -> int:
        """How many of ``length`` entries are left: all, or none where the checkpoint covers more."""
        if key not in self.slots or length >= self.lengths[key]:
            return length
        self._clear(key)
        return 0

    def fork(self, source: int, key: int) -> None:
        """``key`` has the state and the records of ``source``."""
        self.allocate(key)
        self.lengths[key] = self.lengths[source]
        self._do("copy", self.slots[source], self.slots[key])

    def _copy(self, source: int, target: int) -> None:
        for tensor in (*self.records, *self.checkpoints):
            if tensor is not None:
                tensor[target] = tensor[source]

    def move(self, key: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Records of entries ``sources`` become those of ``targets``."""
        old, new = ([entry % self.ring for entry in entries] for entries in (sources, targets))
        self._do("move", self.slots[key], old, new)

    def _move(self, slot: int, old: list[int], new: list[int]) -> None:
        for records in self.records:
            if records is not None:
                records[slot, new] = records[slot, old]

    def has_nan(self, key: int) -> bool:
        """Whether the last layer's state or records hold a NaN: what one layer computes, the later ones inherit."""
        slot = self.slots.get(key)
        if slot is None:
            return False
        held = [[side[layer] for side in (self.records, self.checkpoints)] for layer in range(len(self.layers))]
        last = next(pair for pair in reversed(held) if pair[0] is not None)
        return any(bool(tensor[slot].isnan().any()) for tensor in last if tensor is not None)

    def plan(self, batch: Batch) -> Replay:
        """What to run. Raises ValueError for a span that begins before its sequence's checkpoint or adds more than the
        records hold."""
        whole = batch.layers is None  # some layers alone draft: what they read is not committed
        runs: list[Run] = []
        read: list[int] = []
        written: list[int] = []
        kept: list[int] = []
        fed: list[int] = []
        taps: list[list[int]] = []
        for span, offset in zip(batch.spans, batch.offsets):
            run = self._run(span, offset, len(taps), whole=whole)
            base, slot, first = self.lengths[span.key], run.slot, span.start + span.stored
            begin = batch.num_rows + len(read) - (base - self.columns)
            read += [slot * self.ring + entry % self.ring for entry in range(base - self.columns, first)]
            indices = {entry: offset + entry - first for entry in range(first, span.end)}
            for entry in range(base, span.end):
                path = [entry]
                for _ in range(self.columns):
                    path.append(_before(span, path[-1]))
                taps.append([indices.get(each, begin + each) for each in reversed(path)])
            fed += range(len(taps) - span.count, len(taps))
            stored = range(max(first, span.end - self.ring), span.end)
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
        if span.parents is None:
            length = max(length, span.end - self.depth)
        length = max(base, min(length, span.end)) if whole else base
        if span.end - length > self.depth:
            raise ValueError(f"{span.end - length} entries that may be taken back, where {self.depth} are kept")
        before = []
        for entry in range(base, span.end):
            parent = _before(span, entry)
            before.append(NONE if parent < base else node + parent - base)
        rows = [NONE] * (first - base) + [*range(offset, offset + span.count)]
        return Run(span.key, self.slots[span.key], before, rows, node + length - base - 1, length, node)

    def commit(self, replay: Replay) -> None:
        """A forward has stored its checkpoints."""
        for run in replay.runs:
            self.lengths[run.key] = run.length

    def check(self, keys: Sequence[int]) -> None:
        """Raise AssertionError unless those who have pages, and nobody else, have a state."""
        if sorted(self.slots) != sorted(keys):
            raise AssertionError("sequences with pages and those with states differ")
        every = sorted([*self.slots.values(), *self.kept, *self.free_slots])
        if every != [*range(self.count + self.max_kept)] or len(self.kept) > self.max_kept:
            raise AssertionError("the slots of states are counted wrongly")


def _before(span: Span, entry: int) -> int:
    """The entry that one stands behind."""
    node = entry - span.start
    return entry - 1 if span.parents is None or node <= 0 else span.start + span.parents[node]
