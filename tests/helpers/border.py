"""Calls across the border of compiled code."""

from forerun import kernels

NOWHERE = 0


def call(name, *arguments):
    assert kernels.has(name)
    getattr(kernels.library(), name)(*arguments)


def with_each(good, bad):
    """``good`` with one argument at a time replaced by a bad one."""
    return [(*good[:at], value, *good[at + 1 :]) for at, values in bad.items() for value in values]
