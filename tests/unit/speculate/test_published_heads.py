"""Heads as others publish them: drafts are those of the published layers, whichever form the files have."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_dflash import BLOCK, HEADS, INNER, KV_HEADS, LAYERS, MASK, WIDTH, config_of, draft, random_weights
from test_dflash import write as write_folder
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun import LLM, ForerunError
from gguf_files import add, finish
from published import EAGLE_IDS, LLAMA3, THETA, Published, config_of_head, eagle_weights
from refusals import refused

NAMES = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight", "rope_freqs.weight": "rope_freqs.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "d2t": "d2t",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight", "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias",
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight", "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight", "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}  # fmt: skip


def write(path, architecture, about, vocabulary, weights):
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "embedding_length": weights["fc.weight"].shape[0], "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": WIDTH, "feed_forward_length": INNER,
    }  # fmt: skip
    for name, value in {**common, **about}.items():
        add(writer, f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 1000.0)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(vocabulary)])
    writer.add_uint32("tokenizer.ggml.mask_token_id", MASK)
    for name, tensor in weights.items():
        if name in ("embed_tokens.weight", "t2d"):
            continue
        _, _, rest = name.partition("layers.")
        number, _, part = rest.partition(".")
        to = f"blk.{number}.{LAYER[part]}" if rest else NAMES[name]
        writer.add_tensor(to, tensor.numpy().astype(np.int64 if name == "d2t" else np.float32))
    return finish(writer, path)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_blocks_of_a_gguf_file_are_those_of_the_folder(tiny_target, tmp_path, kind):
    config = config_of(Path(tiny_target), kind)
    weights = random_weights(config["hidden_size"], config["vocab_size"], 2, kind)
    about = {"block_count": LAYERS, "block_size": BLOCK, "target_layers": [1, 2]}
    if kind == "dflash2":
        about["selector_top_k"] = 6
    file = write(tmp_path / "d.gguf", "dflash", about, config["vocab_size"], weights)
    folder = write_folder(tmp_path / "d", config, weights)
    for options in ({}, {"quantization": "q8_0"}):
        assert draft(tiny_target, file, **options) == draft(tiny_target, folder, **options)


VARIANTS = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "EAGLE-3.1's norms before fc": {"fc_norm": True},
    "EAGLE-3.1's normed outputs": {"norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "one norm before fc": {"input_norm": True},
    "Llama 3's frequencies": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    "Llama 3's in a GGUF file": {"rope_scaling": LLAMA3},
}
"""What differs between heads: keys of their configs, but for the one norm, which the tensors tell."""
SOME_LAYERS = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
BY_SGLANG = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}


def paired(rows, heads):
    """Rows as llama.cpp's converter puts them: the two of a rotated pair side by side."""
    return torch.cat([head[[i // 2 + (i % 2) * WIDTH // 2 for i in range(WIDTH)]] for head in rows.chunk(heads)])


def save_eagle(folder, config, weights, form):
    """A head as its authors, speculators or llama.cpp's converter write it, the first two with tensors that the target
    has itself; or with SGLang's numbers of layers."""
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    known = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, EAGLE_IDS, True)
    shifts = {"d2t": EAGLE_IDS - torch.arange(len(EAGLE_IDS))}
    more = {**shifts, "embed_tokens.weight": torch.randn(vocabulary, size), "t2d": known}
    if form == "authors":
        named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
        return write_folder(folder, {**config, **SOME_LAYERS}, named | more)
    if form == "speculators":
        return write_folder(folder, {"transformer_layer_config": config, **SOME_LAYERS}, weights | more)
    if form != "GGUF":
        return write_folder(folder, {**config, **(BY_SGLANG if form == "SGLang" else SOME_LAYERS)}, weights | shifts)
    held = {**weights, "d2t": EAGLE_IDS}
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        held[name] = paired(weights[name], heads)
    if "rope_scaling" in config:
        stretched = ROPE_INIT_FUNCTIONS["llama3"](config_of_head(size, **config), "cpu")[0]
        held["rope_freqs.weight"] = THETA ** (-torch.arange(0, WIDTH, 2) / WIDTH) / stretched
    about = {"norm_before_residual": config.get("norm_before_residual", False)}
    return write(
        folder.with_suffix(".gguf"), "eagle3", {"block_count": 1, "target_layers": [1, 2], **about}, vocabulary, held
    )


@pytest.mark.usefixtures("cpu_attention")
@pytest.mark.parametrize(("variant", "form"), [
    *((variant, "vLLM") for variant in VARIANTS if "GGUF" not in variant),
    ("plain", "authors"), ("plain", "speculators"), ("plain", "GGUF"), ("normed residual", "GGUF"),
    ("one norm before fc", "GGUF"), ("one norm before fc", "SGLang"), ("Llama 3's in a GGUF file", "GGUF"),
])  # fmt: skip
def test_an_eagle_head_drafts_what_the_published_layers_say(tiny_target, reference, tmp_path, variant, form):
    about = VARIANTS[variant]
    config = config_of(Path(tiny_target), "dflash", **{key: about[key] for key in about if key != "input_norm"})
    weights = eagle_weights(config["hidden_size"], **about)
    drafted, committed = draft(tiny_target, save_eagle(tmp_path / "e", config, weights, form), method="eagle")
    assert drafted == Published(reference, weights, **about).draft(committed, 4)
    texts = [committed[:count] for count in range(3, len(committed) + 1)]
    told, plainly = Published(reference, weights, **about), Published(reference, weights)
    same = all(told.draft(text, 4) == plainly.draft(text, 4) for text in texts)
    assert same == (variant == "plain") or form == "GGUF"  # whose frequencies differ in longer texts alone


@pytest.mark.parametrize(("changes", "part", "message"), [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None, "supports the default RoPE"),
    ({"rope_scaling": {**LLAMA3, "factor": None}}, None, "supports the default RoPE"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, None, r"0 to 2, not \[1, 3\]"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "x"}}, None, "layers are some of its target's"),
    ({"fc_norm": True, **SOME_LAYERS}, None, "fc_norm.0.weight has shape None"),
    ({}, "q_proj", "a head of EAGLE or EAGLE-2"),
])  # fmt: skip
def test_eagle_heads_of_other_kinds_are_refused_in_one_line(tiny_target, tmp_path, changes, part, message):
    config = config_of(Path(tiny_target), "dflash", **changes)
    weights = eagle_weights(config["hidden_size"])
    if part is not None:
        weights[f"layers.0.self_attn.{part}.weight"] = torch.zeros(HEADS * WIDTH, config["hidden_size"])
    folder = write_folder(tmp_path / "e", config, weights | {"d2t": EAGLE_IDS - torch.arange(len(EAGLE_IDS))})
    refused(ForerunError, message, LLM, tiny_target, speculative_config={"method": "eagle", "model": str(folder)})


def test_files_of_other_architectures_are_refused(tiny_target, tmp_path):
    config = config_of(Path(tiny_target), "dflash")
    weights = random_weights(config["hidden_size"], config["vocab_size"], 2, "dflash")
    about = {"block_count": LAYERS, "block_size": BLOCK, "target_layers": [1, 2]}
    file = write(tmp_path / "d.gguf", "dflash", about, config["vocab_size"], weights)
    with pytest.raises(ForerunError, match=r"architecture 'dflash', not a drafter \(eagle3\)"):
        LLM(tiny_target, speculative_config={"method": "eagle", "model": str(file)})
    del about["target_layers"]
    file = write(tmp_path / "n.gguf", "dflash", about, config["vocab_size"], weights)
    with pytest.raises(
        ForerunError, match=r"does not say which of the target's layers it reads \(dflash.target_layers\)"
    ):
        LLM(tiny_target, speculative_config={"method": "dflash", "model": str(file)})
