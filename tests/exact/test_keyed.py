"""The law again, with the noise that decoding uses: thousands of seeds, several rounds in a row, chi-square.

Here a rule, the drafters' chooser and the sampler run as they are. Noise that rounds, nodes of one depth or trials
share biases rules that compare p and q (total variation 0.02 to 0.07 on small laws), which the enumeration cannot see
and chi-square sees late: so it is also checked that no noise is met twice.
"""

import itertools
from collections import Counter

import numpy
import pytest
import torch
from enumeration import variants
from scipy import stats

from forerun import SamplingParams
from forerun.core.batch import Scores
from forerun.core.request import RequestState
from forerun.core.tree import POINT_MASS, Draft
from forerun.sampling.draw import Sampler
from forerun.sampling.noise import Gumbel, uniform
from forerun.sampling.warp import Row, warp
from forerun.speculate.accept import rules
from forerun.speculate.draft.base import Chooser

SEEDS = 1500
"""Requests behind each of the two prompts."""
LENGTH = 3
DRAWN = [name for name in rules if rules[name].lossless]
TREES = [name for name in DRAWN if rules[name].trees]
# By the token before: two tokens that the drafter likes the wrong way round.
TARGET = torch.tensor([[0.7, 0.3], [0.35, 0.65]])
DRAFTER = torch.tensor([[0.3, 0.7], [0.75, 0.25]])


def drafted(chooser, sequences, widths, streams):
    """One tree per sequence, level by level, as a draft model does it; ``streams`` drafters share it."""
    drafts = [Draft() for _ in sequences]
    tables = []
    for stream in range(streams):
        each = Chooser(chooser.sampler, chooser.rule, stream=stream)
        levels = [[-1] for _ in sequences]
        for width in widths:
            places = [(index, node) for index, level in enumerate(levels) for node in level]
            rows = [Row(sequences[index], drafts[index].path_tokens(node)) for index, node in places]
            last = [row.path[-1] if row.path else row.sequence.tokens[-1] for row in rows]
            ids, q, q_rows = each.choose(DRAFTER[last].log(), rows, [node for _, node in places], width)
            base = sum(len(table) for table in tables)
            levels = [[] for _ in sequences]
            for (index, node), tokens, row in zip(places, ids, q_rows):
                for token in tokens:
                    child = drafts[index].add(token, node, POINT_MASS if row == POINT_MASS else base + row)
                    if child not in levels[index]:
                        levels[index].append(child)
            if q is not None:
                tables.append(q)
    if tables:
        q = torch.cat(tables)
        for draft in drafts:
            draft.q = q
    return drafts


def decode(rule, widths, temperature=1.0, streams=1, seeds=SEEDS, length=LENGTH):
    """The first tokens behind the prompts 0 and 1 in turn, each request with a seed of its own, decoded in rounds."""
    sampler = Sampler(2)
    chooser = Chooser(sampler, rule)
    params = SamplingParams(temperature=temperature)
    sequences = [RequestState(i, [i % 2], 1, params, seed=i) for i in range(2 * seeds)]
    while running := [s for s in sequences if s.num_output < length]:
        drafts = drafted(chooser, running, widths, streams)
        first = list(itertools.accumulate((len(draft) + 1 for draft in drafts[:-1]), initial=0))
        scores = Scores(running, drafts, first, torch.empty(0))
        rows = [Row(s, d.path_tokens(node)) for s, d in zip(running, drafts) for node in range(-1, len(d))]
        last = [row.path[-1] if row.path else row.sequence.tokens[-1] for row in rows]
        scores.warped = warp(TARGET[last].log(), rows)
        for sequence, draft, verdict in zip(running, drafts, rule.accept(scores, sampler)):
            assert verdict.error is None
            sequence.tokens += verdict.decided_tokens(draft)
    return [tuple(s.tokens[1 : 1 + length]) for s in sequences]


def distribution(start):
    """Of all sequences of ``LENGTH`` tokens behind ``start``, in lexicographic order."""
    masses = []
    for tokens in itertools.product(range(2), repeat=LENGTH):
        path = (start, *tokens)
        masses.append(float(numpy.prod([TARGET[a, b] for a, b in itertools.pairwise(path)])))
    return numpy.array(masses) / sum(masses)


def check(tokens):
    for start in (0, 1):
        counts = numpy.zeros(2**LENGTH)
        for answer in tokens[start::2]:
            counts[int("".join(map(str, answer)), 2)] += 1
        assert stats.chisquare(counts, distribution(start) * counts.sum()).pvalue > 1e-3


@pytest.mark.parametrize("name", DRAWN)
def test_chain(name):
    for rule in variants(name)[:1]:
        check(decode(rule, (1, 1)))


@pytest.mark.parametrize("name", TREES)
def test_tree(name):
    for rule in variants(name):
        check(decode(rule, (2, 1)))


@pytest.mark.parametrize("name", ["recursive", "traversal"])
def test_two_drafters_in_one_tree(name):
    check(decode(variants(name)[0], (1, 1), streams=2))


@pytest.mark.parametrize("name", [name for name in rules if rules[name].needs_q])
def test_no_noise_is_met_twice(name, monkeypatch, listen):
    """Draws, tests and residuals of one request: every round, parent and trial has noise of its own."""
    met = []

    def recorded(key):
        met.append(key)
        return uniform(key)

    listen(Gumbel, "rows", lambda self, keys, ahead=(): met.extend(keys))
    monkeypatch.setattr("forerun.sampling.draw.uniform", recorded)
    monkeypatch.setattr("forerun.speculate.accept.base.uniform", recorded)
    for rule in variants(name):
        for widths, streams in [((1, 1, 1), 1), ((2, 2), 1), ((2, 1), 2)] if rule.trees else [((1, 1, 1), 1)]:
            met.clear()
            decode(rule, widths, streams=streams, seeds=2, length=30)
            assert len(met) > 4 * 30
            assert max(Counter(met).values()) == 1


def test_identity():
    """Under ``coupled`` the tokens are those of decoding without a draft, whatever is drafted."""
    rule = rules["coupled"]()
    plain = decode(rule, ())
    check(plain)
    for widths in [(1, 1), (2, 1)]:
        assert decode(rule, widths, seeds=300) == plain[:600]


@pytest.mark.parametrize("name", DRAWN)
def test_greedy_identity(name):
    plain = decode(rules["coupled"](), (), 0.0, seeds=1)
    for rule in variants(name):
        for widths in [(1, 1), (2, 1)] if rule.trees else [(1, 1)]:
            assert decode(rule, widths, 0.0, seeds=1) == plain
