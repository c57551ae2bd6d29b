"""Kernels in C++ for processors with AVX-512, compiled once per processor and kept in the user's cache folder.

Where there is no compiler, no AVX-512 or no place to keep the result, ``library`` is None and callers use torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
SOURCES = (HERE / "linear.cpp", HERE / "attention.cpp", HERE / "decoder.cpp", HERE / "sampling.cpp", HERE / "warp.cpp")
HEADERS = (HERE / "common.h", HERE / "blocks.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
COMPILERS = ("c++", "g++", "clang++")
PATIENCE = 120.0
"""Seconds that the compiler may take for a source; it takes ten."""

_P, _N, _I, _F, _U = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_uint64
_LINEAR = (_P, _P, _P, _P, _P, _N, _N, _N, _I)
_LINEAR_INT8 = (_P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _I)
_NORM = (_P, _P, _P, _N, _N, _N, _F)
_SILU_TIMES = (_P, _P, _N, _N)
_ATTEND = (_P, _P, _P, _P, _P, _P, _P, _P, _N, _P, _P, _P, _F, _F, _I)
_TURN = (_P, _N, _P, _N, _N, _N)
_DECODE = (_P, _P, _P, _F, _F)
_DRAFT = (_P, _P, _P, _P, _F, _F)
SIGNATURES = {
    "advise": (_P, _N),
    "linear_float32": _LINEAR,
    "linear_bfloat16": _LINEAR,
    "linear_int8_float32": _LINEAR_INT8,
    "linear_int8_bfloat16": _LINEAR_INT8,
    "norm_float32": _NORM,
    "norm_bfloat16": _NORM,
    "silu_times_float32": _SILU_TIMES,
    "silu_times_bfloat16": _SILU_TIMES,
    "attend_float32": _ATTEND,
    "attend_bfloat16": _ATTEND,
    "turn_float32": _TURN,
    "turn_bfloat16": _TURN,
    "decode_float32": _DECODE,
    "decode_bfloat16": _DECODE,
    "draft_float32": _DRAFT,
    "draft_bfloat16": _DRAFT,
    "gumbel": (_U, _P, _P, _N),
    "choose": (_P, _N, _N, _P, _P, _P, _P, _P, _P, _I),
    "draw": (_P, _N, _N, _P, _P),
    "weigh": (_P, _N, _N, _P, _N, _P, _P, _P, _P, _F, _P, _P, _P, _P, _P),
    "rank": (_P, _N, _N, _P, _N, _P, _P, _P),
    "restrict_rows": (_P, _N, _N, _P, _P, _P, _I),
    "penalise": (_P, _N, _P, _N, _N, _F, _F, _F),
    "overlaps": (_P, _N, _N, _P, _P, _P, _P, _I),
}


def folder() -> Path:
    """Where compiled kernels are kept: ``FORERUN_CACHE``, or ``forerun`` in the user's cache folder."""
    named = os.environ.get("FORERUN_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


def processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    about = {line for line in lines if line.startswith(("model name", "flags", "cpu family", "model\t"))}
    return "\n".join([platform.platform(), *sorted(about)])


def _compile(compiler: str, to: Path) -> None:
    """Raises OSError or a SubprocessError."""
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as work:

        def run(*arguments: str) -> None:
            subprocess.run([compiler, *FLAGS, *arguments], check=True, capture_output=True, timeout=PATIENCE)

        parts = {source: str(Path(work) / f"{source.stem}.o") for source in SOURCES}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: run("-c", str(source), "-o", parts[source]), SOURCES))
        made = Path(work) / to.name
        run("-shared", *parts.values(), "-o", str(made))
        os.replace(made, to)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, each with its argument types; those that the processor lacks are missing."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or compiler is None:
        return None
    parts = [path.read_text(encoding="utf-8") for path in SOURCES + HEADERS]
    parts += [compiler, *FLAGS, processor()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    try:
        path = folder() / f"kernels-{key}.so"
        if not path.is_file():
            _compile(compiler, path)
        found = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        log.warning("no CPU kernels of our own, torch's serve instead: %s", said[0] if said else error)
        return None
    for name, arguments in SIGNATURES.items():
        if hasattr(found, name):
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, None
    return found


def has(name: str) -> bool:
    """Whether kernel ``name`` can be called here."""
    found = library()
    return found is not None and hasattr(found, name)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
