"""CPU kernels in C++, for x86-64 with AVX2 and FMA or AVX-512, and for ARM64.

``library`` loads those that came with the wheel (``make wheels``), or compiles the sources once per processor into the
user's cache folder. On Linux, what serves one dtype or one block-quantized type is compiled when it is first needed
(``load``). ``library`` returns None, and callers use torch, where neither works, where the processor lacks something,
or where the environment variable ``FORERUN_KERNELS`` is 0. ``FORERUN_TILES=0`` leaves a matrix unit (AMX) unused.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun.core.errors import ConfigError, ForerunError
from forerun.core.folders import cache_folder, distrust, make_folder, replace_with
from forerun.core.loading import watch_parts
from forerun.core.threads import usable_cores
from forerun.kernels import structs

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.cpp")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")
SANITIZE = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
"""Added if ``FORERUN_SANITIZE`` is 1, as ``make sanitize`` sets it."""
ON_ARM = platform.machine() in ("aarch64", "arm64")
_AVX2, _NEON = frozenset(("avx2", "fma", "f16c")), frozenset(("asimd",))
NEEDED = _NEON if ON_ARM else _AVX2
"""Features that a processor must have, as ``/proc/cpuinfo`` names them."""
SYSTEMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
"""The systems and processors that the kernels are written for."""
PREBUILT = HERE / "carried"
"""Where a platform's wheel has its kernels, a file for each of ``VARIANTS``."""
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
"""Prebuilt kernels, the best first: the processor features that each needs, and its compiler flags."""
COMPILERS = ("c++", "g++", "clang++")
ZIG = "ziglang"
"""A Python package with a C++ compiler: the extra ``forerun[compiler]``."""
HASH_SIZE = hashlib.sha256().digest_size
"""A library ends with the hash of the bytes before, so that a truncated or changed file is never loaded."""
COMPILING, COMPILING_PART = "Compiling the kernels, once", "Compiling the kernels for {}, once"
COMPILE_TIMEOUT = 600.0
"""Seconds for one source. It takes ten, and many times that on a busy machine."""

