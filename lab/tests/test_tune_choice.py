"""Which way of drafting ``forerun tune`` takes to be the quickest."""

import random

import pytest

from forerun.cli.options import speculative_config
from forerun.engine import tuned
from forerun.measure import search
from forerun.measure.rounds import Measured, Sample
from forerun_lab.tune import choose


def test_a_choice_does_not_follow_what_else_runs(monkeypatch):
    """Rounds that wait for others, one in ten, each a hundred times as long or more, fall on every way by chance; what
    is found is about what a quiet machine would say. What drafters themselves take counts, however it is shared out:
    the cascade asks a cheap drafter for half of its rounds, and the head reads the prompt in its first."""
    rows = {"none": 1, "ngram": 5, "cascade": 4, "eagle": 4}
    brought = {"none": 1, "ngram": 2, "cascade": 2, "eagle": 3}
    draw = random.Random(0)
    disturbed = True

    def spent(method, number):
        usual = {"none": 1.0, "ngram": 1.6, "cascade": (1.05, 2.6)[number % 2], "eagle": 20.0 if not number else 1.5}
        return usual[method] * (draw.uniform(100, 400) if disturbed and draw.random() < 0.1 else 1)

    class Simulated:
        def __init__(self, llm, options, **changes):
            self.method = options["method"]

        def run(self, prompts, params):
            times = [spent(self.method, number) for number in range(40)]
            rounds = [Sample((3,), rows[self.method], brought[self.method], 0.0, 0.0, 0.0, total) for total in times]
            return Measured(rounds=rounds, tokens=40 * brought[self.method], seconds=sum(times))

    def result():
        ways = [{"method": name} for name in rows if name != "none"]
        measurements = choose._measured(None, ways, [[1]] * 8, 8, 1.0, shown=False)
        return {row["config"]["method"]: row["speedup"] for row in measurements}

    monkeypatch.setattr(search, "EngineContender", Simulated)
    quiet = {"none": 1.0, "ngram": 2 / 1.6, "cascade": 2 / 1.825, "eagle": 3 * 40 / (20 + 39 * 1.5)}
    for _ in range(20):
        assert result() == pytest.approx(quiet, rel=0.2)
    disturbed = False
    assert result() == pytest.approx(quiet)


def test_slow_candidates_of_a_race_drop_out_and_plain_decoding_never_does(monkeypatch):
    took, asked = {"none": 1.0, "good": 0.5, "close": 0.55, "poor": 3.0}, []

    class Simulated:
        def __init__(self, llm, options, **changes):
            self.method = options["method"]

        def run(self, prompts, params):
            asked.append((self.method, params[0].temperature, len(prompts)))
            rounds = [Sample((1,), 2, 2, 0.0, 0.0, 0.0, 2 * took[self.method])] * 8
            return Measured([[1]], rounds=rounds, tokens=16, seconds=16 * took[self.method])

    monkeypatch.setattr(search, "EngineContender", Simulated)
    race = search.Race(
        None, [{"method": name} for name in ("poor", "close", "good")], [[1]] * 12, [(0.0, 1), (0.8, 2)], tokens=9
    )
    told = []
    race.run(lambda: len(told) == 3, lambda turn, now: told.append(now.configs[now.best()]["method"]))
    assert told == ["good"] * 3
    warm = 1
    assert {name: sum(method == name for method, *_ in asked) - warm for name in took} == {
        "none": 6, "good": 6, "close": 6, "poor": 2,
    }  # fmt: skip
    assert {asked[i][1:] for i in range(4, len(asked))} == {(0.0, 1), (0.8, 2)}
    assert [row["speedup"] for row in race.rows()[-2:]] == pytest.approx([2.0, 2.0])
    assert race.identity(race.best())["passed"]


def test_what_comes_for_a_model_is_used_unless_another_way_is_asked_for(monkeypatch):
    result = {"method": "suffix", "datastore": "text", "num_speculative_tokens": 4, "length": "adaptive"}
    monkeypatch.setattr(tuned, "bundled", lambda model: model == "ours")
    monkeypatch.setattr(tuned, "load", lambda folder, model, lora=None: dict(result))
    ours = {"model": "ours"}
    assert speculative_config({}, ours) == result
    assert speculative_config({"num_speculative_tokens": 7}, ours) == {**result, "num_speculative_tokens": 7}
    assert speculative_config({"length": "fixed"}, ours) == {**result, "length": "fixed"}
    assert "datastore" not in speculative_config({"accept": "token"}, ours)
    assert "datastore" not in speculative_config({"method": "suffix"}, ours)
    assert "datastore" not in speculative_config({}, {**ours, "lora": ["folder"]})
    assert speculative_config({}, {"model": "another"}) == {"method": "suffix", "length": "adaptive"}
