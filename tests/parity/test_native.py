"""The native path against transformers and against the transformers path, on random checkpoints."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import one_call
from forerun import kernels
from forerun.core.batch import Batch, Span
from forerun.core.errors import ModelError
from forerun.models.base import Model, new_attention
from forerun.models.hf import HFModel
from forerun.models.native import NativeModel, applies
from here import where
from modules import native as made_of

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass
class Case:
    kind: str
    options: dict = field(default_factory=dict)


CASES = {
    "llama": Case("llama", {"tie_word_embeddings": True}),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": Case("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": Case("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-eps": Case("llama", {"rms_norm_eps": 0.3, "head_dim": 10}),
    "mistral": Case("mistral", {"sliding_window": 7, "head_dim": 24}),
    "mistral-whole": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "qwen3-biases": Case("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 6,
                                   "max_window_layers": 2, "head_dim": 16}),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": Case("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6,
                                       "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Case name -> folder of a random checkpoint, saved by transformers."""
    made: dict[str, str] = {}

    def get(name: str) -> str:
        if name not in made:
            torch.manual_seed(len(made))
            case = CASES[name]
            sizes = {
                "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "intermediate_size": 72, "max_position_embeddings": 256,
                "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
            }  # fmt: skip
            module = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.kind, **{**sizes, **case.options}))
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.2, mean=1.0 if parameter.dim() == 1 else 0.0)
            module.tie_weights()
            made[name] = str(tmp_path_factory.mktemp(name))
            module.save_pretrained(made[name])
        return made[name]

    return get


def load(path: str, dtype: torch.dtype = torch.float32, implementation: str = "eager") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=implementation).eval()


def native(path: str, dtype: torch.dtype = torch.float32, invariant: bool = False, **options) -> NativeModel:
    return made_of(load(path, dtype), name="t", eos_ids=frozenset(), invariant=invariant, **options)


def adapter(path: str, dtype: torch.dtype = torch.float32, invariant: bool = False) -> HFModel:
    return HFModel(load(path, dtype, "forerun"), name="t", eos_ids=frozenset(), invariant=invariant)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model: Model, attention, spans: list[Span], **options):
    return model.forward(Batch(spans, **options), attention)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    scale = expected.abs().max().clamp(min=1.0)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * scale


@pytest.mark.parametrize("name", CASES)
def test_logits_and_hidden_states_of_transformers(checkpoints, name):
    reference, model = load(checkpoints(name)), native(checkpoints(name))
    tokens = ids(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True)
    layers = tuple(range(model.info.num_layers + 1))
    attention = new_attention(model, max_seqs=1, max_len=64)
    got = run(model, attention, [Span(0, 0, tokens, logits=list(range(40)))], hidden=layers)
    close(got.logits, expected.logits[0])
    for layer in layers:
        close(got.hidden[layer], expected.hidden_states[layer][0])
    close(model.lm_head(got.hidden[layers[-1]]), got.logits)
    close(model.embed(torch.tensor(tokens)), got.hidden[0])


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-biases", "smollm3-window"])
def test_chunks_decodes_and_batch_mates(checkpoints, name, invariant, page_size):
    model = native(checkpoints(name), invariant=invariant)
    texts = [ids(30, seed) for seed in range(3)]
    with torch.inference_mode():
        reference = load(checkpoints(name))
        expected = [reference(torch.tensor([text])).logits[0] for text in texts]
    attention = new_attention(model, max_seqs=3, max_len=64, page_size=page_size)
    fed = [0, 0, 0]
    for step in ([11, 5, 0], [1, 9, 7], [4, 1, 3], [1, 1, 1], [13, 5, 1], [0, 9, 18]):
        spans = [
            Span(i, fed[i], text[fed[i] : fed[i] + count], logits=list(range(count)))
            for i, (text, count) in enumerate(zip(texts, step))
            if count
        ]
        logits = run(model, attention, spans).logits
        close(logits, torch.cat([expected[s.key][s.start : s.end] for s in spans]))
        fed = [have + count for have, count in zip(fed, step)]
    assert fed == [30, 30, 30]


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_trees_follow_their_paths(checkpoints, name, invariant, page_size):
    model, other = native(checkpoints(name), invariant=invariant), adapter(checkpoints(name), invariant=invariant)
    prompt, nodes, parents = ids(13), ids(7, 9), [-1, 0, 0, 1, 2, 2, 5]
    results = []
    for each in (model, other):
        attention = new_attention(each, max_seqs=2, max_len=64, page_size=page_size)
        run(each, attention, [Span(0, 0, prompt)])
        results.append(run(each, attention, [Span(0, 13, nodes, parents, logits=list(range(7)))]).logits)
    close(*results)
    for leaf, path in {3: [0, 1, 3], 4: [0, 2, 4], 6: [0, 2, 5, 6]}.items():
        attention = new_attention(model, max_seqs=1, max_len=64)
        tokens = prompt + [nodes[node] for node in path]
        alone = run(model, attention, [Span(0, 0, tokens, logits=[len(tokens) - 1])])
        close(results[0][leaf], alone.logits[0])


