"""How weights are asked for ahead of their use, and whether a matrix unit multiplies them, ``Asking`` in
``kernels/rows.h``: measured on each processor once, by kinds of weights and numbers of rows, since it depends on how
fast that multiplies and how fast its memory is. No bits depend on it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
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
"""Bytes of one kind from which it is worth knowing: fewer may stay in a core's own cache."""
READ = 1 << 27
"""Bytes, about, that are read at a time. Caches may hold fewer, so what is found goes for weights of such a size."""
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
"""Rows that are tried; those between are asked for as the next fewer."""
TURNS, SECONDS = 3, 0.5
"""Turns at least, and time until which there are more."""
NOTHING, NEAR, FAR, TILED = range(4)
MOST = 32
"""Rows; more are asked for as these."""


def settle(layers: Iterable[Linear], dtype: torch.dtype) -> None:
    """Measure, or remember, for each kind of which there are ``ENOUGH`` bytes in ``layers``, for rows in ``dtype``."""
    by_kind: dict[int, list[Compiled]] = {}
    for layer in _compiled(layers):
        by_kind.setdefault(layer.fields().kind, []).append(layer)
    for kind, parts in by_kind.items():
        held = sum(part.nbytes for part in parts)
        if held >= ENOUGH:
            size = min(held, READ).bit_length()
            what = f"prefetch of {structs.KINDS[kind]}, 2^{size} bytes, rows in {dtype}, {kernels.source_hash()}"
            set_prefetch(kind, tiles.measured_once(what, partial(_measure, kind, parts, dtype), partial(_good, kind)))


def ways(kind: int) -> tuple[int, ...]:
    """Those that there are here. Numbers as they are have one unit for all rows, since units round differently."""
    library = kernels.library()
    tiled = library is not None and library.tiles and structs.KINDS[kind] != "own"
    return (NOTHING, NEAR, FAR, TILED) if tiled else (NOTHING, NEAR, FAR)


def set_prefetch(kind: int, ways: Sequence[int]) -> None:
    """Of a kind, a way for each of ``COUNTS``."""
    library = kernels.library()
    assert library is not None
    for (first, end), way in zip(pairwise((*COUNTS, MOST + 1)), ways, strict=True):
        for rows in range(first, end):
            library.set_prefetch(kind, rows, way)


def _good(kind: int, value: object) -> list[int] | None:
    if not isinstance(value, list) or len(value) != len(COUNTS):
        return None
    return value if all(type(way) is int and way in ways(kind) for way in value) else None


def _compiled(layers: Iterable[Linear]) -> Iterator[Compiled]:
    for layer in layers:
        if isinstance(layer, Joined):
            yield from layer.parts
        elif isinstance(layer, Compiled):
            yield layer


@torch.inference_mode()
def _measure(kind: int, parts: Sequence[Compiled], dtype: torch.dtype) -> list[int]:
    some, read = [], 0
    for part in parts:
        if read < READ:
            some.append(part)
            read += part.nbytes
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(COUNTS[-1] * max(part.inputs for part in some), generator=generator).to(dtype)
    workspace = torch.empty(COUNTS[-1] * max(part.outputs for part in some), dtype=dtype)
    library = kernels.library()
    assert library is not None

    def run(part: Compiled, count: int) -> torch.Tensor:
        rows = numbers[: count * part.inputs].view(count, part.inputs)
        part.run(rows, workspace.data_ptr(), None, count, part.outputs)
        return workspace[: count * part.outputs]

    def bits(way: int) -> torch.Tensor:
        set_prefetch(kind, [way] * len(COUNTS))
        return torch.cat([run(some[0], count) for count in COUNTS])

    serve = ways(kind)
    if TILED in serve and not torch.equal(bits(NEAR), bits(TILED)):
        log.warning("the matrix unit of this processor gives other sums of whole numbers, so it is not used for them")
        serve = tuple(way for way in serve if way != TILED)
    result: dict[int, dict[int, list[float]]] = {count: {way: [] for way in serve} for count in COUNTS}
    turns, start = 0, perf_counter()
    while turns < TURNS or perf_counter() - start < SECONDS:
        turns += 1
        for count, way in product(COUNTS, serve):
            library.set_prefetch(kind, count, way)
            began = perf_counter()
            for part in some:
                run(part, count)
            result[count][way].append(perf_counter() - began)
    return [min(times, key=lambda way: median(times[way])) for times in result.values()]
