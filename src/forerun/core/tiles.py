"""Calls of a few row counts, so that a row's bits do not depend on the rest of the batch.

A library's kernel sums in an order that depends on the shape of the call and on the row's index in it, and on nothing
else. So calls are padded to one of a few sizes. The sizes in use are tested once per machine: a call of one row
repeated must give the same bits at every index, and in every size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from forerun import kernels
from forerun.core.folders import Record

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
"""Row counts that a call may have."""
ENOUGH = 8
"""The largest size should have at least this many rows: with fewer, a prompt takes too many calls."""

T = TypeVar("T")
Groups = list[list[int]]
"""Groups of sizes that agree: a row gets the same bits at every index of all sizes in a group."""


def compare(sizes: Sequence[int], run: Callable[[int], torch.Tensor]) -> Groups:
    """Groups the sizes that agree, each with itself as well. ``run(size)`` computes one row repeated, [size, ...]."""
    result: list[tuple[torch.Tensor, list[int]]] = []
    for size in sizes:
        rows = run(size)
        if not bool((rows == rows[:1]).all()):
            continue
        for row, group in result:
            if torch.equal(row, rows[0]):
                group.append(size)
                break
        else:
            result.append((rows[0].clone(), [size]))
    return [group for _, group in result]


def intersect(groups: Groups, others: Groups) -> Groups:
    """The groups of sizes that are together in both."""
    both = ([size for size in group if size in other] for group in groups for other in others)
    return [group for group in both if group]


def best_group(groups: Groups) -> tuple[int, ...]:
    """The group to use: one with a size of at least ``ENOUGH`` rows if possible, then the one that starts lowest."""
    best: list[int] = min(groups, key=lambda group: (group[-1] < ENOUGH, group[0], -len(group)), default=[])
    return tuple(best)


def call_size(rows: int, sizes: Sequence[int]) -> int:
    """The size of the call that takes ``rows`` rows, or the largest."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def split_rows(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Splits ``rows`` rows into calls: yields first row, end, size."""
    for first in range(0, rows, sizes[-1]):
        end = min(rows, first + sizes[-1])
        yield first, end, call_size(end - first, sizes)


SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
            "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE", "ONEDNN_DEFAULT_FPMATH_MODE", "FORERUN_TILES")  # fmt: skip
"""Environment variables by which libraries choose other kernels than the processor's best."""


def environment() -> list[str]:
    """What the order of sums depends on besides shapes: processor, libraries, threads."""
    settings = [f"{name}={os.environ.get(name, '')}" for name in SWITCHES]
    threads = f"{torch.get_num_threads()} threads"
    return [kernels.processor(), torch.__version__, torch.__config__.show(), threads, *settings]


class Provisional(list[Any]):
    """A measurement to use but not to keep."""


def measured_once(what: str, measure: Callable[[], T], validate: Callable[[object], T | None]) -> T:
    """``measure()``, or its result from before in this ``environment``, kept on disk unless ``Provisional``.

    ``validate`` returns a kept value, or None if ``measure`` cannot have returned it.
    """
    record = Record("tiles", what, *environment())
    result = validate(record.read())
    if result is None:
        result = measure()
        if not isinstance(result, Provisional):
            record.write(result)
    return result


def as_groups(value: object) -> Groups | None:
    """``value`` if it is a list of groups."""
    if not isinstance(value, list) or not all(isinstance(group, list) and group for group in value):
        return None
    good = all(type(size) is int and size in SIZES for group in value for size in group)
    return value if good and all(group == sorted(set(group)) for group in value) else None
