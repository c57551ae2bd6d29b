"""Tokens that a draft model reads ahead: what is looked up, that drafts stay the same, and how many pay."""

import random
from array import array

import pytest
import torch

from forerun import LLM, SamplingParams, kernels
from forerun.kernels import KernelError
from forerun.kernels.structs import PassStruct
from forerun.speculate.draft.chain import REACH, ChainGuess, ChainLookup
from here import where
from refusals import refused

COMPILED = where(kernels.has("draft_float32"), [True])
TEXT = "the cat sat on the mat; the cat sat on the mat; the cat "


def look_up(text, counts, room):
    out, found = array("q", bytes(8 * max(1, *counts))), array("q", (0, 0))
    kept = array("q", text), array("q", counts), out, found
    at = [numbers.buffer_info()[0] for numbers in kept]
    kernels.library().prompt_lookup(at[0], len(text), at[1], len(counts) - 1, room, at[2], at[3])
    return found[0], out[: found[1]].tolist()


def naive(text, counts, room):
    for length in range(min(len(counts) - 1, len(text) - 1), 0, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                return length, text[start + length :][: min(room, counts[length])]
    return 0, []


@pytest.mark.parametrize("_", COMPILED)
def test_the_longest_match_that_is_last(_):
    rng = random.Random(0)
    lengths = set()
    for _ in range(2000):
        text = [rng.randrange(rng.choice((2, 5, 30))) for _ in range(rng.randrange(1, 40))]
        counts, room = [0, *(rng.randrange(6) for _ in range(rng.randrange(5)))], rng.randrange(7)
        length, tokens = look_up(text, counts, room)
        assert (length, tokens) == naive(text, counts, room)
        lengths.add(length)
    assert len(lengths) == 5


@pytest.mark.parametrize("accept", where(kernels.has("draft_float32"), ["coupled", "token"]))
@pytest.mark.parametrize(("size", "together"), [(None, 1), (60, 1), (None, 2)])
def test_drafts_stay_the_same(accept, size, together, tiny_target, tiny_draft, monkeypatch):
    """Tokens and q, bit by bit, in fewer calls."""
    monkeypatch.setattr(ChainLookup, "_time", lambda *_: None)  # rows of so small a model are dear
    texts = [TEXT, TEXT[5:]][:together]

    def drafted(most):
        config = {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 7, "accept": accept,
                  "draft_vocab_size": size, "prompt_lookup_num_tokens": most}  # fmt: skip
        llm = LLM(tiny_target, dtype="float32", speculative_config=config)
        (drafter,) = llm.engine.router.drafters.values()
        rounds, passes = [], []
        if most:
            learn = drafter.chains.lookup.learn
            drafter.chains.lookup.learn = lambda guess: passes.append(guess) or learn(guess)
        llm.engine.on_round = lambda result: rounds.append([
            (draft.tokens, [draft.q[t.q_row].clone() for trials in draft.trials for t in trials if t.q_row >= 0])
            for draft in result.drafts
        ])  # fmt: skip
        for seed, temperature in enumerate((0.0, 0.3, 1.0)):
            llm.generate(texts, SamplingParams(temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True))
        llm.engine.check()
        return rounds, passes

    (plain, _), (ahead, passes) = drafted(0), drafted(5)
    for drafts, expected in zip(ahead, plain, strict=True):
        assert [tokens for tokens, _ in drafts] == [tokens for tokens, _ in expected]
        assert all(len(a) == len(b) and all(map(torch.equal, a, b)) for (_, a), (_, b) in zip(drafts, expected))
    calls = [PassStruct(*each) for guess in passes for each in zip(*[iter(guess.passes)] * len(PassStruct._fields))]
    calls = [each for each in calls if each.rows]
    assert any(each.num_correct for each in calls)
    assert any(each.num_correct < each.num_guessed for each in calls)
    assert any(tokens for guess in passes for tokens in guess.first)
    assert len(calls) < sum(max(len(tokens) for tokens, _ in drafts) for drafts in plain)


def learn(lookup, match, right, guessed, rows=None, cost=0.0):
    rows = 1 + guessed if rows is None else rows
    one = PassStruct(1, 10**6, 0, 0, 0)
    each = PassStruct(rows, round(10**6 * (1.0 + cost * (rows - 1))), match, guessed, right)
    guess = ChainGuess(lookup.counts(), 3)
    guess.passes = array("q", (*one, *one, *each))
    lookup.learn(guess)


def test_as_many_as_pay():
    lookup = ChainLookup(8)
    before = lookup.counts().tolist()
    assert before[0] == 0
    assert before == sorted(before)
    assert before[REACH] == 8
    for _ in range(60):
        learn(lookup, 2, 0, 2, cost=0.1)
    assert lookup.counts()[2] == 0  # never right
    assert lookup.counts()[REACH] == 8
    for _ in range(60):
        learn(lookup, 2, 4, 4, cost=0.1)
    assert lookup.counts()[2] == 8  # always right
    assert lookup.price == pytest.approx(0.1, rel=0.05)


def test_dear_rows_are_not_read():
    lookup = ChainLookup(8)
    for _ in range(100):
        learn(lookup, 1, 1, 2, cost=0.9)
    assert lookup.price == pytest.approx(0.9, rel=0.05)
    assert lookup.counts().tolist()[:3] == [0, 0, 0]
    lookup.right = [0.0] * len(lookup.right)
    assert lookup.begin([[5, 6, 5]], [4], 10) is None
    for _ in range(2000):
        if lookup.begin([[5, 6, 5]], [4], 10) is not None:
            learn(lookup, 1, 0, 0)
    assert lookup.counts()[1] > 0  # tried again


@pytest.mark.parametrize("_", COMPILED)
def test_what_the_kernel_refuses(_):
    refused(KernelError, "out of range", look_up, [1, 2], [0, 1], -1)
    refused(KernelError, "out of range", look_up, [1, 2], [0, 10**6], 1)
    refused(KernelError, "null", look_up, [], [0, 1], 1)


BAD = {
    "text": lambda guess: guess.texts.__setitem__(0, 10**6),
    "behind": lambda guess: guess.guessed.__setitem__(0, guess.guessed[0] + 1),
    "counts": lambda guess: guess.counts.__setitem__(1, 65),
    "length": lambda guess: guess.lengths.__setitem__(0, 0),
}


@pytest.mark.parametrize("length", ["fixed", "adaptive"])
@pytest.mark.parametrize("part", where(kernels.has("draft_float32"), BAD))
def test_a_wrong_guess_ends_drafts_and_nothing_else(part, length, tiny_target, tiny_draft, monkeypatch, caplog):
    """With ``adaptive`` drafts fail while their prices are measured, too: they are asked for once there."""

    def spoilt(self, *given):
        guess = begin(self, *given)
        BAD[part](guess)
        return guess

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(tiny_target, speculative_config={"method": "draft_model", "model": tiny_draft, "length": length})
    expected = llm.generate([TEXT], params, speculate=False)[0].outputs[0].token_ids
    begin = ChainLookup.begin
    monkeypatch.setattr(ChainLookup, "begin", spoilt)
    answer = llm.generate([TEXT], params)[0]
    if length == "fixed":
        assert "a kernel was called wrongly" in answer.metrics.draft_error
    assert answer.outputs[0].token_ids == expected
    assert 0 < sum("failed" in record.message for record in caplog.records) < 4
