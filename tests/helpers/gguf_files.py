"""Small GGUF files, written by the gguf package."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kinds

from forerun.models.formats.blocks import Blocks
from forerun.models.formats.gguf_types import PACKED

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?'", "Ġ", "Ċ"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = ["<|end|>", "<|start|>", "<tool>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
KINDS = [3, 3, 4] + [1] * (len(TOKENS) - 3)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS, "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip
SIZES = {
    "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 32, "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}  # fmt: skip


SCALES = {
    Kinds.Q4_K: {0: 2e-3, 2: 2e-3}, Kinds.Q5_K: {0: 1e-3, 2: 1e-3}, Kinds.Q6_K: {208: 1e-4},
    Kinds.Q2_K: {80: 1e-2, 82: 1e-2}, Kinds.Q3_K: {108: 4e-3}, Kinds.IQ4_NL: {0: 2e-3}, Kinds.IQ4_XS: {0: 1e-4},
    Kinds.IQ3_S: {0: 1e-3}, Kinds.IQ3_XXS: {0: 1e-3}, Kinds.IQ2_S: {0: 2e-3}, Kinds.IQ2_XS: {0: 2e-3},
    Kinds.IQ2_XXS: {0: 2e-3}, Kinds.IQ1_S: {0: 1e-2}, Kinds.IQ1_M: {}, Kinds.NVFP4: {}, Kinds.Q1_0: {},
}  # fmt: skip
"""Where float16 scales lie in a block, and such that its values are like others'."""
FORMS = [*{packed.form: kind for kind, packed in reversed(PACKED.items())}.values()]
"""A type for each form that the kernels have."""


def shapes(width):
    """Every weight of the model that ``SIZES`` describes, tied to its embeddings of ``width`` numbers."""
    wide, half = 2 * width, width // 2
    layer = {
        "attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, width), "attn_k": (half, width),
        "attn_v": (half, width), "attn_output": (width, width), "ffn_gate": (wide, width), "ffn_up": (wide, width),
        "ffn_down": (width, wide),
    }  # fmt: skip
    result = {"token_embd.weight": (len(TOKENS), width), "output_norm.weight": (width,)}
    for block in range(2):
        result |= {f"blk.{block}.{name}.weight": shape for name, shape in layer.items()}
    return result


def write_model(path, changes=None, extra=None, kinds=None, width=32):
    """A random Llama with a vocabulary: matrices in Q4_1, embeddings in Q8_0, norms in float32. ``changes`` replace
    metadata, those of value None leave them out; ``extra`` are further tensors; ``kinds``: other types of the tensors
    whose names contain such a text."""
    sizes = {"llama.embedding_length": width, "llama.feed_forward_length": 2 * width}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (VOCABULARY | SIZES | sizes | (changes or {})).items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            add(writer, key, value)
    noise = np.random.default_rng(0)
    for name, shape in (shapes(width) | (extra or {})).items():
        own = next((kind for part, kind in (kinds or {}).items() if part in name), None)
        usual = Kinds.F32 if len(shape) == 1 else Kinds.Q8_0 if name == "token_embd.weight" else Kinds.Q4_1
        kind = own or usual
        writer.add_tensor(name, blocks(kind, shape, noise), raw_dtype=kind)
    return finish(writer, path)


def blocks(kind, shape, noise):
    """A random tensor's bytes. Of types that the gguf package does not round to every byte is random, with scales that
    give values like the others'."""
    if kind not in SCALES:
        return gguf.quants.quantize(noise.normal(scale=0.3, size=shape).astype(np.float32), kind)
    of, size = gguf.GGML_QUANT_SIZES[kind]
    raw = noise.integers(0, 256, (*shape[:-1], shape[-1] // of, size), np.uint8)
    for at, scale in SCALES[kind].items():
        halves = (scale * (1 + noise.random(raw.shape[:-1]))).astype(np.float16)
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind is Kinds.IQ1_M:  # its scale, 0.04, is in the high halves of four bytes
        raw[..., 49::2] = raw[..., 49::2] & 15 | np.array([0, 0, 0x90, 0x20], np.uint8)
    if kind is Kinds.NVFP4:  # scales of 0.0625 to 0.234, halved
        raw[..., :4] = raw[..., :4] & 15 | 0x18
    return raw.reshape(*shape[:-1], -1)


def weights(kind, outputs, inputs, seed=0):
    """As a file has them, with zeros up to whole blocks."""
    of, _ = gguf.GGML_QUANT_SIZES[Kinds[kind.upper()]]
    raw = blocks(Kinds[kind.upper()], (outputs, -(-inputs // of) * of), np.random.default_rng(seed))
    raw = np.array(raw).reshape(outputs, -1)
    return Blocks(kind, raw, -(-inputs // of) * of)


def add(writer, key, value):
    kind = gguf.GGUFValueType.get_type(value)
    unsigned = kind is gguf.GGUFValueType.INT32  # as published files write their counts
    writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if unsigned else kind)


def finish(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
