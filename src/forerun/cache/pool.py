"""The KV cache: a pool of pages, and a block table per sequence (PagedAttention, arXiv 2309.06180).

The *paged* layout has small pages, which sequences with a common prefix share. The *slotted* layout has one page per
sequence, so that a sequence's keys are one contiguous view.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
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

CACHE_LINE = 64
"""Bytes of a processor's cache line, to which tensors are aligned."""
SPARSE_BYTES = 1 << 17
"""From this many bytes per head and page on, pages are expected to stay mostly empty."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, sparse: bool = False) -> torch.Tensor:
    """A tensor of zeros that on a CPU takes memory only where it is used; torch's own is written at once.

    ``sparse``: only small parts will be used, so that the system's large pages, which NumPy asks for, are turned off.
    It is an ordinary tensor also where it is first used in inference mode.
    """
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(*shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        if sparse and size and hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a system that has no large pages
                pages.madvise(mmap.MADV_NOHUGEPAGE)
            return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(*shape)
        buffer = np.zeros(size + CACHE_LINE, np.uint8)
        first = -buffer.ctypes.data % CACHE_LINE
        return torch.from_numpy(buffer[first : first + size]).view(dtype).view(*shape)


def adjacent(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """k and v as one view [rows, 2 * heads, width] if v's heads follow k's in memory, as in a fused projection."""
    strides = k.stride()
    distance = k.shape[1] * strides[1] * k.element_size()
    if (
        v.data_ptr() - k.data_ptr() != distance
        or v.stride() != strides
        or v.untyped_storage()._cdata != k.untyped_storage()._cdata
    ):
        return None
    return k.as_strided((k.shape[0], 2 * k.shape[1], k.shape[2]), strides, k.storage_offset())


SlotMapping = tuple[torch.Tensor, torch.Tensor]
"""(page, offset) of entries, int64."""
Slots = SlotMapping | tuple[int, slice]
"""Where entries are: a slot mapping, or a range of one page."""
Change = tuple[str, tuple[Any, ...]]
"""A change of tensors: its name and arguments."""


class OutOfPages(ForerunError):
    """The pool has too few free pages; nothing was changed."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one layer's entries: key/value heads and the widths of a key and a value."""

    heads: int
    key_dim: int
    value_dim: int
    shared: bool = False
    """Values are the first numbers of the keys, and are not stored apart."""

    @property
    def numbers(self) -> int:
        """Numbers per entry."""
        return self.heads * (self.key_dim + (0 if self.shared else self.value_dim))


