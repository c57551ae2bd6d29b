"""Kernels for ARM, run by qemu on this process's own memory; ``make emulated`` runs tests of the kernels with them."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from built import compiled, kept
from forerun import kernels

QEMU = "qemu-aarch64-static"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
"""Where Debian has ARM's C library."""
PROCESSORS = {"neon": "cortex-a72", "neon_dotprod": "neoverse-n1", "neon_i8mm": "max"}
"""What qemu is told to be for each form of the kernels, the least that it knows and that has what the form needs."""
LACKING = "needs Linux on x86-64 with qemu-user-static, libc6-arm64-cross and ziglang"
MASK = (1 << 64) - 1


def can_emulate():
    return bool(shutil.which(QEMU) and LIBRARIES.is_dir() and kernels.zig()) and kernels.library() is not None


def _address(argument):
    if argument is None or isinstance(argument, int):
        return (argument or 0) & MASK
    if isinstance(argument, ctypes.c_void_p):
        return argument.value or 0
    return ctypes.addressof(getattr(argument, "_obj", argument))  # also what ``byref`` makes


class Emulated:
    """A library of kernels as ``ctypes.CDLL`` has it, for what ``kernels._bind`` and callers do with one."""

    def __init__(self, library, runner, processor):
        self._name = str(library)
        memory = os.open("/proc/self/mem", os.O_RDWR)
        command = [QEMU, "-L", str(LIBRARIES), "-cpu", processor, str(runner), str(library), str(memory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory])
        os.close(memory)
        self.turn = threading.Lock()
        kernels._bind(self)

    def __getattr__(self, name):
        if not name.startswith("forerun_"):
            raise AttributeError(name)
        result = Function(partial(self._call, name))
        setattr(self, name, result)
        return result

    def _call(self, name, text, numbers, floats):
        numbers, floats = numbers + [0] * (16 - len(numbers)), floats + [0.0] * (4 - len(floats))
        pipe, answer = self.process.stdin, self.process.stdout
        assert pipe is not None
        assert answer is not None
        with self.turn:
            pipe.write(struct.pack("64sq16Q4f", name.encode(), text, *numbers, *floats))
            pipe.flush()
            head = answer.read(16)
            if len(head) < 16:
                pytest.fail(f"the emulated {name} ended with {self.process.wait()}")
            result, length = struct.unpack("qq", head)
            return answer.read(length) if text else result

    def close(self):
        self.process.communicate()


class Function:
    """One of its functions."""

    argtypes: tuple[type, ...] = ()
    restype: Any = ctypes.c_int

    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        kinds = self.argtypes or (ctypes.c_int64,) * len(arguments)
        pairs = list(zip(arguments, kinds, strict=True))
        numbers = [_address(argument) for argument, kind in pairs if kind is not ctypes.c_float]
        floats = [float(argument) for argument, kind in pairs if kind is ctypes.c_float]
        result = self.call(self.restype is ctypes.c_char_p, numbers, floats)
        return result if isinstance(self.restype, type) else self.restype(result)


def build(name, platform):
    """The kernels as a platform's wheel carries them under a name of ``kernels.VARIANTS``, but compiled sooner."""
    sys.path.append(str(Path(__file__).parents[2] / ".ci"))
    from prebuild import TARGETS, zig_flag

    target, machine = TARGETS[platform][0], zig_flag(kernels.VARIANTS[name][1])
    return compiled(kernels.zig(), "-target", target, machine)


def command(processor, program, *arguments):
    """The emulator's own memory lies at other addresses than this process's, which the program sees as its own."""
    return ["setarch", "-L", QEMU, "-L", str(LIBRARIES), "-cpu", processor, str(program), *map(str, arguments)]


def program(language, *sources):
    """Compiled for ARM; ``language`` is ``cc`` or ``c++``."""
    zig = [sys.executable, "-m", kernels.ZIG, language, "-target", "aarch64-linux-gnu", "-O1", "-pthread", "-rdynamic"]

    def make(to):
        subprocess.run([*zig, *map(str, sources), "-o", str(to), "-ldl"], check=True, capture_output=True)

    return kept(make, *zig[1:], *(source.read_text(encoding="utf-8") for source in sources))


def emulate(name, processor=None):
    """A form of the kernels, on the processor of its own or another one's in ``PROCESSORS``."""
    runner = program("cc", Path(__file__).with_suffix(".c"))
    return Emulated(build(name, "manylinux_2_28_aarch64"), runner, PROCESSORS[processor or name])


def pytest_configure(config):
    """As a plugin, ``-p emulated``: every test's kernels are those of FORERUN_EMULATED."""
    name = os.environ["FORERUN_EMULATED"]
    if not can_emulate():
        raise pytest.UsageError(LACKING)
    result = emulate(name)
    kernels.library = lambda: result
