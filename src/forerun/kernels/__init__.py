"""Kernels in C++ for x86-64 processors with AVX2 and FMA or with AVX-512, compiled once per processor and kept in the
user's cache folder.

Where there is no compiler, no such processor or no place to keep the result, or where the environment variable
``FORERUN_KERNELS`` is 0, ``library`` is None and callers use torch.
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

from forerun.core.errors import ConfigError, ForerunError
from forerun.core.folders import cache_folder
from forerun.kernels import structs

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
SOURCES = tuple(
    HERE / f"{name}.cpp" for name in ("attention", "border", "decoder", "linear", "quants", "sampling", "warp")
)
HEADERS = tuple(
    HERE / f"{name}.h"
    for name in ("lanes", "lanes_avx2", "lanes_avx512", "kernels", "structs", "blocks", "quants", "rows")
)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
SANITIZE = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
"""Added if ``FORERUN_SANITIZE`` is 1; ``make sanitize`` runs tests under it."""
NEEDED = frozenset(("avx2", "fma", "f16c"))
"""Of a processor, as ``/proc/cpuinfo`` has them."""
COMPILERS = ("c++", "g++", "clang++")
PATIENCE = 600.0
"""Seconds that the compiler may take for a source; it takes ten, on a busy machine many times that."""

TYPES = ("float32", "bfloat16", "float16")
_P, _N, _I, _F, _U = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_uint64
_BY_TYPE = {
    "linear": (_P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "linear_int8": (_P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "linear_quants": (_N, _P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "take_rows": (_N, _P, _P, _P, _N, _N, _N),
    "norm": (_P, _P, _P, _N, _N, _N, _F),
    "silu_times": (_P, _P, _N, _N),
    "attend": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _F, _F, _I),
    "turn": (_P, _N, _P, _N, _N, _N),
    "decode": (_P, _P, _P, _F, _F),
    "draft": (_P, _P, _P, _P, _F, _F),
}
SIGNATURES = {
    "advise": (_P, _N),
    "gumbel": (_U, _P, _P, _N),
    "choose": (_P, _N, _N, _P, _P, _P, _P, _P, _P, _I),
    "draw": (_P, _N, _N, _P, _P),
    "weigh": (_P, _N, _N, _P, _N, _P, _P, _P, _P, _F, _P, _P, _P, _P, _P),
    "rank": (_P, _N, _N, _N, _P, _N, _P, _N, _P, _P),
    "restrict_rows": (_P, _N, _N, _P, _P, _P, _I),
    "penalise": (_P, _N, _P, _N, _N, _F, _F, _F),
    "overlaps": (_P, _N, _N, _N, _P, _P, _P, _P, _I),
    **{f"{name}_{kind}": arguments for name, arguments in _BY_TYPE.items() for kind in TYPES},
}


class KernelError(ForerunError):
    """Arguments that a kernel refuses: sizes, indices or addresses that would reach memory that is not the caller's."""


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
    around = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's, or anyone's
    with tempfile.TemporaryDirectory(dir=to.parent) as work:

        def run(*arguments: str) -> None:
            command = [compiler, *_flags(), *arguments]
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE, env=around)

        parts = {source: str(Path(work) / f"{source.stem}.o") for source in SOURCES}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: run("-c", str(source), "-o", parts[source]), SOURCES))
        made = Path(work) / to.name
        run("-shared", *parts.values(), "-o", str(made))
        os.replace(made, to)


def _serves() -> bool:
    """Whether this processor has what the kernels are written in."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return any(line.startswith("flags") and set(line.split()) >= NEEDED for line in lines)


def _switched_on() -> bool:
    """What ``FORERUN_KERNELS`` says; raises ConfigError if that is neither 0 nor 1."""
    said = os.environ.get("FORERUN_KERNELS") or "1"
    if said not in ("0", "1"):
        raise ConfigError(f"FORERUN_KERNELS is 1 or, to do without kernels of our own, 0; not {said!r}")
    return said == "1"


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *SANITIZE) if os.environ.get("FORERUN_SANITIZE") == "1" else FLAGS


def _bind(found: ctypes.CDLL) -> None:
    """Give every kernel its name, its argument types, and an error for arguments that it refuses. Raises RuntimeError
    where the library has other structs than ``structs.py``."""
    found.forerun_layout.restype = found.forerun_words.restype = ctypes.c_char_p
    if (layout := found.forerun_layout().decode()) != structs.LAYOUT:
        raise RuntimeError(f"structs.h and structs.py differ: {layout!r}, {structs.LAYOUT!r}")

    def check(complaint: int) -> None:
        if complaint:
            raise KernelError(f"a kernel was called wrongly: {found.forerun_words(complaint).decode()}")

    for name, arguments in SIGNATURES.items():
        function = getattr(found, f"forerun_{name}")
        function.argtypes, function.restype = arguments, check
        setattr(found, name, function)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels by their names in ``SIGNATURES``, each with its argument types. A call raises KernelError
    for arguments that the kernel refuses."""
    if not _switched_on() or not _serves():
        return None
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.warning(
            "no C++ compiler, so torch runs the models, at about half the speed and less; install one "
            "(apt-get install g++), or set FORERUN_KERNELS=0 to do without"
        )
        return None
    parts = [path.read_text(encoding="utf-8") for path in SOURCES + HEADERS]
    parts += [compiler, *_flags(), processor()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    try:
        path = cache_folder() / f"kernels-{key}.so"
        if not path.is_file():
            _compile(compiler, path)
        found = ctypes.CDLL(str(path))
        _bind(found)
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        said = [line for line in said if "error" in line] or said
        log.warning("no CPU kernels of our own, torch's serve instead: %s", said[0] if said else error)
        return None
    return found


def has(name: str) -> bool:
    """Whether kernel ``name`` can be called here."""
    found = library()
    return found is not None and hasattr(found, name)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
