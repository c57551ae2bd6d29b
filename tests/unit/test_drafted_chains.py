"""Chains drafted in one call are what a step at a time drafts: tokens, trials and q, bit by bit."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from described import CASES, save_described
from forerun import LLM, SamplingParams, kernels
from forerun.speculate.draft import drafters
from forerun.speculate.draft.chain import ChainRunner
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Sizes
from forerun.speculate.draft.model import DraftModel
from here import where

PROMPTS = ["def foo(x): return x", "abcabcabcabc", "hello world, hello wor", "x"]
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.01},
]


SURE = {"confidence_threshold": 0.01}


@pytest.fixture(params=["draft_model", "sure", "eagle", "reduced", "blocks", "gemma2", "qwen3_moe-some"])
def options(request, tiny_target, tiny_draft, tmp_path):
    if request.param in ("draft_model", "sure"):
        return {"method": "draft_model", "model": tiny_draft} | (SURE if request.param == "sure" else {})
    if request.param in CASES:
        save_described(request.param, tmp_path)
        return {"method": "draft_model", "model": str(tmp_path)}
    if request.param in ("reduced", "blocks"):
        kind = "int8_rows" if request.param == "reduced" else "q4_0"
        model = reduced_head(Path(tiny_target), tmp_path)
        return {"method": "eagle", "model": model, "quantization": kind, "confidence_threshold": 0.05}
    return {"method": "eagle", **drafters["eagle"].example(Path(tiny_target), tmp_path)}


def reduced_head(target, folder):
    """An EAGLE head that knows every third token, with a matrix before its layer."""
    config = json.loads((target / "config.json").read_text("utf-8"))
    ids = torch.arange(1, config["vocab_size"], 3)
    options = {"mixed": True, "draft_vocab_size": len(ids), "heads": 4, "kv_heads": 2, "width": 8, "inner_size": 24}
    torch.manual_seed(1)
    head = EagleHead(Sizes(config["hidden_size"], config["vocab_size"], config["num_hidden_layers"], 4, options))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head.d2t.copy_(ids - torch.arange(len(ids)))
    head.save(folder)
    return str(folder)


def record(target, options, *, page_size=None, stepwise=False):
    """Every draft of every round: tokens, parents, and each trial with its row of q."""
    llm = LLM(
        target, dtype="bfloat16", max_num_seqs=4, page_size=page_size,
        speculative_config={**options, "num_speculative_tokens": 4},
    )  # fmt: skip
    drafter = next(iter(llm.engine.router.drafters.values()))
    assert isinstance(drafter.chains, ChainRunner)
    if stepwise:
        drafter.chains = None
    rounds = []

    def see(result):
        rounds.append([
            (draft.tokens, draft.parents, [
                [(trial.node, draft.q[trial.row].clone() if trial.row >= 0 else None) for trial in trials]
                for trials in draft.trials
            ])
            for draft in result.drafts
        ])  # fmt: skip

    llm.engine.on_round = see
    params = [SamplingParams(**each, seed=i, max_tokens=20 + i, ignore_eos=True) for i, each in enumerate(OPTIONS)]
    llm.generate(PROMPTS, params)
    llm.engine.check()
    return rounds


def same(one, other):
    def flat(value):
        if isinstance(value, torch.Tensor):
            return value.view(torch.int32).tolist()
        return [flat(part) for part in value] if isinstance(value, list | tuple) else value

    return flat(one) == flat(other)


@pytest.mark.parametrize("rule", where(kernels.has("draft_bfloat16"), ["coupled", "token"]))
@pytest.mark.parametrize("page_size", [None, 4])
def test_one_call_drafts_what_single_steps_draft(tiny_target, options, rule, page_size):
    options = {**options, "accept": rule}
    chains = record(tiny_target, options, page_size=page_size)
    steps = record(tiny_target, options, page_size=page_size, stepwise=True)
    assert any(tokens for drafts in chains for tokens, _, _ in drafts)
    assert same(chains, steps)


@pytest.mark.parametrize("stepwise", [*where(kernels.has("draft_float32"), [False]), True])
@torch.no_grad()
def test_a_chain_ends_where_it_is_unlikely_to_be_kept(tiny_target, tiny_draft, stepwise):
    """By transformers' probabilities of the draft's likeliest tokens."""
    reference = AutoModelForCausalLM.from_pretrained(tiny_draft, dtype=torch.float32).eval()
    config = {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 5, **SURE}
    llm = LLM(tiny_target, dtype="float32", speculative_config=config, trace=True)
    drafter = next(iter(llm.engine.router.drafters.values()))
    assert isinstance(drafter, DraftModel)
    if stepwise:
        drafter.chains = None
    assert (drafter.chains is None) == stepwise
    lengths = set()
    for out in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)):
        trace = out.outputs[0].trace
        text = [*out.prompt_token_ids, *trace[0].tokens]  # that round only reads the prompt
        for entry in trace[1:-5]:  # the last ones are short of room
            kept = [token for token, origin in zip(entry.tokens, entry.origins) if origin == "accepted"]
            ahead, chances = list(text), [1.0]
            for token in [*kept, *entry.rejected]:
                distribution = reference(torch.tensor([ahead])).logits[0, -1].softmax(-1)
                chances.append(chances[-1] * float(distribution.max()))
                assert token == int(distribution.argmax())
                ahead.append(token)
            assert min(chances[:-1]) >= SURE["confidence_threshold"]
            assert chances[-1] < SURE["confidence_threshold"] or entry.drafted == 5
            lengths.add(entry.drafted)
            text += entry.tokens
    assert len(lengths) > 2
