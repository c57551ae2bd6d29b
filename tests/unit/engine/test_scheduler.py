"""The scheduler against an account of rows, pages and turns; no tensors."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forerun.cache.pool import Pages
from forerun.cache.prefix import PrefixTree
from forerun.core.errors import RequestError
from forerun.core.request import RequestState
from forerun.engine.scheduler import LONGEST_WAIT, PATIENCE, PrefillBudget, Scheduler
from refusals import refused

PARAMS = SimpleNamespace()


def sequence(key, prompt, output=4, priority=0, tokens=None):
    made = RequestState(key, tokens or [key] * prompt, prompt, PARAMS, seed=0, max_tokens=prompt + output)
    made.priority = priority
    return made


class Rounds:
    """Plays the part of the round: feeds what was scheduled, and answers like a model that always says ``key + 1``
    and accepts as much of a draft as it is told to."""

    def __init__(self, scheduler, prompt_token=0.1):
        self.scheduler = scheduler
        self.prompt_token = prompt_token
        """Seconds; a round takes one without."""
        self.done = []

    def step(self, accepted=lambda sequence: 0):
        pool = self.scheduler.pool
        chosen = self.scheduler.schedule()
        for one in chosen:
            end = one.num_computed_tokens + one.scheduled + (one.draft_budget or 0)
            pool.reserve(one.id, end)
            pool.advance(one.id, end)
            emitted = 0
            if one.decodes:
                emitted = 1 + min(accepted(one), one.draft_budget or 0, one.remaining - 1)
            one.num_computed_tokens += one.scheduled + max(0, emitted - 1)
            pool.truncate(one.id, one.num_computed_tokens)
            one.tokens.extend([one.id + 1] * emitted)
        for one in chosen:
            if one.remaining == 0:
                self.scheduler.remove(one)
                self.done.append(one)
        read = sum(one.scheduled for one in chosen if one.scheduled > 1 or one.num_output == 1)
        self.scheduler.observe(1.0 + self.prompt_token * read)
        return chosen

    def finish(self, limit):
        """Step until idle, in at most ``limit`` rounds."""
        for _ in range(limit):
            if not self.scheduler.busy:
                return
            assert self.step(), "the scheduler is busy and schedules nobody"
        raise AssertionError(f"not done after {limit} rounds")


class SchedulerMachine(RuleBasedStateMachine):
    """Random adds, rounds, cancels and pauses on a pool that is too small for all."""

    @initialize(
        page_size=st.integers(1, 4),
        num_pages=st.integers(5, 12),
        seqs=st.integers(2, 6),
        rows=st.integers(6, 20),
        prefill=st.sampled_from([None, 1, 3, 50]),
        shared=st.booleans(),
        nodes=st.integers(0, 4),
        first=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 16), st.integers(0, 1)), min_size=2, max_size=6),
    )
    def start(self, page_size, num_pages, seqs, rows, prefill, shared, nodes, first):
        self.pool = Pages(num_pages, page_size)
        self.nodes = nodes
        self.admitted = {}
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=seqs, max_num_batched_tokens=rows, draft_rows=self.draft_rows,
            prefill_budget=PrefillBudget(prefill), tree=PrefixTree(self.pool) if shared else None,
            on_admit=lambda one, reused: self.admitted.__setitem__(one.id, reused), on_preempt=self.preempted,
        )  # fmt: skip
        self.rounds = Rounds(self.scheduler)
        self.alive = {}
        self.paused = []
        self.victims = []
        self.keys = 0
        for prompt, output, like in first:
            self.add_one(prompt, output, 0, like)

    def draft_rows(self, one):
        return min(self.nodes, one.remaining - 1) if one.decodes else 0

    def preempted(self, victim):
        assert all(victim.rank >= other.rank for other in self.scheduler.running)
        self.victims.append(victim)

    @rule(prompt=st.integers(1, 9), output=st.integers(1, 16), priority=st.integers(-1, 1), like=st.integers(0, 1))
    def add(self, prompt, output, priority, like):
        for _ in range(2):
            self.add_one(prompt, output, priority, like)

    def add_one(self, prompt, output, priority, like):
        self.keys += 1
        one = sequence(self.keys, prompt, output, priority, tokens=[like] * prompt)
        if self.pool.pages_for(prompt + output) > self.pool.num_pages:
            refused(RequestError, "tokens of KV cache", self.scheduler.add, one)
        else:
            self.scheduler.add(one)
            self.alive[one.id] = one

    @rule(accepts=st.lists(st.integers(0, 4), min_size=1, max_size=8))
    def rounds_go_by(self, accepts):
        for accepted in accepts:
            self.round(accepted)
            self.pages_are_accounted_for()

    def round(self, accepts):
        self.victims.clear()
        waiting = [one.id for one in self.scheduler.waiting]
        tokens = {key: len(one.tokens) for key, one in self.alive.items()}
        cached = {one.id: one.num_computed_tokens for one in self.scheduler.running}
        chosen = self.rounds.step(lambda one: accepts)
        self.check_rows(chosen, tokens, cached)
        self.check_turns(chosen, waiting)
        for one in self.rounds.done:
            self.alive.pop(one.id, None)

    def check_rows(self, chosen, tokens, cached):
        """Everyone who lacked one token got it, whatever else there was; the budget held."""
        assert len({one.id for one in chosen}) == len(chosen)
        used = 0
        victims = {one.id for one in self.victims}
        for one in chosen:
            used += one.scheduled + (one.draft_budget or 0)
            assert one.scheduled >= 1
            assert 0 <= (one.draft_budget or 0) <= self.nodes
        assert used <= self.scheduler.max_num_batched_tokens
        decoding = {key for key, count in cached.items() if tokens[key] == count + 1 and tokens[key] > 1} - victims
        started = {key for key in decoding if tokens[key] > self.alive[key].num_prompt}
        assert started <= {one.id for one in chosen}
        if not started and (self.scheduler.running or cached):
            assert chosen

    def check_turns(self, chosen, waiting):
        """Nobody is admitted past someone who has waited in front."""
        admitted = [key for key in waiting if key not in [one.id for one in self.scheduler.waiting]]
        assert admitted == waiting[: len(admitted)] or self.victims
        ranks = [one.rank for one in self.scheduler.running]
        assert ranks == sorted(ranks)
        assert len(ranks) <= self.scheduler.max_num_seqs

    @rule(data=st.data())
    def cancel(self, data):
        if self.alive:
            key = data.draw(st.sampled_from(sorted(self.alive)))
            one = self.alive.pop(key)
            if one in self.paused:
                self.paused.remove(one)
            self.scheduler.remove(one)
            assert key not in self.pool.block_tables

    @rule(data=st.data())
    def pause(self, data):
        if self.alive:
            one = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
            if one not in self.paused:
                self.scheduler.remove(one)
                one.num_computed_tokens = one.scheduled = 0
                self.paused.append(one)

    @rule()
    def resume(self):
        if self.paused:
            self.scheduler.add(self.paused.pop())

    @invariant()
    def pages_are_accounted_for(self):
        self.pool.check()
        running = {one.id: one for one in self.scheduler.running}
        assert set(self.pool.block_tables) <= set(running)
        for key, one in running.items():
            assert self.pool.length(key) == one.num_computed_tokens <= len(one.tokens)
            assert self.admitted[key] <= len(one.tokens) - 1
        assert all(one.num_computed_tokens == 0 for one in self.scheduler.waiting)

    def teardown(self):
        """Whatever happened, everyone's turn comes, and nothing is left."""
        if not hasattr(self, "pool"):
            return
        while self.paused:
            self.resume()
        todo = sum(2 * len(one.tokens) + 2 * one.remaining for one in self.alive.values())
        self.rounds.finish(limit=20 + 4 * todo)
        assert not self.pool.block_tables
        assert self.pool.num_free + self.pool.num_evictable == self.pool.num_pages
        self.pool.check()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def make(num_pages=100, page_size=4, **options):
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    scheduler = Scheduler(Pages(num_pages, page_size), **given)
    return scheduler, Rounds(scheduler)