BASE = ("border", "sampling", "warp", "threads", "shared")
"""Sources that serve every dtype; ``border`` also checks the arguments of the others."""
BY_DTYPE = ("attention", "decoder", "linear", "recurrent", "experts", "border")
"""Sources compiled for one dtype at a time; another, ``quants``, for one block-quantized type at a time."""
SLOWEST = ("attention", "quants")
"""They begin first, so that none of them runs alone at the end."""
TYPES = {"float32": "float", "bfloat16": "Bfloat16", "float16": "Float16"}
"""Dtypes of activations, and their names in the sources."""
_P, _N, _I, _F, _U = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_uint64
_BY_TYPE = {
    "linear": (_P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "linear_int8": (_P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "linear_quants": (_N, _P, _P, _P, _P, _P, _N, _N, _N, _N, _I),
    "get_rows": (_N, _P, _P, _P, _N, _N, _N),
    "norm": (_P, _P, _P, _P, _N, _N, _N, _F, _I),
    "apply_activation": (_N, _P, _I, _P, _P, _N, _N),
    "project_each": (_P, _N, _P, _N, _N, _P, _N, _N, _N, _I),
    "moe": (_P, _P, _P, _P, _N, _I, _P),
    "attend": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _F, _F, _I),
    "apply_rotary": (_P, _N, _P, _N, _N, _N),
    "recur": (_P, _P, _P, _P, _P, _P, _N, _I),
    "decode": (_P, _P, _P),
    "draft": (_P, _P, _P, _P),
}
ALL_REDUCE = ctypes.CFUNCTYPE(_I, _P, _N, _P, _N)
"""``AllReduce`` in ``structs.h``."""
SIGNATURES = {
    "use_huge_pages": (_P, _N),
    "set_prefetch": (_N, _N, _N),
    "stop_threads": (),
    "softcap": (_P, _N, _F),
    "gumbel": (_U, _P, _P, _N),
    "gumbel_max": (_P, _N, _N, _P, _P, _P, _P, _P, _P, _I),
    "inverse_cdf": (_P, _N, _N, _P, _P),
    "acceptance": (_P, _N, _N, _P, _N, _P, _P, _P, _P, _F, _P, _P, _P, _P, _P),
    "prompt_lookup": (_P, _N, _P, _N, _N, _P, _P),
    "top_logprobs": (_P, _N, _N, _N, _P, _N, _P, _N, _P, _P),
    "filter_rows": (_P, _N, _N, _P, _P, _P, _I),
    "apply_penalties": (_P, _N, _P, _N, _N, _F, _F, _F),
    "overlaps": (_P, _N, _N, _N, _P, _P, _P, _P, _I),
}


class KernelError(ForerunError):
    """Arguments that a kernel refuses: sizes, indices or addresses outside the caller's memory."""


def cpuinfo() -> list[str]:
    """Lines of ``/proc/cpuinfo``; none where there is no such file."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def processor() -> str:
    """The processor, as far as ``-march=native`` depends on it."""
    names = ("model name", "flags", "cpu family", "model\t", "Features", "CPU ")
    about = {line for line in cpuinfo() if line.startswith(names)}
    return "\n".join([platform.platform(), *sorted(about)])


def zig() -> tuple[str, ...]:
    """The command of ziglang's compiler; empty where it is not installed."""
    return (sys.executable, "-m", ZIG, "c++") if find_spec(ZIG) else ()


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler; empty where there is none."""
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    return (path,) if path else zig()


class Library(NamedTuple):
    """A file to make of the compiler's arguments for each of its parts, and what the linker gets besides."""

    path: Path
    units: Sequence[Sequence[str]]
    links: Sequence[str] = ()


def compile_kernels(
    compiler: Sequence[str],
    libraries: Sequence[Library],
    machine: Sequence[str] = ("-mcpu=native" if ON_ARM else "-march=native",),
    timeout: float | None = COMPILE_TIMEOUT,
    title: str = COMPILING,
) -> dict[Path, Exception]:
    """Compiles libraries side by side, each into a file of one folder, and appends their hashes. A library may link
    those before it. Returns the errors: OSError or a SubprocessError for each file that was not made."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # such as a sanitizer
    strip = () if "-g" in _flags() else ("-s",)  # a library is a tenth as large without symbols
    steps, errors = sum(len(each.units) + 1 for each in libraries), dict[Path, Exception]()
    with (
        tempfile.TemporaryDirectory(dir=libraries[0].path.parent) as work,
        watch_parts.get()(title, steps) as advance,
        ThreadPoolExecutor(usable_cores()) as pool,  # all at once would end together: the bar would not move
    ):

        def run(*arguments: str) -> str:
            command = [*compiler, *_flags(), *machine, *arguments]
            subprocess.run(command, check=True, capture_output=True, timeout=timeout, env=environment)
            advance(1)
            return arguments[-1]

        units = [(each.path, unit) for each in libraries for unit in each.units]
        units.sort(key=lambda each: Path(each[1][-1]).stem not in SLOWEST)
        parts: dict[Path, list[Future[str]]] = {each.path: [] for each in libraries}
        for number, (path, unit) in enumerate(units):
            parts[path].append(pool.submit(run, "-c", *unit, "-o", str(Path(work) / f"{number}.o")))
        try:
            for path, _, links in libraries:
                made = Path(work) / path.name
                try:
                    run("-shared", *strip, *(part.result() for part in parts[path]), *links, "-o", str(made))
                    content = made.read_bytes()
                    sealed = content + hashlib.sha256(content).digest()
                    replace_with(path, partial(Path.write_bytes, data=sealed))
                except (OSError, subprocess.SubprocessError) as error:
                    errors[path] = error
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt
    return errors


def all_units() -> list[tuple[str, ...]]:
    """The compiler's arguments for each part of one library with all kernels."""
    quants = [unit for form in structs.QUANTS for unit in units_of(form)]
    return [(str(source),) for source in SOURCES if source.stem != "quants"] + quants


def units_of(part: str | None) -> list[tuple[str, ...]]:
    """The same for the library of a dtype or of a block-quantized type; None: for what they share."""
    if part in structs.QUANTS:
        inputs, size = structs.QUANTS[part]
        return [(f"-DCOMPILED(F)=F({part}, {inputs}, {size})", str(HERE / "quants.cpp"))]
    each = f"F({part}, {TYPES[part]})" if part else ""
    return [(f"-DFOR_EACH_TYPE(F)={each}", str(HERE / f"{name}.cpp")) for name in (BY_DTYPE if part else BASE)]


def intact(path: Path) -> bool:
    """Whether a library is as it was compiled: loading a truncated one would end the process."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-HASH_SIZE]).digest() == content[-HASH_SIZE:]


_HWCAP, _HWCAP2 = 16, 26
_ARM_FEATURES = {
    "asimd": (_HWCAP, 1, b"hw.optional.neon"),
    "asimddp": (_HWCAP, 20, b"hw.optional.arm.FEAT_DotProd"),
    "i8mm": (_HWCAP2, 13, b"hw.optional.arm.FEAT_I8MM"),
}
"""Processor features: the word and bit of Linux's ``getauxval``, and macOS's name."""


def _has_on_arm(feature: str) -> bool:
    system, (word, bit, name) = ctypes.CDLL(None), _ARM_FEATURES[feature]
    if sys.platform == "darwin":
        value, size = _I(), ctypes.c_size_t(ctypes.sizeof(_I))
        at = ctypes.byref(value), ctypes.byref(size)
        return system.sysctlbyname(name, *at, None, ctypes.c_size_t(0)) == 0 and value.value == 1
    system.getauxval.argtypes, system.getauxval.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return bool(system.getauxval(word) >> bit & 1)


def _cpu_features() -> frozenset[str]:
    """The processor's features, as ``/proc/cpuinfo`` names them; empty where they are unknown."""
    if ON_ARM and sys.platform in ("linux", "darwin"):
        return frozenset(filter(_has_on_arm, _ARM_FEATURES))
    return frozenset(next((line.split() for line in cpuinfo() if line.startswith("flags")), ()))


def _source_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in SOURCES + HEADERS]


