"""Kernels compiled in other ways than for this processor, and torch's threads."""

import ctypes
from contextlib import contextmanager

import pytest
import torch

from forerun import kernels


def kernels_for(folder, *machine):
    """As the compiler makes them with the options ``machine``, quickly."""
    path = folder / "kernels.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLAGS", ("-O1", *kernels.FLAGS[1:]))
        patch.delenv("FORERUN_SANITIZE", raising=False)
        kernels._compile(kernels.compiler(), path, machine)
    result = ctypes.CDLL(str(path))
    kernels._bind(result)
    return result


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
