"""Requests through the engine: bad ones, broken ones, aborted ones, and what is counted."""

import json

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from drafting import fill
from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError, RequestError
from forerun.core.tree import Draft, Verdict
from forerun.engine.metrics import RequestMetrics
from forerun.engine.trials import trials
from forerun.speculate.accept import rules
from refusals import refused
from tiny import ALPHABET


def params(**given):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": 1, **given})


@pytest.mark.parametrize(("prompt", "given", "message"), [
    ("", {}, "the prompt is empty"),
    ([], {}, "the prompt is empty"),
    ({"prompt_token_ids": []}, {}, "the prompt is empty"),
    ([98], {}, "token id 98 is outside the vocabulary of 98"),
    ([3, -1], {}, "token id -1 is outside the vocabulary of 98"),
    ([3, 2.0], {}, "token id 2.0 is outside the vocabulary of 98"),
    (["hello", 3], {}, "token id 'hello' is outside the vocabulary of 98"),
    ([True, False], {}, "token id True is outside the vocabulary of 98"),
    ("x" * 64, {}, "the prompt has 64 tokens; max_model_len 64 leaves no room"),
    ({"text": "x"}, {}, "a prompt mapping has 'prompt_token_ids' or 'prompt'"),
    ({"prompt_token_ids": None}, {}, "a prompt is a string, a list of token ids or a mapping, not NoneType"),
    ({"prompt": [98]}, {}, "token id 98 is outside the vocabulary of 98"),
    (7, {}, "a prompt is a string"),
    ([np.float32(3.0)], {}, "token id 3.0 is outside the vocabulary"),
    (torch.tensor([[[5]]]), {}, r"token id \[\[5\]\] is outside the vocabulary"),
    (b"ab", {}, "a prompt is a string, a list of token ids or a mapping, not bytes"),
    ("x", {"stop_token_ids": [98]}, "token id 98 is outside the vocabulary"),
    ("x", {"logit_bias": {98: 1.0}}, "token id 98 is outside the vocabulary"),
    ("x", {"bad_words_ids": [[3, 98]]}, "token id 98 is outside the vocabulary"),
])  # fmt: skip
def test_a_prompt_that_cannot_be_run(llm, prompt, given, message):
    model = llm(max_model_len=64)
    prompts = ["fine", prompt] if isinstance(prompt, (str, bytes, dict)) else [[3, 4], prompt]
    refused(RequestError, message, model.generate, prompts, params(**given))
    assert not model.engine.busy
    model.engine.check()
    assert len(model.generate("fine", params())[0].outputs[0].token_ids) == 12


def test_bad_words_are_banned_with_and_without_a_space_before_them():
    """Ids of the bundled target: the same word begins with another token after a space."""
    model = LLM()
    without, after, spaces = (tuple(model.tokenizer.encode(text)) for text in ("value", " value", "  value"))
    assert len({without, after, spaces}) == 3
    for word, expected in (
        ("value", {without, after}),
        (" value", {without, after}),
        ("  value", {without, after, spaces}),
    ):
        job = model.engine.add([1], params(bad_words=[word]))[0]
        model.engine.abort(job)
        assert set(job.sequence.params.bad_words_ids) == expected


