"""How far ahead the kernels prefetch weights, and whether a matrix unit multiplies them (``Prefetch`` in
``kernels/rows.h``). Measured once per processor, for each kind of weights and number of rows: it depends on how fast
the processor multiplies and reads memory. No bits depend on it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from statistics import median
from time import perf_counter

import torch

from forerun import kernels
from forerun.core import tiles
from forerun.kernels import structs
from forerun.models.formats.base import Linear
from forerun.models.formats.compiled import Compiled, Joined

log = logging.getLogger(__name__)
ENOUGH = 1 << 23
"""Bytes of one kind from which it is measured: fewer may stay in a core's own cache."""
READ = 1 << 27
"""Bytes, about, that a measurement reads: more than caches hold, as a model's weights are."""
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32)
"""Measured row counts; others use the next smaller one's. Without the matrix unit, over 16 rows read weights twice."""
MIN_ROUNDS, SECONDS = 3, 0.5
"""Rounds of measurement: at least this many, and for so long."""
MARGIN = 0.03
"""A smaller gain over the default way may be noise. Times are minima: other programs only make them longer."""
TILED_FROM = 12
"""Rows from which ``TILED`` is the default, for kinds that it makes faster at the largest count."""
UNSTEADY = 3 * MARGIN
"""The result is not kept if, by medians, some way is faster than the chosen one by more: the machine was busy."""
NOTHING, NEAR, FAR, TILED = range(4)
MOST = 32
"""The largest row count that has a setting of its own."""


def autotune(layers: Iterable[Linear], dtype: torch.dtype) -> None:
    """Set the best prefetch, measured or remembered, of kinds with ``ENOUGH`` bytes in ``layers``, for ``dtype``."""
    by_kind: dict[int, list[Compiled]] = {}
    for layer in layers:
        for part in layer.parts if isinstance(layer, Joined) else (layer,):
            if isinstance(part, Compiled):
                by_kind.setdefault(part.fields().kind, []).append(part)
    for kind, parts in by_kind.items():
        total = sum(part.nbytes for part in parts)
        if total >= ENOUGH:
            size = min(total, READ).bit_length()
            what = f"prefetch of {structs.KINDS[kind]}, 2^{size} bytes, rows in {dtype}, {kernels.source_hash()}"
            set_prefetch(kind, tiles.measured_once(what, partial(_measure, kind, parts, dtype), partial(_valid, kind)))


def ways(kind: int) -> tuple[int, ...]:
    """The settings available here. Unquantized weights never use the matrix unit, whose rounding differs."""
    library = kernels.library()
    tiled = library is not None and library.tiles and structs.KINDS[kind] != "own"
    return (NOTHING, NEAR, FAR, TILED) if tiled else (NOTHING, NEAR, FAR)


def set_prefetch(kind: int, ways: Sequence[int]) -> None:
    """Set the prefetch of a kind: a setting for each of ``COUNTS``."""
    library = kernels.library()
    assert library is not None
    for (first, end), way in zip(pairwise((*COUNTS, MOST + 1)), ways, strict=True):
        for rows in range(first, end):
            library.set_prefetch(kind, rows, way)


def _valid(kind: int, value: object) -> list[int] | None:
    if not isinstance(value, list) or len(value) != len(COUNTS):
        return None
    return value if all(type(way) is int and way in ways(kind) for way in value) else None


@torch.inference_mode()
def _measure(kind: int, parts: Sequence[Compiled], dtype: torch.dtype) -> list[int]:
    """The fastest setting for each of ``COUNTS``."""
    sample, read = [], 0
    for part in parts:
        if read < READ:
            sample.append(part)
            read += part.nbytes
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(COUNTS[-1] * max(part.inputs for part in sample), generator=generator).to(dtype)
    workspace = torch.empty(COUNTS[-1] * max(part.outputs for part in sample), dtype=dtype)
    library = kernels.library()
    assert library is not None

    def run(part: Compiled, count: int) -> torch.Tensor:
        rows = numbers[: count * part.inputs].view(count, part.inputs)
        part.run(rows, workspace.data_ptr(), None, count, part.outputs)
        return workspace[: count * part.outputs]

    def bits(way: int) -> torch.Tensor:
        set_prefetch(kind, [way] * len(COUNTS))
        return torch.cat([run(sample[0], count) for count in COUNTS])

    usable = ways(kind)
    if TILED in usable and not torch.equal(bits(NEAR), bits(TILED)):
        log.warning("the matrix unit of this processor gives other sums of whole numbers, so it is not used for them")
        usable = tuple(way for way in usable if way != TILED)
    result: dict[int, dict[int, list[float]]] = {count: {way: [] for way in usable} for count in COUNTS}
    rounds, start = 0, perf_counter()
    while rounds < MIN_ROUNDS or perf_counter() - start < SECONDS:
        rounds += 1
        for count, way in product(COUNTS, usable):
            library.set_prefetch(kind, count, way)
            began = perf_counter()
            for part in sample:
                run(part, count)
            result[count][way].append(perf_counter() - began)
    least, typical = (
        {count: {way: over(times) for way, times in by_way.items()} for count, by_way in result.items()}
        for over in (min, median)
    )
    many = _fastest(least[COUNTS[-1]], NEAR)
    default = {count: TILED if many == TILED and count >= TILED_FROM else NEAR for count in COUNTS}
    chosen = {count: _fastest(least[count], default[count]) for count in COUNTS}
    if any(times[chosen[count]] * (1 - UNSTEADY) > min(times.values()) for count, times in typical.items()):
        return tiles.Provisional(chosen.values())
    return list(chosen.values())


def _fastest(seconds: dict[int, float], default: int) -> int:
    """The way with the least time, but the default unless another is faster than it by more than ``MARGIN``."""
    way = min(seconds, key=lambda each: seconds[each])
    return way if seconds[way] < (1 - MARGIN) * seconds[default] else default
