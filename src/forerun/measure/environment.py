"""The machine, versions and weights of a measurement."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

import forerun
from forerun.core.batch import Batch, Span
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.memory import megabytes
from forerun.kernels import cpuinfo
from forerun.models import formats
from forerun.models.load import load_model
from forerun.models.run.base import Model, new_attention
from forerun.models.text.tokenizer import load_tokenizer

UNITS = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx_vnni": "AVX-VNNI", "avx512_vnni": "VNNI", "avx512_bf16": "BF16",
    "amx_tile": "AMX", "asimd": "NEON", "asimddp": "DotProd", "i8mm": "I8MM",
}  # fmt: skip
"""Instruction sets, by their flags in /proc/cpuinfo."""
KERNEL = Path("/proc/sys/kernel")


def processor() -> str:
    """The processor's name, which hypervisors shorten, and its instruction sets."""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo()) if value}
    if not facts:
        return platform.processor() or platform.machine()
    flags = (facts.get("flags") or facts.get("Features", "")).split()
    units = ", ".join(name for flag, name in UNITS.items() if flag in flags)
    return facts.get("model name", platform.machine()) + (f" ({units})" if units else "")


def stopped() -> float:
    """Fraction of time that Linux stops this process, 0 without a real-time policy (``chrt -f``). By default 50 ms a
    second (sched(7), ``sched_rt_runtime_us``): now and then, an answer of a third of a second comes a seventh late."""
    if not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) not in (os.SCHED_FIFO, os.SCHED_RR):
        return 0.0
    try:
        period, runs = (int((KERNEL / f"sched_rt_{name}_us").read_text()) for name in ("period", "runtime"))
    except OSError:
        return 0.0
    return 0.0 if runs < 0 else (period - runs) / period


def read_bandwidth(device: torch.device, megabytes: int = 512) -> float:
    """Bytes per second that a sum over ``megabytes`` reads, the best of five runs."""
    numbers = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(5):
        began = perf_counter()
        float(numbers.sum())
        best = max(best, numbers.nbytes / (perf_counter() - began))
    return best


def environment(llm: LLM, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, machine, model and the mode in which it ran, as JSON values."""
    info = llm.model.info
    result: dict[str, Any] = {
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
        result["accelerator"] = torch.cuda.get_device_name(info.device)
    return result


PROMPTS = 8
TARGET, DRAFT = "target", "draft"


def weights(
    engines: Iterable[Engine], prompts: Sequence[Sequence[int]], known: Iterable[dict[str, Any]] = ()
) -> list[Any]:
    """An entry for the target and for each draft model, beside those already ``known``. The logits of quantized weights
    are compared with those of the original weights, which are loaded for this, on the first prompts."""
    result = {(item["role"], item["model"], item["layout"]): item for item in known}
    for engine in engines:
        for role, model in ((TARGET, engine.model), *((DRAFT, model) for model in engine.router.models())):
            info = model.info
            key = role, info.name, info.path
            if key in result:
                continue
            result[key] = {
                "model": info.name,
                "layout": info.path,
                "bytes": info.weight_bytes,
                "bytes_per_token": info.token_bytes,
                "quantization": info.quantization,
                "role": role,
            }
            if info.quantization is not None:
                own = prompts[:PROMPTS]
                if role == DRAFT:  # whose tokenizer may be another
                    tokenizer = load_tokenizer(info.name)
                    own = [tokenizer.encode(engine.tokenizer.decode(list(prompt))) for prompt in own]
                result[key] |= _against_original(model, own)
    return list(result.values())


def _against_original(model: Model, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    info = model.info
    original = load_model(info.name, dtype=info.dtype, device=info.device, model_path="native", lora=info.lora)
    expected = logits(original, prompts)
    if info.outputs is not None:
        expected = expected[:, info.outputs]
    return {
        "original_bytes": original.info.weight_bytes,
        "original_dtype": str(info.dtype).removeprefix("torch."),
        "error": formats.error(expected, logits(model, prompts)),
    }


def logits(model: Model, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of every position of every prompt, [rows, vocabulary]."""
    texts = [list(prompt)[: model.info.max_len] for prompt in prompts]
    attention = new_attention(model, max_seqs=len(texts), max_len=max(map(len, texts)))
    spans = [
        Span(i, 0, text, logits=list(range(len(text))), source=model.info.begin(text)[1])
        for i, text in enumerate(texts)
    ]
    return model.forward(Batch(spans, model.info.device), attention).logits


def line(item: Mapping[str, Any]) -> str:
    """Such as ``forerun:draft 1.9 MB of weights in int8 by rows (bfloat16: 3.0 MB, logits off by 2.1 %)``."""
    text = f"{item['model']} {megabytes(item['bytes'])} of weights"
    if item["quantization"] is None:
        return text
    was = f"{item['original_dtype']}: {megabytes(item['original_bytes'])}" if "original_bytes" in item else ""
    return f"{text} in {item['quantization']} ({was}, logits off by {item['error']:.1%})"
