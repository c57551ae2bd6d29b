"""Which way of drafting ``forerun tune`` takes to be the quickest."""

import random

import pytest

from forerun.cli.options import speculative_config
from forerun.engine import tuned
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
        measurements = choose._measured(None, [{"method": name} for name in rows], [[1]] * 8, 8, 1.0, shown=False)
        return {row["config"]["method"]: row["speedup"] for row in measurements}

    monkeypatch.setattr(choose, "EngineContender", Simulated)
    quiet = {"none": 1.0, "ngram": 2 / 1.6, "cascade": 2 / 1.825, "eagle": 3 * 40 / (20 + 39 * 1.5)}
    for _ in range(20):
        assert result() == pytest.approx(quiet, rel=0.2)
    disturbed = False
    assert result() == pytest.approx(quiet)


def test_what_comes_for_a_model_is_used_unless_another_way_is_asked_for(monkeypatch):
    result = {"method": "suffix", "datastore": "text", "num_speculative_tokens": 4, "length": "adaptive"}
    monkeypatch.setattr(tuned, "has_bundled", lambda model: model == "ours")
    monkeypatch.setattr(tuned, "load", lambda folder, model, lora=None: dict(result))
    ours = {"model": "ours"}
    assert speculative_config({}, ours) == result
    assert speculative_config({"num_speculative_tokens": 7}, ours) == {**result, "num_speculative_tokens": 7}
    assert speculative_config({"length": "fixed"}, ours) == {**result, "length": "fixed"}
    assert "datastore" not in speculative_config({"accept": "token"}, ours)
    assert "datastore" not in speculative_config({"method": "suffix"}, ours)
    assert "datastore" not in speculative_config({}, {**ours, "lora": ["folder"]})
    assert speculative_config({}, {"model": "another"}) == {"method": "suffix", "length": "adaptive"}
