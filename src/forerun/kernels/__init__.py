"""Kernels in C++ for x86-64 processors with AVX2 and FMA or with AVX-512, and for ARM64, compiled once per processor
and kept in the user's cache folder.

A wheel for Linux or macOS (``make wheels``) carries them compiled; then nothing is compiled. Elsewhere, with neither
that nor a compiler, without such a processor or a place to keep the result, or where the environment variable
``FORERUN_KERNELS`` is 0, ``library`` is None and callers use torch. With ``FORERUN_TILES`` 0 they leave a matrix unit
alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from forerun.core.errors import ConfigError, ForerunError
from forerun.core.folders import cache_folder, distrust, make_folder, replace_with
from forerun.core.loading import watch_parts
from forerun.kernels import structs

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.cpp")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")
SANITIZE = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
"""Added if ``FORERUN_SANITIZE`` is 1; ``make sanitize`` runs tests under it."""
ON_ARM = platform.machine() in ("aarch64", "arm64")
_AVX2, _NEON = frozenset(("avx2", "fma", "f16c")), frozenset(("asimd",))
NEEDED = _NEON if ON_ARM else _AVX2
"""Of a processor, as ``/proc/cpuinfo`` has them."""
SYSTEMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
"""Those that the kernels are written for, and their processors."""
PREBUILT = HERE / "carried"
"""Where a platform wheel has them, a file for each of ``VARIANTS``."""
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
VARIANTS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512_amx": (
        _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    ),
    "avx512_vnni_bf16": (
        _AVX512 | {"avx512_vnni", "avx512_bf16"}, ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
    ),
    "avx512_vnni": (_AVX512 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
    "avx512": (_AVX512, ("-march=x86-64-v4",)),
    "avx_vnni": (_AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    "avx2": (_AVX2, ("-march=x86-64-v3",)),
    "neon_i8mm": (_NEON | {"asimddp", "i8mm"}, ("-mcpu=generic+dotprod+i8mm",)),
    "neon_dotprod": (_NEON | {"asimddp"}, ("-mcpu=generic+dotprod",)),
    "neon": (_NEON, ("-mcpu=generic",)),
}  # fmt: skip
"""What a processor must have for each, as ``/proc/cpuinfo`` has it, and how it is compiled; the best first."""
COMPILERS = ("c++", "g++", "clang++")
ZIG = "ziglang"
"""A module that compiles C++, for every system from each: the extra ``forerun[compiler]``."""
TARGETS = {
    "manylinux_2_28_x86_64": ("x86_64-linux-gnu.2.28", "avx2"),
    "manylinux_2_28_aarch64": ("aarch64-linux-gnu.2.28", "asimd"),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", "asimd"),
}
"""By platform tag, for wheels that carry kernels: what ``ZIG`` compiles for, and the unit that its variants share."""
HASH_SIZE = hashlib.sha256().digest_size
"""Bytes at a library's end, behind all that a loader reads: the hash of what is before them, so that one that is cut
short or changed is known before it is loaded."""
COMPILING = "Compiling the kernels for this processor: once, in half a minute to two minutes"
COMPILE_TIMEOUT = 600.0
"""Seconds that the compiler may take for a source; it takes ten, on a busy machine many times that."""

TYPES = ("float32", "bfloat16", "float16")
_P, _N, _I, _F, _U = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_uint64
_BY_TYPE = {
    "linear": (_P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "linear_int8": (_P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "linear_quants": (_N, _P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "take_rows": (_N, _P, _P, _P, _N, _N, _N),
    "norm": (_P, _P, _P, _P, _N, _N, _N, _F, _I),
    "gate": (_N, _P, _I, _P, _P, _N, _N),
    "project_each": (_P, _N, _P, _N, _N, _P, _N, _N, _N, _I),
    "mix": (_P, _P, _P, _P, _N, _I, _P),
    "attend": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _F, _F, _I),
    "apply_rotary": (_P, _N, _P, _N, _N, _N),
    "recur": (_P, _P, _P, _P, _P, _P, _N, _I),
    "decode": (_P, _P, _P),
    "draft": (_P, _P, _P, _P),
}
SUM = ctypes.CFUNCTYPE(_I, _P, _N, _P, _N)
"""``Sum`` in ``structs.h``."""
SIGNATURES = {
    "advise": (_P, _N),
    "set_prefetch": (_N, _N, _N),
    "rest": (),
    "softcap": (_P, _N, _F),
    "gumbel": (_U, _P, _P, _N),
    "choose": (_P, _N, _N, _P, _P, _P, _P, _P, _P, _I),
    "draw": (_P, _N, _N, _P, _P),
    "weigh": (_P, _N, _N, _P, _N, _P, _P, _P, _P, _F, _P, _P, _P, _P, _P),
    "look_up": (_P, _N, _P, _N, _N, _P, _P),
    "rank": (_P, _N, _N, _N, _P, _N, _P, _N, _P, _P),
    "restrict_rows": (_P, _N, _N, _P, _P, _P, _I),
    "penalise": (_P, _N, _P, _N, _N, _F, _F, _F),
    "overlaps": (_P, _N, _N, _N, _P, _P, _P, _P, _I),
    **{f"{name}_{kind}": arguments for name, arguments in _BY_TYPE.items() for kind in TYPES},
}


class KernelError(ForerunError):
    """Arguments that a kernel refuses: sizes, indices or addresses that would reach memory that is not the "
    "caller's."""


