"""Small GGUF files, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?'", "Ġ", "Ċ"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = ["<|end|>", "<|start|>", "<tool>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
KINDS = [3, 3, 4] + [1] * (len(TOKENS) - 3)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": TEMPLATE,
}
SIZES = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every weight of the model that ``SIZES`` describes, tied to its embeddings."""
    layer = {
        "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
        "attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), 32), "output_norm.weight": (32,)}
    for block in range(2):
        found |= {f"blk.{block}.{name}.weight": shape for name, shape in layer.items()}
    return found


def write_model(
    path: Path, changes: dict[str, Any] | None = None, extra: dict[str, tuple[int, ...]] | None = None
) -> Path:
    """A random Llama with a vocabulary: matrices in Q4_1, embeddings in Q8_0, norms in float32. ``changes`` replace
    metadata, those of value None leave them out; ``extra`` are further tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (VOCABULARY | SIZES | (changes or {})).items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            add(writer, key, value)
    noise = np.random.default_rng(0)
    kinds = gguf.GGMLQuantizationType
    for name, shape in (shapes() | (extra or {})).items():
        values = noise.normal(scale=0.3, size=shape).astype(np.float32)
        kind = kinds.F32 if len(shape) == 1 else kinds.Q8_0 if name == "token_embd.weight" else kinds.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    return finish(writer, path)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