DRAFT = {"method": "draft_model", "model": "DRAFT"}
STRANGE = {**DRAFT, "use_heterogeneous_vocab": True}
LENIENCE = "'lenience'; it belongs to lenient"
SPECULATION = [
    ("ngram", "speculative_config must be a mapping"),
    ({"num_speculative_tokens": 3}, "speculative_config needs a 'method'"),
    ({"method": "telepathy"}, "unknown method 'telepathy': choose one of"),
    ({"method": ["ngram"]}, r"unknown method \['ngram'\]"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "must be an integer from 1 to 4096"),
    ({"method": "ngram", "num_speculative_tokens": 10**9}, "num_speculative_tokens must be an integer from 1 to 4096"),
    ({"method": "ngram", "num_speculative_tokens": "3"}, "must be an integer"),
    ({"method": "ngram", "draft": 1}, "method 'ngram' has no option 'draft'"),
    ({"method": "ngram", "model": "x"}, r"no option 'model' \(it belongs to .*draft_model"),
    ({"method": "ngram", "prompt_lookup_max": 4, "max_order": 3}, r"'max_order' \(it belongs to ngram"),
    ({"method": "ngram", "disable_by_batch_size": 8}, "'adaptive'"),
    ({"method": "none", "num_speculative_tokens": 3}, "method 'none' has no option"),
    ({"method": "ngram", "accept": "hope"}, "unknown acceptance rule 'hope'"),
    ({"method": "ngram", "length": "long"}, "unknown length policy 'long'"),
    ({"method": "ngram", "draft_temperature": "hot"}, "draft_temperature must be a number"),
    ({"method": "ngram", "max_order": None}, "max_order must be an integer, not None"),
    ({"method": "cascade", "min_confidence": "high"}, "min_confidence must be a number"),
    ({"method": "cascade", "drafters": None}, "must list the options of 2 to 15"),
    ({"method": "merged", "drafters": 5}, "must list the options of 2 to 15"),
    ({"method": "cascade", "drafters": [{"method": "ngram"}]}, "must list the options of 2 to 15"),
    ({"method": "merged", "drafters": [{"method": "ngram", "tree_nodes": 3}, {"method": "suffix"}]},
     "'ngram' has no option 'tree_nodes'"),
    ({"method": "merged", "accept": "token"}, "supports chains only, but 'merged' drafts trees"),
    ({"method": "suffix", "tree_nodes": 5, "accept": "token"}, "supports chains only"),
    ({"method": "suffix", "tree": [2, 1], "tree_nodes": 4}, "'tree' conflicts with 'tree_nodes': remove one"),
    ({"method": "staged", "drafter": {"num_speculative_tokens": 2}}, r"a mapping like \{'method': 'suffix'\}"),
    *(({"method": method, "draft_temperature": 0.5}, "draft_temperature")
      for method in ("prompt_lookup", "suffix", "token_recycling", "random", "ngram", "merged")),
    ({"method": "table", "table_file": 5}, "table_file must be text, not 5"),
    ({"method": "layerskip", "layers": 5}, "layers must be ascending layer numbers from 0, not 5"),
    ({"method": "dflash", "draft_window": 64}, "windows of method 'dflash'"),
    *(({"method": method, "accept": accept, "lenience": 0.5}, LENIENCE)
      for method in ("none", "ngram") for accept in ("coupled", "token", "block", "recursive")),
    ({"method": "ngram", "lenience": 0.5}, LENIENCE),
    ({"method": "ngram", "accept": "lenient", "lenience": 0.0}, "lenience"),
    ({"method": "ngram", "accept": "traversal", "replacement": "yes"}, "replacement"),
    *(({**DRAFT, "tree": [2, 1], "accept": name}, "supports chains only") for name in rules if not rules[name].trees),
    ({**DRAFT, "tree": [2, 0]}, "tree must list how many children"),
    ({**DRAFT, "tree": 3}, "tree must list how many children"),
    ({**DRAFT, "speculative_token_tree": "[(0,)]"}, "'tree'"),
    ({**DRAFT, "draft_tensor_parallel_size": 2}, "remove it: rank 0"),
    ({**DRAFT, "quantization": []}, r"quantization must be text, not \[\]"),
    ({**DRAFT, "draft_window": 0}, "draft_window"),
    *(({**DRAFT, "prefill_chunk": chunk}, "prefill_chunk must be an integer") for chunk in (0, -1, True, "8")),
    ({**DRAFT, "prompt_lookup_num_tokens": 4, "tree": [2, 1]}, "prompt_lookup_num_tokens"),
    ({**STRANGE, "prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens"),
    ({**DRAFT, "prompt_lookup_num_tokens": 4, "method": "staged"}, "prompt_lookup_num_tokens"),
    ({**DRAFT, "draft_vocab_size": 5_000_000}, r"draft_vocab_size is 5000000, and .* has \d+ tokens"),
    ({**DRAFT, "draft_vocab_size": 0}, "at least 1"),
    ({**STRANGE, "draft_vocab_size": 10}, "remove it"),
]  # fmt: skip
OTHERS = [
    ({"max_model_len": 0}, "max_model_len must be an integer of at least 1"),
    ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
    ({"page_size": 2.5}, "page_size must be an integer, not 2.5"),
    ({"max_sequences": 4}, "unknown engine option 'max_sequences': choose one of"),
    ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ({"model_path": "fast"}, "unknown model_path 'fast'"),
    ({"logprobs_mode": "logits"}, "logprobs_mode must be"),
    ({"device": "warp"}, "device 'warp' cannot be used"),
    ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
    ({"max_model_len": 512}, "max_model_len 512 exceeds the model's context of 256 tokens"),
    ({"seed": "one"}, "seed must be an integer, not 'one'"),
    ({"invariant": "yes"}, "invariant must be true or false, not 'yes'"),
    *(({"kv_cache_memory": text}, "kv_cache_memory must be") for text in ("much", "2 GiBs", "-1", "", True, "1" * 400)),
    ({"kv_cache_memory": "1MB", "num_pages": 4}, "conflicts with num_pages"),
    ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "every running request needs one token per step"),
    ({"prefix_caching": True, "page_size": None}, "needs page_size"),
    ({"max_prefill_tokens": 0}, "max_prefill_tokens must be"),
    ({"speculative_config": {**DRAFT, "draft_window": 8}, "model_path": "hf"}, "native path"),
]


