"""Rest: where the work for speculation does not pay, it is left out."""

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.draft import drafters
from forerun.speculate.draft.heads.base import FeatureDrafter
from forerun.speculate.draft.heads.layers import LayerDrafter
from forerun.speculate.length.base import Parts, Seconds, Setting
from forerun.speculate.length.rest import Rest
from forerun.speculate.names import policies
from simulated import Machine, play

METHODS = [name for name in drafters if issubclass(drafters[name], FeatureDrafter)]

DEAR = {"base": 6.0, "per_sequence": 0.0, "prices": (1.0, 1.05, 1.1, 1.5, 1.85, 2.2, 2.55, 2.9), "multiple": 1}
"""Four requests on a CPU: no drafted row pays, and following four texts takes a ninth of a round."""


@pytest.mark.parametrize(("rate", "looks_up"), [(0.0, False), (0.0, True), (0.9, False), (0.9, True)])
def test_following_costs_little_where_no_draft_can_pay(rate, looks_up):
    """Without rests these make 0.90."""
    costs = {"draft": 0.05, "per_level": 0.0, "per_token_behind": 0.0} if looks_up else {}
    machine = Machine(**DEAR, **costs, follows=0.25, keeps=0.01, looks_up=looks_up)
    runs = [play(machine, "adaptive", 4, lambda *_: rate, length=96, requests=60, seed=seed) for seed in range(2)]
    assert sum(run.plain_work for run in runs) / sum(run.work for run in runs) > 0.97


def test_the_next_process_rests_from_its_first_round():
    def speed(seed, kept=None):
        machine = Machine(**DEAR, follows=0.25, keeps=0.01)
        run = play(machine, "adaptive", 4, lambda *_: 0.0, length=48, requests=12, seed=seed, kept=kept)
        return run.plain_work / run.work, run.kept

    first, kept = zip(*[speed(seed) for seed in range(4)])
    second, _ = zip(*[speed(seed, kept[seed]) for seed in range(4)])
    assert min(second) > 0.98 > max(first)


@pytest.mark.parametrize("state", [[0, 1, 1.0], [0, 0, 1, -1.0], [0, 0, "x", 1.0], [0, float("nan"), 1, 1.0], None])
def test_what_is_no_state_of_a_rest_is_refused(state):
    with pytest.raises((TypeError, ValueError)):
        Rest().restore(state)


def told(rest, rounds, plain, price, seconds, host=0.0):
    for _ in range(rounds):
        rest.observe(plain, price, seconds, host)


def rounds_of_a_rest(seconds, found=False):
    """Where rounds with speculation take this many seconds, for the host's work, and others one."""
    rest, rounds = Rest(), 0
    told(rest, rest.BLOCK, 1.0, 1.0, seconds, seconds - 1.0)
    told(rest, rest.COLD + rest.CHECK, 1.0, 1.0, 1.0)
    while rest.resting:
        told(rest, 1, 1.0, 1.0, 1.0)
        rounds += 1
        if found and rounds % 8 == 0:
            told(rest, 1, 4.0, 2.0, 2.0)
    return rounds


def test_a_rest_is_longer_where_more_is_lost_and_ends_where_look_ups_find_something():
    assert rounds_of_a_rest(1.01) == 0
    assert 50 < rounds_of_a_rest(1.15) < rounds_of_a_rest(1.6) / 2
    assert rounds_of_a_rest(1.6, found=True) < rounds_of_a_rest(1.6) / 4


def test_what_an_earlier_process_found_free_is_soon_compared_again():
    rest = Rest()
    rest.restore([0.0, -0.1, 1, 1.1])
    told(rest, rest.BLOCK, 1.0, 1.0, 1.2, 0.2)
    told(rest, rest.COLD + rest.CHECK, 1.0, 1.0, 1.0)
    assert rest.extra > 0.05


def test_rounds_that_read_prompts_count_but_are_not_compared():
    """Many clients ask so often that few rounds read no prompt."""
    rest, rounds = Rest(), 0
    while not rest.resting:
        for _ in range(4):
            rest.skip()
        told(rest, 1, 1.0, 1.0, 1.5, 0.5)
        rounds += 5
    assert rounds < 3 * rest.BLOCK
    told(rest, rest.COLD + rest.CHECK, 1.0, 1.0, 1.0)
    assert rest.extra > 0.15


def test_look_ups_at_rest_are_priced_by_the_rows_of_all_who_look_up():
    """Each row costs as much as a plain one; half of what is looked up is accepted."""
    costs = {"base": 5.0, "per_sequence": 0.0, "multiple": 1, "prices": [0.5 + 0.5 * rows for rows in range(1, 60)]}
    machine = Machine(**costs, draft=0.05, per_level=0.0, per_token_behind=0.0, looks_up=True, follows=0.2, keeps=0.01)
    given = {"depth": 15, "length": 120, "requests": 32}
    kept = play(machine, "adaptive", 16, lambda *_: 0.5, **given).kept
    run = play(machine, "adaptive", 16, lambda *_: 0.5, **given, kept=kept)
    assert run.slowest() > 0.97