def test_a_long_prompt_does_not_stop_the_others():
    scheduler, rounds = make(prefill_budget=PrefillBudget(8), draft_rows=lambda one: min(3, one.remaining - 1))
    for key in (1, 2):
        scheduler.add(sequence(key, 5, output=60))
    rounds.step()
    scheduler.add(sequence(3, 50))
    for _ in range(6):
        chosen = {one.id: (one.scheduled, one.draft_budget) for one in scheduler.schedule()}
        assert chosen == {1: (1, 3), 2: (1, 3), 3: (8, 0)}
        scheduler.running[-1].num_computed_tokens += 8
        scheduler.pool.advance(3, scheduler.running[-1].num_computed_tokens)
    assert [one.scheduled for one in scheduler.schedule()] == [1, 1, 2]


def test_without_others_a_prompt_gets_every_row():
    scheduler, rounds = make(prefill_budget=PrefillBudget(8))
    for key, prompt in ((1, 64), (2, 5)):
        scheduler.add(sequence(key, prompt))
    assert [one.scheduled for one in rounds.step()] == [64]
    assert [one.id for one in scheduler.waiting] == [2]


@pytest.mark.parametrize(("source", "rows", "steps", "running"), [(None, 12, 2, [1]), ((5,), 64, 1, [1, 2])])
def test_a_prompt_waits_for_who_reads_the_same(source, rows, steps, running):
    pool, reused = Pages(20, 4), {}
    scheduler = Scheduler(
        pool, max_num_seqs=2, max_num_batched_tokens=rows, tree=PrefixTree(pool),
        on_admit=lambda one, count: reused.__setitem__(one.id, count),
    )  # fmt: skip
    rounds = Rounds(scheduler)
    for key in (1, 2):
        scheduler.add(sequence(key, 17, tokens=[*range(17)]))
    scheduler.waiting[1].source = source
    for _ in range(steps):
        rounds.step()
    assert [one.id for one in scheduler.running] == running
    rounds.finish(20)
    assert reused == {1: 0, 2: 0 if source else 16}