def cpuinfo() -> list[str]:
    """Lines of ``/proc/cpuinfo``; none where there is no such file."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def processor() -> str:
    """What ``-march=native`` depends on."""
    names = ("model name", "flags", "cpu family", "model\t", "Features", "CPU ")
    about = {line for line in cpuinfo() if line.startswith(names)}
    return "\n".join([platform.platform(), *sorted(about)])


def _zig() -> tuple[str, ...]:
    """The command of ``ZIG``; empty where it is not installed."""
    return (sys.executable, "-m", ZIG, "c++") if find_spec(ZIG) else ()


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler that is there; empty where there is none."""
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    return (path,) if path else _zig()


def _compile(
    compiler: Sequence[str],
    to: Path,
    machine: Sequence[str] = ("-mcpu=native" if ON_ARM else "-march=native",),
    timeout: float | None = COMPILE_TIMEOUT,
    title: str = COMPILING,
) -> None:
    """Compile the kernels into the file ``to``, with their seal. Raises OSError or a SubprocessError."""
    around = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's, or anyone's
    with tempfile.TemporaryDirectory(dir=to.parent) as work, watch_parts.get()(title, len(SOURCES) + 1) as advance:

        def run(*arguments: str) -> None:
            command = [*compiler, *_flags(), *machine, *arguments]
            subprocess.run(command, check=True, capture_output=True, timeout=timeout, env=around)
            advance(1)

        strip = () if "-g" in _flags() else ("-s",)  # a library is a tenth as large without symbols
        parts = {source: str(Path(work) / f"{source.stem}.o") for source in SOURCES}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: run("-c", str(source), "-o", parts[source]), SOURCES))
        made = Path(work) / to.name
        run("-shared", *strip, *parts.values(), "-o", str(made))
        content = made.read_bytes()
        replace_with(to, lambda file: file.write_bytes(content + hashlib.sha256(content).digest()))


def _intact(path: Path) -> bool:
    """Whether a library is as it was compiled: the system ends a process that loads one that is cut short."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-HASH_SIZE]).digest() == content[-HASH_SIZE:]


_HWCAP, _HWCAP2 = 16, 26
_ARM_UNITS = {
    "asimd": (_HWCAP, 1, b"hw.optional.neon"),
    "asimddp": (_HWCAP, 20, b"hw.optional.arm.FEAT_DotProd"),
    "i8mm": (_HWCAP2, 13, b"hw.optional.arm.FEAT_I8MM"),
}
"""Which bit of which word Linux has for them (``getauxval``), and how macOS calls them."""


def _has_on_arm(unit: str) -> bool:
    system, (word, bit, name) = ctypes.CDLL(None), _ARM_UNITS[unit]
    if sys.platform == "darwin":
        value, size = _I(), ctypes.c_size_t(ctypes.sizeof(_I))
        at = ctypes.byref(value), ctypes.byref(size)
        return system.sysctlbyname(name, *at, None, ctypes.c_size_t(0)) == 0 and value.value == 1
    system.getauxval.argtypes, system.getauxval.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return bool(system.getauxval(word) >> bit & 1)


def _cpu_features() -> frozenset[str]:
    """What the processor has, as ``/proc/cpuinfo`` has it; empty where that is not told."""
    if ON_ARM and sys.platform in ("linux", "darwin"):
        return frozenset(filter(_has_on_arm, _ARM_UNITS))
    return frozenset(next((line.split() for line in cpuinfo() if line.startswith("flags")), ()))


def _source_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in SOURCES + HEADERS]


def _key(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def source_hash() -> str:
    """A name for the sources as they are."""
    return _key(_source_texts())


def prebuilt(name: str, folder: Path | None = None) -> Path:
    """Where a wheel has the kernels compiled as ``VARIANTS[name]``, for the sources as they are."""
    return (folder or PREBUILT) / f"{name}-{source_hash()}.so"


def prebuild(platform: str, folder: Path) -> None:
    """Compile into ``folder`` what the wheel for a platform carries, which may be nothing; what is there stays.
    ``python -m forerun.kernels PLATFORM FOLDER``. Raises KernelError without ``ZIG``, OSError or a SubprocessError
    where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    target, common = TARGETS.get(platform, ("", None))
    variants = {prebuilt(name, folder): machine for name, (needed, machine) in VARIANTS.items() if common in needed}
    for other in set(folder.iterdir()) - set(variants):  # of other sources
        shutil.rmtree(other) if other.is_dir() else other.unlink()
    zig = _zig()
    for path, machine in variants.items():
        if path.is_file() and _intact(path):
            continue
        if not zig:
            raise KernelError(f"wheels are compiled by {ZIG}: pip install 'forerun[compiler]'")
        flags = ("-target", target, for_zig(machine))
        _compile(zig, path, flags, timeout=None, title=f"Compiling {path.name} for {platform}")


