"""Gemma 4's assistant: what it drafts, and from which q, is what transformers' own module says of the same text."""

from functools import cache

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from damage import CONFIG, QUERY, edit, weights
from described import SIZES, TOKENS, UNEVEN, save_described
from drafting import watch
from forerun import LLM, ForerunError, SamplingParams
from forerun.engine.drafter_files import method_of
from forerun.models.run.assistant import TargetReader
from gguf_files import add, finish
from refusals import refused
from tiny import save_checkpoint, tiny_llama

PROMPTS = [[5, 9, 12, 7, 7, 3, 5, 9, 12, 11, 4], [8, 30, 8]]
COUNT = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
HOT = SamplingParams(temperature=0.9, seed=5, max_tokens=14, ignore_eos=True)


def save_assistant(folder, target, **options):
    """A random one for the described target of that name."""
    torch.manual_seed(3)
    sized = {key: value for key, value in UNEVEN[target][1].items() if key.startswith(("global_", "num_global", "att"))}
    text = Gemma4TextConfig(**{
        **SIZES, **sized, "hidden_size": 48, "num_hidden_layers": 3, "sliding_window": 7, "vocab_size": TOKENS,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "final_logit_softcapping": 3.0,
    })  # fmt: skip
    module = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=64, **options))
    for name, part in module.named_parameters():
        torch.nn.init.normal_(part, float(name.endswith("norm.weight")), 0.3)
    for name, part in module.named_buffers():
        if name.endswith("token_ordering"):
            part.copy_(torch.randperm(TOKENS))
        elif name.endswith("layer_scalar"):
            torch.nn.init.uniform_(part, 0.5, 1.5)
    module.tie_weights()
    module.save_pretrained(folder)
    return module.eval()


CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": TOKENS // 2, "centroid_intermediate_top_k": 3}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Target's and assistant's folders and modules, by the target's name and whether tokens are in clusters."""

    @cache
    def get(name, ordered=False):
        target, folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("assistant")
        save_described(name, target)
        assistant = save_assistant(folder, name, **(CLUSTERS if ordered else {}))
        model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
        return target, folder, model, assistant

    return get


@torch.no_grad()
def expected(model, assistant, committed, drafted):
    """Logits [len(drafted), vocabulary] behind what is drafted so far, as transformers' generation feeds it."""
    out = model(torch.tensor([committed[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    hidden, token, rows = out.hidden_states[-1][:, -1:], committed[-1], []
    for drafts in drafted:
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        made = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1), position_ids=torch.tensor([[len(committed) - 1]]),
            shared_kv_states=out.shared_kv_states,
        )  # fmt: skip
        rows.append(made.logits[0, -1])
        hidden, token = made.last_hidden_state, drafts
    return torch.stack(rows)


def load(target, assistant, **options):
    """An engine, and a list that gets (committed tokens, drafted tokens, their rows of q) of every draft."""
    config = {"method": "mtp", "model": str(assistant), **options.pop("spec", {"num_speculative_tokens": COUNT})}
    llm = LLM(str(target), speculative_config=config, dtype="float32", max_model_len=64, **options)
    seen = []

    def see(sequences, _, drafts):
        for sequence, draft in zip(sequences, drafts):
            rows = [draft.trials[node][0].q_row for node in range(len(draft))] if draft.is_chain else []
            q = [draft.q[row] for row in rows if row >= 0]
            seen.append((list(sequence.tokens), list(draft.tokens), q))

    watch(llm.engine.router.drafters["mtp"], see)
    return llm, seen


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", UNEVEN)
def test_it_drafts_what_transformers_own_module_says(pair, name, ordered):
    """Every draft of two requests at once, behind accepted and rejected drafts, on both sides of the window."""
    target, folder, model, assistant = pair(name, ordered)
    llm, seen = load(target, folder)
    llm.generate(PROMPTS, GREEDY)
    assert len(seen) >= 6
    assert max(len(drafted) for _, drafted, _ in seen) == COUNT
    for committed, drafted, _ in seen:
        assert drafted == expected(model, assistant, committed, drafted).argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_q_is_transformers_own(pair, rule, ordered):
    target, folder, model, assistant = pair("gemma4", ordered)
    llm, seen = load(target, folder, spec={"accept": rule, "num_speculative_tokens": COUNT})
    llm.generate(PROMPTS, HOT)
    assert len(seen) >= 6
    for committed, drafted, rows in seen:
        q = torch.softmax(expected(model, assistant, committed, drafted) / HOT.temperature, -1)
        assert torch.allclose(torch.stack(rows), q, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [{"num_speculative_tokens": COUNT}, {"tree": [3, 2, 1]}, {"draft_vocab_size": 40}, {"confidence_threshold": 0.2}],
)
def test_no_token_changes(pair, spec):
    target, folder, *_ = pair("gemma4")
    llm, seen = load(target, folder, spec=spec, page_size=4, enable_prefix_caching=True)
    for params in (GREEDY, GREEDY, HOT):
        drafted, plain = (llm.generate(PROMPTS, params, speculate=each) for each in (True, False))
        assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
        assert sum(each.metrics.num_draft_tokens for each in drafted) > 0
    assert len({tuple(committed) for committed, *_ in seen}) < len(seen)  # a prefix hit drafts, too


def test_its_folder_says_the_method(pair):
    assert method_of(str(pair("gemma4")[1])) == "mtp"


def test_without_the_kernel_it_reads_the_same(pair):
    target, folder, *_ = pair("gemma4")
    llm, seen = load(target, folder, page_size=4)
    llm.generate(PROMPTS, GREEDY)
    first = list(seen)
    seen.clear()
    drafter = llm.engine.router.drafters["mtp"]
    drafter.attention = TargetReader(drafter.context.attention().pool, drafter.model.layers)
    llm.generate(PROMPTS, GREEDY)
    assert seen == first


def as_gguf(module, path, **changes):
    """As llama.cpp's converter writes it."""
    text, writer = module.config.text_config, gguf.GGUFWriter(path, "gemma4-assistant")
    narrow, wide = text.per_layer_config[0], text.per_layer_config[2]
    for write, value in (
        (writer.add_context_length, text.max_position_embeddings), (writer.add_embedding_length, text.hidden_size),
        (writer.add_block_count, 3), (writer.add_nextn_predict_layers, 3), (writer.add_shared_kv_layers, 3),
        (writer.add_feed_forward_length, text.intermediate_size), (writer.add_head_count, text.num_attention_heads),
        (writer.add_head_count_kv, [each.num_key_value_heads for each in text.per_layer_config]),
        (writer.add_key_length, wide.head_dim), (writer.add_value_length, wide.head_dim),
        (writer.add_key_length_swa, narrow.head_dim), (writer.add_value_length_swa, narrow.head_dim),
        (writer.add_rope_dimension_count, wide.head_dim), (writer.add_rope_dimension_count_swa, narrow.head_dim),
        (writer.add_rope_freq_base, 1e6), (writer.add_rope_freq_base_swa, 1e4),
        (writer.add_layer_norm_rms_eps, text.rms_norm_eps), (writer.add_sliding_window, text.sliding_window),
        (writer.add_sliding_window_pattern, [True, True, False]),
        (writer.add_embedding_length_out, module.config.backbone_hidden_size),
    ):  # fmt: skip
        write(value)
    for key, value in changes.items():
        add(writer, f"gemma4-assistant.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 3)
    scales = {name: part for name, part in module.named_buffers() if name.endswith("layer_scalar")}
    for name, part in {**dict(module.named_parameters()), **scales}.items():
        own = f"nextn.{name}" if name.startswith(("pre_", "post_projection")) else None
        own = own or f"{names.get_name(name.removesuffix('.weight'))}.weight"
        writer.add_tensor(own, part.detach().numpy())
    turned = int((text.rope_parameters["full_attention"]["partial_rotary_factor"]) * wide.head_dim / 2)
    rest = wide.head_dim // 2 - turned
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * rest, np.float32))
    return finish(writer, path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "gemma4-dense"])