@pytest.mark.parametrize(
    ("options", "message"), [*(({"speculative_config": config}, message) for config, message in SPECULATION), *OTHERS]
)
def test_an_engine_option_that_cannot_be_honoured(tiny_target, tiny_draft, options, message):
    refused(ConfigError, message, LLM, tiny_target, **fill(options, {"DRAFT": tiny_draft}))


def test_nothing_left_to_sample_ends_the_request(llm):
    everything = {token: float("-inf") for token in range(98)}
    outputs = llm().generate(["ab", "cd"], [params(logit_bias=everything), params()])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "no token is permitted" in outputs[0].outputs[0].stop_reason
    assert len(outputs[1].outputs[0].token_ids) == 12


def test_an_aborted_request_gives_everything_back(llm):
    engine = llm({"method": "ngram"}, max_num_seqs=2).engine
    jobs = [engine.add([5, 6, 7, 5, 6], params(max_tokens=60))[0] for _ in range(4)]
    for _ in range(3):
        engine.step()
    for job in (jobs[0], jobs[3]):  # one runs, one waits
        engine.abort(job)
        engine.abort(job)
        assert job.finish.reason == "abort"
    while engine.busy:
        engine.step()
    engine.check()
    assert [len(job.output_ids) for job in jobs[1:3]] == [60, 60]


def test_who_watches_updates_may_train(llm):
    """Steps run in inference mode; callbacks do not."""
    weight = torch.nn.Parameter(torch.ones(3))

    def learn(update):
        (weight * torch.full((3,), 2.0)).sum().backward()

    model = llm()
    model.generate("ab", params(max_tokens=3), on_update=learn)
    assert torch.equal(weight.grad, torch.full((3,), 6.0))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_several_answers_to_one_prompt(llm, temperature):
    sampling = params(temperature=temperature, n=3)
    several = llm({"method": "ngram"}).generate("a prompt", sampling)[0].outputs
    single = llm().generate("a prompt", params(temperature=temperature))[0].outputs[0]
    assert [out.index for out in several] == [0, 1, 2]
    assert several[0].token_ids == single.token_ids
    assert len({tuple(out.token_ids) for out in several}) == (3 if temperature else 1)


def test_a_request_without_a_seed_takes_the_engines_or_a_fresh_one(llm):
    free = params(temperature=1.0, seed=None)
    same = [llm(seed=11).generate("x", free)[0].outputs[0].token_ids for _ in range(2)]
    assert same[0] == same[1] == llm().generate("x", params(temperature=1.0, seed=11))[0].outputs[0].token_ids
    fresh = [tuple(llm().generate("x", free)[0].outputs[0].token_ids) for _ in range(3)]
    assert len(set(fresh)) == 3


def test_prompts_as_text_ids_and_mappings(llm):
    ids = [ALPHABET.index(character) for character in "hello"]
    forms = ["hello", ids, {"prompt_token_ids": ids}, {"prompt": "hello"}]
    outputs = [llm().generate([form], params())[0] for form in forms]
    assert all(out.prompt_token_ids == ids for out in outputs)
    assert len({out.outputs[0].text for out in outputs}) == 1
    assert [out.prompt for out in outputs] == ["hello", None, None, "hello"]
    assert llm().generate(ids, params())[0].outputs == outputs[0].outputs


def verdict(tokens, accepted, tested=0, overlap=0.0):
    path = list(range(accepted))
    return Verdict(path=path, token=1, tokens=[1] * tokens, tested=tested, overlap=overlap)


def test_metrics_by_hand():
    """Three drafts of four, of which 4, 1 and 0 tokens stay, then a plain round."""
    metrics = RequestMetrics(start=10.0)
    draft = Draft.chain([1, 2, 3, 4])
    metrics.add(draft, verdict(tokens=5, accepted=4, tested=4, overlap=3.0))
    metrics.add(draft, verdict(tokens=2, accepted=1, tested=2, overlap=0.7))
    metrics.add(draft, verdict(tokens=1, accepted=0, tested=1, overlap=0.3))
    metrics.add(Draft(), verdict(tokens=1, accepted=0))
    metrics.first_token, metrics.end = 12.0, 15.0
    assert metrics.rounds == 4
    assert metrics.decode_tokens == 9
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (3, 12, 5)
    assert metrics.acceptance_histogram == [1, 1, 0, 0, 1]
    assert metrics.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert metrics.tokens_per_round == pytest.approx(9 / 4)
    assert metrics.draft_acceptance_rate == pytest.approx(5 / 12)
    assert metrics.alpha == pytest.approx(4.0 / 7)
    assert metrics.match_rate == pytest.approx(5 / 7)
    assert metrics.tokens_per_second == pytest.approx(3.0)
    assert metrics.time_to_first_token == pytest.approx(2.0)
    assert metrics.seconds == pytest.approx(5.0)


