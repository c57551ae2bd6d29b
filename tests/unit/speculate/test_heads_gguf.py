"""Drafters in GGUF files draft what the folders that they were made of do."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_dflash import (
    BLOCK,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    MASK,
    WIDTH,
    config_of,
    draft,
    random_weights,
)
from test_dflash import write as write_folder
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun import LLM, ForerunError
from forerun.models.run.rotary import default_frequencies
from forerun_lab.heads.eagle import TrainedEagle
from gguf_files import add, finish
from refusals import refused
from unrolled import unrolled

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


def eagle_weights(size, vocabulary, ids):
    g = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(*shape, generator=g) * 0.3

    at, wide, narrow = "layers.0.", HEADS * WIDTH, KV_HEADS * WIDTH
    weights = {
        "fc.weight": r(size, 2 * size), "norm.weight": 1 + r(size), "lm_head.weight": r(len(ids), size), "d2t": ids,
    }  # fmt: skip
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"{at}{name}.weight"] = 1 + r(size)
    shapes = {"q": (wide, 2 * size), "k": (narrow, 2 * size), "v": (narrow, 2 * size), "o": (size, wide)}
    weights |= {f"{at}self_attn.{name}_proj.weight": r(*shape) for name, shape in shapes.items()}
    shapes = {"gate": (INNER, size), "up": (INNER, size), "down": (size, INNER)}
    return weights | {f"{at}mlp.{name}_proj.weight": r(*shape) for name, shape in shapes.items()}


def test_published_layouts_draft_the_same(tiny_target, tmp_path):
    """By the names of EAGLE's authors and in speculators' form, each with tensors that the target has itself."""
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    config = config_of(Path(tiny_target), "dflash") | layers
    size, vocabulary, ids = config["hidden_size"], config["vocab_size"], torch.arange(0, 60, 3)
    weights = eagle_weights(size, vocabulary, ids) | {"d2t": ids - torch.arange(len(ids))}
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    known = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    more = {"embed_tokens.weight": torch.randn(vocabulary, size), "t2d": known}
    folders = [
        write_folder(tmp_path / "flat", config, weights),
        write_folder(tmp_path / "authors", config, named | more),
        write_folder(tmp_path / "speculators", {"transformer_layer_config": config, **layers}, weights | more),
    ]
    first, *others = (draft(tiny_target, folder, method="eagle") for folder in folders)
    assert others == [first] * 2


def paired(rows, heads):
    """Rows as llama.cpp's converter puts them: the two of a rotated pair side by side."""
    return torch.cat([head[[i // 2 + (i % 2) * WIDTH // 2 for i in range(WIDTH)]] for head in rows.chunk(heads)])


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 2048}  # fmt: skip


def llama3(width):
    """Frequencies as transformers has them."""
    about = LlamaConfig(head_dim=width, rope_parameters={**LLAMA3, "rope_theta": 1000.0})
    return ROPE_INIT_FUNCTIONS["llama3"](about, "cpu")[0]


@pytest.mark.parametrize(("before", "third"), [(False, False), (True, False), (False, True)])
@torch.no_grad()
def test_an_eagle_head_in_a_gguf_file_is_the_folders(tiny_target, tmp_path, before, third):
    """``third``: with EAGLE-3.1's norm before ``fc``, Llama 3's frequencies, and SGLang's numbers of layers."""
    config = config_of(Path(tiny_target), "dflash", norm_before_residual=before)
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    ids = torch.arange(0, 60, 3)
    weights = eagle_weights(size, vocabulary, ids)
    folder = tmp_path / "e"
    folder.mkdir()
    said = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    divided = {}
    if third:
        said = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}, "rope_scaling": LLAMA3}
        weights["input_norm.weight"] = torch.rand(2 * size) + 0.5
        divided["rope_freqs.weight"] = 1000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH) / llama3(WIDTH)
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    save_file({**weights, "d2t": ids - torch.arange(len(ids))}, folder / "model.safetensors")
    at = "layers.0.self_attn."
    turned = {f"{at}q_proj.weight": paired(weights[f"{at}q_proj.weight"], HEADS),
              f"{at}k_proj.weight": paired(weights[f"{at}k_proj.weight"], KV_HEADS)}  # fmt: skip
    about = {"block_count": 1, "target_layers": [1, 2], "norm_before_residual": before}
    file = write(tmp_path / "e.gguf", "eagle3", about, vocabulary, {**weights, **turned, **divided})
    drafted, committed = draft(tiny_target, file)
    assert (drafted, committed) == draft(tiny_target, folder)
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    head = TrainedEagle.load(file, config["num_hidden_layers"])
    hidden = reference(torch.tensor([committed[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden[1][0], hidden[2][0]], -1)
    if third:
        features /= (features.square().mean(-1, keepdim=True) + 1e-6).sqrt() / weights["input_norm.weight"]
        torch.testing.assert_close(head.frequencies, llama3(WIDTH))
        assert not torch.allclose(default_frequencies(WIDTH, 1000.0), llama3(WIDTH))
    features = features @ weights["fc.weight"].T
    normed = (
        features / (features.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["layers.0.hidden_norm.weight"]
    )
    torch.testing.assert_close(head.enter(features, features), normed if before else features)
    embedding, tokens = reference.get_input_embeddings(), list(committed)
    for step in range(4):
        said = unrolled(head, features, embedding(torch.tensor(tokens)), len(features), step + 1)[-1]
        tokens.append(int(ids[(weights["lm_head.weight"] @ head.norm(said)).argmax()]))
    assert drafted == tokens[-4:]


@pytest.mark.parametrize(("changes", "part", "message"), [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None, "supports the default RoPE"),
    ({"rope_scaling": {**LLAMA3, "factor": None}}, None, "supports the default RoPE"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, None, r"0 to 2, not \[1, 3\]"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "x"}}, None, "layers are some of its target's"),
    ({}, "q_proj", "a head of EAGLE or EAGLE-2"),
])  # fmt: skip
def test_eagle_heads_of_other_kinds_are_refused_in_one_line(tiny_target, tmp_path, changes, part, message):
    config = config_of(Path(tiny_target), "dflash", **changes)
    size, ids = config["hidden_size"], torch.arange(0, 60, 3)
    weights = eagle_weights(size, config["vocab_size"], ids)
    if part is not None:
        weights[f"layers.0.self_attn.{part}.weight"] = torch.zeros(HEADS * WIDTH, size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({**weights, "d2t": ids - torch.arange(len(ids))}, tmp_path / "model.safetensors")
    refused(ForerunError, message, LLM, tiny_target, speculative_config={"method": "eagle", "model": str(tmp_path)})


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