def _key(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def source_hash() -> str:
    return _key(_source_texts())


def prebuilt(name: str, folder: Path | None = None) -> Path:
    """The file of a wheel's kernels ``VARIANTS[name]``, made of the present sources."""
    return (folder or PREBUILT) / f"{name}-{source_hash()}.so"


def _load_prebuilt() -> ctypes.CDLL | None:
    """The best kernels for this processor that came with the wheel; None where there are none."""
    if not PREBUILT.is_dir() or os.environ.get("FORERUN_SANITIZE") == "1":
        return None
    features = _cpu_features()
    path = next((prebuilt(name) for name, (needed, _) in VARIANTS.items() if features >= needed), None)
    if path is None or not path.is_file():
        return None
    try:
        if not intact(path):
            raise OSError(f"{path} is damaged")
        result = ctypes.CDLL(str(path))
        _bind(result)
    except (OSError, RuntimeError, AttributeError) as error:
        log.warning("the kernels of this installation cannot be loaded, they are compiled instead: %s", error)
        return None
    return result


def _supported() -> bool:
    """Whether the kernels are written for this system and processor."""
    return (sys.platform, platform.machine()) in SYSTEMS and _cpu_features() >= NEEDED


def _enabled(name: str = "FORERUN_KERNELS", without: str = "kernels of our own") -> bool:
    """Whether an environment variable is not 0. Raises ConfigError if it is neither 0 nor 1."""
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise ConfigError(f"{name} is 1 or, to do without {without}, 0; not {value!r}")
    return value == "1"


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *SANITIZE) if os.environ.get("FORERUN_SANITIZE") == "1" else FLAGS


