"""Published orderings: who wins is decided by differences and their error, and what cannot run is left out."""

import json
import sys

import pytest
import scipy.stats

from forerun.engine.config import SpeculativeConfig
from forerun.speculate.accept import rules
from forerun_lab.bench import orderings
from forerun_lab.bench.orderings import (
    BROKEN,
    HELD,
    ORDERINGS,
    UNDECIDED,
    Ordering,
    OrderingBench,
    compare_all,
    verdict,
)


def test_a_verdict_needs_two_standard_errors():
    values = [0.3, 0.1, 0.4, 0.2, 0.35]
    middle, error, result = verdict(values)
    assert middle == pytest.approx(0.27)
    assert error == pytest.approx(scipy.stats.sem(values))
    assert result == HELD
    assert verdict([-value for value in values])[2] == BROKEN
    assert verdict([0.3, -0.3, 0.1])[2] == UNDECIDED
    assert verdict([0.0, 0.0])[2] == UNDECIDED


def test_the_target_as_its_own_draft_beats_random_guesses(llm, tiny_target):
    own, guess = {"method": "draft_model", "model": tiny_target, "num_speculative_tokens": 3}, {"method": "random"}
    prompts = [[5 + i, 6, 7, 8] for i in range(4)]
    cases = [
        Ordering("a", "x", own, guess),
        Ordering("b", "x", guess, own),
        Ordering("c", "x", {"method": "eagle"}, own),
    ]
    first, second, third = compare_all(OrderingBench(llm(), prompts, 16, 4), cases)
    assert (first.verdict, second.verdict, third.verdict) == (HELD, BROKEN, "left out")
    assert first.better == second.worse
    assert first.better == pytest.approx(15 / 4)  # four rounds for all but the first token
    assert first.worse < 2
    assert first.difference == pytest.approx(-second.difference)
    assert "forerun tune" in third.note
    lines = orderings.table([first, second, third]).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1


def test_the_orderings_are_of_this_engine():
    for ordering in ORDERINGS:
        sides = [SpeculativeConfig.parse({**side}) for side in (ordering.better, ordering.worse)]
        assert sides[0] != sides[1]
        assert all(rules[side.accept].lossless for side in sides)


def test_the_command_prints_a_row_per_ordering_and_temperature(monkeypatch, capsys, tiny_target, tiny_draft):
    more = json.dumps({"draft_model": {"model": tiny_draft}})
    options = f"--model {tiny_target} --prompts 2 --prompt-tokens 8 --max-tokens 8 --prompt-set random --json"
    monkeypatch.setattr(sys, "argv", ["orderings", *options.split(), "--speculative-config", more])
    orderings.main()
    result = json.loads(capsys.readouterr().out)
    assert len(result) == sum(len(ordering.temperatures) for ordering in ORDERINGS)
    measured = [item for item in result if item["verdict"] != "left out"]
    assert [item["claim"].split()[0] for item in measured] == ["recursive:", "block", "traversal"]
    assert all(item["better"] >= 1 and item["worse"] >= 1 for item in measured)
