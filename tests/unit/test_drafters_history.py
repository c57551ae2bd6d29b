"""Drafters that learn from tokens alone, against brute force over the same tokens."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from drafting import VOCAB, build, noisy_text, occurrences, sequence
from scipy.stats import chisquare

from forerun.core.errors import ConfigError
from forerun.core.tree import POINT_MASS
from forerun.speculate.draft.ngram import NgramIndex
from forerun.speculate.draft.random import _distinct

# prompt_lookup


def brute_lookup(text, low, high, count):
    for length in range(min(high, len(text)), low - 1, -1):
        ends = [end for end in occurrences(text[-length:], text) if end < len(text)]
        if ends:
            distance = len(text) - ends[-1]
            copied = list(text)
            for _ in range(count):
                copied.append(copied[-distance])
            return copied[len(text) :]
    return []


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 4), (2, 5), (3, 3)])
def test_prompt_lookup_copies_what_followed_the_latest_longest_match(low, high):
    rng = random.Random(low * 10 + high)
    hits = 0
    for _ in range(40):
        text = noisy_text(rng, 60)
        drafter = build("prompt_lookup", prompt_lookup_min=low, prompt_lookup_max=high, num_speculative_tokens=6)
        known = 0
        while known < len(text):
            known = min(len(text), known + rng.randrange(1, 5))
            draft = drafter.propose([sequence(text[:known])], [6])[0]
            expected = brute_lookup(text[:known], low, high, 6)
            assert draft.tokens == expected
            assert draft.is_chain
            hits += bool(expected)
    assert hits > 300


def test_tentative_tokens_are_context_but_are_not_learnt():
    rng = random.Random(3)
    for method in ("prompt_lookup", "ngram", "suffix"):
        drafter = build(method)
        for _ in range(20):
            text, tail = noisy_text(rng, 40), noisy_text(rng, 6)
            drafter.release(sequence(text))
            drafter.propose([sequence(text)], [5])
            tentative = sequence(text + tail)
            tentative.tentative = len(tail)
            drafter.propose([tentative], [5])
            drafter.rewind(sequence(text))
            assert drafter.cached_tokens(sequence(text)) == text
            again = drafter.propose([sequence(text)], [5])[0]
            fresh = build(method).propose([sequence(text)], [5])[0]
            assert again.tokens == fresh.tokens


def test_a_lookup_behind_a_tail_continues_the_tail():
    places = NgramIndex(2, 3)
    places.update([1, 2, 3, 4, 1, 2, 9])
    index, length = places.lookup([1, 2])
    assert (index, length) == (6, 2)
    assert places.copy(index, [1, 2], 5) == [9, 1, 2, 9, 1]


def test_releasing_a_sequence_frees_its_index():
    for method in ("prompt_lookup", "ngram", "suffix"):
        drafter = build(method)
        drafter.propose([sequence([1, 2, 1, 2], key=7), sequence([3, 3, 3], key=8)], [3, 3])
        assert set(drafter.indices) == {7, 8}
        drafter.release(sequence([1, 2, 1, 2], key=7))
        assert set(drafter.indices) == {8}
        assert drafter.cached_tokens(sequence([1, 2, 1, 2], key=7)) == []


# ngram with counts as q


def test_counts_are_the_distribution_that_ngram_draws_from():
    text = [1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 1]
    drafter = build("ngram", "token", counts_as_q=True, max_order=2, num_speculative_tokens=1)
    drawn = Counter()
    for seed in range(3000):
        draft = drafter.propose([sequence(text, temperature=0.7, seed=seed)], [1])[0]
        drawn[draft.tokens[0]] += 1
        row = draft.trials[0][0].row
        assert draft.q[row].nonzero()[:, 0].tolist() == [2, 3, 4]
        torch.testing.assert_close(draft.q[row][[2, 3, 4]], torch.tensor([0.6, 0.2, 0.2]))
    assert chisquare([drawn[2], drawn[3], drawn[4]], [1800, 600, 600]).pvalue > 1e-4


def test_ngram_with_one_continuation_or_a_greedy_request_is_a_point_mass():
    drafter = build("ngram", "token", counts_as_q=True)
    single = drafter.propose([sequence([1, 2, 3, 1, 2], temperature=1.0)], [3])[0]
    assert single.tokens[:1] == [3]
    assert single.trials[0][0].row == POINT_MASS or single.q[single.trials[0][0].row][3] == 1.0
    greedy = drafter.propose([sequence([1, 2, 1, 3, 1, 3, 1], temperature=0.0, key=2)], [2])[0]
    assert greedy.tokens[0] == 3
    assert all(trial.row == POINT_MASS for trials in greedy.trials for trial in trials)


# random and table


def test_random_tokens_are_uniform_and_say_so():
    for rule in ("token", "coupled"):
        drafter = build("random", rule, num_speculative_tokens=2)
        seen = Counter()
        for seed in range(2500):
            draft = drafter.propose([sequence([5, 6], temperature=1.0, seed=seed)], [2])[0]
            seen.update(draft.tokens)
            assert draft.q.shape == (1, VOCAB)
            torch.testing.assert_close(draft.q[0], torch.full((VOCAB,), 1 / VOCAB))
        assert chisquare([seen[token] for token in range(VOCAB)]).pvalue > 1e-4


def test_draws_without_replacement_cover_every_order_alike():
    rng = random.Random(0)
    seen = Counter(tuple(_distinct([rng.random() for _ in range(3)], 4)) for _ in range(12_000))
    assert len(seen) == 24
    assert all(len(set(draw)) == 3 for draw in seen)
    assert chisquare(list(seen.values())).pvalue > 1e-4


@pytest.mark.parametrize("order", [1, 2])
def test_table_draws_from_the_counts_of_its_file(tmp_path, order):
    text = "abacabadabacabb"
    (tmp_path / "text.txt").write_text(text)
    drafter = build("table", "token", table_file=str(tmp_path / "text.txt"), table_order=order)
    if order == 2:
        counts = Counter(after for before, after in pairwise(text) if before == "a")
    else:
        counts = Counter(text)
    total = sum(counts.values())
    draft = drafter.propose([sequence([7, 0], temperature=2.0)], [1])[0]
    weights = {letter: math.sqrt(count / total) for letter, count in counts.items()}
    expected = torch.zeros(VOCAB)
    for letter, weight in weights.items():
        expected[ord(letter) - ord("a")] = weight / sum(weights.values())
    torch.testing.assert_close(draft.q[draft.trials[0][0].row], expected)
    greedy = drafter.propose([sequence([7, 0])], [3])[0]
    assert greedy.tokens[0] == ord(counts.most_common(1)[0][0]) - ord("a")


def test_table_backs_off_to_all_tokens_and_names_a_missing_file(tmp_path):
    (tmp_path / "text.txt").write_text("aab")
    drafter = build("table", table_file=str(tmp_path / "text.txt"))
    assert drafter.propose([sequence([25])], [1])[0].tokens == [0]
    with pytest.raises(ConfigError, match=r"missing\.txt cannot be read"):
        build("table", table_file=str(tmp_path / "missing.txt"))
