"""The distribution of answers under the adaptive length policy, with a rule that looks at tokens and one that looks at
blocks: lengths that follow measured prices and earlier acceptance must not follow the tokens that are being drawn."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from matrix import Case
from test_answers_keep_the_distribution import PARAMS, PROMPT, distribution, pvalue

from forerun import SamplingParams
from forerun.speculate.length.base import Seconds
from harness import set_prices, until_idle

RULES = ("token", "block")
REQUESTS = 2000
SEEDS = range(100_000, 100_000 + REQUESTS)
CHEAP, PHASE = 60, 80
"""Drafting is cheap in so many of a phase's rounds, and dear in the others."""
__all__ = ["distribution"]


class Clock:
    """Prices by rows and depth in place of measured ones, so that every run meets the same; counts drafts by length."""

    def __init__(self, engine):
        self.observe, self.rounds = engine.policy.observe, 0
        self.lengths = Counter()
        engine.policy.observe = self
        set_prices(engine, lambda: self.level)

    @property
    def level(self):
        return 0.6 if self.rounds % PHASE > CHEAP else 0.001

    def __call__(self, sequences, drafts, verdicts, seconds):
        self.rounds += 1
        depth = max(map(len, drafts), default=0)
        self.observe(sequences, drafts, verdicts, Seconds(self.level * depth, 1.0, 0.01))
        self.lengths.update(map(len, drafts))


def counted(engine):
    """The answers to requests that come as others leave, eight at a time."""
    clock = Clock(engine)
    prompt = engine.tokenizer.encode(PROMPT)
    jobs = [engine.add(prompt, SamplingParams(seed=seed, **PARAMS))[0] for seed in SEEDS]
    until_idle(engine)
    assert not any(job.metrics.draft_error for job in jobs)
    return jobs, clock


@pytest.fixture
def speculating(engine, keys):
    def build(rule, length="adaptive"):
        options = {"accept": rule, "length": length, "num_speculative_tokens": 2, "draft_temperature": 3.0}
        made = engine(keys(Case("draft_model", "chain"), **options), max_num_seqs=8)
        # Reading a prompt for answers as short as these would never pay.
        made.policy.setting = replace(made.policy.setting, backlog=lambda sequence: 0)
        ticks = count()
        made.clock = lambda: 0.01 * next(ticks)  # every run reads prompts and plans alike
        made.policy.clock = lambda: 0.0
        return made

    return build


@pytest.mark.parametrize("rule", RULES)
def test_the_answers_keep_the_targets_distribution(speculating, distribution, rule):
    jobs, clock = counted(speculating(rule))
    assert all(clock.lengths[length] > 30 for length in (0, 1, 2)), clock.lengths
    assert pvalue(jobs, distribution) > 1e-4


def test_a_q_that_nothing_was_drawn_from_would_be_noticed(speculating, distribution):
    engine = speculating("token", "fixed")  # it drafts in every round, whatever the machine does beside
    (drafter,) = engine.router.drafters.values()
    propose = drafter.propose

    def moved(sequences, budgets):
        drafts = propose(sequences, budgets)
        for draft in drafts:
            if draft.q is not None:
                draft.q = draft.q.roll(1, dims=1)
        return drafts

    drafter.propose = moved
    assert pvalue(counted(engine)[0], distribution) < 1e-9
