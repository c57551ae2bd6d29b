"""Calls across the border of compiled code."""

import pytest

from forerun import kernels
from forerun.kernels import structs
from here import NO_KERNELS

NOWHERE = 0
ALL_KERNELS = [] if all(map(kernels.load, [*kernels.TYPES, *structs.QUANTS])) else [pytest.mark.elsewhere(NO_KERNELS)]
"""Marks of a file that needs the kernels of every dtype and type."""


def call(name, *arguments):
    assert kernels.has(name)
    getattr(kernels.library(), name)(*arguments)


def with_each(good, bad):
    """``good`` with one argument at a time replaced by a bad one."""
    return [(*good[:at], value, *good[at + 1 :]) for at, values in bad.items() for value in values]
