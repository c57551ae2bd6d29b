"""Checkpoints of known models' shapes with random weights: for speed, where the weights' values do not matter.

``python -m forerun_lab.shapes llama-3.2-1b FOLDER`` writes one; ``forerun bench --model FOLDER --prompt-set random``
measures it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast

from forerun.core.errors import ConfigError

SIZES = {
    "llama-3.2-1b": {"hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "head": 64, "tied": True},
    "llama-3.2-3b": {"hidden": 3072, "intermediate": 8192, "layers": 28, "heads": 24, "head": 128, "tied": True},
    "llama-3.1-8b": {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "head": 128, "tied": False},
    "tiny": {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 16, "head": 8, "tied": True},
}
KV_HEADS = 8
VOCABULARY = 128_256
CONTEXT = 2048
END = "<end>"


def shape_config(shape: str, vocabulary: int = VOCABULARY) -> LlamaConfig:
    """The configuration of a named shape. Raises ConfigError."""
    if shape not in SIZES:
        raise ConfigError(f"unknown shape {shape!r}: choose one of {', '.join(SIZES)}")
    size = SIZES[shape]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=KV_HEADS,
        head_dim=size["head"],
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=bool(size["tied"]),
        bos_token_id=None,
        eos_token_id=0,
        dtype="bfloat16",
    )


def random_checkpoint(folder: Path, shape: str, *, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """Write a bfloat16 checkpoint of a named shape, weights normal with deviation 0.02, and a tokenizer of as many
    words; gives ``folder``."""
    config = shape_config(shape, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    indices: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_shards(config, generator)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        indices |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": indices}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    _words(vocabulary).save_pretrained(folder)
    return folder


def _shards(config: LlamaConfig, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    """The embeddings, then every layer."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim or 0

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    ends = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden)}
    ends["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    if not config.tie_word_embeddings:
        ends["lm_head.weight"] = matrix(config.vocab_size, hidden)
    yield ends
    queries, keys = config.num_attention_heads * width, KV_HEADS * width
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config.num_hidden_layers):
        tensors = {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        yield tensors


def _words(count: int) -> PreTrainedTokenizerFast:
    """One word per id: <end>, w1, w2, ..."""
    words = {END: 0} | {f"w{i}": i for i in range(1, count)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=END)


if __name__ == "__main__":
    _, shape, folder = sys.argv
    print(random_checkpoint(Path(folder), shape))
