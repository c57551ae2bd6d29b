"""What ``adaptive`` makes of a start, of rounds it does not watch, and of evidence that comes in one piece."""

from __future__ import annotations

from math import exp

import pytest
from simulated import Machine, play

from forerun import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length import LengthPolicy, Seconds, Setting, policies
from forerun.speculate.length.beliefs import Belief, Beliefs, MethodBelief, News
from forerun.speculate.length.plan import Coasting
from forerun.speculate.length.prices import Drafting, Prices

BUNDLED = {
    "base": 0.34, "per_sequence": 0.045, "per_row": 0.06, "draft": 0.05, "per_level": 0.017, "per_draft_token": 0.0133,
    "per_token_behind": 0.0025, "chill": 0.12, "thaws": 2.5, "host": 0.02, "jitter": 0.06, "multiple": 1,
}  # fmt: skip
"""The bundled pair's prices, as measured."""


@pytest.mark.parametrize("seed", range(8))
def test_a_cold_start_is_not_held_against_drafts(seed: int) -> None:
    """Everything takes up to 2.2 times as long in the first milliseconds of a process."""
    machine = Machine(**BUNDLED, slow=lambda seconds: 1.0 + 1.2 * exp(-seconds / 0.004))
    found = play(machine, "adaptive", 1, lambda *_: 0.63, requests=24, seed=seed)
    assert found.plain_work / found.work > 1.1


def sequence(key: int, scheduled: int = 1) -> Sequence:
    made = Sequence(key, [0] * 9, 8, SamplingParams(), 0, max_tokens=9999, drafter="m", scheduled=scheduled)
    made.cached = len(made.tokens) - scheduled
    return made


def drive(policy: LengthPolicy, running: list[Sequence], count: int) -> list[object]:
    """So many rounds in which every draft is accepted; the first four decode. Returns the plans that held."""
    plans: list[object] = []
    for _ in range(count):
        for one in running[:4]:
            one.scheduled, one.cached = 1, len(one.tokens) - 1
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


def test_an_overdue_check_does_not_plan_every_round() -> None:
    """Plain decoding cannot be measured while somebody reads a prompt; until then plans hold for a while."""
    policy = policies["adaptive"](Setting({"m": [0, 1, 2, 3]}, 1))
    running = [sequence(i) for i in range(4)]
    drive(policy, running, 100)
    for _ in range(1000):
        since = policy.prices.since + policy._coasting.gone + len(policy.ledger.entries)
        if policy._plan.budgets and not policy._plan.left and since >= policy._check:
            break
        drive(policy, running, 1)
    else:
        pytest.fail("no check was due")
    running.append(sequence(4, scheduled=5))
    assert len(drive(policy, running, 300)) < 300 / 6


def test_whoever_comes_as_coasting_begins_ends_it() -> None:
    policy = policies["adaptive"](Setting({"m": [0, 1, 2, 3]}, 1))
    running = [sequence(i) for i in range(4)]
    for _ in range(1000):
        drive(policy, running, 1)
        if policy._coasting.left and not policy._coasting.gone:
            break
    else:
        pytest.fail("it never coasted")
    running[0] = sequence(9)
    drive(policy, running, 1)
    assert (policy._coasting.left, policy._coasting.gone) == (0, 0)
    assert len(policy.ledger.entries) == 1  # watched


def test_coasting_ends_when_tokens_stop_coming() -> None:
    coasting = Coasting.over(60, sequences=1, tokens=2.2)
    for tokens in [1, 4, 2, 1, 3] * 6:
        coasting.see(tokens)
    assert (coasting.left, coasting.gone) == (30, 30)
    for _ in range(8):
        coasting.see(1)
    assert coasting.left == 0


@pytest.mark.parametrize("seed", range(4))
def test_useless_drafts_end_a_plan_that_nobody_watches(seed: int) -> None:
    """After 300 good tokens nothing is accepted: within forty rounds hardly anything is drafted."""
    found = play(Machine(**BUNDLED), "adaptive", 1, lambda _, place: 0.9 * (place < 300), length=500, seed=seed)
    emitted, late = 0, []
    for nodes, tokens in zip(found.drafted, found.emitted):
        emitted += tokens
        if emitted > 340:
            late.append(nodes)
    assert sum(late) / len(late) < 0.5


