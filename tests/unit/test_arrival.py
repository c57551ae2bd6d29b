"""The arrival measurement on a clock that counts rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forerun import LLM
from forerun.bench.arrival import arrival


def test_a_prompt_in_chunks_slows_the_others_by_its_share(llm: Callable[..., LLM], monkeypatch) -> None:
    """Three running requests and 6 prompt tokens a round: a round takes 9 rows' time for 3."""
    engine = llm(max_prefill_tokens=6, max_num_seqs=4, max_model_len=200).engine
    rows = [0]
    forward = engine.model.forward

    def counting(batch, cache):
        rows[0] += batch.num_rows
        return forward(batch, cache)

    monkeypatch.setattr(engine.model, "forward", counting)
    monkeypatch.setattr(engine, "clock", lambda: float(rows[0]))
    prompts = [engine.tokenizer.encode(text) for text in ("abc", "hello", "x = 1")]
    found = arrival(engine, prompts, engine.tokenizer.encode("0123456789" * 6))
    assert found.before == pytest.approx(3.0)
    assert found.during == pytest.approx(9.0)
    assert found.without == pytest.approx(3.0)
    assert found.slowdown == found.slowest == found.since_before == found.slowest_since == pytest.approx(3.0)
    assert found.rounds == 10
    assert found.first_token == pytest.approx(10 * 9)
    assert found.alone == pytest.approx(60)
    assert not engine.busy
    engine.check()


def test_growing_contexts_are_not_put_down_to_the_prompt(llm: Callable[..., LLM], monkeypatch) -> None:
    """On a clock that counts keys: rounds become dearer without a prompt too, and only the rest is its doing."""
    engine = llm(max_prefill_tokens=1, max_num_seqs=4, max_model_len=200).engine
    keys = [0]
    forward = engine.model.forward

    def counting(batch, cache):
        keys[0] += sum(span.end for span in batch.spans)
        return forward(batch, cache)

    monkeypatch.setattr(engine.model, "forward", counting)
    monkeypatch.setattr(engine, "clock", lambda: float(keys[0]))
    monkeypatch.setattr("forerun.bench.arrival.SETTLE", 1)
    monkeypatch.setattr("forerun.bench.arrival.ROUNDS", 1)
    found = arrival(engine, [engine.tokenizer.encode("abc")], engine.tokenizer.encode("0123456789"))
    plain, prompt = sum(range(6, 16)), sum(range(1, 11))
    assert found.without == pytest.approx(plain / 10)
    assert found.during == pytest.approx((plain + prompt) / 10)
    assert found.slowdown == pytest.approx((plain + prompt) / plain)
    assert found.since_before > found.slowdown
    assert found.slowest == pytest.approx((14 + 9) / 14)
