"""What a model's weights take as they are held, and what 8 bits cost: size and error against the original."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from forerun.core.batch import Batch, Span
from forerun.engine.engine import Engine
from forerun.engine.memory import megabytes
from forerun.models import quantize
from forerun.models.base import Model, new_attention
from forerun.models.load import load_model
from forerun.models.tokenizer import load_tokenizer

PROMPTS = 8
TARGET, DRAFT = "target", "draft"


def weights(engines: Iterable[Engine], prompts: Seq[Seq[int]], known: Iterable[dict[str, Any]] = ()) -> list[Any]:
    """One entry for the target and for each model that drafts, beside those ``known`` already. Quantized ones are
    compared with their original, which is loaded for it, on the first prompts."""
    found = {(item["role"], item["model"], item["layout"]): item for item in known}
    for engine in engines:
        for role, model in ((TARGET, engine.model), *((DRAFT, model) for model in engine.router.models())):
            key = role, model.info.name, model.info.path
            if key in found:
                continue
            found[key] = facts(model) | {"role": role}
            if model.info.quantization is not None:
                own = prompts if role == TARGET else [_translated(prompt, engine, model) for prompt in prompts]
                found[key] |= _against_original(model, own[:PROMPTS])
    return list(found.values())


def facts(model: Model) -> dict[str, Any]:
    info = model.info
    return {
        "model": info.name,
        "layout": info.path,
        "bytes": info.weight_bytes,
        "bytes_per_token": info.token_bytes,
        "quantization": info.quantization,
    }


def _translated(prompt: Seq[int], engine: Engine, model: Model) -> list[int]:
    """A prompt in the ids of a draft, whose tokenizer may be another."""
    return load_tokenizer(model.info.name).encode(engine.tokenizer.decode(list(prompt)))


def _against_original(model: Model, prompts: Seq[Seq[int]]) -> dict[str, Any]:
    info = model.info
    original = load_model(info.name, dtype=info.dtype, device=info.device, model_path="native", lora=info.lora)
    return {
        "original_bytes": original.info.weight_bytes,
        "original_dtype": str(info.dtype).removeprefix("torch."),
        "error": quantize.error(logits(original, prompts), logits(model, prompts)),
    }


def logits(model: Model, prompts: Seq[Seq[int]]) -> torch.Tensor:
    """Of every position of every prompt."""
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
