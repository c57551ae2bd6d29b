"""From how many rows on a kind of weights is asked for far ahead, ``Ask`` in ``kernels/rows.h``: measured on each
processor once, since it depends on how fast that multiplies and how fast its memory is. No bits depend on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from time import perf_counter

import torch

from forerun import kernels
from forerun.core import tiles
from forerun.kernels import structs
from forerun.models.formats.base import Linear
from forerun.models.formats.compiled import Compiled, Joined

ENOUGH = 1 << 25
"""Bytes of one kind from which it is worth knowing: fewer may stay in a cache."""
READ = 1 << 27
"""Bytes, about, that are read at a time."""
COUNTS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
TURNS = 3
ALWAYS, NEVER = 1, 1 << 30


def settle(layers: Iterable[Linear], dtype: torch.dtype) -> None:
    """Measure, or remember, for each kind of which there are ``ENOUGH`` bytes in ``layers``, for rows in ``dtype``."""
    library = kernels.library()
    by_kind: dict[int, list[Compiled]] = {}
    for layer in _compiled(layers):
        by_kind.setdefault(layer.fields().kind, []).append(layer)
    for kind, parts in by_kind.items():
        if library is not None and sum(part.nbytes for part in parts) >= ENOUGH:
            what = f"rows from which to ask far ahead for {structs.KINDS[kind]} {dtype}"
            library.ask_far(kind, tiles.remembered(what, partial(_measure, kind, parts, dtype), _rows))


def _rows(value: object) -> int | None:
    return value if type(value) is int and value in (*COUNTS, NEVER) else None


def _compiled(layers: Iterable[Linear]) -> Iterator[Compiled]:
    for layer in layers:
        if isinstance(layer, Joined):
            yield from layer.parts
        elif isinstance(layer, Compiled):
            yield layer


@torch.inference_mode()
def _measure(kind: int, parts: Seq[Compiled], dtype: torch.dtype) -> int:
    library, some, read = kernels.library(), [], 0
    assert library is not None
    for part in parts:
        if read < READ:
            some.append(part)
            read += part.nbytes
    numbers = torch.randn(COUNTS[-1] * max(part.inputs for part in some)).to(dtype)
    room = torch.empty(COUNTS[-1] * max(part.outputs for part in some), dtype=dtype)
    best: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for _ in range(TURNS):
        for count in COUNTS:
            for far, seconds in best.items():
                library.ask_far(kind, ALWAYS if far else NEVER)
                began = perf_counter()
                for part in some:
                    rows = numbers[: count * part.inputs].view(count, part.inputs)
                    part.run(rows, room.data_ptr(), None, count, part.outputs)
                seconds[count] = min(seconds.get(count, float("inf")), perf_counter() - began)
    return first_far(best[False], best[True])


def first_far(near: Mapping[int, float], far: Mapping[int, float]) -> int:
    """The number of rows from which on asking far ahead takes least, of seconds by rows: by the sum of what the counts
    take over what they take at best, so that one disturbed count does not decide."""

    def cost(first: int) -> float:
        return sum((far if count >= first else near)[count] / min(far[count], near[count]) for count in near)

    return min((*near, NEVER), key=lambda first: (cost(first), -first))
