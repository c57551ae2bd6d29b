"""Costs from measured rounds."""

from __future__ import annotations

import pytest

from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM
from forerun.plan.estimate import Measured, Sample
from forerun.plan.load.arrivals import Arrival
from forerun.plan.load.measured import Bench, _way


def run(*rounds: tuple[int, float], k: int = 0) -> Measured:
    """Rounds of so many requests, that took so many seconds."""
    return Measured(rounds=[Sample((k,) * n, n * (1 + k), n, 0.0, 0.0, 0.0, seconds) for n, seconds in rounds])


def test_a_price_is_that_of_as_many_as_it_says():
    found = _way("none", 0, {1: run((1, 1.0)), 2: run((1, 9.0), (2, 3.0), (2, 3.0)), 4: run((2, 3.0), (3, 4.0))})
    assert found.seconds.points == {1: 1.0, 2: 3.0}
    assert found.tokens == 1.0


def test_a_price_of_one_is_none_of_several():
    alone = {1: run((1, 1.0)), 2: run((1, 1.0)), 3: run((1, 1.0))}
    with pytest.raises(ConfigError, match="2, 3 never decoded together: raise kv_cache_memory"):
        _way("none", 0, alone)
    assert _way("none", 0, {1: run((1, 1.0))}).seconds.points == {1: 1.0}
    assert _way("ngram", 3, {count: run((1, 1.0), k=3) for count in (1, 2, 3)}) is None
    assert _way(
        "ngram",
        3,
        {1: run((1, 1.0), k=3), 2: run((2, 1.5), k=3)},
    ).seconds.points == {1: 1.0, 2: 1.5}


@pytest.mark.slow
def test_requests_decode_together_whose_prompts_take_longer_than_their_answers(tiny_target):
    llm = LLM(tiny_target, page_size=16, prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=48)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[2 + (7 * i + j) % 90 for j in range(length)] for i in range(count)]

    found = Bench(llm, Arrival(0.0, 200, 8), 200, prompts).costs([])
    assert list(found.ways[0].seconds.points) == [1, 2, 4]
