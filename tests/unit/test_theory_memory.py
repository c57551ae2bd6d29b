"""Memory traffic, counted."""

from __future__ import annotations

import pytest

from forerun.theory import memory_access_factor, round_traffic


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
