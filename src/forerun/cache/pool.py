"""One KV cache for every layout: pages of entries and a page table per sequence.

*Paged* has small pages, which prefixes may share; *slotted* is the case of one page per sequence, so that a
sequence's keys are one contiguous view.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.core.errors import ForerunError

if TYPE_CHECKING:
    from forerun.cache.prefix import PrefixTree
    from forerun.cache.sources import Sources
    from forerun.cache.states import States

LINE = 64
"""Bytes of a cache line, where what is made here begins."""
SPARSE = 1 << 17
"""Bytes of a head's part of a page from which several pages are thought to be mostly empty."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, sparse: bool = False) -> torch.Tensor:
    """An ordinary tensor, whoever touches it first, which on a CPU takes memory as it is used; torch's is written.
    ``sparse``: a little here and there will be; of the large pages that NumPy asks for most would be empty."""
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(*shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        if sparse and size and hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a system that has no large pages
                pages.madvise(mmap.MADV_NOHUGEPAGE)
            return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(*shape)
        buffer = np.zeros(size + LINE, np.uint8)
        first = -buffer.ctypes.data % LINE
        return torch.from_numpy(buffer[first : first + size]).view(dtype).view(*shape)


def adjacent(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """[rows, 2 * heads, width] over both if v's heads follow k's in memory, as in a fused projection's output."""
    strides = k.stride()
    apart = k.shape[1] * strides[1] * k.element_size()
    if (
        v.data_ptr() - k.data_ptr() != apart
        or v.stride() != strides
        or v.untyped_storage()._cdata != k.untyped_storage()._cdata
    ):
        return None
    return k.as_strided((k.shape[0], 2 * k.shape[1], k.shape[2]), strides, k.storage_offset())


SlotMapping = tuple[torch.Tensor, torch.Tensor]
"""(page, offset) of entries, int64."""
Change = tuple[Any, ...]
"""Which method of a pool changed its entries, and what it was given."""


class OutOfPages(ForerunError):
    """The pool has too few free pages; nothing was changed."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one layer's entries: key/value heads and the widths of a key and a value."""

    heads: int
    key_dim: int
    value_dim: int
    shared: bool = False
    """Values are the first numbers of keys and are stored with them."""

    @property
    def numbers(self) -> int:
        """Of an entry."""
        return self.heads * (self.key_dim + (0 if self.shared else self.value_dim))


class Pages:
    """The bookkeeping of a pool: which pages hold which sequence's entries. No tensors."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.ref_counts = [0] * num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.block_tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.version = 0
        self.prefix_tree: PrefixTree | None = None
        """Holds pages that nobody uses at the moment, and gives them back on request."""
        self.sources: Sources | None = None
        """What the encoder made of the sequences' sources, in an encoder-decoder."""
        self.states: States | None = None
        """What layers keep of the sequences beside keys and values."""
        self.cached = [False] * num_pages
        self.num_evictable = 0
        """Pages that the prefix_tree alone holds."""

    def length(self, key: int) -> int:
        """Entries that ``key`` has in the cache."""
        return self.lengths.get(key, 0)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_free(self) -> int:
        return len(self.free_pages)

    def can_reserve(self, key: int, length: int) -> bool:
        if self.states is not None and not self.states.can_allocate(key):
            return False
        short = self._missing(key, length) - len(self.free_pages)
        return short <= self.num_evictable

    def _missing(self, key: int, length: int) -> int:
        """How many fresh pages ``length`` entries take: new ones, and copies of shared ones that would be written."""
        table = self.block_tables.get(key, ())
        requested, missing = self.pages_for(length), 0
        for index in range(self.lengths.get(key, 0) // self.page_size, requested):
            if index >= len(table) or self.ref_counts[table[index]] > 1:
                missing += 1
        return missing

    def reserve(self, key: int, length: int) -> None:
        """Make room for ``length`` entries of ``key``; entries past its length become writable.

        A shared page that would be written is copied first. Raises OutOfPages, changing nothing, when the pool
        is too full.
        """
        if not self.try_reserve(key, length):
            raise OutOfPages(f"the KV cache is full: {self.num_pages} pages of {self.page_size} tokens, none free")

    def try_reserve(self, key: int, length: int) -> bool:
        """``reserve``, or False and no change where the pool is too full."""
        missing, new = self._missing(key, length), self.states is not None and key not in self.states.slots
        if not missing and key in self.block_tables and not new:
            return True
        short = missing - len(self.free_pages)
        if short > self.num_evictable or (self.states is not None and not self.states.can_allocate(key)):
            return False
        if self.states is not None and new:
            self.states.allocate(key)
        if short > 0 and self.prefix_tree is not None:
            self.prefix_tree.evict(short)
        table = self.block_tables.setdefault(key, [])
        current = self.lengths.setdefault(key, 0)
        for index in range(current // self.page_size, min(len(table), self.pages_for(length))):
            if self.ref_counts[table[index]] > 1:
                fresh = self._take()
                self._copy_page(table[index], fresh, min(self.page_size, current - index * self.page_size))
                self._drop(table[index])
                table[index] = fresh
                self.version += 1
        while len(table) < self.pages_for(length):
            table.append(self._take())
            self.version += 1
        return True

    def advance(self, key: int, length: int) -> None:
        """Record that entries up to ``length`` have been written."""
        if length > len(self.block_tables[key]) * self.page_size:
            raise ValueError(f"{length} entries were written where {len(self.block_tables[key])} pages are reserved")
        self.lengths[key] = length

    def truncate(self, key: int, length: int) -> None:
        """Forget entries from ``length`` on. Pages whose first position is at or past it go back to the pool; a
        partial last page stays; a shared page only loses this sequence's reference. All entries go where layers' states
        cannot go back so far."""
        table = self.block_tables[key]
        if self.states is not None:
            length = self.states.truncate(key, length)
        self.lengths[key] = min(self.lengths[key], length)
        while len(table) > self.pages_for(length):
            self._drop(table.pop())
            self.version += 1

    def fork(self, source: int, key: int, length: int) -> None:
        """Give ``key`` the first ``length`` entries of ``source``, sharing their pages."""
        self.adopt(key, self.block_tables[source][: self.pages_for(length)], length)
        if self.states is not None:
            self.states.fork(source, key)
            self.truncate(key, length)

    def adopt(self, key: int, pages: Sequence[int], length: int) -> None:
        """Start ``key`` on existing ``pages`` (a cached prefix), sharing them."""
        if self.block_tables.get(key):
            raise ValueError(f"sequence {key} already has pages")
        for page in pages:
            self._share(page)
        self.block_tables[key] = list(pages)
        self.lengths[key] = length
        self.version += 1

    def free(self, key: int) -> None:
        """Give up everything ``key`` holds; unknown keys hold nothing."""
        for page in self.block_tables.pop(key, []):
            self._drop(page)
        self.lengths.pop(key, None)
        self.version += 1
        if self.prefix_tree is not None:
            self.prefix_tree.forget(key)
        if self.sources is not None:
            self.sources.release(key)
        if self.states is not None:
            self.states.release(key)

    def replace(self, key: int, index: int, page: int) -> None:
        """Let ``key`` use ``page``, which holds the same entries, in the place of its ``index``-th page."""
        table = self.block_tables[key]
        self._share(page)
        self._drop(table[index])
        table[index] = page
        self.version += 1

    def cache_page(self, page: int) -> None:
        """Add the prefix_tree's reference to a page in use."""
        self.ref_counts[page] += 1
        self.cached[page] = True

    def uncache_page(self, page: int) -> None:
        """Take the prefix_tree's reference away."""
        self.cached[page] = False
        self.num_evictable -= self.ref_counts[page] == 1
        self._drop(page)

    def _take(self) -> int:
        page = self.free_pages.pop()
        self.ref_counts[page] = 1
        return page

    def _share(self, page: int) -> None:
        self.num_evictable -= self.cached[page] and self.ref_counts[page] == 1
        self.ref_counts[page] += 1

    def _drop(self, page: int) -> None:
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            self.free_pages.append(page)
        elif self.cached[page] and self.ref_counts[page] == 1:
            self.num_evictable += 1

    def _copy_page(self, source: int, target: int, count: int) -> None:
        """Copy a page's first ``count`` entries; the tensor-less bookkeeping has none."""

    def check(self) -> None:
        """Raise AssertionError unless every reference to a page is accounted for, the prefix_tree's included."""
        counts = [int(held) for held in self.cached]
        for key, table in self.block_tables.items():
            for page in table:
                counts[page] += 1
            if self.lengths[key] > len(table) * self.page_size:
                raise AssertionError(f"sequence {key}: {self.lengths[key]} entries on {len(table)} pages")
        if counts != self.ref_counts:
            wrong = [page for page in range(self.num_pages) if counts[page] != self.ref_counts[page]]
            raise AssertionError(f"reference counts are off for pages {wrong[:8]}")
        free = set(self.free_pages)
        if len(free) != len(self.free_pages) or free != {p for p in range(self.num_pages) if self.ref_counts[p] == 0}:
            raise AssertionError("the free list and the reference counts disagree")
        if self.sources is not None:
            self.sources.check()
        if self.states is not None:
            self.states.check(list(self.block_tables))
        if self.prefix_tree is not None:
            self.prefix_tree.check()
        idle = sum(1 for held, refs in zip(self.cached, self.ref_counts) if held and refs == 1)
        if idle != self.num_evictable:
            raise AssertionError(
                f"{idle} pages are held by the prefix_tree alone, but {self.num_evictable} were counted"
            )


class Pool(Pages):
    """Pages with their tensors: per layer, keys and values [pages, heads, page size, width], zeroed at first.

    Zeroed, because an additive mask does not stop a NaN of an unwritten entry.
    """

    def __init__(
        self,
        layers: Sequence[KVShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(num_pages, page_size)
        self.device = torch.device(device)
        self.dtype = dtype
        self.layers = list(layers)
        self.changes: list[Change] | None = None
        """What happened to entries beside being stored; None: nobody asks."""

    @cached_property
    def pairs(self) -> list[torch.Tensor | None]:
        """Per layer, keys and then values in one tensor [pages, 2 * heads, page size, width], where they are equally
        wide; ``keys`` and ``values`` are its halves."""
        paired = [s.key_dim == s.value_dim and not s.shared for s in self.layers]
        return [self._zeros(2 * s.heads, s.key_dim) if both else None for s, both in zip(self.layers, paired)]

    def _stored(self) -> Iterator[list[torch.Tensor]]:
        """Per layer, the tensors that hold its entries, each number once."""
        for shape, pair, keys, values in zip(self.layers, self.pairs, self.keys, self.values):
            yield [pair] if pair is not None else [keys] if shape.shared else [keys, values]

    @cached_property
    def keys(self) -> list[torch.Tensor]:
        return [
            self._zeros(shape.heads, shape.key_dim) if pair is None else pair[:, : shape.heads]
            for shape, pair in zip(self.layers, self.pairs)
        ]

    @cached_property
    def values(self) -> list[torch.Tensor]:
        return [
            keys[..., : shape.value_dim] if shape.shared
            else self._zeros(shape.heads, shape.value_dim) if pair is None else pair[:, shape.heads :]
            for shape, pair, keys in zip(self.layers, self.pairs, self.keys)
        ]  # fmt: skip

    def _zeros(self, heads: int, width: int) -> torch.Tensor:
        shape = (self.num_pages, heads, self.page_size, width)
        slots = self.num_pages > 1 and self.page_size * width * self.dtype.itemsize > SPARSE
        return zeros(shape, self.dtype, self.device, sparse=slots)

    def scrub(self) -> None:
        """Zero every page that no sequence uses, after a model returned NaN: an additive mask does not stop those of
        a page's last owner."""
        if self.prefix_tree is not None:
            self.prefix_tree.evict(self.num_evictable)
            self.prefix_tree.evict_states()
        if self.sources is not None:
            self.sources.clear()
        self._zero(list(self.free_pages))

    def _note(self, *change: Any) -> None:
        if self.changes is not None:
            self.changes.append(change)

    def redo(self, change: Change) -> None:
        """Do to this pool what happened to another one with the same pages."""
        ways: dict[str, Callable[..., None]] = {"zero": self._zero, "move": self._move, "copy": self._copy_page}
        ways[change[0]](*change[1:])

    def _zero(self, pages: list[int]) -> None:
        self._note("zero", pages)
        for tensors in self._stored():
            for tensor in tensors:
                tensor[pages] = 0

    def has_nan(self, key: int, first: int = 0) -> bool:
        """Whether an entry of ``key`` from ``first`` on is NaN, or one behind its end on the same pages, or its state.
        The last layer tells: what one layer stores, the later ones inherit."""
        if self.states is not None and self.states.has_nan(key):
            return True
        page, offset = divmod(first, self.page_size)
        pages = self.block_tables.get(key, ())[page:]
        if not pages:
            return False
        keys = next((side for side in reversed(self.keys) if side.shape[1]), self.keys[-1])
        if len(pages) == 1:  # perhaps a whole slot
            return bool(keys[pages[0], :, offset : self.length(key) - page * self.page_size].isnan().any())
        return bool(keys[list(pages)].isnan().any())

    @property
    def page_bytes(self) -> int:
        return self.page_size * sum(shape.numbers for shape in self.layers) * self.dtype.itemsize

    def resize(self, num_pages: int) -> None:
        """Hold ``num_pages`` pages instead. Only while nobody has any: memory is taken when it is first used."""
        if self.num_free != self.num_pages:
            raise ValueError("a pool in use cannot be resized")
        for made in ("pairs", "keys", "values"):
            self.__dict__.pop(made, None)
        beside = self.prefix_tree, self.sources, self.states
        super().__init__(num_pages, self.page_size)
        self.prefix_tree, self.sources, self.states = beside

    def slot_mapping(self, key: int, entries: Sequence[int]) -> SlotMapping:
        """(page, offset) int64 tensors of the given entries of ``key``."""
        return self.slot_mappings([(key, entries)])

    def slot_mappings(self, runs: Sequence[tuple[int, Sequence[int]]]) -> SlotMapping:
        """The same of entries of several sequences, one's behind the other's."""
        size, tables = self.page_size, self.block_tables
        pages = [tables[key][entry // size] for key, entries in runs for entry in entries]
        offsets = [entry % size for _, entries in runs for entry in entries]
        sides = (torch.tensor(side, dtype=torch.long, device=self.device) for side in (pages, offsets))
        return next(sides), next(sides)

    def write(self, layer: int, slot_mapping: SlotMapping, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store rows ``k`` and ``v`` ([rows, heads, width]) of one layer at ``slot_mapping``."""
        pages, offsets = slot_mapping
        pair, both = self.pairs[layer], adjacent(k, v)
        if pair is not None and both is not None:
            pair[pages, :, offsets] = both
        else:
            self.keys[layer][pages, :, offsets] = k
            if not self.layers[layer].shared:
                self.values[layer][pages, :, offsets] = v

    def write_run(self, layer: int, page: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store rows ``k`` and ``v`` in one page, from offset ``first`` on."""
        pair, both = self.pairs[layer], adjacent(k, v)
        if pair is not None and both is not None:
            pair[page, :, first : first + k.shape[0]] = both.transpose(0, 1)
        else:
            self.keys[layer][page, :, first : first + k.shape[0]] = k.transpose(0, 1)
            if not self.layers[layer].shared:
                self.values[layer][page, :, first : first + k.shape[0]] = v.transpose(0, 1)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., heads, count * page size, width] of page lists [..., count], in order."""

        def together(side: torch.Tensor) -> torch.Tensor:
            result = side.index_select(0, pages.reshape(-1)).view(*pages.shape, *side.shape[1:]).transpose(-4, -3)
            return result.reshape(*pages.shape[:-1], side.shape[1], -1, side.shape[3])

        pair = self.pairs[layer]
        if pair is None:
            return together(self.keys[layer]), together(self.values[layer])
        k, v = together(pair).tensor_split(2, dim=-3)
        return k, v

    def keep(self, key: int, start: int, offsets: Sequence[int]) -> int:
        """Tree rollback: entries ``start + offsets[i]`` become ``start + i`` and the rest is forgotten.

        ``offsets`` must ascend. The gather happens before the store, so overlaps are safe. A shared page is copied
        before entries move into it; where there is no page for that, only those before the first that moves stay.
        Returns how many do.
        """
        moves = [(i, offset) for i, offset in enumerate(offsets) if i != offset]
        if moves:
            source = self.slot_mapping(key, [start + offset for _, offset in moves])
            self.lengths[key] = start + moves[0][0]
            if not self.try_reserve(key, start + len(offsets)):
                offsets, moves = offsets[: moves[0][0]], []
        if moves:
            target = self.slot_mapping(key, [start + i for i, _ in moves])
            self._move(source, target)
            if self.states is not None:
                self.states.move(key, [start + offset for _, offset in moves], [start + i for i, _ in moves])
            self.lengths[key] = start + len(offsets)
        self.truncate(key, start + len(offsets))
        return len(offsets)

    def _move(self, source: SlotMapping, target: SlotMapping) -> None:
        self._note("move", source, target)
        for tensors in self._stored():
            for tensor in tensors:
                tensor[target[0], :, target[1]] = tensor[source[0], :, source[1]]

    def _copy_page(self, source: int, target: int, count: int) -> None:
        self._note("copy", source, target, count)
        for tensors in self._stored():
            for tensor in tensors:
                tensor[target, :, :count] = tensor[source, :, :count]