def test_a_gguf_file_drafts_what_transformers_own_module_says(pair, tmp_path, name):
    target, _, model, assistant = pair(name)
    path = as_gguf(assistant, tmp_path / "assistant.gguf")
    assert method_of(str(path)) == "mtp"
    llm, seen = load(target, path)
    llm.generate(PROMPTS, GREEDY)
    assert len(seen) >= 6
    for committed, drafted, _ in seen:
        assert drafted == expected(model, assistant, committed, drafted).argmax(-1).tolist()
    as_gguf(assistant, path, embedding_length_out=65)
    refused(ForerunError, "trained for a target of hidden size 65", load, target, path)
    refused(ForerunError, "gemma4-assistant", LLM, str(path))


@pytest.mark.parametrize(
    ("damage", "spec", "message"),
    [
        (edit(CONFIG, backbone_hidden_size=32), {}, "trained for a target of hidden size 32"),
        (weights(lambda tensors: tensors.pop("pre_projection.weight")), {}, "lacks pre_projection.weight"),
        (weights(lambda tensors: tensors.pop(QUERY)), {}, "lacks 1 weights"),
        (weights(lambda tensors: tensors["masked_embedding.token_ordering"].zero_()), {}, "does not name each of"),
        (edit(CONFIG, num_centroids=40), {}, "do not divide"),
        (edit(CONFIG, text_config__num_key_value_heads=1), {}, "key-value heads"),
        (lambda f: None, {"draft_vocab_size": 40}, "remove draft_vocab_size"),
        (lambda f: None, {"draft_vocab_size": 4000}, "draft_vocab_size is 4000"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, pair, damage, spec, message):
    target = pair("gemma4")[0]
    save_assistant(tmp_path, "gemma4", **CLUSTERS)
    damage(tmp_path)
    refused(ForerunError, message, load, target, tmp_path, spec=spec)


def test_other_targets_are_refused(tmp_path, pair):
    folder = pair("gemma4")[1]
    save_checkpoint(tiny_llama(), tmp_path)
    refused(ForerunError, "reads the cache of a Gemma 4 on the native path", load, tmp_path, folder)
    refused(ForerunError, "layers that borrow keys", LLM, str(folder))