def test_a_round_tells_how_deep_its_prompt_tokens_are(monkeypatch):
    told = []
    monkeypatch.setattr(
        PrefillBudget, "observe", lambda self, rows, tokens, seconds, depth: told.append((rows, tokens, depth))
    )
    scheduler, rounds = make(prefill_budget=PrefillBudget(8))
    scheduler.add(sequence(1, 2, output=20))
    rounds.step()
    for key, prompt in ((2, 12), (3, 30)):
        scheduler.add(sequence(key, prompt))
    for _ in range(3):
        rounds.step()
    assert told[1:] == [(1, 8, 4.0), (1, 8, 6.0), (2, 8, 8.0)]


def test_a_request_drafts_for_its_own_rows_only():
    """Four requests on 20 rows: 1 + 3 for those who draft, 1 for who does not, 1 near its end."""
    drafts = {1: 3, 2: 0, 3: 3, 4: 3}
    scheduler, rounds = make(
        max_num_batched_tokens=12, draft_rows=lambda one: min(drafts[one.id], one.remaining - 1) if one.decodes else 0
    )
    for key in drafts:
        scheduler.add(sequence(key, 1, output=3 if key == 4 else 20))
    rounds.step()
    assert {one.id: one.draft_budget for one in rounds.step()} == {1: 3, 2: 0, 3: 3, 4: 1}


@pytest.mark.parametrize(("rows", "drafts"), [(8, {1: 3, 2: 0, 3: 0}), (9, {1: 3, 2: 3, 3: 0})])
def test_drafts_share_the_rows_that_are_left(rows, drafts):
    """8 rows, three decoding: 5 are left for drafts of 3, so one of them drafts."""
    scheduler, rounds = make(max_num_batched_tokens=rows, draft_rows=lambda one: 3)
    for key in (1, 2, 3):
        scheduler.add(sequence(key, 2, output=20))
    rounds.step()
    assert {one.id: one.draft_budget for one in rounds.step()} == drafts


def test_drafts_leave_some_rows_to_prompts():
    scheduler, rounds = make(max_num_batched_tokens=8, prefill_budget=PrefillBudget(50), draft_rows=lambda one: 3)
    for key in (1, 2):
        scheduler.add(sequence(key, 2, output=20))
    rounds.step()
    scheduler.add(sequence(3, 30))
    assert [one.scheduled for one in rounds.step()] == [1, 1, 6]