def test_rounds_in_which_nobody_may_draft_are_not_compared():
    policy, told = policies["adaptive"](Setting({"m": [0, 1, 2]})), []
    policy._rests[0].observe = lambda *round: told.append(round)
    sequence = RequestState(0, [0] * 9, 8, SamplingParams(max_tokens=99), seed=0, max_tokens=200, scheduled=1)
    sequence.num_computed_tokens = 8
    for drafter in ("m", None, None, "m"):
        sequence.drafter = drafter
        assert policy.longest_nodes(sequence) == (2 if drafter else 0)
        drafts = [Draft.chain([0] * budget) for budget in policy.budgets([sequence])]
        policy.observe([sequence], drafts, [Verdict(token=0, tokens=[0], fed=1)], Seconds(0.0, 1.0, 0.0))
        policy.observe_host(0.1)
    assert len(told) == 2


def test_most_rounds_at_rest_reserve_no_rows_and_look_nothing_up():
    policy, found = policies["adaptive"](Setting({"m": [0, 1, 2]}, parts={"m": Parts(("m",), None)})), []
    policy._rests[0].restore([0.5, 0.0, 1, 0.6])
    one = RequestState(0, [0] * 9, 8, SamplingParams(max_tokens=99), seed=0, max_tokens=200, drafter="m", scheduled=1)
    one.num_computed_tokens = 8
    for _ in range(32):
        one.draft_budget = None
        one.draft_budget = policy.longest_nodes(one)
        found.append((one.draft_budget, *policy.budgets([one])))
        policy.observe([one], [Draft()], [Verdict(token=0, tokens=[0], fed=1)], Seconds(0.0, 1.0, 0.0))
        policy.observe_host(0.0)
    assert found[8:] == 3 * [*[(0, 0)] * 7, (2, 2)]


def test_one_slow_round_is_not_what_work_costs():
    rest = Rest()
    told(rest, rest.BLOCK - 1, 1.0, 1.0, 1.0)
    told(rest, 1, 1.0, 1.0, 20.0)
    told(rest, rest.COLD + rest.CHECK, 1.0, 1.0, 1.0)
    assert not rest.resting
    assert rest.extra < 0.02


def test_nothing_is_compared_where_each_round_at_rest_verifies_a_draft():
    """As where a request brings its own prediction."""
    rest = Rest()
    told(rest, rest.BLOCK, 1.0, 1.0, 1.5)
    assert rest.resting
    told(rest, rest.COLD + rest.CHECK, 1.0, 1.2, 1.2)
    assert not rest.resting
    assert rest.extra == 0.0


def test_where_speculation_pays_it_is_compared_seldom_and_drafters_follow():
    rest, compared = Rest(), 0
    for _ in range(4000):
        compared += rest.resting
        rest.observe(*((1.0, 1.0, 1.0, 0.0) if rest.resting else (1.5, 1.0, 1.0, 0.0)))
    assert 0 < compared < 80
    rest.check()  # rounds with drafts have become slower
    told(rest, 1, 1.5, 1.0, 1.0)
    assert rest.resting


def test_it_rests_though_the_machine_is_at_times_twice_as_slow():
    """The work for speculation is 4 % of a round. Without rests these make 0.96."""
    costs = {**DEAR, "follows": 0.25, "keeps": 0.01}
    machine = Machine(**costs, jitter=0.08, slow=lambda at: (1.0, 2.0, 1.2, 1.0, 1.4)[int(2 * at) % 5])
    runs = [play(machine, "adaptive", 1, lambda *_: 0.2, depth=6, requests=60, seed=seed) for seed in range(8)]
    assert sum(run.plain_work for run in runs) / sum(run.work for run in runs) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("kept", [64, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_reads_what_it_missed_at_rest(method, temperature, kept, tiny_target, tmp_path, monkeypatch):
    """After a long rest it begins anew with the last tokens. The tokens are those of plain decoding."""
    monkeypatch.setattr(LayerDrafter, "UNREAD", kept)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    prompts = ["def foo(x): return x", "abcabcabcabc", "hello"]
    plain = [each.outputs[0].token_ids for each in LLM(tiny_target, speculative_config=None).generate(prompts, params)]
    config = {"method": method, **drafters[method].example(Path(tiny_target), tmp_path), "length": "fixed"}
    engine = LLM(tiny_target, speculative_config=config).engine
    jobs = [engine.add(engine.tokenizer.encode(text), params)[0] for text in prompts]
    budgets, drafted, unread = engine.policy.budgets, [], set()
    (drafter,) = engine.router.drafters.values()
    engine.policy.budgets = lambda all: [0 if len(drafted) % 12 >= 6 else budget for budget in budgets(all)]
    while engine.busy:
        engine.step()
        drafted.append(sum(job.metrics.num_draft_tokens for job in jobs))
        unread |= {0, *drafter.skipped.values()}
    assert [job.output_ids for job in jobs] == plain
    assert drafted[-1] > drafted[11] > 0
    assert not isinstance(drafter, LayerDrafter) or (max(unread) == 0) == (kept > 6)
    engine.check()
