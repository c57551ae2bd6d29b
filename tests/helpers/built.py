"""Kernels compiled in other ways than for this processor, and torch's threads."""

import ctypes
import sys
import time
from contextlib import contextmanager
from importlib import metadata

import pytest
import torch

from forerun import kernels
from forerun.core.folders import cache_folder, make_folder, replace_with

KEPT = 7 * 24 * 3600
"""Seconds after which what other sources made may go."""


def kept(make, *parts):
    """The file that ``make`` writes: once for these ``parts`` and the kernels' sources as they are, and kept where the
    engine keeps its own."""
    key = kernels._key([*kernels._source_texts(), *parts, kernels.processor()])
    path = make_folder(cache_folder()) / f"tested-{key}"
    if not path.is_file():
        for old in path.parent.glob("tested-*"):
            if time.time() - old.stat().st_mtime > KEPT:
                old.unlink(missing_ok=True)
        replace_with(path, make)
    return path


def compiled(compiler, *machine, dtype=""):
    """The kernels as a compiler makes them with the options ``machine``, quickly; those of one dtype, or all."""
    each = f"-DFOR_EACH_TYPE(F)=F({dtype}, {kernels.TYPES.get(dtype)})"
    units = [(each, str(source)) for source in kernels.SOURCES if source.stem != "quants"] if dtype else None

    def make(file):
        whole = kernels.Library(file, units or kernels.all_units())
        assert kernels.compile_kernels(compiler, [whole], machine, timeout=None) == {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLAGS", ("-O1", *kernels.FLAGS[1:]))
        patch.delenv("FORERUN_SANITIZE", raising=False)
        version = metadata.version(kernels.ZIG) if kernels.ZIG in compiler else ""
        by = [part for part in compiler if part != sys.executable]  # which lies elsewhere in every environment
        return kept(make, *by, version, *kernels._flags(), *machine, dtype)


def bound(path):
    result = ctypes.CDLL(str(path))
    kernels._bind(result)
    return result


def kernels_for(*machine, **which):
    """As the compiler that is here makes them with the options ``machine``."""
    return bound(compiled(kernels.compiler(), *machine, **which))


@contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
