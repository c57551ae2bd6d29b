"""Where kernels in Triton run: on an NVIDIA GPU and, for tests, under Triton's interpreter on a CPU.

The kernels are beside what they compute: ``models/formats/triton.py``, ``models/run/rows.py``, ``attention/triton.py``
and ``sampling/triton.py``. With the environment variables ``FORERUN_INTERPRET`` and ``TRITON_INTERPRET`` set to 1, all
of them run on a CPU in place of the kernels in C++: slowly, and with the GPU's results up to rounding.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

log = logging.getLogger("forerun")
OLDEST = (8, 0)
"""The least compute capability: it has bfloat16."""
VARYING = ["input_ids", "positions", "row_span", "start", "fed", "offset", "count", "tree", "tables", "paths", "first",
           "table_stride", "path_stride", "rows", "limits", "keys", "steps", "depths", "now", "most"]  # fmt: skip
"""Kernels' arguments whose alignment and value follow the number of rows: Triton would compile them again for each."""


def interpreted() -> bool:
    """Whether the kernels run on a CPU."""
    asked = os.environ.get("FORERUN_INTERPRET") == "1" and os.environ.get("TRITON_INTERPRET") == "1"
    if asked:
        _prepare()
    return asked


@cache
def _prepare() -> None:
    """Makes the interpreter multiply every row of a tile alike, as a GPU does: in float64, since a row's bits in
    NumPy's float32 product depend on its place. It replaces Triton's functions once, not at every call, and does not
    look for overflows, as a GPU does not either: that took half of the time."""
    import numpy as np
    from triton.runtime import interpreter

    def wide(side: Any) -> Any:
        bits = side.dtype.scalar.is_bf16()  # which NumPy does not have
        return ((side.data.astype(np.uint32) << 16).view(np.float32) if bits else side.data).astype(np.float64)

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(wide(a), wide(b)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    patch, patched = interpreter._patch_lang, set[str]()

    interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang = create_dot, patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def serves(device: torch.device) -> bool:
    """Whether our kernels in Triton compute on ``device``. A GPU on which they cannot is named in the log, once."""
    if device.type == "cpu":
        return interpreted()
    return device.type == "cuda" and torch.cuda.is_available() and _check(device)


def counters(device: torch.device, count: int) -> torch.Tensor:
    """At least ``count`` zeros, by which the programs of a call find out which of them is the last. Each call leaves
    zeros behind, and calls on a device come one after the other."""
    return _counters(device, max(1 << 14, 1 << (count - 1).bit_length()))


@cache
def _counters(device: torch.device, count: int) -> torch.Tensor:
    """They are never freed: a CUDA graph may hold their address."""
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int32, device=device)


def send(numbers: Any, device: torch.device) -> torch.Tensor:
    """Numbers of the host on ``device``. Nobody waits: a copy of memory that is not pinned would."""
    host = torch.as_tensor(numbers)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class HostCopy:
    """A tensor's numbers, on their way to the host."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
        self._host = numbers.to("cpu", non_blocking=True, copy=True)  # pinned
        self._copied = torch.cuda.Event() if numbers.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> torch.Tensor:
        """Waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def fill_in(self, ids: torch.Tensor) -> None:
        """Replaces every -1 - i in ``ids``, on the device, by the i-th number."""
        ids.copy_(torch.where(ids < 0, self.numbers[(-1 - ids).clamp_(min=0)], ids))


def to_host(*tensors: torch.Tensor) -> list[list[Any]]:
    """The numbers of several tensors, which travel together."""
    copies = [HostCopy(tensor) for tensor in tensors]
    return [copy.read().tolist() for copy in copies]


class Laps:
    """A clock for the parts of a round, the first of which begins now. On a GPU it is the device's own: calls return
    before their kernels have run. The last part ends with the round, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._began = 0.0 if self._stream is None else perf_counter()
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """A part ends, and the next one begins."""
        if self._stream is None:
            self._marks.append(perf_counter())
        else:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record(self._stream)

    def seconds(self) -> list[float]:
        """Those of each part; the last one ends now."""
        if self._stream is None:
            self.mark()
            return [after - before for before, after in pairwise(self._marks)]
        self._marks[-1].synchronize()  # it has passed where tokens were read
        parts = [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._marks)]
        return [*parts, max(0.0, perf_counter() - self._began - sum(parts))]


@cache
def warn(message: str) -> None:
    """Writes a warning to the log, once."""
    log.warning("%s", message)


@cache
def _check(device: torch.device) -> bool:
    """Whether our kernels run on this GPU. The log says why they do not."""
    capability = torch.cuda.get_device_capability(device)
    if find_spec("triton") is not None and capability >= OLDEST:
        return True
    old = "compute capability {}.{}, and this GPU has {}.{}".format(*OLDEST, *capability)
    end = "torch's own run instead, slower and not the same at every number of rows"
    warn(f"Forerun's kernels for GPUs need {old if capability < OLDEST else 'Triton: pip install triton'}; {end}")
    return False
