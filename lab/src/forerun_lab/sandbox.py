"""A program in a child process with limits: time, memory, files, no children, and no network where the kernel allows.

For code that a model wrote by mistake or chance. It is no wall against code that somebody wrote to do harm: what the
user may read, it can read.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass

from forerun.core.errors import ConfigError

LIMITS = {
    "RLIMIT_CPU": 5,  # seconds
    "RLIMIT_AS": 1 << 30,
    "RLIMIT_FSIZE": 1 << 20,
    "RLIMIT_NOFILE": 32,
    "RLIMIT_NPROC": 0,
    "RLIMIT_CORE": 0,
}
SECONDS = 20.0
"""Longest run, for a program that sleeps. Well above the CPU's limit, since the machine may be busy."""
RUNNER = """
import ctypes, json, os, resource, sys
given = json.load(sys.stdin)
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(null, number)
unshare = getattr(ctypes.CDLL(None), "unshare", None)
# a user and a network namespace; root may do without the first
offline = unshare is not None and (unshare(0x50000000) == 0 or unshare(0x40000000) == 0)
for name, value in given["limits"].items():
    hard = resource.getrlimit(getattr(resource, name))[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(getattr(resource, name), (value, value))
os.write(out, b"1" if offline else b"0")
exec(compile(given["program"], "program", "exec"), {"__name__": "program"})
os.write(out, given["done"].encode())
"""
"""Says whether the network is cut off, runs the program and, only if it came to its end, says the word it was given, so
that an early exit does not pass."""


@dataclass(frozen=True)
class Outcome:
    passed: bool
    """The program came to its end."""
    offline: bool
    """It had no network."""


def run(program: str, *, seconds: float = SECONDS) -> Outcome:
    """Run Python source in a process of its own, in an empty temporary folder, with the standard library alone. Raises
    ConfigError where the system knows no limits."""
    if os.name != "posix":
        raise ConfigError("programs are run with the limits of a POSIX system, and this is none")
    done = secrets.token_hex(16)
    message = json.dumps({"program": program, "limits": LIMITS, "done": done}).encode()
    with tempfile.TemporaryDirectory(prefix="forerun-program-", ignore_cleanup_errors=True) as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            printed, _ = child.communicate(message, timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(child)
            printed, _ = child.communicate()
        finally:
            _end(child)
    return Outcome(printed[1:] == done.encode(), printed[:1] == b"1")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Also whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