def test_a_prefix_that_ends_inside_a_page_never_blocks_a_request():
    """Reusing the page takes a copy of it, for which there is no page: it is read again instead."""
    pool = Pages(4, 4)
    scheduler = Scheduler(pool, max_num_seqs=2, max_num_batched_tokens=64, tree=PrefixTree(pool))
    rounds = Rounds(scheduler)
    scheduler.add(sequence(1, 13, output=3, tokens=list(range(100, 113))))
    rounds.finish(10)
    assert pool.num_evictable == 3
    scheduler.add(sequence(2, 13, output=3, tokens=[*range(100, 111), 7, 7]))
    rounds.finish(10)
    assert [one.id for one in rounds.done] == [1, 2]


def test_a_draft_without_pages_becomes_plain_decoding():
    scheduler, rounds = make(num_pages=2, draft_rows=lambda one: 3 if one.decodes else 0)
    scheduler.add(sequence(1, 4, output=4))
    rounds.step()
    assert [one.draft_budget for one in rounds.step()] == [3]
    assert [one.draft_budget for one in rounds.step()] == [0]
    rounds.finish(10)


def test_low_priority_waits_but_not_for_ever():
    """A stream of urgent requests, one per round: the patient one is served after ``PATIENCE`` rounds at most."""
    scheduler, rounds = make(max_num_seqs=1)
    patient = sequence(0, 2, output=2, priority=1)
    scheduler.add(patient)
    for key in range(1, 2 * PATIENCE):
        scheduler.add(sequence(key, 2, output=2))
        rounds.step()
        if patient in rounds.done:
            break
    assert PATIENCE < scheduler.clock < 2.1 * PATIENCE
    assert len(rounds.done) > PATIENCE / 2.1


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(0, -1000), (1000, -1000), (10**9, -(10**9)), (0, -(10**400))],
    ids=["0 and -1000", "1000 and -1000", "billions", "beyond floats"],
)
def test_no_priority_keeps_a_request_waiting_for_ever(mine, theirs):
    """More urgent newcomers than can be served, as many as a bounded queue takes: whoever waits is served once those
    are who came in time, all differences of priority notwithstanding."""
    scheduler, rounds = make(max_num_seqs=2)
    scheduler.add(sequence(0, 2, output=2, priority=theirs))
    patient = sequence(1, 2, output=2, priority=mine)
    scheduler.add(patient)
    for key in range(2, 10 * LONGEST_WAIT):
        if len(scheduler.waiting) < 9:
            scheduler.add(sequence(key, 2, output=2, priority=theirs))
        rounds.step()
        if patient in rounds.done:
            break
    assert patient in rounds.done
    expected = LONGEST_WAIT * (2 if mine else 1)
    assert 0.95 * expected < scheduler.clock < expected + 20


def test_lower_priority_goes_first_however_large():
    values = [10**400, 0, 1, 1000, 999, -1, 10, 20, -1000, -(10**9), -20]
    scheduler, rounds = make(max_num_seqs=1)
    for key, value in enumerate(values):
        scheduler.add(sequence(key, 2, output=1, priority=value))
    rounds.finish(100)
    assert [one.priority for one in rounds.done] == sorted(values)


@pytest.mark.parametrize(("priorities", "order"), [((1, 0, -1), [3, 2, 1]), ((0, 0, 0), [1, 2, 3])])
def test_urgent_and_early_requests_are_admitted_first_and_preempted_last(priorities, order):
    scheduler, rounds = make(num_pages=6, max_num_seqs=2)
    for key, priority in enumerate(priorities, start=1):
        scheduler.add(sequence(key, 8, output=12, priority=priority))
    rounds.step()
    assert [one.id for one in scheduler.running] == order[:2]
    while len(scheduler.running) == 2:
        rounds.step()
        assert [one.id for one in scheduler.running] == order[: len(scheduler.running)]
    assert [one.id for one in scheduler.waiting] == order[1:]
    rounds.finish(200)
    assert [one.id for one in rounds.done] == order


@pytest.mark.parametrize(("decoding", "prompts", "tokens"), [(7, 1, 4), (7, 2, 4), (4, 2, 8), (2, 2, 16), (1, 6, 16)])
def test_where_prompt_tokens_are_dear_the_fewer_wait_for_the_more(decoding, prompts, tokens):
    """A prompt token costs as much as a round: many who decode wait for a few at a time, few for more."""
    scheduler, _ = make(max_num_seqs=8)
    rounds = Rounds(scheduler, prompt_token=1.0)
    for key in range(decoding):
        scheduler.add(sequence(key, 1, output=80))
    for _ in range(5):
        rounds.step()
    for key in range(decoding, decoding + prompts):
        scheduler.add(sequence(key, 60, output=4))
    rounds.step()  # nothing is known of the price yet
    assert sum(one.scheduled for one in rounds.step() if one.id >= decoding) == tokens


