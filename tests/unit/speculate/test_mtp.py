"""Layers for multi-token prediction: what they draft is what transformers' own layer says."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import MtpLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from drafting import drafts_of, first_draft
from forerun import LLM, ForerunError, SamplingParams
from forerun.engine.config import SpeculativeConfig
from forerun.engine.drafter_files import brings_mtp
from forerun.models.formats import ON_CPU
from gguf_files import VOCABULARY, finish
from gguf_files import add as set_field
from here import where
from refusals import refused
from tiny import save_checkpoint

LAYERS = 2
PROMPT = [5, 9, 12, 7, 7, 3, 5, 9, 12, 11, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.8,
        "mscale_all_dim": 0.6}  # fmt: skip
LATENTS = {
    "glm": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}),
    "deepseek": ("deepseek_v3", {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
                                 "attention_bias": True}),
    "deepseek-whole": ("deepseek_v3", {"first_k_dense_replace": 0, "q_lora_rank": None, "rope_interleave": False}),
}  # fmt: skip
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3,
    "num_nextn_predict_layers": 1, "attn_implementation": "eager", "eos_token_id": 0, "pad_token_id": None,
    "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def randomised(module):
    for name, part in module.named_parameters():
        nn.init.normal_(part, mean=1.0 if "norm" in name else 0.0, std=0.3)
    for _, part in module.named_buffers():
        part.normal_()
    return module.eval()


@torch.no_grad()
def qwen(folder):
    torch.manual_seed(1)
    config = Qwen3Config(**SIZES)
    model = Qwen3ForCausalLM(config).eval()
    save_checkpoint(model, folder)
    return model, randomised(MtpLayer(config, Qwen3DecoderLayer, Qwen3RMSNorm, 0))


@torch.no_grad()
def glm(folder):
    """Half of a head is turned, and the layer is a mixture with a shared expert."""
    torch.manual_seed(1)
    config = Glm4MoeConfig(
        **SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
        n_group=1, topk_group=1, partial_rotary_factor=0.5, use_qk_norm=True, routed_scaling_factor=1.5,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).eval()
    save_checkpoint(model, folder)
    return model, randomised(MtpLayer(config, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, 1))


@torch.no_grad()
def latent(folder, kind, **options):
    """Layer and target have latent attention; the layer is a mixture with a shared expert."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SIZES, **LATENT, **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.uniform_(0.0, 0.3)
    save_checkpoint(model, folder)
    decoder = type(model.model.layers[0]), type(model.model.norm)
    layer = randomised(MtpLayer(config, *decoder, config.num_hidden_layers - 1))
    layer.mtp_block.mlp.gate.e_score_correction_bias.uniform_(0.0, 0.3)
    return model, layer


def deepseek_names(name):
    return f"model.layers.{LAYERS}.{name.replace('post_norm', 'shared_head.norm').removeprefix('mtp_block.')}"


def qwen_names(name):
    short = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    stem, _, kind = name.rpartition(".")
    return f"mtp.{short[stem]}.{kind}" if stem in short else f"mtp.{name.replace('mtp_block', 'layers.0')}"


def mimo_names(name):
    short = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
             "post_norm": "final_layernorm"}  # fmt: skip
    stem, _, kind = name.rpartition(".")
    return f"model.mtp_layers.0.{short.get(stem, stem).removeprefix('mtp_block.')}.{kind}"


