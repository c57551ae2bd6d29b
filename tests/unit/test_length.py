"""Length policies on a simulated machine: what they cost where drafting is useless, what they gain where it is not, and
what ``adaptive`` makes of a cold start, of an overdue check and of drafts that stop being accepted."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import pytest
from simulated import Machine, play

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length import Seconds, Setting, policies
from forerun.speculate.length.adaptive import Acceptance, Adaptive
from forerun.speculate.length.costs import Costs, Curve, Drafted

COUNTS = (1, 4, 8, 16)
LOOKUP = {"draft": 0.03, "per_level": 0.0, "per_draft_token": 0.005, "per_token_behind": 0.0}


def speeds(machine, count, rate, policy="adaptive"):
    """Speed over plain decoding, the mean of three runs of eight batches."""
    ratios = []
    for seed in range(3):
        runs = [play(machine, name, count, lambda *_: rate, requests=8 * count, seed=seed) for name in (policy, None)]
        ratios.append(runs[0].speed / runs[1].speed)
    return sum(ratios) / len(ratios)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("costs", [{}, LOOKUP], ids=["model", "lookup"])
def test_useless_drafts_cost_next_to_nothing(count, costs):
    assert speeds(Machine(**costs), count, rate=0.0) > 0.97


def unhurried(row_multiple):
    """The policy with a clock that stands still: its own time depends on what else the machine does."""
    policy = Adaptive(Setting({"m": [0, 1, 2, 3]}, row_multiple))
    policy.clock = lambda: 0.0
    return policy


def sequence(key, scheduled=1):
    made = RequestState(key, [0] * 9, 8, SamplingParams(), 0, max_tokens=9999, drafter="m", scheduled=scheduled)
    made.num_computed_tokens = len(made.tokens) - scheduled
    return made


def one_round(policy, running, seconds, accepts=lambda one: True):
    """Its budgets. Drafts are accepted whole or not at all; ``seconds`` says what drafting and verifying take."""
    budgets, verdicts = policy.budgets(running), []
    for one, budget in zip(running, budgets):
        kept = budget if accepts(one) else 0
        verdict = Verdict([*range(kept)], 0, tokens=[0] * (kept + 1), fed=one.scheduled, tested=min(budget, kept + 1))
        one.tokens += verdict.tokens if one.scheduled == 1 else []
        verdicts.append(verdict)
    policy.observe(
        running, [Draft.chain([0] * budget) for budget in budgets], verdicts, Seconds(*seconds(budgets), 0.0)
    )
    return budgets


def as_on(machine):
    """The seconds of ``one_round``."""

    def seconds(budgets):
        count = len(budgets)
        return machine.drafting(count, max(budgets), 0), machine.verify(count, count + sum(budgets))

    return seconds


def busy(seconds):
    """Others use the machine too, for some dozen rounds at a time."""
    return 1.7 if int(seconds / 0.11) % 3 == 1 else 1.0


SMALL = {
    "base": 0.9, "per_sequence": 0.1, "per_row": 0.09, "cold_penalty": 0.2, "host": 0.1, "jitter": 0.06, "slow": busy,
}  # fmt: skip
"""A small model's rounds, as measured: the policy's own time, and caches that drafting fills, are no longer small."""
SMALL_DRAFTS = [
    {"draft": 0.0, "per_level": 0.0, "per_draft_token": 0.04, "per_token_behind": 0.0},
    {"draft": 0.1, "per_level": 0.2, "per_draft_token": 0.03, "per_token_behind": 0.004},
]


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rate", [0.0, 0.14, 0.3])
@pytest.mark.parametrize("costs", SMALL_DRAFTS, ids=["lookup", "model"])
def test_little_is_lost_on_a_busy_machine_where_drafts_do_not_pay(count, rate, costs):
    """Speed against plain rounds of as many sequences, undisturbed ones on both sides; a cold start is included."""
    machine = Machine(**SMALL, **costs)
    runs = [play(machine, "adaptive", count, lambda *_: rate, requests=2 * count + 6, seed=s) for s in range(2)]
    assert sum(run.plain_work for run in runs) / sum(run.work for run in runs) > 0.965


def test_drafts_that_pay_are_found_on_a_busy_machine():
    machine = Machine(**SMALL, **SMALL_DRAFTS[1])
    result, fixed = (play(machine, name, 1, lambda *_: 0.8, requests=8, length=128) for name in ("adaptive", "fixed"))
    assert result.plain_work / result.work > 0.9 * fixed.plain_work / fixed.work > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_good_cheap_drafts_are_used(count):
    """At least two thirds of what drafting always and as far as possible would gain."""
    machine = Machine(**LOOKUP)
    gain = speeds(machine, count, 0.7, "fixed") - 1.0
    assert speeds(machine, count, rate=0.7) - 1.0 > 2 / 3 * gain


def test_a_slow_first_moment_is_not_believed_for_long():
    machine = Machine(**LOOKUP, slow=lambda seconds: 1.7 if seconds < 0.03 else 1.0)
    assert speeds(machine, 8, rate=0.0) > 0.95


@dataclass
class Cold(Machine):
    """The first rounds with several drafted tokens cost three times as much."""

    cold: int = 12

    def verify(self, sequences, rows):
        deep = rows > 2 * sequences
        self.cold -= deep
        return super().verify(sequences, rows) * (3.0 if deep and self.cold >= 0 else 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_first_impressions_of_deep_drafts_are_reconsidered(seed):
    result = play(Cold(**LOOKUP), "adaptive", 1, lambda *_: 0.9, length=1500, seed=seed)
    late = result.drafted[len(result.drafted) // 2 :]
    assert sum(late) / len(late) > 2.5


@pytest.mark.parametrize("count", [1, 8])
def test_it_gives_up_and_recovers(count):
    """Nothing is accepted in the middle third of every answer."""
    long = 600

    def accepts(request, position):
        return 0.0 if long // 3 <= position < 2 * long // 3 else 0.9

    result = play(Machine(**LOOKUP), "adaptive", count, accepts, length=long)
    drafted = {"first": [], "useless": [], "last": []}
    emitted = 0
    for nodes, tokens in zip(result.drafted, result.emitted):
        done = emitted / count / long
        emitted += tokens
        part = "first" if done < 0.3 else "useless" if 0.5 < done < 0.65 else "last" if 0.85 < done < 0.98 else None
        if part is not None:
            drafted[part].append(nodes)
    means = {part: sum(nodes) / len(nodes) / count for part, nodes in drafted.items()}
    assert means["first"] > 1.5
    assert means["useless"] < 0.5
    assert means["last"] > 1.5


def test_what_drafts_have_earned_is_spent_on_looking_for_more():
    """Good and useless stretches of 200 tokens in turn. With waits that double through a useless one it is 1.36."""

    def accepts(request, position):
        return 0.9 if position % 400 < 200 else 0.0

    runs = [play(Machine(**LOOKUP), "adaptive", 1, accepts, length=2400, seed=seed) for seed in range(3)]
    assert sum(run.plain_work for run in runs) / sum(run.work for run in runs) > 1.4


def test_each_sequence_has_its_own_budget():
    """Drafts of the first four requests are always accepted, of the other four never."""
    policy = unhurried(1)
    machine = Machine(**LOOKUP)
    given = [[0] * 8]
    sequences = [sequence(i) for i in range(8)]
    for _ in range(150):
        for one in sequences:
            one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
        given.append(one_round(policy, sequences, as_on(machine), lambda one: one.id < 4))
    last = given[-40:]
    assert sum(sum(budgets[:4]) for budgets in last) > 2.5 * 4 * len(last)
    assert sum(sum(budgets[4:]) for budgets in last) < 0.5 * 4 * len(last)


def test_planned_settles_on_the_depth_that_is_best():
    machine = Machine(jitter=0.0, spikes=0.0)
    result = play(machine, "planned", 1, lambda *_: 0.5, length=300)
    best = max(range(4), key=lambda depth: _expected(machine, depth, 0.5))
    assert set(result.drafted[-30:-5]) == {best}


def _expected(machine, depth, rate):
    tokens = sum(rate**level for level in range(depth + 1))
    return tokens / (machine.verify(1, 1 + depth) + (machine.drafting(1, depth, 0) if depth else 0.0))


def test_rows_that_are_not_planned_are_not_reserved():
    policy = unhurried(2)
    one = sequence(0)
    assert policy.longest_nodes(one) == 3
    for _ in range(400):
        one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
        one_round(policy, [one], lambda budgets: (0.01 * budgets[0], 0.01), lambda one: False)
    one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
    assert policy.longest_nodes(one) in (0, 3)
    policy.release(one)
    assert not policy.by_sequence


def test_a_curve_gives_back_what_it_measured_and_extends_it():
    curve = Curve(slope=0.1)
    assert curve.at(1) is None
    for count in (1, 4, 16):
        for _ in range(9):
            curve.add(count, 3.0 + 0.3 * count)
    for count in (1, 4, 7, 16, 32):
        assert curve.at(count) == pytest.approx(3.0 + 0.3 * count, rel=0.02)


def test_a_curve_bends_where_a_price_jumps():
    curve = Curve(slope=0.06)
    for count, price in [(4, 1.0), (8, 1.05), (12, 2.0), (16, 2.05)]:
        for _ in range(9):
            curve.add(count, price)
    for count, price in [(4, 1.0), (8, 1.05), (12, 2.0), (16, 2.05)]:
        assert curve.at(count) == pytest.approx(price, rel=0.01)


def test_a_curve_is_not_moved_by_one_slow_measurement_nor_made_to_fall():
    curve = Curve(slope=0.8)
    for count, price in [(1, 1.0), (1, 1.0), (1, 50.0), (1, 1.0), (1, 1.0), (2, 0.5), (2, 0.5), (2, 0.5)]:
        curve.add(count, price)
    assert curve.at(1) == pytest.approx(1.0, rel=0.3)
    assert curve.at(9) > curve.at(5) > 0.0


def test_counts_of_a_slow_minute_are_compared_with_each_other():
    """All take 1.6 times as long there; a long draft was measured then alone."""
    curve = Curve(slope=0.06)
    for _ in range(3):
        curve.learn([(1, 1.0), (5, 1.06)], 3)
    for _ in range(2):
        curve.learn([(5, 1.6 * 1.06)] * 5 + [(8, 1.6 * 1.27)] * 3, 3)
    assert curve.at(8) / curve.at(5) == pytest.approx(1.27 / 1.06, rel=0.03)
    assert curve.level == pytest.approx(1.0, abs=0.05), "two stretches of five"
    for _ in range(7):
        curve.learn([(5, 1.6 * 1.06)] * 8, 3)
    assert curve.level == pytest.approx(1.6, rel=0.03)
    assert curve.at(5) == pytest.approx(1.06, rel=0.03)


def settle(costs, seconds):
    """Plain rounds after drafts, until they are as fast as any."""
    for since in range(1, 15):
        costs.observe_plain(1, seconds, since)


def test_reading_has_a_price_of_its_own():
    costs = Costs({"m": [0, 1, 2, 3]})
    settle(costs, 1.0)
    for behind, seconds in [(0, 0.5), (0, 0.5), (100, 2.5)]:
        costs.observe_drafted(4, seconds, 1.2, [Drafted("m", 1, 3, behind)])
    settle(costs, 1.0)
    assert costs.draft("m", 1, 3) == pytest.approx(0.5, rel=0.06)
    assert costs.read("m", 50) == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize("now", [1.0, 0.6])
def test_drafts_get_their_price_from_the_plain_rounds_around_them(now):
    """Plain rounds took 1.0 when they were first measured and take ``now`` since: a draft of 0.5 then costs more."""
    costs = Costs({"m": [0, 1, 2, 3]})
    settle(costs, 1.0)
    for _ in range(20):
        settle(costs, now)
        for _ in range(6):
            costs.observe_drafted(4, 0.5, 1.2 * now, [Drafted("m", 1, 3, 0)])
    settle(costs, now)
    assert costs.slowdown == pytest.approx(now)
    assert costs.verify(1) == pytest.approx(1.0, rel=0.06)
    assert costs.verify(4) == pytest.approx(1.2, rel=0.06)
    assert costs.draft("m", 1, 3) == pytest.approx(0.5 / now, rel=0.06)


def test_what_was_learnt_goes_on_in_another_engine():
    """Also on a machine where everything takes twice as long."""
    costs = Costs({"m": [0, 1, 2, 3]})
    settle(costs, 1.0)
    for _ in range(3):
        for _ in range(5):
            costs.observe_drafted(4, 0.5, 1.2, [Drafted("m", 1, 3, 0)])
        settle(costs, 1.0)
    other = Costs({"m": [0, 1, 2, 3]})
    other.restore(costs.state())
    settle(other, 2.0)
    for rows, over in [(1, 1.0), (4, 1.2)]:
        assert other.verify(rows) / other.verify(1) == pytest.approx(over, rel=0.06)
    assert other.draft("m", 1, 3) / other.verify(1) == pytest.approx(0.5, rel=0.06)


def test_acceptance_by_depth():
    method = Acceptance(3, fade=0.999)
    assert method.rates() == pytest.approx([0.6, 0.6, 0.6])
    for _ in range(500):
        for made, kept in [(1, 0), (1, 0), (3, 3), (0, 0)]:
            method.learn(3, made, kept)
    first, second, third = method.rates()
    assert first == pytest.approx(0.25, abs=0.03)
    assert second > 0.85
    assert third > 0.85
    assert method.existence()[:2] == pytest.approx([0.75, 1 / 3], abs=0.05)
    method.cap_weight(3.0)
    for _ in range(3):
        method.learn(1, 1, 1)
    assert method.rates()[0] == pytest.approx((3 * 0.25 + 3 + 3 * 0.6) / 9, abs=0.02)


def test_deep_positions_are_worth_what_they_bring_though_most_drafts_are_short():
    """A drafter that copies: of four drafts two are one token, and wrong, one has four tokens that are all right, and
    one time there is nothing to copy. Each depth of the long one brings a quarter of a token."""
    method = Acceptance(4, fade=0.999)
    for made, kept in [(1, 0), (1, 0), (4, 4), (0, 0)] * 200:
        method.learn(4, made, kept)
    rates, chance = method.rates(), 1.0
    for rate in rates:
        chance *= rate
        assert chance == pytest.approx(0.25, rel=0.06)


def test_a_sequence_moves_what_is_expected_of_its_method():
    own = Acceptance(2, weight=8.0, fade=0.93)
    assert own.rates([0.5, 0.8]) == pytest.approx([0.5, 0.8])
    for _ in range(40):
        own.learn(2, 2, 2)
    assert min(own.rates([0.5, 0.5])) > 0.75
    for _ in range(80):
        own.learn(2, 2, 0)
    assert own.rates([0.5, 0.5])[0] < 0.3


def test_newcomers_draft_as_soon_as_their_prompt_is_read():
    """Of four whose drafts are all accepted one leaves, and another reads its prompt for three rounds."""
    policy = unhurried(1)
    sequences, newest = [sequence(i) for i in range(4)], []
    for turn in range(80):
        if turn == 60:
            sequences[1] = sequence(4)
        for one in sequences:
            reads = one.id == 4 and turn < 63
            one.scheduled = 4 if reads else 1
            one.num_computed_tokens = 0 if reads else len(one.tokens) - 1
            one.draft_budget = None  # as the scheduler does it
            one.draft_budget = None if reads else policy.longest_nodes(one)
        newest.append(one_round(policy, sequences, as_on(Machine(**LOOKUP)))[1])
    assert sum(newest[40:60]) > 20, newest
    assert newest[60:63] == [0, 0, 0]
    assert sum(newest[63:68]) > 3, newest


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


@pytest.mark.slow
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


def drive(policy, running, count):
    """So many rounds in which every draft is accepted; the first four decode. Returns the plans that held."""
    plans = []
    for _ in range(count):
        for one in running[:4]:
            one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
        one_round(policy, running, lambda budgets: (1e-4 * max(budgets), 1e-3 + 1e-5 * max(budgets)))
        if not plans or policy._plan is not plans[-1]:
            plans.append(policy._plan)
    return plans


def test_an_overdue_check_does_not_plan_every_round():
    """Plain decoding cannot be measured while somebody reads a prompt; until then plans hold for a while."""
    policy = policies["adaptive"](Setting({"m": [0, 1, 2, 3]}, 1))
    running = [sequence(i) for i in range(4)]
    drive(policy, running, 100)
    for _ in range(1000):
        if policy._plan.budgets and not policy._plan.rounds_left and policy._since_check >= policy._check_after:
            break
        drive(policy, running, 1)
    else:
        pytest.fail("no check was due")
    running.append(sequence(4, scheduled=5))
    assert len(drive(policy, running, 300)) < 300 / 6


@pytest.mark.parametrize("rounds", range(4))
def test_a_check_ends_though_an_answer_ends_and_a_prompt_is_read_in_it(rounds):
    """After so many of its plain rounds, when checks are as far apart as they get. The next answer drafts, too."""
    policy, first = unhurried(1), sequence(0)
    for _ in range(1000):
        if policy._since_check >= policy._check_after == policy.CHECKS[1] and not policy._plan.rounds_left:
            break
        drive(policy, [first], 1)
    else:
        pytest.fail("no check was due")
    drive(policy, [first], rounds)
    policy.release(first)
    following = sequence(1, scheduled=5)
    one_round(policy, [following], lambda budgets: (0.0, 5e-3), accepts=lambda _: False)
    assert any(plan.budgets for plan in drive(policy, [following], 30))


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
