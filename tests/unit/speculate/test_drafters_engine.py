"""Composed and cross-vocabulary drafters in an engine, beside what the conformance tests say of them."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from drafting import CONFIGS, DRAFT, PROMPTS, STRANGER, TREE_NODES, fill, params, watch
from forerun import LLM, SamplingParams
from forerun.speculate.names import policies
from tiny import ALPHABET, UNKNOWN, save_checkpoint, tiny_llama

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", [{"num_speculative_tokens": 3}, {"tree": [3, 2, 1]}], ids=["chain", "tree"])
def test_a_round_tells_the_models_own_logits_and_the_features_of_what_stays(llm, places, reference, monkeypatch, shape):
    engine = llm({**fill(DRAFT, places), **shape}, max_num_batched_tokens=40).engine
    monkeypatch.setattr(engine.target, "hidden", (1,))
    job, features, roots = None, [], {}

    def told(sequences, drafts, verdicts, result):
        for index, (sequence, verdict) in enumerate(zip(sequences, verdicts)):
            if sequence is job.sequence:
                before, first = sum(map(len, features)), result.logit_first[index]
                features.append(verdict.hidden[1])
                if verdict.token is not None:
                    roots[before + verdict.fed - 1] = result.output.logits[first].clone()
                else:
                    assert first == len(result.output.logits)
        observe(sequences, drafts, verdicts, result)

    observe = engine.router.observe
    monkeypatch.setattr(engine.router, "observe", told)
    biased = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={7: 2.0})
    engine.add([*range(5, 14)], biased)
    job = engine.add([*range(3, 45)], biased)[0]
    while engine.busy:
        engine.step()
    assert job.metrics.num_accepted_draft_tokens > 10
    with torch.inference_mode():
        out = reference(torch.tensor([job.sequence.tokens]), output_hidden_states=True)
    kept = torch.cat(features)
    assert len(kept) >= len(job.sequence.tokens) - 1
    assert torch.allclose(kept, out.hidden_states[1][0, : len(kept)], atol=1e-4)
    for position, logits in roots.items():
        assert torch.allclose(logits, out.logits[0, position], atol=1e-3)


def test_tree_nodes_bound_the_drafts(llm, monkeypatch):
    for method in ("suffix", "token_recycling"):
        speculative = llm({"method": method, "tree_nodes": TREE_NODES, "num_speculative_tokens": 4})
        drafter = next(iter(speculative.engine.router.drafters.values()))
        sizes = []
        monkeypatch.setattr(drafter, "propose", drafter.propose)  # what was there comes back
        watch(drafter, lambda _, __, drafts, sizes=sizes: sizes.extend((len(each), each.depth) for each in drafts))
        speculative.generate(PROMPTS, params(0.8))
        # The suffix drafter stops before its budget where nothing else has followed the match.
        assert max(size for size, _ in sizes) in (
            (TREE_NODES,) if method == "token_recycling" else range(2, TREE_NODES)
        )
        assert max(depth for _, depth in sizes) <= 4
        assert any(depth < size for size, depth in sizes)


@pytest.mark.parametrize("name", ["model-best-first", "tli-best-first", "staged-model", "merged"])
def test_a_cache_that_was_rolled_back_drafts_like_one_filled_afresh(name, llm, places, monkeypatch):
    speculative = llm(fill(CONFIGS[name], places), max_num_seqs=5)
    drafter = next(iter(speculative.engine.router.drafters.values()))
    fresh = type(drafter).build(drafter.config, drafter.context)
    compared = 0

    def check(sequences, budgets, drafts):
        nonlocal compared
        for sequence in sequences:
            fresh.release(sequence)
        for draft, again in zip(drafts, fresh.propose(sequences, budgets), strict=True):
            assert (draft.tokens, draft.parents) == (again.tokens, again.parents)
            compared += len(draft) > 1

    monkeypatch.setattr(drafter, "propose", drafter.propose)  # what was there comes back
    watch(drafter, check)
    answers = speculative.generate(PROMPTS, params(0.8))
    assert [answer.metrics.draft_error for answer in answers] == [None] * len(PROMPTS)
    assert compared > 20


def test_a_copy_of_the_target_is_accepted_whole_through_every_composition(llm, tiny_target):
    same = {"method": "draft_model", "model": tiny_target, "num_speculative_tokens": 3}
    for config in (
        {"method": "staged", "model": tiny_target, "num_speculative_tokens": 4},
        {"method": "merged", "drafters": [{"method": "random"}, same]},
        {"method": "cascade", "drafters": [{"method": "prompt_lookup"}, same], "min_confidence": 1.0},
        {**same, "use_heterogeneous_vocab": True},
        {**same, "use_heterogeneous_vocab": True, "heterogeneous_vocab_method": "slem"},
    ):
        answers = llm(copy.deepcopy(config)).generate(PROMPTS, params(0.0))
        assert [answer.metrics.match_rate for answer in answers] == [1.0] * len(PROMPTS), config


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_a_token_that_a_draft_cannot_read_costs_others_no_draft(llm, tiny_draft, tmp_path, method):
    alphabet = ["<nothing>" if token == UNKNOWN else token for token in ALPHABET]
    save_checkpoint(LlamaForCausalLM.from_pretrained(tiny_draft), tmp_path, alphabet, unknown="<nothing>")
    config = {**STRANGER, "model": str(tmp_path)}
    speculative = llm({**config, "heterogeneous_vocab_method": method})
    silent = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={ALPHABET.index(UNKNOWN): 99.0})
    reader = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (alone,) = speculative.generate(PROMPTS[:1], reader)
    beside, _ = speculative.generate(PROMPTS[:2], [reader, silent])
    assert alone.metrics.num_draft_tokens > 0
    assert beside.metrics.num_draft_tokens == alone.metrics.num_draft_tokens


def test_a_checkpoint_without_shared_tokens_is_refused(tmp_path, tiny_target):
    from forerun import ConfigError

    save_checkpoint(tiny_llama(layers=1, vocab_size=3), tmp_path, ["<other>", "é", "ß"])
    with pytest.raises(ConfigError, match="shares no token"):
        LLM(tiny_target, speculative_config={"method": "draft_model", "model": str(tmp_path),
                                             "use_heterogeneous_vocab": True})  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), [({}, "adaptive"), ({"length": "fixed"}, "fixed")])
def test_drafters_that_name_no_length_policy_share_the_others(tiny_target, tiny_draft, said, expected):
    """A draft model by its name alone has another usual policy than n-grams."""
    by_name, ngram = {"model": tiny_draft}, {"method": "ngram", **said}
    for configs in ([by_name, ngram], [ngram, {"method": "staged", **by_name}, by_name]):
        engine = LLM(tiny_target, speculative_config=configs).engine
        assert len(engine.router.drafters) == len(configs)
        assert type(engine.policy) is policies[expected]