def _bind(result: ctypes.CDLL) -> None:
    """Declares every kernel's name, argument types, and the error for arguments that it refuses. Raises RuntimeError if
    the library's structs differ from ``structs.py``."""
    result.forerun_layout.restype = result.forerun_error.restype = ctypes.c_char_p
    if (layout := result.forerun_layout().decode()) != structs.LAYOUT:
        raise RuntimeError(f"structs.h and structs.py differ: {layout!r}, {structs.LAYOUT!r}")
    result.forerun_has_kernels.argtypes = (_N,)
    result.tiles = bool(result.forerun_tiles())  # type: ignore[attr-defined]
    _declare(result, result, SIGNATURES)
    parts = {form: True for form in structs.QUANTS if _has_quants(result, form)}
    for dtype in TYPES:
        if hasattr(result, f"forerun_linear_{dtype}"):
            _declare(result, result, _signatures(dtype))
            parts[dtype] = True
    result.parts, result.command, result.errors = parts, (), {}  # type: ignore[attr-defined]


def _declare(result: ctypes.CDLL, source: ctypes.CDLL, signatures: Mapping[str, Sequence[Any]]) -> None:
    """Gives ``result`` the functions of ``source``."""

    def check(error: int) -> None:
        if error:
            raise KernelError(f"a kernel was called wrongly: {result.forerun_error(error).decode()}")

    for name, arguments in signatures.items():
        function = getattr(source, f"forerun_{name}")
        function.argtypes, function.restype = arguments, check
        setattr(result, name, function)


def _signatures(dtype: str) -> dict[str, tuple[Any, ...]]:
    return {f"{name}_{dtype}": arguments for name, arguments in _BY_TYPE.items()}