def test_metrics_of_several_answers_add_up():
    parts = []
    for start, accepted in ((1.0, 2), (0.5, 0)):
        part = RequestMetrics(start=start, first_token=start + 1, end=start + 4)
        part.add(Draft.chain([1, 2]), verdict(tokens=accepted + 1, accepted=accepted, tested=2, overlap=1.0))
        parts.append(part)
    total = RequestMetrics.merged(parts)
    assert (total.rounds, total.num_draft_tokens, total.num_accepted_draft_tokens) == (2, 4, 2)
    assert total.acceptance_histogram == [1, 0, 1]
    assert total.alpha == pytest.approx(0.5)
    assert (total.start, total.first_token, total.end) == (0.5, 1.5, 5.0)


def test_alpha_is_the_mean_overlap_of_p_and_q(llm, tiny_target, tiny_draft):
    """Against both models run by transformers on the answer: sum min(p, q) at each position that was tested."""
    model = llm({"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 4}, trace=True)
    out = model.generate("def f(x):", params(temperature=1.0, max_tokens=40))[0]
    tokens = torch.tensor([out.prompt_token_ids + out.outputs[0].token_ids])
    with torch.inference_mode():
        p, q = (
            LlamaForCausalLM.from_pretrained(path)(tokens).logits[0].softmax(dim=-1)
            for path in (tiny_target, tiny_draft)
        )
    overlap = torch.minimum(p, q).sum(dim=-1)
    index, values = len(out.prompt_token_ids), []
    for step in out.outputs[0].trace:
        tested = min(step.drafted, len(step.tokens))
        values += overlap[index - 1 : index - 1 + tested].tolist()
        index += len(step.tokens)
    assert out.metrics.alpha == pytest.approx(sum(values) / len(values), abs=1e-4)
    assert out.metrics.tested == len(values)


@pytest.mark.parametrize("count", [1, 8])
def test_a_full_batch_has_measured_prices(tiny_target, count):
    """Beside its requests there is no room for others, so prices are measured before they are admitted."""
    with LLM(tiny_target, speculative_config={"method": "suffix", "length": "adaptive"}, max_num_seqs=count) as model:
        model.generate([3, 4, 5, 3, 4], params(), speculate=False, use_tqdm=False)
        assert not model.engine.policy.prices.tables
        model.generate([[3, 4, 5, 3, 4]] * count, params())
        (table,) = model.engine.policy.prices.tables.values()
        assert not table.unchecked
        assert len(table.verify.points) > 2


@pytest.mark.parametrize("compiled", [True, False])
def test_deep_drafts_are_timed_though_the_drafter_is_unsure(tiny_target, tiny_draft, compiled):
    way = {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 4, "confidence_threshold": 0.99}
    with LLM(tiny_target, speculative_config=way) as model:
        if not compiled:
            model.engine.router.drafters["draft_model"].chains = None
        with trials(model.engine, 2) as (time_round, _):
            assert [time_round("draft_model", depth, 5).depth for depth in (1, 2, 4)] == [1, 2, 4]


def test_states_are_not_asked_to_go_back_further_than_a_draft(hybrid, tiny_draft):
    way = {"method": "draft_model", "model": tiny_draft, "tree": [2, 2], "length": "adaptive"}
    with LLM(hybrid("lfm2"), speculative_config=way) as model, trials(model.engine, 1) as (time_round, _):
        assert [time_round("draft_model", 2, rows).rows for rows in (7, 13)] == [7, 7]


def test_long_made_up_contexts_take_free_pages_only(folder):
    """Cached prefixes stay, and nothing is left behind."""
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024}))
    with LLM(folder, speculative_config={"method": "suffix", "length": "adaptive"}, page_size=16) as model:
        pool = model.engine.target.attention.pool
        for held in (0, pool.num_free - pool.pages_for(600)):
            pool.reserve(7, held * pool.page_size)
            with trials(model.engine, 2) as (time_round, _):
                timed = time_round(None, 0, 3, long=True)
                assert (timed.rows, timed.context) == ((3, 0) if held else (6, (1024 - 64) // 2))
            pool.free(7)
            model.engine.prepare()
            pool.check()
            assert pool.num_free == pool.num_pages