class Recorded:
    """Tensors whose changes between forwards, ``_NAME``, other ranks repeat."""

    changes: list[Change] | None = None
    """None: not recorded."""

    def _apply(self, name: str, *arguments: Any) -> None:
        """Makes a change, and records it."""
        if self.changes is not None:
            self.changes.append((name, arguments))
        self.redo(name, arguments)

    def redo(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Repeats a change of another rank."""
        getattr(self, f"_{name}")(*arguments)


class Pages(Recorded):
    """The bookkeeping of a pool, without tensors: which pages hold which sequence's entries.

    ``block_tables`` lists each sequence's pages; ``ref_counts`` counts a page's users, the prefix tree included.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.ref_counts = [0] * num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.block_tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.cached = [False] * num_pages
        """Which pages the prefix tree holds."""
        self.num_evictable = 0
        """Pages that the prefix tree alone holds."""
        self.prefix_tree: PrefixTree | None = None
        self.sources: Sources | None = None
        """Encoded sources of an encoder-decoder."""
        self.states: States | None = None
        """Layers' recurrent states."""

    def length(self, key: int) -> int:
        """Entries of sequence ``key`` in the cache."""
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
        return self._missing(key, length) - len(self.free_pages) <= self.num_evictable

    def _missing(self, key: int, length: int) -> int:
        """How many free pages ``length`` entries take: new ones, and copies of shared ones that would be written."""
        table, missing = self.block_tables.get(key, ()), 0
        for index in range(self.lengths.get(key, 0) // self.page_size, self.pages_for(length)):
            missing += index >= len(table) or self.ref_counts[table[index]] > 1
        return missing

    def reserve(self, key: int, length: int) -> None:
        """Allocates pages for ``length`` entries of ``key``. A shared page that would be written is copied first.

        Raises:
            OutOfPages: there are too few free pages; nothing was changed.
        """
        if not self.try_reserve(key, length):
            raise OutOfPages(f"the KV cache is full: {self.num_pages} pages of {self.page_size} tokens, none free")

    def try_reserve(self, key: int, length: int) -> bool:
        """As ``reserve``; returns False instead of raising."""
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
                fresh = self._allocate()
                self._apply("copy", table[index], fresh, min(self.page_size, current - index * self.page_size))
                self._unref(table[index])
                table[index] = fresh
        while len(table) < self.pages_for(length):
            table.append(self._allocate())
        return True

    def advance(self, key: int, length: int) -> None:
        """Records that entries up to ``length`` have been written."""
        if length > len(self.block_tables[key]) * self.page_size:
            raise ValueError(f"{length} entries were written where {len(self.block_tables[key])} pages are reserved")
        self.lengths[key] = length

    def truncate(self, key: int, length: int) -> None:
        """Chain rollback: forgets entries from ``length`` on, and frees the pages that lie wholly past it.

        All entries are forgotten where the layers' states cannot go back so far.
        """
        table = self.block_tables[key]
        if self.states is not None:
            length = self.states.truncate(key, length)
        self.lengths[key] = min(self.lengths[key], length)
        while len(table) > self.pages_for(length):
            self._unref(table.pop())

    def fork(self, source: int, key: int, length: int) -> None:
        """Gives ``key`` the first ``length`` entries of ``source``, sharing their pages."""
        self.adopt(key, self.block_tables[source][: self.pages_for(length)], length)
        if self.states is not None:
            self.states.fork(source, key)
            self.truncate(key, length)

    def adopt(self, key: int, pages: Sequence[int], length: int) -> None:
        """Starts ``key`` on existing ``pages``, such as a cached prefix, sharing them."""
        if self.block_tables.get(key):
            raise ValueError(f"sequence {key} already has pages")
        for page in pages:
            self._ref(page)
        self.block_tables[key] = list(pages)
        self.lengths[key] = length

    def free(self, key: int) -> None:
        """Frees everything of ``key``, which may be unknown."""
        for page in self.block_tables.pop(key, []):
            self._unref(page)
        self.lengths.pop(key, None)
        if self.prefix_tree is not None:
            self.prefix_tree.forget(key)
        if self.sources is not None:
            self.sources.release(key)
        if self.states is not None:
            self.states.release(key)

    def replace(self, key: int, index: int, page: int) -> None:
        """Replaces the ``index``-th page of ``key`` by ``page``, which holds the same entries."""
        table = self.block_tables[key]
        self._ref(page)
        self._unref(table[index])
        table[index] = page

    def cache_page(self, page: int) -> None:
        """Adds the prefix tree's reference to a page in use."""
        self.ref_counts[page] += 1
        self.cached[page] = True

    def uncache_page(self, page: int) -> None:
        """Removes the prefix tree's reference."""
        self.cached[page] = False
        self.num_evictable -= self.ref_counts[page] == 1
        self._unref(page)

    def _allocate(self) -> int:
        page = self.free_pages.pop()
        self.ref_counts[page] = 1
        return page

    def _ref(self, page: int) -> None:
        self.num_evictable -= self.cached[page] and self.ref_counts[page] == 1
        self.ref_counts[page] += 1

    def _unref(self, page: int) -> None:
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            self.free_pages.append(page)
        elif self.cached[page] and self.ref_counts[page] == 1:
            self.num_evictable += 1

    def _copy(self, source: int, target: int, count: int) -> None:
        """Copies a page's first ``count`` entries."""

    def check(self) -> None:
        """Raises AssertionError unless every reference to a page is accounted for, the prefix tree's included."""
        counts = [int(held) for held in self.cached]
        for key, table in self.block_tables.items():
            for page in table:
                counts[page] += 1
            if self.lengths[key] > len(table) * self.page_size:
                raise AssertionError(f"sequence {key}: {self.lengths[key]} entries on {len(table)} pages")
        if counts != self.ref_counts:
            wrong = [page for page in range(self.num_pages) if counts[page] != self.ref_counts[page]]
            raise AssertionError(f"reference counts are off for pages {wrong[:8]}")
        if sorted(self.free_pages) != [page for page in range(self.num_pages) if self.ref_counts[page] == 0]:
            raise AssertionError("the free list and the reference counts disagree")
        if self.sources is not None:
            self.sources.check()
        if self.states is not None:
            self.states.check(list(self.block_tables))
        if self.prefix_tree is not None:
            self.prefix_tree.check()
        evictable = sum(1 for cached, refs in zip(self.cached, self.ref_counts) if cached and refs == 1)
        if evictable != self.num_evictable:
            raise AssertionError(f"{evictable} pages are evictable, but {self.num_evictable} were counted")


class Pool(Pages):
    """The tensors of the KV cache (vLLM's ``kv_cache``): per layer, keys and values [pages, heads, page size, width].

    They start as zeros: a NaN in an unwritten slot would pass an additive mask, as NaN + -inf is NaN.
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

    @cached_property
    def pairs(self) -> list[torch.Tensor | None]:
        """Per layer, keys and values in one tensor [pages, 2 * heads, page size, width], of which ``keys`` and
        ``values`` are halves; None where their widths differ."""
        paired = [s.key_dim == s.value_dim and not s.shared for s in self.layers]
        return [self._zeros(2 * s.heads, s.key_dim) if both else None for s, both in zip(self.layers, paired)]

    def _tensors(self) -> Iterator[torch.Tensor]:
        """All tensors, without the views among them."""
        for shape, pair, keys, values in zip(self.layers, self.pairs, self.keys, self.values):
            yield from [pair] if pair is not None else [keys] if shape.shared else [keys, values]

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
        sparse = self.num_pages > 1 and self.page_size * width * self.dtype.itemsize > SPARSE_BYTES
        return zeros(shape, self.dtype, self.device, sparse)

    def allocate(self) -> None:
        """Makes the tensors now, not when they are first used. Raises OSError, MemoryError or torch's error."""
        assert len(self.keys) == len(self.values)

    def scrub(self) -> None:
        """Zeroes unused pages after a model returned NaN: an additive mask does not stop a NaN left in a page."""
        if self.prefix_tree is not None:
            self.prefix_tree.evict(self.num_evictable)
            self.prefix_tree.evict_states()
        if self.sources is not None:
            self.sources.clear()
        self.zero(list(self.free_pages))

    def zero(self, pages: list[int], count: int | None = None) -> None:
        """Zeroes these pages' first ``count`` entries; None: all."""
        self._apply("zero", pages, count)

    def _zero(self, pages: list[int], count: int | None) -> None:
        for tensor in self._tensors():
            tensor[pages, :, :count] = 0

    def has_nan(self, key: int, first: int = 0) -> bool:
        """Whether the state of ``key``, or a slot from entry ``first`` to the end of its last page, holds NaN.

        Only the last layer is looked at: later layers inherit a NaN of earlier ones.
        """
        if self.states is not None and self.states.has_nan(key):
            return True
        page, offset = divmod(first, self.page_size)
        pages = self.block_tables.get(key, ())[page:]
        if not pages:
            return False
        keys = next((side for side in reversed(self.keys) if side.shape[1]), self.keys[-1])
        if len(pages) == 1:  # in the slotted layout a large one
            return bool(keys[pages[0], :, offset : self.length(key) - page * self.page_size].isnan().any())
        return bool(keys[list(pages)].isnan().any())

    @property
    def page_bytes(self) -> int:
        return self.page_size * sum(shape.numbers for shape in self.layers) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of everything in it, sources and states included."""
        states, sources = self.states, self.sources
        kept = 0 if states is None else (states.count + states.max_kept) * states.bytes_per_sequence
        return self.num_pages * self.page_bytes + kept + (0 if sources is None else sources.nbytes)

    def resize(self, num_pages: int) -> None:
        """Changes the number of pages, while none is in use. Memory is taken when it is first used."""
        if self.num_free != self.num_pages:
            raise ValueError("a pool in use cannot be resized")
        for name in ("pairs", "keys", "values"):
            self.__dict__.pop(name, None)
        attached = self.prefix_tree, self.sources, self.states
        super().__init__(num_pages, self.page_size)
        self.prefix_tree, self.sources, self.states = attached

    def slot_mapping(self, key: int, entries: Sequence[int]) -> SlotMapping:
        """(page, offset) int64 tensors of the given entries of ``key``."""
        return self.slot_mappings([(key, entries)])

    def slot_mappings(self, runs: Sequence[tuple[int, Sequence[int]]]) -> SlotMapping:
        """The same for (key, entries) of several sequences, in order."""
        size, tables = self.page_size, self.block_tables
        pages = [tables[key][entry // size] for key, entries in runs for entry in entries]
        offsets = [entry % size for _, entries in runs for entry in entries]
        page_index, offset_index = torch.tensor([pages, offsets], dtype=torch.long, device=self.device)
        return page_index, offset_index

    def write(self, layer: int, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores rows ``k`` and ``v`` [rows, heads, width] of one layer at ``slots``."""
        page, offset = slots
        pair, both = self.pairs[layer], adjacent(k, v)
        if pair is not None and both is not None:
            sides = [(pair, both)]
        elif self.layers[layer].shared:
            sides = [(self.keys[layer], k)]
        else:
            sides = [(self.keys[layer], k), (self.values[layer], v)]
        for tensor, rows in sides:
            tensor[page, :, offset] = rows.transpose(0, 1) if isinstance(page, int) else rows

    def gather(self, layer: int, pages: torch.Tensor, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., heads, length, width] of block tables [..., count], in order; ``length`` None: all."""

        def concatenated(side: torch.Tensor) -> torch.Tensor:
            if pages.shape[-1] == 1:  # a long page, perhaps, of which little is used
                side = side[:, :, :length]
            result = side.index_select(0, pages.reshape(-1)).view(*pages.shape, *side.shape[1:]).transpose(-4, -3)
            return result.reshape(*pages.shape[:-1], side.shape[1], -1, side.shape[3])[..., :length, :]

        pair = self.pairs[layer]
        if pair is None:
            return concatenated(self.keys[layer]), concatenated(self.values[layer])
        k, v = concatenated(pair).tensor_split(2, dim=-3)
        return k, v

    def keep(self, key: int, start: int, offsets: Sequence[int]) -> int:
        """Tree rollback: entries ``start + offsets[i]`` become ``start + i``, and the rest is forgotten.

        ``offsets`` ascend. A shared page is copied before entries move into it. Where no page is free for that, only
        the entries before the first move stay. Returns how many stay.
        """
        moves = [(start + offset, start + i) for i, offset in enumerate(offsets) if i != offset]
        count = len(offsets)
        if moves:
            old, new = zip(*moves)
            source = self.slot_mapping(key, old)
            self.lengths[key] = new[0]
            if self.try_reserve(key, start + count):
                self._apply("move", source, self.slot_mapping(key, new))
                if self.states is not None:
                    self.states.move(key, old, new)
                self.lengths[key] = start + count
            else:
                count = new[0] - start
        self.truncate(key, start + count)
        return count

    def _move(self, source: SlotMapping, target: SlotMapping) -> None:
        for tensor in self._tensors():
            tensor[target[0], :, target[1]] = tensor[source[0], :, source[1]]

    def _copy(self, source: int, target: int, count: int) -> None:
        for tensor in self._tensors():
            tensor[target, :, :count] = tensor[source, :, :count]
