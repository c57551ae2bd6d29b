"""Memory traffic, counted."""

import itertools
import math

import pytest

from forerun.theory import expected_experts, memory_access_factor, round_traffic


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_memory_is_read_once_a_round(alpha, gamma):
    """Section 3.4, by counting: a round reads the weights once and emits j tokens with probability
    alpha^(j-1) (1 - alpha), all gamma + 1 with alpha^gamma."""
    emitted = sum(j * alpha ** (j - 1) * (1 - alpha) for j in range(1, gamma + 1)) + (gamma + 1) * alpha**gamma
    assert memory_access_factor(alpha, gamma) == pytest.approx(emitted, rel=1e-12)


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_batch_shares_the_weights_and_nothing_else(sequences):
    """Counted byte by byte: what each layer reads and writes for each sequence."""
    weights, keys, states = [40, 60], [3, 4], [0, 5]
    moved = sum(weights)
    for _ in range(sequences):
        for read, state in zip(keys, states):
            moved += read + state  # read
            moved += state  # written
    assert round_traffic(sum(weights), sequences, sum(keys), sum(states)) == moved


@pytest.mark.parametrize(("count", "chosen", "rows"), [(4, 2, 3), (5, 1, 4), (3, 3, 2)])
def test_experts_that_rows_read_by_mere_chance(count, chosen, rows):
    """By every choice that the rows can make."""
    choices = list(itertools.combinations(range(count), chosen))
    sizes = [len(set().union(*each)) for each in itertools.product(choices, repeat=rows)]
    mean = sum(sizes) / len(sizes)
    assert expected_experts(count, chosen, rows) == pytest.approx(mean, rel=1e-12)
    assert expected_experts(count, chosen, rows, sequences=rows) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("again", [0.08, 0.2])
def test_experts_that_rows_of_a_text_read(again):
    """By the density of each expert's own chance, summed up; two rows share what they are said to share; texts that
    have no more than chance in common read apart."""
    count, chosen = 64, 4
    p = chosen / count
    s = (1 - again) / (again - p)
    a, b = s * p, s * (1 - p)
    steps = 20_000
    chances = [math.sin(math.pi * (i + 0.5) / (2 * steps)) ** 2 for i in range(steps)]  # crowded at both ends
    widths = [math.sqrt(x * (1 - x)) for x in chances]
    density = [w * x ** (a - 1) * (1 - x) ** (b - 1) for x, w in zip(chances, widths)]

    def read(rows, texts=1):
        out = sum(d * (1 - x) ** rows for d, x in zip(density, chances)) / sum(density)
        return count * (1 - out**texts)

    for rows in (1, 2, 5, 16):
        assert expected_experts(count, chosen, rows, again) == pytest.approx(read(rows), rel=2e-3)
        assert expected_experts(count, chosen, 3 * rows, again, 3) == pytest.approx(read(rows, 3), rel=2e-3)
    assert expected_experts(count, chosen, 2, again) == pytest.approx(chosen * (2 - again), rel=1e-12)
    assert expected_experts(count, chosen, 9, 1.0) == pytest.approx(chosen, rel=1e-12)
