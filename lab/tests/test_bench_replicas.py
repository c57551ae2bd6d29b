"""What the comparison of replicas makes of its measurements; Ray itself is in ``tests/serve/test_replicas.py``."""

import asyncio

import pytest

from forerun.core.errors import ForerunError
from forerun.sampling.params import SamplingParams
from forerun_lab.bench import replicas
from forerun_lab.bench.replicas import FirstToken, ReplicaLoad


def test_turns_are_the_same_and_begin_with_another():
    called = []

    def contender(name):
        async def take(turn):
            called.append((name, turn))
            return turn

        return take

    result = asyncio.run(replicas.interleaved({name: contender(name) for name in "ab"}, turns=3))
    assert result == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert called == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]


def test_a_load_keeps_so_many_under_way_and_ends_with_what_is_refused():
    running, most = 0, 0

    async def ask(url, body):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0)
        running -= 1
        if body["seed"] == 99:
            return 400, {"error": {"message": "no such seed"}}
        return 200, {"choices": [{"text": str(body["seed"])}], "usage": {"completion_tokens": 3}}

    done = asyncio.run(replicas.load(ask, [{"seed": seed} for seed in range(7)], streams=3))
    assert (done.texts, done.tokens, most) == ([str(seed) for seed in range(7)], 21, 3)
    with pytest.raises(ForerunError, match="no such seed"):
        asyncio.run(replicas.load(ask, [{"seed": 99}], streams=3))


def test_rows_and_tables():
    base = [ReplicaLoad(2.0, 100, ["x", "y"]), ReplicaLoad(2.0, 100, ["x", "y"])]
    own = [ReplicaLoad(4.0, 100, ["x", "z"]), ReplicaLoad(1.0, 100, ["x", "y"])]
    row = replicas._of_load("two", own, base)
    assert (row["tokens_per_second"], row["speedup"], row["same"]) == (62.5, 1.25, 0.75)
    chance = [[FirstToken(0.4, 100, 0), FirstToken(0.4, 100, 50)]]
    affine = [[FirstToken(0.1, 100, 50), FirstToken(0.3, 100, 100)]]
    first = replicas._of_first("affine", affine, chance)
    assert (first["hit_rate"], first["ratio"]) == (0.75, pytest.approx(0.5))
    shown = replicas.tables({"throughput": [row], "routing": [first]})
    assert "| two | 62 | 1.25 |  | 75% |" in shown
    assert "| affine | 75% | 200.0 ms | 200.0 ms | 300.0 ms | 0.50 |  |" in shown


def test_first_tokens_are_what_a_reader_waits_for(llm):
    from forerun.engine.async_engine import AsyncEngine

    engine = AsyncEngine(llm(page_size=4).engine)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    try:
        one, again = (
            asyncio.run(replicas.first_tokens(engine, [list(range(5, 30))], params, streams=2)) for _ in range(2)
        )
    finally:
        engine.close()
    assert (one[0].prompt, one[0].cached) == (25, 0)
    assert again[0].cached >= 20
    assert one[0].seconds > 0
