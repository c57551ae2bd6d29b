"""What an encoder made of sources: the keys and values that decoders attend to across.

One page per source, for all the sequences that read it (a request's answers, beams, requests with equal texts). It
stays behind its last reader until the page is needed, so that the same text is not encoded again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import torch

from forerun.cache.pool import KVShape, OutOfPages, Pool
from forerun.core.batch import Span

Source = tuple[int, ...]
Encode = Callable[[list[Source]], list[tuple[torch.Tensor, torch.Tensor]]]
"""Sources -> per decoder layer, keys and values [all sources' tokens, heads, width], source after source."""


class Sources:
    """Encoded sources beside the cache of a model with ``layers``: at most ``count`` of at most ``longest`` tokens."""

    def __init__(
        self, layers: Sequence[KVShape], count: int, longest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pool = Pool(layers, count, longest, dtype, device)
        self.longest = longest
        self.readers: dict[int, Source] = {}
        """By sequence."""
        self.counts: Counter[Source] = Counter()
        """Readers of each source; none with 0."""
        self.keys: OrderedDict[Source, int] = OrderedDict()
        """Its key in the pool; the least recently used first."""
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self.pool.num_pages * self.pool.page_bytes

    def prepare(self, spans: Sequence[Span], encode: Encode) -> None:
        """See that what the spans' sequences read is there: ``encode`` is called at most once, for the sources that are
        new. Raises OutOfPages for more sources at once than there is room for."""
        fresh: dict[Source, None] = {}
        for span in spans:
            assert span.source is not None
            if self.readers.get(span.key) is span.source:
                continue
            self.release(span.key)
            if span.source in self.keys:
                self._read(span.key, span.source)
            else:
                fresh[span.source] = None
        if fresh:
            self._store(list(fresh), encode(list(fresh)))
            for span in spans:
                if span.key not in self.readers and span.source is not None:
                    self._read(span.key, span.source)

    def _store(self, sources: list[Source], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        first = 0
        for source in sources:
            end, key = first + len(source), self._evict()
            self.pool.reserve(key, len(source))
            page = self.pool.block_tables[key][0]
            for layer, (k, v) in enumerate(layers):
                self.pool.write_run(layer, page, 0, k[first:end], v[first:end])
            self.pool.advance(key, len(source))
            self.keys[source], first = key, end

    def _evict(self) -> int:
        """A key for a new source; the least recently used one that nobody reads makes room where there is none."""
        if not self.pool.num_free:
            idle = next((source for source in self.keys if source not in self.counts), None)
            if idle is None:
                raise OutOfPages(f"{self.pool.num_pages} encoded sources are in use, and there is room for no more")
            self.pool.free(self.keys.pop(idle))
        self._next += 1
        return self._next

    def _read(self, key: int, source: Source) -> None:
        self.readers[key] = source
        self.counts[source] += 1
        self.keys.move_to_end(source)

    def release(self, key: int) -> None:
        """A sequence ended, or lost its pages; unknown ones read nothing."""
        source = self.readers.pop(key, None)
        if source is not None:
            self.counts[source] -= 1
            if not self.counts[source]:
                del self.counts[source]

    def clear(self) -> None:
        """Forget what nobody reads."""
        for source in [source for source in self.keys if source not in self.counts]:
            self.pool.free(self.keys.pop(source))

    def page(self, key: int) -> tuple[int, int]:
        """Which page holds what a sequence reads, and its tokens."""
        source = self.readers[key]
        return self.pool.block_tables[self.keys[source]][0], len(source)

    def check(self) -> None:
        """Raise AssertionError unless every reader and every page is accounted for."""
        self.pool.check()
        if Counter(self.readers.values()) != self.counts or not self.counts.keys() <= self.keys.keys():
            raise AssertionError("readers of encoded sources are counted wrongly")
        if sorted(self.keys.values()) != sorted(self.pool.block_tables):
            raise AssertionError("encoded sources and their pages disagree")