def add(folder, layer, names):
    """The layer's weights beside the target's."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        if name == "eh_proj.weight" and "mtp_layers" in names(name):
            tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
        weights[names(name)] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def expected(model, layer, committed, count, ids):
    """The whole text at once, with the layer's own outputs behind the target's hidden states."""
    hidden = model(torch.tensor([committed[:-1]]), output_hidden_states=True).hidden_states[-1]
    tokens = list(committed)
    drafted = []
    for _ in range(count):
        embedded = model.get_input_embeddings()(torch.tensor([tokens[1:]]))
        rows = embedded.shape[1]
        positions = torch.arange(rows)[None]
        mask = torch.full((1, 1, rows, rows), -torch.inf).triu(1)
        angles = model.model.rotary_emb(embedded, positions)
        out = layer(embedded, hidden, angles, mask, positions, None)
        logits = model.lm_head(out[0, -1])
        best = int(logits.argmax()) if ids is None else int(ids[logits[ids].argmax()])
        drafted.append(best)
        tokens.append(best)
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return drafted


@torch.no_grad()
def expected_of_modules(model, modules, committed, count):
    """The whole text at once through module after module (DeepSeek-V3's equations 21 to 23); from the first one again
    with the modules' last outputs behind the target's hidden states."""
    hidden = model(torch.tensor([committed[:-1]]), output_hidden_states=True).hidden_states[-1]
    tokens, newest = list(committed), []
    for step in range(count):
        if step % len(modules) == 0:
            hidden = given = torch.cat([hidden, *newest], dim=1)
            newest = []
        rows, first = given.shape[1], step % len(modules) + 1
        embedded = model.get_input_embeddings()(torch.tensor([tokens[first : first + rows]]))
        positions = torch.arange(rows)[None]
        mask = torch.full((1, 1, rows, rows), -torch.inf).triu(1)
        angles = model.model.rotary_emb(embedded, positions)
        given = modules[step % len(modules)](embedded, given, angles, mask, positions, None)
        newest.append(given[:, -1:])
        tokens.append(int(model.lm_head(given[0, -1]).argmax()))
    return tokens[len(committed) :]


def draft(target, invariant=None, **options):
    config = {"method": "mtp", "num_speculative_tokens": 4, **options}
    return first_draft(target, config, PROMPT, dtype="float32", max_model_len=64, invariant=invariant)


@pytest.mark.parametrize("names", [deepseek_names, qwen_names, mimo_names])
def test_it_drafts_what_transformers_own_layer_says(tmp_path, names):
    model, layer = qwen(tmp_path)
    add(tmp_path, layer, names)
    drafted, committed = draft(tmp_path)
    assert drafted == expected(model, layer, committed, 4, None)


def numbered(names, module):
    """The names of a later module's tensors."""
    old, new = {
        deepseek_names: (f"layers.{LAYERS}.", f"layers.{LAYERS + module}."),
        qwen_names: ("layers.0.", f"layers.{module}."), mimo_names: ("mtp_layers.0.", f"mtp_layers.{module}."),
    }[names]  # fmt: skip
    return lambda name: names(name).replace(old, new)


@pytest.mark.parametrize(("names", "count", "chunk"), [
    (deepseek_names, 2, 128), (deepseek_names, 3, 3), (mimo_names, 2, 3), (qwen_names, 3, 128),
])  # fmt: skip
def test_step_after_step_runs_module_after_module(tmp_path, names, count, chunk):
    """All rounds' drafts, whose last entries are read again with the tokens that were accepted, and those of steps
    beyond the last module."""
    model, first = qwen(tmp_path)
    modules = [
        first,
        *(randomised(MtpLayer(model.config, Qwen3DecoderLayer, Qwen3RMSNorm, 0)) for _ in range(count - 1)),
    ]
    if names is qwen_names:  # whose modules share the rest
        for layer in modules[1:]:
            layer.load_state_dict({k: v for k, v in first.state_dict().items() if "mtp_block" not in k}, strict=False)
    for module, layer in enumerate(modules):
        add(tmp_path, layer, numbered(names, module))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": count}))
    for tokens in (1, 7):
        config = {"method": "mtp", "num_speculative_tokens": tokens, "prefill_chunk": chunk}
        llm = LLM(str(tmp_path), speculative_config=config, trace=True, dtype="float32", max_model_len=64)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (14, 9)]
        for answer in llm.generate([PROMPT, PROMPT[3:]], params):
            drafts = list(drafts_of(answer))
            assert drafts
            for committed, drafted in drafts:
                assert drafted == expected_of_modules(model, modules, committed, len(drafted))


def test_a_mixture_with_a_shared_expert_drafts_what_transformers_says(tmp_path):
    model, layer = glm(tmp_path)
    add(tmp_path, layer, deepseek_names)
    drafted, committed = draft(tmp_path, invariant=False)
    assert drafted == expected(model, layer, committed, 4, None)


@pytest.mark.parametrize("case", LATENTS)
def test_latent_attention_drafts_what_transformers_says_and_auto_takes_it(tmp_path, case):
    kind, options = LATENTS[case]
    model, layer = latent(tmp_path, kind, **options)
    add(tmp_path, layer, deepseek_names)
    drafted, committed = draft(tmp_path)
    assert drafted == expected(model, layer, committed, 4, None)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]
    plain = LLM(str(tmp_path), speculative_config=None, dtype="float32").generate([PROMPT] * 2, params)
    llm = LLM(str(tmp_path), dtype="float32")
    assert [each.method for each in llm.speculative.drafter.drafters] == ["suffix", "mtp"]
    for each in (llm, LLM(str(tmp_path), speculative_config={"method": "mtp", "tree": [2, 2]}, dtype="float32")):
        assert each.engine.identity
        told = each.generate([PROMPT] * 2, params)
        assert [o.outputs[0].token_ids for o in told] == [o.outputs[0].token_ids for o in plain]