@pytest.mark.parametrize("invariant", [False, True])
def test_stored_nodes_grow_a_tree_level_by_level(checkpoints, invariant):
    model = native(checkpoints("mistral"), invariant=invariant)
    prompt, nodes, parents = ids(13), ids(6, 9), [-1, -1, 0, 0, 1, 2]
    attention = new_attention(model, max_seqs=1, max_len=64)
    run(model, attention, [Span(0, 0, prompt)])
    whole = run(model, attention, [Span(0, 13, nodes, parents, logits=list(range(6)))]).logits
    attention.pool.truncate(0, 13)
    grown = [
        run(model, attention, [Span(0, 13, nodes[a:b], parents[:b], stored=a, logits=list(range(b - a)))]).logits
        for a, b in ((0, 2), (2, 5), (5, 6))
    ]
    close(torch.cat(grown), whole)


def test_some_layers_and_given_embeddings(checkpoints):
    path = checkpoints("llama")
    model, reference, tokens = native(path), load(path), ids(9)
    attention = new_attention(model, max_seqs=1, max_len=64)
    embeds = torch.randn(2, model.info.hidden_size)
    got = run(model, attention, [Span(0, 0, tokens, logits=[8])], embeds=embeds, embed_rows=[3, 8]).logits
    inputs = reference.get_input_embeddings()(torch.tensor([tokens])).detach()
    inputs[0, [3, 8]] = embeds
    close(got[0], reference(inputs_embeds=inputs).logits[0, -1].detach())

    early = copy.deepcopy(reference)
    early.model.layers = torch.nn.ModuleList([early.model.layers[0], early.model.layers[2]])
    early.config.num_hidden_layers = 2
    attention = new_attention(model, max_seqs=1, max_len=64)
    got = run(model, attention, [Span(0, 0, tokens, logits=[8])], layers=(0, 2), hidden=(2, 3))
    with torch.inference_mode():
        expected = early(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    close(got.logits[0], expected.logits[0, -1])
    close(got.hidden[2], expected.hidden_states[1][0])
    close(got.hidden[3], expected.hidden_states[2][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_half_precision(checkpoints, name, dtype):
    exact, model, other = load(checkpoints(name)), native(checkpoints(name), dtype), load(checkpoints(name), dtype)
    tokens = ids(24)
    with torch.inference_mode():
        expected = exact(torch.tensor([tokens])).logits[0]
        theirs = other(torch.tensor([tokens])).logits[0].float()
    attention = new_attention(model, max_seqs=1, max_len=64)
    got = run(model, attention, [Span(0, 0, tokens, logits=list(range(24)))]).logits
    assert got.dtype == torch.float32
    assert (got - expected).norm() <= 1.5 * (theirs - expected).norm()


def test_a_forward_without_logits(checkpoints):
    model = native(checkpoints("llama"))
    attention = new_attention(model, max_seqs=1, max_len=64)
    assert run(model, attention, [Span(0, 0, ids(5))]).logits.shape == (0, 101)


TYPES = (torch.float32, torch.bfloat16, torch.float16)
ONE_CALL = where(lambda d: kernels.has(f"decode_{kernels.dtype_name(d)}"), TYPES)


@pytest.mark.parametrize("quantization", [None, "int8_rows", "q4_0", "q8_0"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3-biases", "smollm3-window"])
@pytest.mark.parametrize("dtype", ONE_CALL)
def test_all_layers_in_one_call_give_the_bits_of_layer_by_layer(checkpoints, dtype, name, quantization):
    model = native(checkpoints(name), dtype, quantization=quantization)
    one_call.check(model)


@pytest.mark.parametrize("dtype", ONE_CALL)
def test_the_one_call_refuses_what_it_would_misread(checkpoints, dtype):
    model = native(checkpoints("llama"), dtype)
    attention = new_attention(model, max_seqs=1, max_len=64)
    for token in (-1, 101):
        with pytest.raises(IndexError, match="from 0 to 100"):
            run(model, attention, [Span(0, 0, [5, token])])
    with pytest.raises(ValueError, match="ascend"):
        run(model, attention, [Span(0, 0, [5, 6, 7], logits=[1, 0])])
    assert attention.pool.length(0) == 0


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("gpt2", {}, "gpt2"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ],
)
def test_what_does_not_apply_says_why(kind, options, reason):
    config = AutoConfig.for_model(kind, **options)
    assert reason in applies(config)
    if kind == "llama" and "architectures" not in options:
        module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **options, vocab_size=8, hidden_size=8, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
        )  # fmt: skip
        with pytest.raises(ModelError, match=reason):
            made_of(module, name="t", eos_ids=frozenset(), invariant=False)
