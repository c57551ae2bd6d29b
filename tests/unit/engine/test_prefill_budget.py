"""How many prompt tokens ride beside decoding sequences, on made-up machines."""

from itertools import pairwise

import pytest

from forerun.engine.scheduler import PrefillBudget


class Clock:
    """Seconds of a round on a machine where each decoding row and each prompt token has a price."""

    def __init__(self, base, row, token):
        self.base, self.row, self.token = base, row, token

    def seconds(self, decoding, tokens):
        return self.base + self.row * decoding + self.token * tokens


@pytest.mark.parametrize("machine", [Clock(2.0, 0.3, 0.15), Clock(4.0, 0.01, 0.005), Clock(0.5, 0.5, 0.5)])
def test_pace_at_most_doubles_a_round(machine):
    prefill_budget = PrefillBudget()
    for _ in range(20):
        prefill_budget.observe(7, 0, machine.seconds(7, 0))
    for _ in range(40):
        tokens = prefill_budget.allowance(7)
        prefill_budget.observe(7, tokens, machine.seconds(7, tokens))
    ratio = machine.seconds(7, prefill_budget.allowance(7)) / machine.seconds(7, 0)
    assert ratio <= 2.0 or prefill_budget.allowance(7) == 16
    assert ratio >= 1.5, "prompts are read no slower than the bound asks for"


def read_prompt(prefill_budget, plain, base, slope):
    """Chunks of a prompt of 1,500 tokens, each with its round's time over a plain one."""
    depth, chunks = 0, []
    while depth < 1500:
        tokens = min(1500 - depth, prefill_budget.allowance(7, depth, least=4))
        seconds = plain + sum(base + slope * (depth + i) for i in range(tokens))
        prefill_budget.observe(7, tokens, seconds, depth + tokens / 2)
        if tokens:
            chunks.append((tokens, seconds / plain))
        depth += tokens
    return chunks


@pytest.mark.parametrize("slope", [0.0, 0.0002, 0.0005])
def test_pace_knows_what_depth_costs(slope):
    """The first prompt begins with the smallest chunk, the second with what the first one taught of its beginning."""
    prefill_budget, plain = PrefillBudget(), 4.0
    for _ in range(20):
        prefill_budget.observe(7, 0, plain)
    first, second = (read_prompt(prefill_budget, plain, 0.05, slope) for _ in range(2))
    assert first[0][0] == 4
    for chunks in (first, second):
        assert max(ratio for _, ratio in chunks) <= 2.0
        assert all(after <= 2 * max(4, before) for (before, _), (after, _) in pairwise(chunks))
    assert min(ratio for _, ratio in second[5:-1]) >= 1.4


@pytest.mark.parametrize("growth", [0.001, 0.004])
def test_rounds_are_measured_by_those_before_the_prompt(growth):
    """Contexts grow while a prompt is read, so that rounds would become dearer without it: it gets what is left of
    twice the time that they took before."""
    prefill_budget, plain, depth, ratios, chunks = PrefillBudget(), 4.0, 0, [], []
    for _ in range(2):  # the first one teaches prices
        for _ in range(40):
            prefill_budget.observe(7, 0, plain)
        depth, ratios, chunks = 0, [], []
        while depth < 1500:
            tokens = min(1500 - depth, prefill_budget.allowance(7, depth, least=4))
            grown = plain * (1 + growth * len(ratios))
            seconds = grown + sum(0.05 + 0.00005 * (depth + i) for i in range(tokens))
            prefill_budget.observe(7, tokens, seconds, depth + tokens / 2)
            ratios.append(seconds / plain)
            chunks.append(tokens)
            depth += tokens
        assert min(chunks[:-1]) >= 4, "it progresses in every round"
    assert max(ratios) <= 2.0
    assert min(ratios[8:-1]) >= 1.6


def test_rounds_that_stay_dear_become_the_measure():
    """Contexts are longer for good and prompts never cease: they are not kept at the smallest chunk for ever."""
    prefill_budget = PrefillBudget()
    for _ in range(20):
        prefill_budget.observe(7, 0, 4.0)
    given = []
    for _ in range(10 * PrefillBudget.STALE):
        tokens = prefill_budget.allowance(7, least=4)
        prefill_budget.observe(7, tokens, 10.0 + 0.1 * tokens)
        given.append(tokens)
    assert given[200] == 4
    assert given[-1] >= 40


def test_a_round_is_compared_with_those_of_about_as_many_sequences():
    prefill_budget = PrefillBudget()
    for decoding in (8, 10):
        prefill_budget.observe(decoding, 0, float(decoding))
    assert [prefill_budget.allowance(decoding) for decoding in (5, 6, 7, 8, 13, 14)] == [0, 0, 16, 16, 16, 0]
    prefill_budget.observe(8, 16, 8.0 + 16 * 0.1)
    for decoding in (8, 10):
        allowed = max(prefill_budget.allowance(decoding) for _ in range(5))
        assert allowed == pytest.approx(0.8 * decoding / 0.1, abs=1)


def test_tokens_that_cost_less_where_it_is_deep_are_not_thought_to_cost_nothing_deeper():
    prefill_budget = PrefillBudget()
    prefill_budget.observe(7, 0, 4.0)
    for _ in range(20):
        for depth, price in ((100, 0.1), (1000, 0.05)):
            prefill_budget.observe(7, 0, 4.0)
            prefill_budget.observe(7, 16, 4.0 + 16 * price, depth)
    assert prefill_budget.price(4000) >= 0.05


def test_pace_under_a_stream_of_prompts():
    """Prompt tokens in every round from the first on: decoding alone is still measured now and then, and no more."""
    prefill_budget, machine = PrefillBudget(), Clock(2.0, 0.3, 0.15)
    given = []
    for decoding in [1, 2, 3, 4, 5, 6, 7, *[7] * 1100]:
        tokens = prefill_budget.allowance(decoding)
        prefill_budget.observe(decoding, tokens, machine.seconds(decoding, tokens))
        given.append(tokens)
    assert given[0] == 0
    assert given[-1000:].count(0) in (3, 4)
    assert machine.seconds(7, max(given[-200:])) <= 2.0 * machine.seconds(7, 0)
    assert machine.seconds(7, max(given[-200:])) >= 1.5 * machine.seconds(7, 0)


def test_prices_of_long_ago_are_forgotten():
    prefill_budget = PrefillBudget()
    for price in (0.05, 0.2):
        for number in range(2400):
            tokens = 0 if number % 8 else 16
            prefill_budget.observe(7, tokens, 4.0 + price * tokens)
        assert prefill_budget.price(0) == pytest.approx(price, rel=0.15)


def test_one_slow_round_does_not_open_the_gate():
    prefill_budget, machine = PrefillBudget(), Clock(2.0, 0.3, 0.15)
    for _ in range(20):
        prefill_budget.observe(7, 0, machine.seconds(7, 0))
        prefill_budget.observe(7, 16, machine.seconds(7, 16))
    before = max(prefill_budget.allowance(7) for _ in range(3))  # a chunk is at most twice the last one
    prefill_budget.observe(7, 0, 100.0)
    assert prefill_budget.allowance(7) <= 1.5 * before