def test_a_layer_with_latent_attention_in_a_gguf_file_drafts_the_same(tmp_path):
    """Beside a target in another file, its experts stacked and its keys' projection transposed."""
    model, layer = latent(tmp_path, LATENTS["glm"][0], **LATENTS["glm"][1])
    held, path = {}, tmp_path / "layer.gguf"
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b", "mlp.gate": "ffn_gate_inp",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.o_proj": "attn_output", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
        "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "eh_proj": "nextn.eh_proj",
        "post_norm": "nextn.shared_head_norm",
    }  # fmt: skip
    for name, tensor in layer.state_dict().items():
        stem = name.removeprefix("mtp_block.").removesuffix(".weight")
        if stem == "self_attn.kv_b_proj":
            keys, values = tensor.view(4, 22, 24).split((12, 10), 1)
            held |= {"attn_k_b.weight": keys.mT, "attn_v_b.weight": values}
        elif stem == "mlp.experts.gate_up_proj":
            held |= {f"ffn_{part}_exps.weight": t for part, t in zip(("gate", "up"), tensor.chunk(2, 1))}
        elif stem == "mlp.experts.down_proj":
            held["ffn_down_exps.weight"] = tensor
        elif stem.endswith("e_score_correction_bias"):
            held["exp_probs_b.bias"] = tensor
        else:
            held[f"{names[stem]}.weight"] = tensor
    writer = gguf.GGUFWriter(path, "deepseek2")
    for name, tensor in held.items():
        writer.add_tensor(f"blk.{LAYERS}.{name}", tensor.contiguous().numpy().astype(np.float32))
    finish(writer, path)
    drafted, committed = draft(tmp_path, model=str(path))
    assert drafted == expected(model, layer, committed, 4, None)
    tensors = load_file(tmp_path / "model.safetensors")
    weights = {deepseek_names(name): t for name, t in layer.state_dict().items()}
    both = deepseek_names("mtp_block.self_attn.kv_b_proj.weight")
    save_file({**tensors, **weights, both: weights[both][:-1]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ForerunError, match=r"kv_b_proj.weight has shape \[87, 24\]; its config asks for \[88, 24\]"):
        LLM(str(tmp_path), speculative_config={"method": "mtp"})


def test_a_cut_output_layer_drafts_the_best_of_the_commonest_tokens(tmp_path):
    model, layer = qwen(tmp_path)
    add(tmp_path, layer, deepseek_names)
    drafted, committed = draft(tmp_path, draft_vocab_size=40)
    ids = torch.arange(40)  # the special tokens come first in this vocabulary
    assert drafted == expected(model, layer, committed, 4, ids)


def write_gguf(folder, model, layer, names=None, kind=None):
    """Target and layer as one GGUF file in float32; with ``names``, those of the layer stay a checkpoint's. ``kind``:
    the type of the layer's matrices, which are rounded to it in place."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    tokens = VOCABULARY["tokenizer.ggml.tokens"]
    more = [f"x{i}" for i in range(99 - len(tokens))]
    kinds = [*VOCABULARY["tokenizer.ggml.token_type"], *[1] * len(more)]
    vocabulary = {**VOCABULARY, "tokenizer.ggml.tokens": [*tokens, *more], "tokenizer.ggml.token_type": kinds}
    sizes = {
        "block_count": LAYERS + (names is None), "nextn_predict_layers": int(names is None),
        "context_length": 128, "embedding_length": 32,
        "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 16, "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
    }  # fmt: skip
    for name, value in {**{f"qwen3.{name}": value for name, value in sizes.items()}, **vocabulary}.items():
        set_field(writer, name, value)
    block = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_norm": "nextn.shared_head_norm",
             "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "eh_proj": "nextn.eh_proj"}  # fmt: skip
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = dict(model.state_dict())
    inside = {f"model.layers.{LAYERS}.{n.removeprefix('mtp_block.')}": t for n, t in layer.state_dict().items()}
    for name, tensor in layer.state_dict().items() if names else ():
        writer.add_tensor(names(name), tensor.numpy().astype(np.float32))
    tensors |= {} if names else inside
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem not in ends:
            _, _, number, rest = stem.split(".", 3)
            stem = f"blk.{number}.{block[rest]}"
        numbers, raw = tensor.numpy().astype(np.float32), None
        if kind is not None and name in inside and tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            numbers, raw = gguf.quants.quantize(numbers, kind), kind
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(numbers, kind)))
        writer.add_tensor(f"{ends.get(stem, stem)}.weight", numbers, raw_dtype=raw)
    return finish(writer, path)


@pytest.mark.parametrize("kind", where(ON_CPU["q8_0"].can(torch.float32, torch.device("cpu")), ["q8_0"]))
def test_blocks_of_a_gguf_file_stay_blocks_in_the_compiled_call(tmp_path, kind):
    model, layer = qwen(tmp_path)
    path = write_gguf(tmp_path, model, layer, kind=gguf.GGMLQuantizationType[kind.upper()])
    llm = LLM(str(path), speculative_config={"method": "mtp"}, dtype="float32")
    (drafter,) = llm.engine.router.drafters.values()
    kinds = [linear.kind for linear in drafter.decoder.linears()]
    assert kinds.count(kind.upper()) == len(kinds) - 1  # 48 inputs of down_proj are no whole blocks
    assert drafter.chains is not None
    drafted, committed = draft(path)
    assert drafted == expected(model, layer, committed, 4, None)


@pytest.mark.parametrize("names", [None, qwen_names])
def test_a_layer_in_a_gguf_file_drafts_the_same(tmp_path, names):
    model, layer = qwen(tmp_path)
    path = write_gguf(tmp_path, model, layer, names)
    assert brings_mtp(str(path))
    drafted, committed = draft(path)
    assert drafted == expected(model, layer, committed, 4, None)


@pytest.mark.parametrize("names", [deepseek_names, qwen_names, mimo_names])
def test_files_alone_say_that_they_hold_such_a_layer(tmp_path, names):
    """Beside the target in its own files, and by itself in others."""
    target, other = tmp_path / "target", tmp_path / "layer"
    _, layer = qwen(target)
    assert LLM(str(target)).speculative.method == "suffix"
    assert SpeculativeConfig.parse({"model": str(target)}).method == "draft_model"
    other.mkdir()
    save_file({}, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text((target / "config.json").read_text())
    add(other, layer, names)
    drafted = draft(target, method=None, model=str(other))
    add(target, layer, names)
    assert draft(target) == drafted
    llm = LLM(str(target), dtype="float32", max_model_len=64)
    assert [each.method for each in llm.speculative.drafter.drafters] == ["suffix", "mtp"]
    packed = LLM(str(target), speculative_config={"method": "mtp", "quantization": "q8_0"}, dtype="float32")
    plain = LLM(str(target), speculative_config=None, dtype="float32").generate([PROMPT], GREEDY)[0].outputs
    assert llm.generate([PROMPT], GREEDY)[0].outputs == packed.generate([PROMPT], GREEDY)[0].outputs == plain
    save_file({}, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text(json.dumps({"speculators_model_type": "hydra"}))
    with pytest.raises(ForerunError, match="is a drafter of kind 'hydra'; there are eagle, "):
        LLM(str(target), speculative_config={"model": str(other)})


def test_files_without_a_layer_and_with_other_layers_are_refused(tmp_path):
    _, layer = qwen(tmp_path)
    config = {"method": "mtp"}
    refused(ForerunError, "has no layer for multi-token prediction", LLM, str(tmp_path), speculative_config=config)
    weights = load_file(tmp_path / "model.safetensors")
    at = f"model.layers.{LAYERS}."
    full = {deepseek_names(name): tensor for name, tensor in layer.state_dict().items()}

    def wrong(more, message):
        save_file({**weights, **more}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        refused(ForerunError, message, LLM, str(tmp_path), speculative_config=config)

    wrong(
        {**full, f"{at}self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 32)},
        "has 1 weights that its config leaves out, .*kv_a_proj_with_mqa.weight",
    )
    wrong({name: t for name, t in full.items() if "v_proj" not in name}, "lacks 1 weights, .*v_proj.weight among them")
    wrong({**full, f"{at}eh_proj.weight": torch.zeros(32, 32)}, "eh_proj.weight has shape")
    wrong({**full, f"{at}surprise.weight": torch.zeros(2)}, "its config leaves out, .*surprise.weight")
    save_file({**weights, **full}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ForerunError, match="draft_vocab_size is 100"):
        LLM(str(tmp_path), speculative_config={**config, "draft_vocab_size": 100})
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None
