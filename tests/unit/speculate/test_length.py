"""Length policies on a simulated machine: what they cost where drafting is useless, what they gain where it is not, and
what ``adaptive`` makes of a cold start, of an overdue check and of drafts that stop being accepted."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from math import exp, log

import pytest

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Shadow, Verdict, evidence
from forerun.speculate.length import Seconds, Setting
from forerun.speculate.length.acceptance import Drafting, Lookups
from forerun.speculate.length.adaptive import Adaptive, Plan
from forerun.speculate.length.base import Parts
from forerun.speculate.length.prices import Curve, Prices, PriceTable, Timed
from simulated import Machine, play

COUNTS = (1, 4, 8, 16)
LOOKUP = {"draft": 0.03, "per_level": 0.0, "per_draft_token": 0.005, "per_token_behind": 0.0, "looks_up": True}


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
    policy = Adaptive(Setting({"m": [0, 1, 2, 3]}, row_multiple, trials=lambda sequences: timed(Machine(**LOOKUP), 0)))
    policy.clock = policy.prices.clock = lambda: 0.0
    return policy


def sequence(key, scheduled=1):
    made = RequestState(key, [0] * 9, 8, SamplingParams(), 0, max_tokens=99999, drafter="m", scheduled=scheduled)
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
    policy.observe_host(0.0)
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
    {"draft": 0.0, "per_level": 0.0, "per_draft_token": 0.04, "per_token_behind": 0.0, "looks_up": True},
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
def test_a_first_draft_that_fails_is_not_the_last():
    """Rows and drafts are so dear that no draft is expected to pay after it. The first drafted token is wrong."""
    dear = Machine(draft=1.6, per_level=0.2, host=0.1, jitter=0.06, multiple=1, prices=(1.0, 1.2, 1.3, 1.35))
    answer = partial(play, dear, "adaptive", 1, lambda _, position: 0.85 * (position > 1))
    runs = [answer(depth=3, length=128, requests=1, seed=seed) for seed in range(40)]
    assert sum(run.plain_work / run.work > 1.05 for run in runs) >= 30


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

    def verify(self, sequences, rows, context=0.0):
        deep = rows > 2 * sequences
        self.cold -= deep
        return super().verify(sequences, rows, context) * (3.0 if deep and self.cold >= 0 else 1.0)


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

    result = play(Machine(**LOOKUP, multiple=1), "adaptive", count, accepts, length=long)
    drafted, emitted = {"first": [], "useless": [], "last": []}, 0
    for nodes, tokens in zip(result.drafted, result.emitted):
        done = emitted / count / long
        emitted += tokens
        part = "first" if done < 0.3 else "useless" if 0.5 < done < 0.65 else "last" if 0.85 < done < 0.98 else None
        if part is not None:
            drafted[part].append(nodes)
    means = {part: sum(nodes) / len(nodes) / count for part, nodes in drafted.items()}
    assert means["useless"] < 0.5 < 1.5 < min(means["first"], means["last"])


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
    assert not any(learnt.own for learnt in policy.drafting.values())


XEON = {
    "base": 3.2, "per_sequence": 0.0, "prices": (1.0, 1.15, 1.45, 1.62, 1.84), "draft": 0.3, "per_level": 0.4,
    "per_draft_token": 0.0, "per_token_behind": 0.0, "multiple": 1,
}  # fmt: skip
"""SmolLM2 and its head on two threads of an Intel Xeon with AMX, as measured."""


@contextmanager
def timed(machine, seed, clock=None):
    """A busy machine: disturbances multiply what a round takes, for some rounds or for one."""
    draw, clock = random.Random(seed), clock or [0.0]

    def time_round(method, depth, rows, long=False):
        slow = machine.disturb(draw, clock[0])
        parts = machine.drafting(1, depth, 0) if depth else 1e-6, machine.verify(1, rows, 1000 * long)
        clock[0] += slow * sum(parts)
        return Timed(rows, depth, slow * parts[0], slow * parts[1], context=1000 * long)

    yield time_round, {"m": 0.001}


@pytest.mark.parametrize("seed", range(4))
def test_prices_are_measured_as_they_are(seed):
    machine = Machine(**XEON, slow=busy, spikes=0.05, per_context=(1e-3, 4e-4))
    prices = Prices({"m": [0, 1, 2, 3, 4]}, trials=lambda sequences: timed(machine, seed), clock=lambda: 0.0)
    table = prices.at(1)
    for rows in range(1, 6):
        for context in (0, 4000):
            price = prices.verify(prices.at(1, 64 + context), rows, 1)
            assert price == pytest.approx(machine.verify(1, rows, context), rel=0.08)
    for depth in (1, 2, 4):
        assert prices.draft(table, "m", depth) == pytest.approx(machine.drafting(1, depth, 0), rel=0.08)
    other = Prices({"m": [0, 1, 2, 3, 4]})
    other.restore(json.loads(json.dumps(prices.state())))
    assert (other.at(1).verify.points, other.at(1).read) == (table.verify.points, table.read)


@pytest.mark.parametrize(("base", "least", "most"), [(0.4, 0.2, 0.5), (3.2, 0.4, 0.8), (32.0, 1.6, 3.2)])
def test_measuring_takes_half_a_second_to_three_seconds(base, least, most, prices_as_delivered):
    machine, clock = Machine(**XEON | {"base": base, "draft": 0.1 * base, "per_level": 0.1 * base}), [0.0]
    Prices({"m": [0, 1, 2]}, trials=lambda _: timed(machine, 0, clock), clock=lambda: clock[0]).at(1)
    assert least < clock[0] < most


def test_prices_that_have_changed_are_corrected():
    """Three rows cost 1.45 plain rounds where they cost 1.1 before, and the whole machine is slower, too."""
    machine = Machine(**XEON | {"prices": (1.0, 1.05, 1.1)})
    prices = Prices({"m": [0, 1, 2]}, trials=lambda sequences: timed(machine, 0), clock=lambda: 0.0)
    table = prices.at(1)
    for _ in range(60):
        for _ in range(6):
            prices.observe(table, 1, 3, 1.5 * 3.2e-3 * 1.45, 0, True)
        for streak in range(4):
            prices.observe(table, 1, 1, 1.5 * 3.2e-3, 0, streak > 1)
    assert prices.verify(table, 3, 1) / prices.verify(table, 1, 1) == pytest.approx(1.45, rel=0.03)
    assert table.level == pytest.approx(1.5, rel=0.1)
    assert not prices.state(), "the next engine measures anew"


@pytest.mark.parametrize("kept", [False, True])
def test_guessed_and_kept_prices_are_soon_corrected(kept):
    prices = Prices({"m": [0, 1, 2]})
    table = prices.at(1)
    if kept:
        prices.restore(json.loads(json.dumps([[0, 1, table.state()]])))
        table = prices.at(1)
    assert prices.verify(table, 3, 1) > prices.verify(table, 1, 1) > prices.draft(table, "m", 2) > 0.0
    for number in range(16):  # drafts are corrected by the first four
        assert table.unchecked == max(0, prices.UNCHECKED - number)
        prices.observe(table, 1, 3, 1.3, 0, warm=False)
        prices.observe_draft(table, "m", 2, 3, seconds=0.4 if number < prices.UNCHECKED else 0.2)
        for _ in range(2):
            prices.observe(table, 1, 1, 1.0, 0, warm=True)
    assert prices.verify(table, 3, 1) == pytest.approx(1.3, rel=0.02)
    known = PriceTable.of(json.loads(json.dumps(table.state())))  # the next process begins with what was found
    assert [prices.draft(each, "m", 2) for each in (known, table)] == pytest.approx([0.16 * 0.4 / 0.28] * 2, rel=0.05)
    assert prices.verify(known, 17, 1) == pytest.approx(prices.verify(table, 17, 1)) != table.verify(17)


@pytest.mark.parametrize(("rounds", "drafts", "busy", "measured"), [
    ([40], 20, False, 1), ([40], 0, False, 3), ([9], 0, False, 1), ([40, 9], 0, False, 3), ([40], 20, True, 6),
])  # fmt: skip
def test_prices_of_a_busy_minute_or_by_which_nobody_drafts_are_measured_again(rounds, drafts, busy, measured):
    state, asked = ([], 0), []
    given = {"trials": lambda _: asked.append(0) or timed(Machine(**XEON), 0), "clock": lambda: 0.0}
    for many in rounds * (6 // len(rounds)):
        prices = Prices({"m": [0, 1]}, **given, busy=lambda: busy)
        prices.restore(*json.loads(json.dumps(state)))
        for number in range(many):
            table, rows = prices.at(1), 1 + (number < drafts)
            prices.observe(table, 1, rows, prices.verify(table, rows, 1), 0, warm=True)
        state = prices.state(), prices.vain
    assert len(asked) == measured


def test_plain_rounds_behind_a_jump_of_the_machine_say_little():
    prices = Prices({"m": [0, 1, 2]})
    table = prices.at(1)
    for level in (*[1.0] * 8, 1.5):
        prices.observe(table, 1, 3, 1.3, 0, warm=False)
        for _ in range(2):
            prices.observe(table, 1, 1, level, 0, warm=True)
    assert prices.verify(table, 3, 1) == pytest.approx(1.3, rel=0.1)


def test_a_curve_never_falls_and_goes_on_beyond_its_ends():
    curve = Curve({1: 1.0, 2: 1.4, 4: 1.2, 8: 2.0})
    assert [curve(n) for n in (0.5, 1, 2, 4, 6, 8, 10)] == pytest.approx([1.0, 1.0, 1.2, 1.2, 1.6, 2.0, 2.4])
    assert Curve({3: 2.0})(7) == 2.0
    disturbed = Curve({1: 1.0, 8: 3.0, 14: 5.9, 16: 5.0})
    assert [disturbed(n) for n in (14, 16, 24)] == pytest.approx([5.0, 5.0, 7.0])


SMOLLM2 = (1.0, 1.02, 1.2, 1.37, 1.8, 2.1, 2.5, 2.85, 3.05, 3.6, 3.95, 4.3, 4.65, 5.0, 5.35, 5.7)
"""Rows of SmolLM2 on two threads of a Zen 3, over one row: eight are computed as fast as their weights are read."""


@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.parametrize(("room", "least"), [(99, 0.98), (1, 0.97), (0, 0.85)])
def test_look_ups_of_a_full_batch_cost_little_where_each_row_is_dear(count, room, least):
    """With ``room`` for so many requests while prices are measured. Half of the tokens would be accepted."""
    costs = {"base": 5.0, "per_sequence": 0.0, "multiple": 1, "jitter": 0.1, "prices": SMOLLM2, "room": room}
    for seed in range(3):
        machine = Machine(**LOOKUP | costs)
        run = play(machine, "adaptive", count, lambda *_: 0.5, depth=15, length=120, requests=3 * count, seed=seed)
        assert run.slowest() > least


def looks_up_on(machine):
    parts = {"look": Parts(("look",), None)}
    policy = Adaptive(Setting({"look": [0, 1, 2, 3, 4]}, parts=parts, trials=lambda sequences: timed(machine, 0)))
    policy.prices.clock = lambda: 0.0
    return policy


def looked_up(policy, tokens, kinds):
    """What of a looked-up chain is verified."""
    one = sequence(0)
    one.drafter, one.scheduled, one.num_computed_tokens = "look", 1, len(one.tokens) - 1
    policy.budgets([one])
    draft = Draft.chain(tokens)
    draft.method, draft.evidence = "look", kinds
    return one, draft.cut(one.worth(draft))


@pytest.mark.parametrize(("prices", "least", "most"), [((1.0, 1.01, 1.02, 1.03, 1.04), 3, 4), ((1.0, 1.9, 2.8), 0, 0)])
def test_a_looked_up_chain_is_verified_as_far_as_its_rows_pay(prices, least, most):
    policy = looks_up_on(Machine(**XEON | {"prices": prices}))
    _, draft = looked_up(policy, [5, 6, 7, 8], [evidence(2, 0.5)] * 4)
    assert least <= len(draft) <= most
    assert most or draft.shadow == Shadow("look", 0, 5, evidence(2, 0.5))


def test_what_is_not_verified_is_learnt_from_all_the_same():
    """Each look-up is right, and rows are too dear for it at first; then it is known to be always right."""
    machine = Machine(**XEON | {"prices": (1.0, 1.55, 2.1)})
    policy = looks_up_on(machine)
    kinds, lengths = [evidence(1, 0.5)] * 4, []
    for _ in range(60):
        one, draft = looked_up(policy, [5, 5, 5, 5], kinds)
        lengths.append(len(draft))
        verdict = Verdict([*range(len(draft))], 5, tokens=[5] * (len(draft) + 1), fed=1)
        policy.observe([one], [draft], [verdict], Seconds(1e-5, machine.verify(1, 1 + len(draft)), 0.0))
    assert lengths[0] == 0 < min(lengths[-10:])


@pytest.fixture
def steady(monkeypatch):
    """Requests are alike, so that estimates come close to the true rates."""
    monkeypatch.setattr(Drafting, "OWN", 0.0)
    monkeypatch.setattr(Drafting, "LENGTHS", 0.01)


def learn(drafting, requests, drafts, budget):
    """Each request makes all ``drafts``, of which (length, accepted tokens) are given."""
    for number in range(requests):
        one = sequence(number)
        for made, kept in drafts:
            drafting.count(one, budget, Draft.chain([0] * made), [*range(kept)])
        drafting.release(one.id)


def rates(drafting, one, depth):
    """By depth, the chance that a token is accepted if all before it are."""
    chances = [1.0, *drafting.expected(one)[:depth]]
    return [here / before for before, here in pairwise(chances)]


@pytest.mark.usefixtures("steady")
def test_acceptance_by_depth():
    drafting = Drafting(3, 0.6, 3.0, 24.0, 3.0)
    assert rates(drafting, sequence(0), 1) == pytest.approx([0.6], abs=0.01)
    learn(drafting, 500, [(1, 0), (1, 0), (3, 3), (0, 0)], 3)
    first, second, third = rates(drafting, sequence(0), 3)
    assert first == pytest.approx(0.25, abs=0.03)
    assert min(second, third) > 0.85
    assert drafting.exists == pytest.approx([0.75, 0.25, 0.25], abs=0.05)


@pytest.mark.usefixtures("steady")
def test_deep_positions_are_worth_what_they_bring_though_most_drafts_are_short():
    """A drafter that copies: of four drafts two are one token, and wrong, one has four tokens that are all right, and
    one time there is nothing to copy. Each depth of the long one brings a quarter of a token."""
    drafting = Drafting(4, 0.6, 3.0, 24.0, 3.0)
    learn(drafting, 200, [(1, 0), (1, 0), (4, 4), (0, 0)], 4)
    assert drafting.expected(sequence(0)) == pytest.approx([0.25] * 4, rel=0.06)


@pytest.mark.usefixtures("steady")
def test_a_token_beside_the_last_one_helps_only_drafts_that_may_be_longer():
    """Of four drafts that may have two tokens, two end after one that is wrong, once with the right token beside it."""
    drafting, one = Drafting(2, 0.6, 3.0, 24.0, 3.0), sequence(0)
    short = Draft.tree([5, 6], [-1, -1])
    for _ in range(200):
        for draft, path in ((short, [1]), (short, []), (Draft.chain([5, 6]), [0]), (Draft.chain([5, 6]), [])):
            drafting.count(one, 2, draft, path)
    assert rates(drafting, one, 1) == pytest.approx([0.25], abs=0.03)
    assert [drafting.early(1), drafting.early(2)] == pytest.approx([0.0, 0.5], abs=0.05)
    assert drafting.beside == pytest.approx([1.0, 0.5], abs=0.05)


def test_short_answers_of_earlier_processes_do_not_end_drafts_for_good():
    """Each of them drafts once, in vain."""
    drafting = Drafting(3, 0.7, 8.0, 24.0, 3.0)
    for _ in range(20):
        learn(drafting, 1, [(3, 0)], 3)
        state, drafting = drafting.state(), Drafting(3, 0.7, 8.0, 24.0, 3.0)
        drafting.restore(state)
    assert rates(drafting, sequence(0), 1)[0] > 0.6


@pytest.mark.parametrize("reads", [True, False])
def test_a_round_in_which_a_drafter_only_read_teaches_nothing_of_its_drafts(reads):
    """Of five rounds three had no draft: it read a long prompt, or found nothing to draft. All drafts are accepted."""
    policy, one = Adaptive(Setting({"m": [0, 1, 2, 3]}, backlog=lambda one: behind)), sequence(0)
    one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
    for missing in (30, 20, 10, 0, 0) * 6:
        behind = missing + 10 if reads else 1
        policy._plan = Plan({one.id: 2}, sequences=frozenset([one.id]), rounds_left=9)
        drafted = policy.budgets([one])[0] * (not missing)
        behind = missing + 1 if reads else 2
        verdict = Verdict([*range(drafted)], 0, tokens=[0] * (drafted + 1), fed=1, tested=drafted)
        policy.observe([one], [Draft.chain([0] * drafted)], [verdict], Seconds(1e-3, 1e-2, 0.0))
    assert (policy._drafting(one).expected(one)[0] > 0.7) == reads


def test_a_sequence_moves_what_is_expected_of_its_method():
    drafting, one, other = Drafting(2, 0.5, 3.0, 24.0, 3.0), sequence(0), sequence(1)
    assert rates(drafting, one, 2) == pytest.approx([0.5, 0.5], abs=0.04)
    for _ in range(40):
        drafting.count(one, 2, Draft.chain([0, 0]), [0, 1])
    assert min(rates(drafting, one, 2)) > 0.75
    assert rates(drafting, one, 1) > rates(drafting, other, 1)
    for _ in range(80):
        drafting.count(one, 2, Draft.chain([0, 0]), [])
    assert rates(drafting, one, 1)[0] < 0.3
    assert rates(drafting, one, 1) < rates(drafting, other, 1)
    for _ in range(2000):  # tokens without drafts
        drafting.forget(one.id)
    assert rates(drafting, one, 2) == pytest.approx(rates(drafting, other, 2), abs=0.01)
    assert drafting.own[one.id][1] == pytest.approx(drafting.OWN, rel=0.01)
    drafting.release(one.id)
    assert rates(drafting, one, 2) == rates(drafting, other, 2)


def test_answers_without_drafts_bring_back_what_was_expected_at_first():
    drafting, one = Drafting(2, 0.7, 8.0, 24.0, 3.0), sequence(0)
    first = drafting.expected(one)
    learn(drafting, 4, [(2, 0)] * 20, 2)
    assert drafting.expected(one)[0] < 0.2
    for _ in range(40):
        drafting.release(one.id)
    assert drafting.expected(one) == pytest.approx(first, abs=0.01)


def test_what_an_earlier_build_has_kept_is_ignored():
    policy, one = unhurried(1), sequence(0)
    for _ in range(40):
        one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
        one_round(policy, [one], as_on(Machine(**LOOKUP)))
    policy.release(one)
    policy._lookup("m", samples=False)
    state = json.loads(json.dumps(policy.state()))
    same = unhurried(1)
    same.restore(state)
    chances = [each._chances(sequence(1))[0] for each in (unhurried(1), same, policy)]
    first, kept, learnt = [log(chance / (1.0 - chance)) for chance in chances]
    assert kept == pytest.approx(0.5 * (first + learnt), abs=0.02)
    assert learnt > first + 1.0
    assert same.state() is not None
    without = [{key: value for key, value in state.items() if key != gone} for gone in state]
    price = json.loads(json.dumps(state["prices"]))
    del price[0][2]["attention"]
    deeper = [["m", False, [[[0.0, 1.0]] * 9, [1.0] * 9, [0.0, 0.0]]]]
    for other in (*without, {**state, "prices": price}, {**state, "drafting": deeper}, [], None):
        fresh = unhurried(1)
        fresh.restore(other)
        assert not any([fresh.drafting, fresh.lookups, fresh.lengths.seen, fresh.state()])


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


@pytest.mark.parametrize(("short", "least"), [(1.0, 0.93), (0.75, 1.45), (0.0, 1.5)])
def test_a_draft_reads_no_prompt_for_an_answer_that_ends_soon(short, least):
    """Of a share of the answers, only three tokens come. To read one of the prompts takes as long as six tokens do."""
    draw = random.Random(0)
    lengths = [3 if draw.random() < short else 120 for _ in range(60)]
    result = play(Machine(**PAIR), "adaptive", 1, lambda *_: 0.9, requests=60, prompt=200, length=256, depth=7,
                  ends=lengths.__getitem__)  # fmt: skip
    assert result.plain_work / result.work > least


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


def test_drafts_go_on_after_rounds_for_which_no_rows_were_reserved():
    """The scheduler reserves what the plan says, so that nothing can be drafted until the next plan."""
    policy, given = unhurried(1), []
    policy.clock = partial(next, count(0.0, 1e-4))  # plans cost something, so that each holds for several rounds
    one = sequence(0)
    for _ in range(4500):
        one.scheduled, one.num_computed_tokens = 1, len(one.tokens) - 1
        one.draft_budget = None
        one.draft_budget = policy.longest_nodes(one)
        given += one_round(policy, [one], as_on(Machine(**LOOKUP)))
    late = given[200:]
    assert sum(budget == 0 for budget in late) > 3, "prices are checked"
    assert sum(late) > 2.5 * len(late)


def test_counts_that_cannot_be_are_refused():
    made = Lookups()
    tried, kept = made.state()
    for bad in (0.0, float("nan"), -1.0):
        with pytest.raises(ValueError, match="no counts"):
            made.restore(([bad, *tried[1:]], kept))
    made.restore((tried, kept))
    assert made.state() == (tried, kept)