def test_evidence_in_one_piece_counts_as_if_it_came_one_by_one() -> None:
    """Of drafts that all fared alike, against a loop."""
    beliefs = Beliefs({"m": MethodBelief(3, 0.6, 3.0)}, 0.97, 0.9)
    method, own = MethodBelief(3, 0.6, 3.0), Belief(3)
    fate = News(sequence(7), 3, Draft.chain([0, 0, 0]), Verdict([0], tested=2))
    for _ in range(2):
        beliefs.learn([(["m"], [fate])] * 5, known={7})
        for _ in range(5):
            method.fade(0.97)
            method.learn_made(3, 3)
            method.learn(2, 1)
            own.fade(0.9)
            own.learn(2, 1)
    for found, expected in ((beliefs.methods["m"], method), (beliefs.own[7], own)):
        assert found.tested == pytest.approx(expected.tested)
        assert found.matched == pytest.approx(expected.matched)
    assert beliefs.methods["m"].existence() == pytest.approx(method.existence())


def test_those_who_have_left_are_not_learnt_about() -> None:
    beliefs = Beliefs({"m": MethodBelief(1, 0.6, 3.0)}, 0.97, 0.9)
    beliefs.learn([(["m"], [News(sequence(7), 1, Draft.chain([0]), Verdict([0], tested=1))])], known=set())
    assert not beliefs.own
    assert beliefs.methods["m"].tested[0] > 3.0


def test_what_a_faster_machine_takes_is_not_mistaken_for_a_lower_price() -> None:
    """Plain rounds took 1.0 when they were first measured and take 0.6 since; the price of a round stays what it was,
    the pace becomes 0.6, and so a draft of 0.12 is known to cost 0.2."""
    prices = Prices(Setting({"m": [0, 1]}, 1))

    def plain(count: int, seconds: float) -> None:
        for _ in range(count):
            prices.streak += 1
            prices.plain(1, seconds)

    plain(3, 1.0)
    for _ in range(12):
        prices.drafted(1, 2, Seconds(0.12, 0.66, 0.0), [Drafting("m", 1, 1, 0)])
        plain(12, 0.6)
        for _ in range(6):
            prices.drafted(1, 2, Seconds(0.12, 0.66, 0.0), [Drafting("m", 1, 1, 0)])
    plain(12, 0.6)
    assert prices.round(1, 1) == pytest.approx(1.0, rel=0.01)
    assert prices.pace == pytest.approx(0.6, rel=0.01)
    assert prices.drafting("m", 1, 1) == pytest.approx(0.2, rel=0.05)
    assert prices.round(1, 2) == pytest.approx(1.1, rel=0.05)


def test_deep_positions_are_worth_what_they_bring_though_most_drafts_are_short() -> None:
    """A drafter that copies: of four drafts two are one token, and wrong, one has four tokens that are all right, and
    one time there is nothing to copy. Each depth of the long one brings a quarter of a token."""
    beliefs = Beliefs({"m": MethodBelief(4, 0.6, 3.0)}, 0.999, 0.999)
    fates = [
        News(sequence(7), 4, Draft.chain([0]), Verdict(tested=1)),
        News(sequence(7), 4, Draft.chain([0]), Verdict(tested=1)),
        News(sequence(7), 4, Draft.chain([0] * 4), Verdict([0, 1, 2, 3], tested=4)),
        News(sequence(7), 4, Draft(), Verdict()),
    ]
    beliefs.learn([(["m"], [fate]) for fate in fates * 100], known={7})
    offers = beliefs.offers([sequence(7)], [4], {"m": range(5)}, 0.0)
    assert [depth for _, depth, _, _ in offers] == [1, 2, 3, 4]
    assert [gain for gain, *_ in offers] == pytest.approx([0.25] * 4, rel=0.05)
    assert [rows for *_, rows in offers] == pytest.approx([0.75, 0.25, 0.25, 0.25], rel=0.05)