def _has_quants(main: ctypes.CDLL, form: str) -> bool:
    return bool(main.forerun_has_kernels(structs.KINDS.index(form)))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, by their names in ``SIGNATURES``; None: there are none, and a warning says why. Those of a
    dtype end with its name; ``has`` says whether they are there.

    A call raises KernelError for arguments that the kernel refuses. ``tiles`` says whether a matrix unit is used.
    """
    _enabled("FORERUN_TILES", "a matrix unit")  # the kernels read it themselves
    if not _enabled():
        return None
    if not _supported():
        log.warning(
            "torch runs the models: our kernels need Linux on x86-64 with AVX2, FMA and F16C, Linux on ARM64, or macOS "
            f"on ARM64; this is {platform.system()} on {platform.machine()}"
        )
        return None
    if (ready := _load_prebuilt()) is not None:
        return ready
    command = compiler()
    if not command:
        log.warning(
            "no C++ compiler, so torch runs the models, several times slower (SmolLM2: 20 tokens/s, not 107); install "
            "one (pip install 'forerun[compiler]', or apt-get install g++), or set FORERUN_KERNELS=0 to do without"
        )
        return None
    try:
        path = make_folder(cache_folder()) / f"kernels-{_key([*_source_texts(), *command, *_flags(), processor()])}.so"
        libraries = [Library(path, all_units())]
        if sys.platform == "linux":
            first = Library(path, units_of(None), (f"-Wl,-soname,{path.name}",))  # by which the other libraries find it
            libraries = [first, *(_library_of(part, path) for part in sorted(asked))]
        errors = _compile_missing(command, libraries)
        if path in errors:
            raise errors[path]
        result = ctypes.CDLL(str(path))
        _bind(result)
        result.command, result.errors = command, errors  # type: ignore[attr-defined]
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        log.warning("no CPU kernels of our own, torch's serve instead: %s", _reason(error))
        return None
    return result


def _library_of(part: str, shared: Path) -> Library:
    """That of a dtype or of a block-quantized type; ``shared``: that of what they share."""
    return Library(shared.with_name(f"{shared.stem}-{part}.so"), units_of(part), (str(shared),))


def _compile_missing(command: Sequence[str], libraries: Sequence[Library]) -> dict[Path, Exception]:
    """Compiles those that are not there. Returns the errors."""
    wanted = [each for each in libraries if not each.path.is_file() or distrust(each.path) or not intact(each.path)]
    if not wanted:
        return {}
    names = [each.path.stem.split("-")[2:] for each in wanted]  # of what the others share: none
    title = COMPILING_PART.format(", ".join(*zip(*names))) if all(names) else COMPILING
    try:
        make_folder(wanted[0].path.parent)
        return compile_kernels(command, wanted, title=title)
    except OSError as error:
        return {each.path: error for each in wanted}


def _reason(error: Exception) -> str:
    """Why kernels were not compiled, in a line."""
    lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    lines = [line for line in lines if "error" in line] or lines
    if isinstance(error, subprocess.TimeoutExpired):  # its own message is the whole command
        lines = [f"the compiler was not done with a file after {COMPILE_TIMEOUT:.0f} s"]
    advice = "; FORERUN_CACHE names another folder for them" if isinstance(error, OSError) else ""
    return f"{lines[0] if lines else error}{advice}"


_loading = threading.Lock()
asked: set[str] = set()
"""Parts that will be needed: they are compiled beside the next part that is loaded."""


def load(*parts: str) -> bool:
    """Whether there are kernels for all of these dtypes and block-quantized types. What is missing is compiled, side by
    side; where that fails, a warning says why, once."""
    with _loading:
        asked.update(parts)
        main: Any = library()
        if main is None:
            return False
        made = {part: _library_of(part, Path(main._name)) for part in sorted(asked - main.parts.keys())}
        errors = _compile_missing(main.command, [each for each in made.values() if each.path not in main.errors])
        for part, (path, *_) in made.items():
            try:
                if error := {**main.errors, **errors}.get(path):
                    raise error
                if part in TYPES:
                    _declare(main, ctypes.CDLL(str(path)), _signatures(part))
                elif ctypes.CDLL(str(path)) and not _has_quants(main, part):
                    raise OSError(f"{path} does not fit {main._name}")
                main.parts[part] = True
            except (OSError, AttributeError, subprocess.SubprocessError) as error:
                log.warning("no CPU kernels of our own for %s, torch's serve instead: %s", part, _reason(error))
                main.parts[part] = False
        asked.clear()
        return all(main.parts[part] for part in parts)


def _end_threads_of_openmp() -> None:
    """In a child, GNU's OpenMP would wait for threads that stayed with the parent. They start again when used."""
    pause = getattr(ctypes.CDLL(torch._C.__file__), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_I(1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_threads_of_openmp)
_local = threading.local()


_set_openmp_threads = getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", lambda count: None)
"""Sets the number for the calling thread alone; ``torch.set_num_threads`` sets it for threads that start later, too."""


@contextmanager
def on_threads(count: int, *, alone: bool = False) -> Iterator[None]:
    """Within, kernels of this thread (not torch) compute on ``count`` threads, which changes no bit.

    ``alone``: torch computes on one. OpenMP's threads spin for milliseconds after each operation of torch's, on the
    cores that the kernels' threads need.
    """
    before = getattr(_local, "threads", None), getattr(_local, "torch", None)
    usual = torch.get_num_threads() if alone else None
    _local.threads, _local.torch = count, usual
    if usual is not None:
        _set_openmp_threads(1)
    try:
        yield
    finally:
        if usual is not None:
            _set_openmp_threads(usual)
        _local.threads, _local.torch = before


@contextmanager
def all_torch_threads() -> Iterator[None]:
    """Within ``on_threads(count, alone=True)``, torch computes on its own number of threads again."""
    count, before = getattr(_local, "torch", None), torch.get_num_threads()
    if count is None:
        yield
        return
    _set_openmp_threads(count)
    try:
        yield
    finally:
        _set_openmp_threads(before)


def threads() -> int:
    """Threads that kernels compute on: torch's number, except within ``on_threads``."""
    return getattr(_local, "threads", None) or torch.get_num_threads()


def has(name: str) -> bool:
    """Whether kernel ``name`` can be called here. Raises KeyError for a name that no kernel has with any dtype."""
    part, _, dtype = name.rpartition("_")
    if name not in SIGNATURES and part not in _BY_TYPE:
        raise KeyError(name)
    return (dtype not in TYPES or load(dtype)) and hasattr(library(), name)


def kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """The kernel for a dtype. Raises TypeError where there is none."""
    full = f"{name}_{dtype_name(dtype)}"
    if not has(full):
        raise TypeError(f"no kernel {full} here")
    call: Callable[..., None] = getattr(library(), full)
    return call


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
