"""A Llama checkpoint as a GGUF file, for llama.cpp. Token ids only: the file has no vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from forerun.core.errors import ConfigError
from forerun.models.files.checkpoint import weight_files


def gguf_name(name: str, layers: int) -> str:
    """GGUF's name of a weight of a Llama with this many ``layers``. Raises ConfigError for any other weight."""
    import gguf  # every command imports this module; gguf takes its time

    result = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers).get_name(name, (".weight", ".bias"))
    if result is None:
        raise ConfigError(f"weight {name!r} has no place in llama.cpp's Llama")
    return result


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order: rotated pairs side by side, not half a head apart."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def weights(folder: Path, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """GGUF name and value of every weight."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                weight = file.get_tensor(name)
                if ".q_proj." in name:
                    weight = interleave(weight, config.num_attention_heads)
                if ".k_proj." in name:
                    weight = interleave(weight, config.num_key_value_heads)
                yield gguf_name(name, config.num_hidden_layers), weight


def write_gguf(folder: Path, path: Path, dtype: torch.dtype) -> Path:
    """Convert a Llama checkpoint without rope scaling; matrices in ``dtype``, norms in float32. Raises ConfigError."""
    import gguf

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    rope = config.rope_parameters
    if config.model_type != "llama" or rope.get("rope_type", "default") != "default":
        raise ConfigError(f"the llama-cpp peer takes Llama checkpoints without rope scaling, not {config.model_type!r}")
    kinds = {torch.bfloat16: gguf.GGMLQuantizationType.BF16, torch.float16: gguf.GGMLQuantizationType.F16}
    kinds[torch.float32] = gguf.GGMLQuantizationType.F32
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("no_vocab")
    for name, weight in weights(folder, config):
        kept = torch.float32 if weight.dim() == 1 else dtype
        data = weight.to(kept).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=kinds[kept])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
