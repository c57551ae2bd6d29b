"""What a process holds, to see that it does not grow."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import NamedTuple

from forerun.models.formats import compiled


class Held(NamedTuple):
    """With everything given back that can be: Python objects that the collector knows, resident bytes, and bytes that
    malloc has handed out, which fragments do not blur."""

    objects: int
    resident: int
    allocated: int

    def growth(self, earlier, requests):
        """Per request, since ``earlier``."""
        return Held(*((now - then) / requests for now, then in zip(self, earlier)))


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")],
        *[(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")],
    ]


def held():
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo2
    heap = libc.mallinfo2()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    return Held(len(gc.get_objects()), resident, heap.uordblks + heap.hblkhd)


def new_block(monkeypatch):
    """Weights from here on are in a new block of 64 MB, so that none begins between two measurements."""
    monkeypatch.setattr(compiled.arena, "free", compiled.arena.free[:0])
