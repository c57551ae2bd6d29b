"""What ``adaptive`` makes of a cold start, of an overdue check and of drafts that stop being accepted."""

from math import exp

import pytest
from simulated import Machine, play

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length import Seconds, Setting, policies

PAIR = {
    "base": 33.0, "per_sequence": 0.3, "per_row": 1.6, "draft": 1.0, "per_level": 8.0, "per_draft_token": 0.8,
    "per_token_behind": 1.1, "cold_penalty": 0.03, "host": 0.3, "multiple": 1,
}  # fmt: skip
"""A target of 1.5B parameters and a draft of 0.5B, as measured."""
BUNDLED = {
    "base": 0.34, "per_sequence": 0.045, "per_row": 0.06, "draft": 0.05, "per_level": 0.017, "per_draft_token": 0.0133,
    "per_token_behind": 0.0025, "cold_penalty": 0.12, "thaws": 2.5, "host": 0.02, "jitter": 0.06, "multiple": 1,
}  # fmt: skip
"""The bundled pair's prices, as measured."""


@pytest.mark.parametrize("seed", range(8))
def test_a_cold_start_is_not_held_against_drafts(seed):
    """Everything takes up to 2.2 times as long in the first milliseconds of a process."""
    machine = Machine(**BUNDLED, slow=lambda seconds: 1.0 + 1.2 * exp(-seconds / 0.004))
    result = play(machine, "adaptive", 1, lambda *_: 0.63, requests=24, seed=seed)
    assert result.plain_work / result.work > 1.1


@pytest.mark.parametrize(("prompt", "length", "least"), [(200, 128, 0.93), (1500, 1000, 0.85)])
def test_a_draft_that_needs_the_whole_text_reads_it(prompt, length, least):
    """Drafts that began with the last tokens are poor here: nobody stays with them for a long answer."""

    def seconds(policy, windowed):
        runs = [
            play(
                Machine(**PAIR), policy, 1, lambda *_: 0.95, requests=12, prompt=prompt, length=length, depth=7,
                windowed=windowed, seed=seed,
            )
            for seed in range(4)
        ]  # fmt: skip
        return sum(run.work for run in runs)

    assert seconds("fixed", 1.0) / seconds("adaptive", 0.5) > least


def sequence(key, scheduled=1):
    made = RequestState(key, [0] * 9, 8, SamplingParams(), 0, max_tokens=9999, drafter="m", scheduled=scheduled)
    made.num_computed_tokens = len(made.tokens) - scheduled
    return made


def drive(policy, running, count):
    """So many rounds in which every draft is accepted; the first four decode. Returns the plans that held."""
    plans = []
    for _ in range(count):
        for one in running[:4]:
            one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
        drafts = [Draft.chain([0] * budget) for budget in policy.budgets(running)]
        if not plans or policy._plan is not plans[-1]:
            plans.append(policy._plan)
        verdicts = []
        for one, draft in zip(running, drafts):
            made = len(draft)
            verdict = Verdict(path=list(range(made)), token=0, fed=one.scheduled)
            verdict.tested, verdict.tokens = made, [0] * (made + 1)
            one.tokens.extend(verdict.tokens)
            verdicts.append(verdict)
        deepest = max(len(draft) for draft in drafts)
        policy.observe(running, drafts, verdicts, Seconds(1e-4 * deepest, 1e-3 + 1e-5 * deepest, 0.0))
    return plans


def test_an_overdue_check_does_not_plan_every_round():
    """Plain decoding cannot be measured while somebody reads a prompt; until then plans hold for a while."""
    policy = policies["adaptive"](Setting({"m": [0, 1, 2, 3]}, 1))
    running = [sequence(i) for i in range(4)]
    drive(policy, running, 100)
    for _ in range(1000):
        if policy._plan.budgets and not policy._plan.left and policy._since >= policy._check:
            break
        drive(policy, running, 1)
    else:
        pytest.fail("no check was due")
    running.append(sequence(4, scheduled=5))
    assert len(drive(policy, running, 300)) < 300 / 6


@pytest.mark.parametrize("seed", range(4))
def test_useless_drafts_end_a_plan_that_nobody_watches(seed):
    """After 300 good tokens nothing is accepted: within forty rounds hardly anything is drafted."""
    result = play(Machine(**BUNDLED), "adaptive", 1, lambda _, index: 0.9 * (index < 300), length=500, seed=seed)
    emitted, late = 0, []
    for nodes, tokens in zip(result.drafted, result.emitted):
        emitted += tokens
        if emitted > 340:
            late.append(nodes)
    assert sum(late) / len(late) < 0.5
