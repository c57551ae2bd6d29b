"""How an engine stands, for metrics and for whoever routes to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from forerun.engine.metrics import EngineStats


@dataclass(frozen=True)
class Snapshot:
    """``pages`` are the target's KV pages of ``page_size`` tokens, ``free_pages`` those that nobody's tokens need."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    page_size: int
    caches_prefixes: bool
    stats: EngineStats

    @property
    def usage(self) -> float:
        """Share of the pages in use, from 0 to 1."""
        return 1 - self.free_pages / self.pages

    @classmethod
    def merged(cls, parts: Iterable[Snapshot]) -> Snapshot:
        """Several engines of one kind as one."""
        first, *rest = parts
        running, waiting, pages, free = first.running, first.waiting, first.pages, first.free_pages
        stats = _copy(first.stats)
        for part in rest:
            running, waiting = running + part.running, waiting + part.waiting
            pages, free = pages + part.pages, free + part.free_pages
            _add(stats, part.stats)
        return cls(running, waiting, pages, free, first.page_size, first.caches_prefixes, stats)


def _copy(stats: EngineStats) -> EngineStats:
    total = EngineStats()
    _add(total, stats)
    return total


def _add(total: EngineStats, part: EngineStats) -> None:
    for item in fields(EngineStats):
        ours, theirs = getattr(total, item.name), getattr(part, item.name)
        if isinstance(ours, list):
            ours.extend([0] * (len(theirs) - len(ours)))
            for index, count in enumerate(theirs):
                ours[index] += count
        elif isinstance(ours, dict):
            for key, counts in theirs.items():
                known = ours.setdefault(key, [0] * len(counts))
                for index, count in enumerate(counts):
                    known[index] += count
        elif isinstance(ours, bool):
            setattr(total, item.name, ours or theirs)
        else:
            setattr(total, item.name, ours + theirs)
