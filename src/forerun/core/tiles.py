"""Rows in calls of a few sizes, so that a row's bits do not depend on what it is computed beside.

A library's kernel adds up in an order that depends on the shape of the call and on the row's place in it, and on
nothing else. So calls are made in a few sizes only, the rest of a call being repeated rows, and each of its places is
compared once: a call of one row repeated must give one result in all of them, and the same one in every size in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from forerun import kernels
from forerun.core.folders import Record

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
"""Row counts that a call may have."""
ENOUGH = 8
"""Rows that the largest size should have at least: with fewer a prompt takes too many calls."""

T = TypeVar("T")
Groups = list[list[int]]
"""Sizes in whose every place a row gets the same bits, group by group."""


def compare(sizes: Sequence[int], run: Callable[[int], torch.Tensor]) -> Groups:
    """``run(size)`` gives the results [size, ...] of one row repeated; which sizes agree. A size whose places disagree
    is in no group."""
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
    """The groups of sizes that agree in both."""
    both = ([size for size in group if size in other] for group in groups for other in others)
    return [group for group in both if group]


def best_group(groups: Groups) -> tuple[int, ...]:
    """The group to use: one with a size of ``ENOUGH`` rows if there is, and then the one that begins smallest."""
    if not groups:
        return ()

    def last_resorts(group: list[int]) -> tuple[bool, int, int]:
        return group[-1] < ENOUGH, group[0], -len(group)

    best: list[int] = min(groups, key=last_resorts)
    return tuple(best)


def call_size(rows: int, sizes: Sequence[int]) -> int:
    """The size of the call that takes ``rows`` rows, or the largest."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def split_rows(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Calls that take ``rows`` rows: first row, end, size."""
    for first in range(0, rows, sizes[-1]):
        end = min(rows, first + sizes[-1])
        yield first, end, call_size(end - first, sizes)


SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
            "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE", "ONEDNN_DEFAULT_FPMATH_MODE", "FORERUN_TILES")  # fmt: skip
"""What makes libraries choose other kernels than the processor's best."""


def environment() -> list[str]:
    """What the order of sums depends on, beside the shapes: processor, libraries, threads."""
    settings = [f"{name}={os.environ.get(name, '')}" for name in SWITCHES]
    threads = f"{torch.get_num_threads()} threads"
    return [kernels.processor(), torch.__version__, torch.__config__.show(), threads, *settings]


def measured_once(what: str, find: Callable[[], T], good: Callable[[object], T | None]) -> T:
    """``find()``, or what it found here before: kept in the cache folder, by ``what`` and the circumstances, and taken
    as ``good`` has it, which is None for what ``find`` cannot have returned."""
    record = Record("tiles", what, *environment())
    result = good(record.read())
    if result is None:
        result = find()
        record.write(result)
    return result


def as_groups(value: object) -> Groups | None:
    """``value`` if it is what ``find`` returns."""
    if not isinstance(value, list) or not all(isinstance(group, list) and group for group in value):
        return None
    good = all(type(size) is int and size in SIZES for group in value for size in group)
    return value if good and all(group == sorted(set(group)) for group in value) else None
