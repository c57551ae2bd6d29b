"""Where a measurement was made: what a reader needs to judge or repeat it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

import forerun
from forerun.engine.llm import LLM

UNITS = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx_vnni": "AVX-VNNI", "avx512_vnni": "VNNI", "avx512_bf16": "BF16",
    "amx_tile": "AMX",
}  # fmt: skip
"""What arithmetic is made of, by the flags in /proc/cpuinfo."""
KERNEL = Path("/proc/sys/kernel")


def processor() -> str:
    """The processor's name, which hypervisors shorten, and what it computes with."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    flags = facts.get("flags", "").split()
    units = ", ".join(name for flag, name in UNITS.items() if flag in flags)
    return facts.get("model name", platform.machine()) + (f" ({units})" if units else "")


def stopped() -> float:
    """Seconds in every second for which Linux stops this process if its policy is a real-time one (``chrt -f``), as it
    does unless told otherwise (sched(7), ``sched_rt_runtime_us``); 0 for all others. An answer that takes a third of a
    second then comes now and again a seventh late."""
    if not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) not in (os.SCHED_FIFO, os.SCHED_RR):
        return 0.0
    try:
        period, runs = (int((KERNEL / f"sched_rt_{name}_us").read_text()) for name in ("period", "runtime"))
    except OSError:
        return 0.0
    return 0.0 if runs < 0 else (period - runs) / period


def read_bandwidth(device: torch.device, megabytes: int = 512) -> float:
    """Bytes per second that a sum over ``megabytes`` reads, the best of several."""
    numbers = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(5):
        began = perf_counter()
        float(numbers.sum())
        best = max(best, numbers.nbytes / (perf_counter() - began))
    return best


def environment(llm: LLM, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, machine, model and the mode it ran in."""
    info = llm.model.info
    found: dict[str, Any] = {
        "forerun": forerun.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "real_time_stop": stopped(),
        "device": str(info.device),
        "model": info.name,
        "architecture": info.architecture,
        "dtype": str(info.dtype).removeprefix("torch."),
        "model_path": info.path,
        "invariant": llm.model.invariant,
        "engine_options": dict(engine),
    }
    if info.device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(info.device)
    return found
