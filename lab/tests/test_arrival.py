"""The arrival measurement on a clock that counts rows."""

import pytest

from forerun_lab.bench import arrival as module
from forerun_lab.bench.arrival import arrival, medians, time_per_token


def test_a_prompt_in_chunks_slows_the_others_by_its_share(llm, monkeypatch):
    """Three running requests and 6 prompt tokens a round: a round takes 9 rows' time for 3."""
    engine = llm(max_prefill_tokens=6, max_num_seqs=4, max_model_len=200).engine
    rows = [0]
    forward = engine.model.forward

    def counting(batch, attention):
        rows[0] += batch.num_rows
        return forward(batch, attention)

    monkeypatch.setattr(engine.model, "forward", counting)
    monkeypatch.setattr(engine, "clock", lambda: float(rows[0]))
    prompts = [engine.tokenizer.encode(text) for text in ("abc", "hello", "x = 1")]
    result = arrival(engine, prompts, engine.tokenizer.encode("0123456789" * 6))
    assert result.before == pytest.approx(3.0)
    assert result.during == pytest.approx(9.0)
    assert result.without == pytest.approx(3.0)
    assert result.slowdown == result.slowest == result.since_before == result.slowest_since == pytest.approx(3.0)
    assert result.rounds == 10
    assert result.first_token == pytest.approx(10 * 9)
    assert result.alone == pytest.approx(60)
    assert (result.catching_up, result.catching_up_slowdown, result.catching_up_rounds) == (None, None, 0)
    assert not engine.busy
    engine.check()


def test_growing_contexts_are_not_put_down_to_the_prompt(llm, monkeypatch):
    """On a clock that counts keys: rounds become dearer without a prompt too, and only the rest is its doing."""
    engine = llm(max_prefill_tokens=1, max_num_seqs=4, max_model_len=200).engine
    keys = [0]
    forward = engine.model.forward

    def counting(batch, attention):
        keys[0] += sum(span.end for span in batch.spans)
        return forward(batch, attention)

    monkeypatch.setattr(engine.model, "forward", counting)
    monkeypatch.setattr(engine, "clock", lambda: float(keys[0]))
    monkeypatch.setattr("forerun_lab.bench.arrival.SETTLE", 1)
    monkeypatch.setattr("forerun_lab.bench.arrival.ROUNDS", 1)
    result = arrival(engine, [engine.tokenizer.encode("abc")], engine.tokenizer.encode("0123456789"))
    plain, prompt = sum(range(6, 16)), sum(range(1, 11))
    assert result.without == pytest.approx(plain / 10)
    assert result.during == pytest.approx((plain + prompt) / 10)
    assert result.slowdown == pytest.approx((plain + prompt) / plain)
    assert result.since_before > result.slowdown
    assert result.slowest == pytest.approx((14 + 9) / 14)


def drafting(llm, tiny_target, monkeypatch):
    """The target drafts for itself, a token at a time, on a clock that counts the rows that it reads as a draft."""
    config = {"method": "draft_model", "model": tiny_target, "num_speculative_tokens": 1, "prefill_chunk": 6}
    engine = llm(config, max_prefill_tokens=6, max_num_seqs=4).engine
    (drafter,) = engine.router.drafters.values()
    rows = [0]
    forward = drafter._forward

    def counting(spans):
        rows[0] += sum(len(span.tokens) for span in spans)
        return forward(spans)

    monkeypatch.setattr(drafter, "chains", None)
    monkeypatch.setattr(drafter, "_forward", counting)
    monkeypatch.setattr(engine, "clock", lambda: float(rows[0]))
    return engine


PROMPTS = ("abc", "hello", "x = 1")


def test_a_draft_that_catches_up_slows_the_others_by_its_share(llm, tiny_target, monkeypatch):
    """Three running requests get two tokens each per round, for two rows that their draft reads. Of the prompt's 60
    tokens and the first one of its answer, which another joins every round, it reads 6 per round: 61 - 11 * 5 = 6 are
    left to the twelfth."""
    engine = drafting(llm, tiny_target, monkeypatch)
    result = arrival(engine, [engine.tokenizer.encode(text) for text in PROMPTS], engine.tokenizer.encode("01234" * 12))
    assert result.before == result.without == result.during == pytest.approx(3.0)
    assert result.rounds == 10
    assert result.catching_up_rounds == 12
    assert result.catching_up == pytest.approx(6.0)
    assert result.catching_up_slowdown == result.catching_up_since_before == pytest.approx(2.0)
    assert result.catching_up_slowest == pytest.approx(2.0)
    assert not engine.busy


def test_a_prompt_that_is_not_drafted_for(llm, tiny_target, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 7)
    engine = drafting(llm, tiny_target, monkeypatch)
    result = arrival(engine, [engine.tokenizer.encode(text) for text in PROMPTS], engine.tokenizer.encode("01234" * 12))
    assert result.catching_up_rounds == 7
    assert result.catching_up == pytest.approx(6.0)


def test_times_per_token_and_medians():
    assert time_per_token([(0.5, 4), (1.5, 6)], 5) == pytest.approx(1.0)
    assert medians([{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": None}, {"a": 2.0, "b": 5.0}]) == {"a": 2.0, "b": None}
