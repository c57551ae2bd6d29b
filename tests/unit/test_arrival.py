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
    assert found.slowdown == found.slowest == pytest.approx(3.0)
    assert found.rounds == 10
    assert found.first_token == pytest.approx(10 * 9)
    assert found.alone == pytest.approx(60)
    assert not engine.busy
    engine.check()
