"""Encoded sources: the keys and values that an encoder-decoder's decoder cross-attends to.

There is one page per source, shared by all sequences that read it: a request's answers, beams, requests with equal
texts. It stays after its last reader until the page is needed, so that the same text is not encoded again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from forerun.cache.pool import KVShape, OutOfPages, Pool
from forerun.core.batch import Span

Source = tuple[int, ...]
Encode = Callable[[list[Source]], list[tuple[torch.Tensor, torch.Tensor]]]
"""Encodes sources: per decoder layer, keys and values [all sources' tokens, heads, width], source after source."""


class Sources:
    """At most ``count`` encoded sources of at most ``longest`` tokens; ``layers`` are the decoder's."""

    def __init__(
        self, layers: Sequence[KVShape], count: int, longest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pool = Pool(layers, count, longest, dtype, device)
        self.longest = longest
        self.readers: dict[int, Source] = {}
        """The source that each sequence reads."""
        self.keys: OrderedDict[Source, int] = OrderedDict()
        """Each source's key in the pool; the least recently used first."""
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self.pool.num_pages * self.pool.page_bytes

    def prepare(self, spans: Sequence[Span], encode: Encode) -> None:
        """Encodes the new ones among the spans' sources, in at most one call of ``encode``.

        Raises:
            OutOfPages: more sources are read at once than there are pages.
        """
        new: dict[Source, None] = {}
        for span in spans:
            assert span.source is not None
            if self.readers.get(span.key) is span.source:
                continue
            self.release(span.key)
            if span.source in self.keys:
                self._read(span.key, span.source)
            else:
                new[span.source] = None
        if new:
            self._store(list(new), encode(list(new)))
            for span in spans:
                if span.key not in self.readers and span.source is not None:
                    self._read(span.key, span.source)

    def _store(self, sources: list[Source], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        first = 0
        for source in sources:
            end, key = first + len(source), self._new_key()
            self.pool.reserve(key, len(source))
            page = self.pool.block_tables[key][0]
            for layer, (k, v) in enumerate(layers):
                self.pool.write(layer, (page, slice(0, len(source))), k[first:end], v[first:end])
            self.pool.advance(key, len(source))
            self.keys[source], first = key, end

    def _new_key(self) -> int:
        """A key for a new source. If no page is free, the least recently used source without readers is evicted."""
        if not self.pool.num_free:
            unused = self._unused()
            if not unused:
                raise OutOfPages(f"{self.pool.num_pages} encoded sources are in use, and there is room for no more")
            self.pool.free(self.keys.pop(unused[0]))
        self._next += 1
        return self._next

    def _read(self, key: int, source: Source) -> None:
        self.readers[key] = source
        self.keys.move_to_end(source)

    def _unused(self) -> list[Source]:
        """Sources without readers, the least recently used first."""
        used = set(self.readers.values())
        return [source for source in self.keys if source not in used]

    def release(self, key: int) -> None:
        """Forgets what a sequence reads, which ended or lost its pages; it may be unknown."""
        self.readers.pop(key, None)

    def clear(self) -> None:
        """Evicts every source without readers."""
        for source in self._unused():
            self.pool.free(self.keys.pop(source))

    def page(self, key: int) -> tuple[int, int]:
        """The page of what a sequence reads, and how many tokens it holds."""
        source = self.readers[key]
        return self.pool.block_tables[self.keys[source]][0], len(source)

    def check(self) -> None:
        """Raises AssertionError unless every reader and every page is accounted for."""
        self.pool.check()
        if not self.keys.keys() >= set(self.readers.values()):
            raise AssertionError("a source that is read is not encoded")
        if sorted(self.keys.values()) != sorted(self.pool.block_tables):
            raise AssertionError("encoded sources and their pages disagree")
