"""Which layers `layerskip` should draft with: those whose measured acceptance is worth their measured cost.

Draft & Verify (arXiv 2309.08168, section 3.3) searches the subsets by Bayesian optimisation on a time per token. Here
the early exits come first, then single layers are added, removed or exchanged as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Subset:
    """Layers, counted from 0, with what was measured of them and the best predicted speed-up, that of ``k``
    drafted tokens."""

    layers: tuple[int, ...]
    alpha: float
    match_rate: float
    c: float
    k: int
    speedup: float


def choose_layers(measure: Callable[[tuple[int, ...]], Subset | None], num_layers: int, trials: int) -> list[Subset]:
    """At most ``trials`` subsets of a target's layers, the best first. ``measure`` gives None where nothing could be
    drafted."""
    found: dict[tuple[int, ...], Subset | None] = {}

    def best() -> Subset | None:
        return max((subset for subset in found.values() if subset), key=lambda subset: subset.speedup, default=None)

    for last in range(1, num_layers):
        if len(found) < trials:
            layers = tuple(range(last))
            found[layers] = measure(layers)
    start = best()
    while start is not None and len(found) < trials:
        for layers in neighbours(start.layers, num_layers):
            if layers not in found and len(found) < trials:
                found[layers] = measure(layers)
        after = best()
        if after == start:
            break
        start = after
    return sorted((subset for subset in found.values() if subset), key=lambda subset: -subset.speedup)


def neighbours(layers: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    """Subsets, neither empty nor whole, that differ by one layer removed, added or exchanged for another."""
    others = [layer for layer in range(num_layers) if layer not in layers]
    if len(layers) > 1:
        for layer in layers:
            yield tuple(kept for kept in layers if kept != layer)
    for new in others:
        if len(layers) + 1 < num_layers:
            yield tuple(sorted((*layers, new)))
        for layer in layers:
            yield tuple(sorted((*(kept for kept in layers if kept != layer), new)))