MACHINES = {"1.5B": (0.06, 0.005, 1e-6), "135M": (0.0032, 0.0007, 1e-7)}


class Timed:
    """A server whose rounds take as long as on a machine with these prices, in seconds: a plain round, a prompt token,
    and what a token of depth adds to one."""

    def __init__(self, machine, bounded=True):
        self.plain, self.token, self.deep = MACHINES[machine]
        self.scheduler, _ = make(4000, 16, max_num_seqs=16, max_num_batched_tokens=2048)
        self.scheduler.prefill_budget = PrefillBudget()
        self.scheduler.prefill_budget.bounded = bounded
        self.now, self.came, self.first, self.ended = 0.0, {}, {}, {}

    def add(self, key, prompt, output=8):
        self.came[key] = self.now
        self.scheduler.add(sequence(key, prompt, output))

    def step(self):
        chosen = self.scheduler.schedule()
        rows = sum(one.scheduled for one in chosen)
        depths = sum(one.scheduled * (one.num_computed_tokens + one.scheduled / 2) for one in chosen)
        seconds = max(self.plain, self.token * rows) + 0.2 * self.token * min(rows, 8) + self.deep * depths
        self.now += seconds
        self.scheduler.observe(seconds)
        for one in chosen:
            one.num_computed_tokens += one.scheduled
            self.scheduler.pool.advance(one.id, one.num_computed_tokens)
            if one.num_computed_tokens == len(one.tokens):
                one.tokens.append(1)
                self.first.setdefault(one.id, self.now - self.came[one.id])
            if one.remaining == 0:
                self.ended[one.id] = self.now - self.came[one.id]
                self.scheduler.remove(one)
        return seconds

    def finish(self):
        while self.scheduler.busy:
            self.step()
        return self


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("prompt", [500, 1500, 8000])
@pytest.mark.parametrize("warm", [False, True])
def test_a_short_prompt_beside_a_long_one(machine, prompt, warm):
    """It comes just after a round has begun. Its first token comes after three times its time alone at most, the long
    one loses a tenth at most, and long ones alone take no more than a twentieth longer than in one piece."""

    def server(bounded=True):
        timed = Timed(machine, bounded)
        if warm:
            timed.add(9, 300)
            timed.finish()
        return timed

    def together():
        timed = server()
        timed.add(1, prompt, 30)
        began = timed.now
        timed.step()
        timed.add(2, 30)
        timed.came[2] = began
        return timed.finish()

    alone, long, piece = server(), server(), server(bounded=False)
    alone.add(2, 30)
    for timed in (long, piece):
        timed.add(1, prompt, 30)
        timed.finish()
    both = together()
    assert both.first[2] <= 3 * alone.finish().first[2]
    assert both.ended[1] <= 1.1 * long.ended[1]
    assert long.ended[1] <= piece.ended[1] / 0.95


@pytest.mark.parametrize("machine", MACHINES)
def test_long_prompts_finish_although_short_ones_keep_coming(machine):
    alone = Timed(machine)
    alone.add(0, 2000)
    alone.finish()
    timed = Timed(machine)
    for key in (0, 1):
        timed.add(key, 2000)
    for key in range(2, 100_000):
        if len(timed.scheduler.running) < 12:
            timed.add(key, 20, 4)
        timed.step()
        if {0, 1} <= set(timed.ended):
            break
    assert timed.first[0] <= 16 * alone.first[0]
    assert {0, 1} <= set(timed.ended)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("count", "prompt"), [(16, 50), (16, 300), (8, 1000)])
def test_prompts_that_come_together_keep_the_throughput(machine, count, prompt):
    totals = []
    for bounded in (False, True):
        timed = Timed(machine, bounded)
        for key in range(count):
            timed.add(key, prompt, 64)
        totals.append(timed.finish().now)
    assert totals[0] / totals[1] >= 0.95
