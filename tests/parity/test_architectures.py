"""Described architectures against transformers, on random checkpoints."""

import copy
import json
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

import one_call
from described import CASES, LATENT, LATENTS, LINEAR, MAIN, PARTIAL, SIZES, TOKENS, YARN
from forerun import LLM, SamplingParams
from forerun.attention.sdpa import SdpaAttention
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError, ModelError
from forerun.models.architectures.spec import refusal
from forerun.models.formats.tiled import DTYPES, can_tile
from forerun.models.load import load_model
from forerun.models.run.base import new_attention
from forerun.models.run.invariance import self_test
from forerun.models.run.native import NativeModel
from forerun.models.run.rotary import Rotary
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.eagle import TrainedEagle
from here import where
from modules import requested
from refusals import refused
from rounding import apart, bound, by_chance

ROWS = 40
EXPERTS = ("mixtral", "mixtral-tied", "qwen3_moe", "qwen3_moe-some", "gemma4-experts")


def ids(count, seed=0):
    return torch.randint(3, TOKENS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def theirs(folder):
    own = AutoConfig.from_pretrained(folder).model_type == "mistral4"  # which Auto does not know
    kind = Mistral4ForCausalLM if own else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference(folder, tokens):
    return theirs(folder)(torch.tensor([tokens]), use_cache=False).logits[0]


def feed(model, *spans, **options):
    attention = options.pop("attention", None) or new_attention(model, max_seqs=2, max_len=64, page_size=4)
    for span in spans:
        span.logits = list(range(span.count))
    return model.forward(Batch(list(spans), **options), attention)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_hidden_states_of_transformers(described, name, invariant):
    folder, tokens = described(name), ids(ROWS)
    model = load_model(folder, invariant=invariant, weights="auto" if invariant else "plain")
    assert isinstance(model, NativeModel)
    with torch.inference_mode():
        expected = theirs(folder)(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    layers, limit = tuple(range(model.info.num_layers + 1)), bound(theirs(folder).config)
    got = feed(model, Span(0, 0, tokens), hidden=layers)
    assert apart(got.logits, expected.logits[0]) < limit
    for layer in layers:
        assert apart(got.hidden[layer], expected.hidden_states[layer][0]) < limit
    assert apart(model.lm_head(got.hidden[layers[-1]]), got.logits) < limit
    assert apart(model.embed(torch.tensor(tokens)), expected.hidden_states[0][0]) < 1e-6


@pytest.mark.parametrize("name", [*MAIN, "llama", "mistral", "qwen3-biases", "smollm3-window"])
def test_chunks_mates_and_trees(described, name):
    folder, tokens, nodes = described(name), ids(30), ids(5, 9)
    model, parents = load_model(folder, invariant=True), [-1, 0, 0, 1, 2]
    attention = new_attention(model, max_seqs=2, max_len=64, page_size=4)
    rows = [feed(model, Span(0, 0, tokens[:11]), attention=attention).logits]
    rows.append(feed(model, Span(0, 11, tokens[11:]), Span(1, 0, tokens[:9]), attention=attention).logits)
    expected, limit = reference(folder, tokens), bound(theirs(folder).config)
    assert apart(torch.cat(rows), torch.cat([expected, expected[:9]])) < limit
    tree = feed(model, Span(0, 30, nodes, parents), attention=attention).logits
    for leaf, path in {3: [0, 1, 3], 4: [0, 2, 4]}.items():
        assert apart(tree[leaf], reference(folder, tokens + [nodes[node] for node in path])[-1]) < limit


@pytest.mark.parametrize("fault", ["swapped halves", "another token", "a norm 1 % off"])
@pytest.mark.parametrize("name", ["gemma4", "llama", "qwen3_5", "mistral4"])
def test_faults_are_far_beyond_the_bound(described, monkeypatch, name, fault):
    folder, tokens = described(name), ids(ROWS)
    given, arrange = list(tokens), Rotary.arrange
    if fault == "swapped halves":
        monkeypatch.setattr(Rotary, "arrange", lambda self, heads: arrange(self, heads.roll(self.pairs, -1)))
    elif fault == "another token":
        given[-2] = (given[-2] + 1) % TOKENS
    model = load_model(folder, invariant=False, weights="plain")
    if fault == "a norm 1 % off":
        norm = model._norm
        model._norm = lambda *given: norm(*given) * 1.01
    got = feed(model, Span(0, 0, given)).logits
    assert apart(got[-1:], reference(folder, tokens)[-1:]) > 10 * bound(theirs(folder).config)


@pytest.mark.parametrize("invariant", [False, True])
def test_stored_nodes_grow_a_tree_level_by_level(described, invariant):
    model = load_model(described("mistral"), invariant=invariant)
    nodes, parents = ids(6, 9), [-1, -1, 0, 0, 1, 2]
    attention = new_attention(model, max_seqs=1, max_len=64)
    feed(model, Span(0, 0, ids(13)), attention=attention)
    whole = feed(model, Span(0, 13, nodes, parents), attention=attention).logits
    attention.pool.truncate(0, 13)
    grown = [
        feed(model, Span(0, 13, nodes[a:b], parents[:b], stored=a), attention=attention).logits
        for a, b in ((0, 2), (2, 5), (5, 6))
    ]
    assert apart(torch.cat(grown), whole) < bound(theirs(described("mistral")).config)


@torch.inference_mode()
def test_some_layers_and_given_embeddings(described):
    folder, tokens = described("llama"), ids(9)
    model, module = load_model(folder, invariant=False), theirs(folder)
    embeds = torch.randn(2, model.info.hidden_size)
    inputs = module.get_input_embeddings()(torch.tensor([tokens])).clone()
    inputs[0, [3, 8]] = embeds
    got = feed(model, Span(0, 0, tokens), embeds=embeds, embed_rows=[3, 8]).logits
    limit = bound(module.config)
    assert apart(got[3:], module(inputs_embeds=inputs).logits[0, 3:]) < limit

    early = copy.deepcopy(module)
    early.model.layers = torch.nn.ModuleList([early.model.layers[0], early.model.layers[2]])
    early.config.num_hidden_layers = 2
    got = feed(model, Span(0, 0, tokens), layers=(0, 2), hidden=(2, 3))
    expected = early(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    assert apart(got.logits, expected.logits[0]) < limit
    assert apart(got.hidden[2], expected.hidden_states[1][0]) < limit
    assert apart(got.hidden[3], expected.hidden_states[2][0]) < limit


@pytest.mark.parametrize("dtype", where(can_tile, DTYPES))
def test_the_one_call_refuses_what_it_would_misread(described, dtype):
    model = load_model(described("llama"), dtype=dtype)
    attention = new_attention(model, max_seqs=1, max_len=64)
    for token in (-1, TOKENS):
        refused(IndexError, f"from 0 to {TOKENS - 1}", feed, model, Span(0, 0, [5, token]), attention=attention)
    refused(ValueError, "ascend", model.forward, Batch([Span(0, 0, [5, 6, 7], logits=[1, 0])]), attention)
    assert attention.pool.length(0) == 0
    assert model.forward(Batch([Span(0, 0, [5])]), attention).logits.shape == (0, TOKENS)


@pytest.mark.parametrize("part", ["softcap", "logits_softcap", "scale", "window", "rotary"])
def test_what_is_described_bites(described, part):
    """The parity above would not hold without it."""
    name = "gemma3" if part == "rotary" else "gemma2"
    model, tokens = load_model(described(name), invariant=False), ids(ROWS)
    model.fused = None  # layer by layer, parts can be changed
    with_it = feed(model, Span(0, 0, tokens)).logits
    for layer in model._layers:
        if part == "window":
            layer.window = None
        if part == "rotary":
            layer.rotary = "full_attention"
    if part in ("softcap", "logits_softcap", "scale"):
        model.spec = replace(model.spec, **{part: model.spec.head_dim**-0.5 if part == "scale" else None})
    assert apart(feed(model, Span(0, 0, tokens)).logits, with_it) > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", where(can_tile(torch.bfloat16), (*MAIN, "qwen3_5-grouped", "granite-h-grouped")))
def test_bits_do_not_depend_on_the_batch_with_our_kernels(described, name, dtype):
    model = load_model(described(name), dtype=dtype, invariant=None, weights="streamed")
    assert model.invariant
    assert model.tiles is None
    assert self_test(model, page_size=16, rows=60, chunks=(5, 33)) == []


IN_ONE_CALL = [
    (name, DTYPES[(index + turn) % len(DTYPES)], quantization)
    for index, name in enumerate(CASES)
    for turn, quantization in enumerate((None, ("int8_rows", "q4_0", "q8_0")[index // 3 % 3]))
]
"""Every model as it is and in one form, forms and dtypes in turns."""


@pytest.mark.parametrize(("name", "dtype", "quantization"), where(lambda case: can_tile(case[1]), IN_ONE_CALL))
def test_all_layers_in_one_call_give_the_bits_of_layer_by_layer(described, name, dtype, quantization):
    one_call.check(load_model(described(name), dtype=dtype, invariant=True, quantization=quantization))


@pytest.mark.usefixtures("cpu_attention")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "gemma4", "mixtral"])
def test_bits_do_not_depend_on_the_batch_with_torch(described, name, dtype):
    model = load_model(described(name), dtype=dtype, invariant=None, weights="plain")
    assert model.invariant
    assert model.tiles.together >= 8
    assert self_test(model, rows=40, chunks=(5, 33)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3", "gemma4", "llama-biases", "olmo2", "phi3", "qwen3", "mixtral-tied"]
)
def test_half_precision(described, name, dtype):
    folder, tokens = described(name), ids(24)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        off = (other(torch.tensor([tokens])).logits[0].float() - reference(folder, tokens)).norm()
    got = feed(load_model(folder, dtype=dtype, invariant=True), Span(0, 0, tokens)).logits
    assert (got - reference(folder, tokens)).norm() <= by_chance(len(tokens)) * off


@pytest.mark.parametrize("name", ["gemma4-experts", "gpt_oss", "starcoder2", "qwen3_5_moe", "nemotron_h", "mistral4"])
def test_greedy_tokens_of_transformers_with_and_without_a_draft(described, tiny_draft, name):
    folder, prompt = described(name), ids(12, 2)
    answer = list(prompt)
    for _ in range(24):
        answer.append(int(reference(folder, answer)[-1].argmax()))
    draft = folder if name == "qwen3_5_moe" else tiny_draft  # whose tokenizer has a token more in transformers
    drafts = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    sampled = []
    for config in (None, drafts, {"method": "layerskip", "num_speculative_tokens": 2}):
        llm = LLM(folder, speculative_config=config)
        greedy, drawn = llm.generate([prompt] * 2, [
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
            SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True),
        ])  # fmt: skip
        assert greedy.outputs[0].token_ids == answer[len(prompt) :]
        assert llm.engine.identity
        sampled.append(drawn.outputs[0].token_ids)
    assert sampled[0] == sampled[1] == sampled[2]


@torch.inference_mode()
@pytest.mark.parametrize("name", where(can_tile(torch.float32), ["gemma2", "mixtral"]))
def test_a_head_in_one_call_says_what_its_module_says(described, tmp_path, name):
    """With the target's embedding and output layer, scale and soft cap included."""
    options = {"heads": 4, "kv_heads": 2, "width": 16, "inner_size": 24}
    head = TrainedEagle(Sizes(SIZES["hidden_size"], TOKENS, SIZES["num_hidden_layers"], 4, options))
    torch.manual_seed(5)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head.save(tmp_path)
    head = TrainedEagle.load(tmp_path)
    llm = LLM(described(name), speculative_config={"method": "eagle", "model": str(tmp_path)})
    (drafter,) = llm.engine.router.drafters.values()
    feature, tokens = torch.randn(6, SIZES["hidden_size"]), ids(6)
    embedded = llm.model.embed(torch.tensor(tokens))
    stream = head.enter(embedded, feature)
    q, k, v = (each.transpose(0, 1) for each in head.qkv(embedded, stream, torch.arange(6)))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    states, normed = head.outputs(head.finish(stream, attended.transpose(0, 1).flatten(1))[[2, 5]])
    for fused in (True, False):
        got = drafter._run([Span(0, 0, tokens, logits=[2, 5])], feature)
        assert (drafter.decoder.fused is not None) == fused
        assert apart(got[0], states) < 1e-5
        assert apart(got[1], llm.model.lm_head(normed)) < 1e-5
        drafter.decoder.fused = None
        drafter.attention = SdpaAttention(Pool([KVShape(2, 16, 16)], 1, 64, torch.float32, torch.device("cpu")))


@torch.inference_mode()
def test_experts_in_mxfp4(tmp_path):
    """As gpt-oss is published: the levels of neighbours in a byte, one scale for 32."""
    options = {**CASES["gpt_oss"][1], "intermediate_size": 64}
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **{**SIZES, **options})).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    tensors = dict(module.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        stack = tensors.pop(name)
        raw = quantize(stack.transpose(1, 2).contiguous().numpy(), GGMLQuantizationType.MXFP4)
        stack.copy_(torch.from_numpy(dequantize(raw, GGMLQuantizationType.MXFP4)).transpose(1, 2))
        blocks = torch.from_numpy(raw).unflatten(-1, (-1, 17))
        levels = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)
        tensors[f"{name}_blocks"] = levels[..., ::2] | levels[..., 1::2] << 4
        tensors[f"{name}_scales"] = blocks[..., 0].contiguous()
    module.config.quantization_config = {"quant_method": "mxfp4"}
    module.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = module(torch.tensor([ids(ROWS)]), use_cache=False).logits[0]
    for quantization, limit in (("float32", 1e-5), (None, 0.05)):  # 8-bit inputs where weights stay in blocks
        model = load_model(tmp_path, invariant=False, quantization=quantization)
        off = (feed(model, Span(0, 0, ids(ROWS))).logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert off.median() < limit  # a row of 8-bit inputs may go to another expert


def test_layers_read_the_keys_and_values_of_others(described):
    """They have no cache of their own, and none of them is run without the layer that they read."""
    model, tokens = load_model(described("gemma4"), invariant=False), ids(20)
    assert model.info.kv_shapes == tuple(KVShape(heads, *[16 + 16 * (i % 2)] * 2) for i, heads in
                                         enumerate([2, 2, 2, 2, 0, 0]))  # fmt: skip
    with pytest.raises(ModelError, match="layer 4 reads the keys and values of layer 2, which is left out"):
        feed(model, Span(0, 0, tokens), layers=(0, 4))
    given = torch.zeros(1, model.info.hidden_size)
    with pytest.raises(ModelError, match="it cannot be given other rows"):
        feed(model, Span(0, 0, tokens), embeds=given, embed_rows=torch.tensor([0]))


@pytest.mark.parametrize("name", LATENTS)
def test_a_cache_of_latents_has_one_of_each_token(described, name):
    """24 numbers of a latent and 8 of a turned key, however many heads there are."""
    model = load_model(described(name), invariant=False)
    attention = new_attention(model, max_seqs=2, max_len=64, page_size=4)
    stored = {side.untyped_storage().data_ptr(): side.untyped_storage().nbytes() for side in
              (*attention.pool.keys, *attention.pool.values)}  # fmt: skip
    assert attention.pool.page_bytes == 4 * 3 * (24 + 8) * 4
    assert sum(stored.values()) <= attention.pool.num_pages * attention.pool.page_bytes + 3 * 64
    with pytest.raises(ConfigError, match=r"does not support the layers of .*: remove tensor_parallel_size"):
        load_model(described(name), tensor_parallel_size=2)


@pytest.mark.parametrize(
    "scales",
    [{}, {"mscale": 1.0}, {"mscale_all_dim": 0.7}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale_all_dim": 0.0},
     {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.3}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
@torch.inference_mode()
def test_yarn_scales_latent_attention_as_transformers_does(tmp_path, kind, scales):
    rope = {**YARN, "original_max_position_embeddings": 16, **scales}
    config = AutoConfig.for_model(kind, **{**SIZES, **LATENT, "rope_parameters": rope, "q_lora_rank": 20})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    module.save_pretrained(tmp_path)
    expected = module(torch.tensor([ids(60)]), use_cache=False).logits[0]
    assert apart(feed(load_model(tmp_path), Span(0, 0, ids(60))).logits, expected) < 2e-4


@pytest.mark.parametrize("dtype", where(can_tile, DTYPES))
@pytest.mark.parametrize("name", sorted(LATENTS))
def test_a_row_of_two_hundred_has_the_bits_of_one(described, name, dtype):
    """In one call for all layers, for chunks and for nodes of a tree behind a long text, too."""
    model, tokens = load_model(described(name), dtype=dtype, invariant=True), ids(200)
    assert model.fused is not None
    attention = new_attention(model, max_seqs=4, max_len=256, page_size=16)

    def rows(key, *chunks):
        made, at = [], 0
        for count in chunks:
            span = Span(key, at, tokens[at : at + count], logits=list(range(count)))
            made.append(model.forward(Batch([span]), attention).logits)
            at += count
        return torch.cat(made)

    alone = rows(0, *[1] * 200)
    for key, chunks in enumerate([(200,), (3, 64, 5, 16, 112)], 1):
        assert torch.equal(rows(key, *chunks), alone)
    branch = tokens[150:153]
    rows(3, 150)
    tree = Span(3, 150, [branch[0], 9, branch[1], branch[2]], [-1, 0, 0, 2], logits=[0, 1, 2, 3])
    got = model.forward(Batch([tree]), attention).logits
    assert torch.equal(got[[0, 2, 3]], alone[150:153])


def test_a_projection_of_latents_that_does_not_fit(described, tmp_path):
    shutil.copytree(described("deepseek_v3"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    short, asked = {name: tensors[name][:-1].clone()}, r"has shape \[87, 24\]; its config asks for \[88, 24\]"
    for change, message in ((short, asked), ({}, f"{name} is missing")):
        others = {each: tensor for each, tensor in tensors.items() if each != name}
        save_file({**others, **change}, tmp_path / "model.safetensors", {"format": "pt"})
        refused(ModelError, message, load_model, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    given = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        (
            {"kv_lora_rank": 25},
            r"layers.0.self_attn.kv_b_proj.weight has shape \[88, 24\]; its config asks for \[88, 25",
        ),
        ({"q_lora_rank": 21}, r"q_a_layernorm.weight has shape \[20\]; its config asks for \[21"),
        ({"q_lora_rank": None}, "lacks 3 weights, model.layers.0.self_attn.q_proj.weight among them"),
        ({"qk_rope_head_dim": 6}, r"kv_a_proj_with_mqa.bias has shape \[32\]; its config asks for \[30"),
        ({"v_head_dim": -1}, "v_head_dim must be an integer from 1 to"),
        (
            {"rope_parameters": {**given["rope_parameters"], "mscale": "much"}},
            "mscale of rope_parameters must be a number",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**given, **change}))
        assert str(tmp_path) in str(refused(ModelError, message, load_model, tmp_path))
    shutil.copytree(described("mistral4"), tmp_path, dirs_exist_ok=True)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, "qk_rope_head_dim": 6}))
    with pytest.raises(
        ConfigError, match=r"rotate 0.4 of 20 numbers; transformers' AutoModelForCausalLM has no mistral4"
    ):
        load_model(tmp_path)


def with_sight(folder, kind, text, **more):
    """A text model inside one that reads pictures, saved in a folder, and its tensors there."""
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "image_size": 16}  # fmt: skip
    config = AutoConfig.for_model(kind, text_config=text, vision_config=sight, **more)
    torch.manual_seed(0)
    module = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    module.save_pretrained(folder)
    return module, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
@torch.inference_mode()
def test_mistrals_inside_a_model_that_reads_pictures(tmp_path, caplog, name, tied):
    """By the names of published checkpoints, and by those of the module; with an output layer and without."""
    text = {**SIZES, **CASES[name][1], "model_type": name, "tie_word_embeddings": tied}
    module, tensors = with_sight(tmp_path, "mistral3", text, tie_word_embeddings=tied)
    assert any(key.startswith("language_model.model.layers.") for key in tensors)
    expected = module(torch.tensor([ids(30)]), use_cache=False).logits[0]
    for _ in range(2):
        with caplog.at_level("INFO", logger="forerun"):
            model = load_model(tmp_path)
        assert "also reads pictures: that part is left out" in caplog.text
        assert (model.info.path.startswith("native"), model.info.max_len) == (True, 256)
        assert apart(feed(model, Span(0, 0, ids(30))).logits, expected) < bound(module.config.text_config)
        state = {k: tensor.clone() for k, tensor in module.state_dict().items() if not tied or k != "lm_head.weight"}
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})


