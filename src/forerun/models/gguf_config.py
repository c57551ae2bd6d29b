"""What ``config.json`` would say, out of a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

import torch

from forerun.core.errors import ModelError, shown
from forerun.models.architectures.families import GEMMA3, LLAMA
from forerun.models.architectures.spec import FULL, SLIDING
from forerun.models.gguf import GGUFFile

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds of tensors that are numbers."""
READ = {each.gguf: each for each in (LLAMA, GEMMA3)}
"""By ``general.architecture``."""
SCALINGS = {LLAMA.gguf: ("none",), GEMMA3.gguf: ("none", "linear")}
"""Kinds of rotary scaling that are read."""
GEMMA3_PERIOD, GEMMA3_LOCAL_BASE, GEMMA3_LARGEST = 6, 10000.0, 62
"""Of llama.cpp's Gemma 3, which its files leave out: every so many layers one without a window, the rotary base of
those with one, and the depth of the one (27B) whose scores are scaled by another width than a head's."""


class Keys:
    """A file's numbers, by their names behind the architecture's. Raises ModelError for what is none."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{self.file.path} has {shown(value)} as {self.architecture}.{key}, not a positive integer"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ModelError(f"{self.file.path} has {shown(value)} as {self.architecture}.{key}, not a positive number")
        return float(f"{value:.7g}")  # written in single precision


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Raises ModelError for a model of an architecture, or of a kind, that is not read here."""
    found = file.metadata
    architecture = found.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in READ:
        raise ModelError(f"{file.path} holds a model of architecture {shown(architecture)}; only {', '.join(READ)} "
                         "are read from GGUF")  # fmt: skip
    keys = Keys(file)
    if keys.get("expert_count"):
        raise ModelError(f"{file.path} holds a mixture of experts, which is not read from GGUF")
    if (keys.get("rope.scaling.type") or "none") not in SCALINGS[architecture] or "rope_freqs.weight" in file.tensors:
        raise ModelError(f"{file.path} scales its rotary frequencies, which is not read from GGUF")
    vocabulary, (hidden, heads, width) = _vocabulary(file), _widths(file, keys)
    config = {
        "architectures": [READ[architecture].causal],
        "model_type": READ[architecture].model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": width,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    config |= _gemma3(file, keys, config) if architecture == GEMMA3.gguf else {
        "rope_theta": keys.positive("rope.freq_base", 10000.0)
    }  # fmt: skip
    absent = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # transformers has defaults
    return config | absent | _special_ids(file, vocabulary)


def _widths(file: GGUFFile, keys: Keys) -> tuple[int, int, int]:
    """Of the hidden state, the number of heads, and the width of one."""
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    width = keys.whole("attention.key_length", hidden // heads or None)
    if width < 2 or width % 2:
        raise ModelError(f"{file.path} has heads of {width} numbers, which cannot be rotated in pairs")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.whole(key, width) != width:
            other = f"{shown(keys.get(key))} as {keys.architecture}.{key}"
            raise ModelError(f"{file.path} has heads of {width} numbers, but {other}")
    return hidden, heads, width


def _gemma3(file: GGUFFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} has {layers} layers in {len(file.tensors)} tensors")
    base, local = keys.positive("rope.freq_base", 1e6), keys.positive("rope.freq_base_swa", GEMMA3_LOCAL_BASE)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if keys.get("rope.scaling.type") == "linear":
        rope = {"rope_type": "linear", "rope_theta": base, "factor": keys.positive("rope.scaling.factor")}
    width = config["hidden_size"] // config["num_attention_heads"]
    cap = keys.get("final_logit_softcapping")
    return {
        "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": local}},
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": _sliding(keys, layers),
        "query_pre_attn_scalar": width if layers == GEMMA3_LARGEST else config["head_dim"],
        "final_logit_softcapping": None if cap is None else keys.positive("final_logit_softcapping"),
    }


def _sliding(keys: Keys, layers: int) -> list[str]:
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = keys.whole("attention.sliding_window_pattern", GEMMA3_PERIOD)
        pattern = [bool((index + 1) % period) for index in range(layers)]
    if len(pattern) != layers:
        raise ModelError(f"{keys.file.path} has {layers} layers, but says of {len(pattern)} whether they have a window")
    return [SLIDING if slides else FULL for slides in pattern]


def _dtype(file: GGUFFile) -> str:
    """That of rows: the one in which most of the matrices' bytes are numbers, bfloat16 where they are quantized."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.size
    most = max(sizes, key=lambda kind: sizes[kind], default="BF16")
    return str(FLOATS.get(most, torch.bfloat16)).removeprefix("torch.")


def _vocabulary(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no whole model")
    return file.tensors["token_embd.weight"].shape[0]


def _special_ids(file: GGUFFile, vocabulary: int) -> dict[str, Any]:
    """The ids that begin and end texts, and padding's. Raises ModelError."""
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "padding", "eot", "eom"):
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < vocabulary:
            raise ModelError(f"{file.path} has {shown(value)} as tokenizer.ggml.{name}_token_id, not one of its tokens")
        ids[name] = value
    found: dict[str, Any] = {
        f"{to}_token_id": ids[name] for name, to in (("bos", "bos"), ("padding", "pad")) if name in ids
    }
    ends = sorted({ids[name] for name in ("eos", "eot", "eom") if name in ids})
    return found | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})