def for_zig(machine: Sequence[str]) -> str:
    """What other compilers are told about a processor, as ``ZIG`` wants it."""
    units = (flag.removeprefix("-march=").removeprefix("-mcpu=").removeprefix("-m") for flag in machine)
    return f"-mcpu={'+'.join(units).replace('-', '_')}"


def _load_prebuilt() -> ctypes.CDLL | None:
    """The best of what a wheel carries for this processor; None where it carries nothing that serves."""
    if not PREBUILT.is_dir() or os.environ.get("FORERUN_SANITIZE") == "1":
        return None
    units = _cpu_features()
    path = next((prebuilt(name) for name, (needed, _) in VARIANTS.items() if units >= needed), None)
    if path is None or not path.is_file():
        return None
    try:
        if not _intact(path):
            raise OSError(f"{path} is damaged")
        result = ctypes.CDLL(str(path))
        _bind(result)
    except (OSError, RuntimeError, AttributeError) as error:
        log.warning("the kernels of this installation cannot be loaded, they are compiled instead: %s", error)
        return None
    return result


def _supported() -> bool:
    """Whether this system and processor have what the kernels are written in."""
    return (sys.platform, platform.machine()) in SYSTEMS and _cpu_features() >= NEEDED


def _enabled(name: str = "FORERUN_KERNELS", without: str = "kernels of our own") -> bool:
    """What a variable says; raises ConfigError if that is neither 0 nor 1."""
    said = os.environ.get(name) or "1"
    if said not in ("0", "1"):
        raise ConfigError(f"{name} is 1 or, to do without {without}, 0; not {said!r}")
    return said == "1"


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *SANITIZE) if os.environ.get("FORERUN_SANITIZE") == "1" else FLAGS


def _bind(result: ctypes.CDLL) -> None:
    """Give every kernel its name, its argument types, and an error for arguments that it refuses. Raises RuntimeError
    where the library has other structs than ``structs.py``."""
    result.forerun_layout.restype = result.forerun_words.restype = ctypes.c_char_p
    result.tiles = bool(result.forerun_tiles())  # type: ignore[attr-defined]
    if (layout := result.forerun_layout().decode()) != structs.LAYOUT:
        raise RuntimeError(f"structs.h and structs.py differ: {layout!r}, {structs.LAYOUT!r}")

    def check(complaint: int) -> None:
        if complaint:
            raise KernelError(f"a kernel was called wrongly: {result.forerun_words(complaint).decode()}")

    for name, arguments in SIGNATURES.items():
        function = getattr(result, f"forerun_{name}")
        function.argtypes, function.restype = arguments, check
        setattr(result, name, function)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels by their names in ``SIGNATURES``, each with its argument types. A call raises KernelError
    for arguments that the kernel refuses. ``tiles``: whether a matrix unit serves them."""
    _enabled("FORERUN_TILES", "a matrix unit")  # which the kernels look at themselves
    if not _enabled():
        return None
    if not _supported():
        log.warning(
            "torch runs the models: our kernels need Linux on x86-64 with AVX2, FMA and F16C, Linux on ARM64, or macOS "
            "on ARM64; this is %s on %s",
            platform.system(),
            platform.machine(),
        )
        return None
    if (ready := _load_prebuilt()) is not None:
        return ready
    command = compiler()
    if not command:
        log.warning(
            "no C++ compiler, so torch runs the models, at about half the speed and less; install one "
            "(pip install 'forerun[compiler]', or apt-get install g++), or set FORERUN_KERNELS=0 to do without"
        )
        return None
    try:
        folder = make_folder(cache_folder())
        path = folder / f"kernels-{_key([*_source_texts(), *command, *_flags(), processor()])}.so"
        if not path.is_file() or distrust(path) or not _intact(path):
            _compile(command, path)
        result = ctypes.CDLL(str(path))
        _bind(result)
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        said = [line for line in said if "error" in line] or said
        if isinstance(error, subprocess.TimeoutExpired):  # whose own words are the whole command
            said = [f"the compiler was not done with a file after {COMPILE_TIMEOUT:.0f} s"]
        advice = "; FORERUN_CACHE names another folder for them" if isinstance(error, OSError) else ""
        log.warning("no CPU kernels of our own, torch's serve instead: %s%s", said[0] if said else error, advice)
        return None
    return result


class _Threads(threading.local):
    count: int | None = None


_threads = _Threads()


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Within, kernels that this thread calls compute on so many threads; torch's own sums stay as they are. Which
    number it is changes no bit."""
    before, _threads.count = _threads.count, count
    try:
        yield
    finally:
        _threads.count = before


def threads() -> int:
    """Threads that kernels compute on: torch's number, but within ``on_threads``."""
    return _threads.count or torch.get_num_threads()


def has(name: str) -> bool:
    """Whether kernel ``name`` can be called here."""
    result = library()
    return result is not None and hasattr(result, name)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