@torch.inference_mode()
def test_gemma_4_inside_a_model_that_reads_pictures(tmp_path):
    """Vision is left out, and so are keys that nobody reads, which the published checkpoints have."""
    module, tensors = with_sight(tmp_path, "gemma4", {**SIZES, **CASES["gemma4"][1]}, audio_config=None)
    assert any(name.startswith("model.vision_tower.") for name in tensors)
    unread = "model.language_model.layers.5.self_attn.k_proj.weight"
    assert unread not in tensors
    save_file({**tensors, unread: torch.ones(64, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = module(torch.tensor([ids(30)]), use_cache=False).logits[0]
    assert apart(feed(load_model(tmp_path), Span(0, 0, ids(30))).logits, expected) < bound(module.config.text_config)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_row_reads_its_experts_only(described, name):
    model = load_model(described(name), invariant=False, weights="plain")
    spec = model.spec
    sparse = [layer for layer in spec.layers if layer.experts]
    inner = SIZES["intermediate_size"] if name.startswith("mixtral") else 40
    each = 3 * inner * spec.hidden * 4
    idle = sum(each * (layer.experts - spec.routing.top_k) for layer in sparse)
    embedding = 0 if name.endswith("tied") or name.startswith("gemma") else TOKENS * spec.hidden * 4
    assert model.info.token_bytes == model.info.weight_bytes - embedding - idle


@pytest.mark.parametrize(("kind", "options", "reason"), [
    ("gemma2", {"hidden_activation": "relu"}, "activation 'relu'"),
    ("mixtral", {"hidden_act": "gelu"}, "activation 'gelu'"),
    ("apertus", {"hidden_act": "silu"}, "activation 'silu'"),
    ("olmo2", {"rope_parameters": {**PARTIAL["rope_parameters"]}}, "partial rotary"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "attention to later tokens"),
    ("qwen3_moe", {"architectures": ["Qwen3MoeForSequenceClassification"]}, "is not Qwen3MoeForCausalLM"),
    ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
    ("llama", {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}, "dynamic"),
    ("deepseek_v2", {**LATENT, "norm_topk_prob": True}, "norm_topk_prob True"),
    ("deepseek_v2", {**LATENT, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ("deepseek_v3", {**LATENT, "n_group": 3, "topk_group": 1}, "3 of 8 experts in 1 of 3 groups"),
    ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 1}, "3 of 8 experts in 1 of 4 groups"),
    ("deepseek_v3", {**LATENT, "num_key_value_heads": 2}, "num_key_value_heads 2: latent attention has as many"),
    ("mistral4", {**LATENT, "head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     "rotate 0.4 of 20 numbers"),
    ("stablelm", {}, "stablelm is not among the described architectures"),
])  # fmt: skip
def test_what_is_not_described_says_why_in_one_line(tmp_path, kind, options, reason):
    config = AutoConfig.for_model(kind, **{**SIZES, **options})
    assert reason in refusal(config)
    assert reason in str(refused(ModelError, "use the transformers path", NativeModel, config, {}, requested()))
    config.save_pretrained(tmp_path)
    native = {"model_path": "native", "max_model_len": 64}
    assert reason in str(refused(ConfigError, "the native path does not support", load_model, tmp_path, **native))
