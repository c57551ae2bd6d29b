"""Trees, the rows they become, and who sees whom: against paths written out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import SamplingParams
from forerun.attention.layout import tree_mask
from forerun.core.batch import Batch, Span
from forerun.core.request import RequestState
from forerun.core.tree import POINT_MASS, Draft, Trial
from forerun.speculate.verify import pack
from refusals import refused

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=6)


def grown(paths):
    """The tree of all paths, each drawn token by token."""
    draft = Draft()
    for row, path in enumerate(paths):
        node = -1
        for token in path:
            node = draft.add(token, node, row)
    return draft


@settings(max_examples=100, deadline=None)
@given(PATHS)
def test_a_tree_is_its_paths(paths):
    draft = grown(paths)
    prefixes = {tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    assert {tuple(draft.path_tokens(node)) for node in range(len(draft))} == prefixes
    assert len(draft) == len(prefixes)
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert draft.depths() == [len(draft.path(node)) for node in range(len(draft))]
    assert draft.is_chain == all(len(prefixes & {p for p in prefixes if len(p) == d}) <= 1 for d in range(1, 6))
    for node in range(-1, len(draft)):
        path = tuple(draft.path_tokens(node)) if node >= 0 else ()
        below = {prefix[-1] for prefix in prefixes if prefix[:-1] == path}
        assert set(draft.children(node)) == below
        assert all(draft.parents[child] == node for child in draft.children(node).values())


@settings(max_examples=100, deadline=None)
@given(PATHS)
def test_every_draw_stays_a_trial_of_its_own(paths):
    """Repeated draws share a node; merging them would bias recursive rejection."""
    draft = grown(paths)
    assert sum(len(trials) for trials in draft.trials) == sum(len(path) for path in paths)
    if paths:
        assert [draft.tokens[trial.node] for trial in draft.trials[0]] == [path[0] for path in paths]
        assert [trial.q_row for trial in draft.trials[0]] == list(range(len(paths)))


def test_chains_and_hand_made_trees():
    chain = Draft.chain([4, 2, 0], torch.rand(3, 5), [2, 0, 1])
    assert chain.is_chain
    assert chain.trials == [[Trial(0, 2)], [Trial(1, 0)], [Trial(2, 1)], []]
    tree = Draft.tree([7, 8, 9, 7], [-1, -1, 0, 0])
    assert not tree.is_chain
    assert tree.trials == [[Trial(0), Trial(1)], [Trial(2), Trial(3)], [], [], []]
    assert Trial(0).q_row == POINT_MASS
    assert (len(Draft()), Draft().is_chain, Draft().children(-1)) == (0, True, {})
    refused(ValueError, "two siblings carry the same token", Draft.tree, [7, 7], [-1, -1])


@settings(max_examples=100, deadline=None)
@given(PATHS.filter(bool), st.integers(0, 6), st.integers(0, 4), st.sampled_from([None, 1, 3, 20]))
def test_rows_see_their_ancestors_within_the_window(paths, start, stored, window):
    draft = grown(paths)
    stored = min(stored, len(draft) - 1)
    span = Span(0, start, draft.tokens[stored:], draft.parents, stored)
    seen, mask = (tree_mask(span, start + len(draft) + 3, each, torch.float32) for each in (None, window))
    assert span.positions() == [start + len(draft.path(node)) - 1 for node in range(stored, len(draft))]
    assert (span.count, span.end) == (len(draft) - stored, start + len(draft))
    for row, node in enumerate(range(stored, len(draft))):
        own, position = draft.path(node), start + len(draft.path(node)) - 1
        assert (seen[row, start:] == 0).nonzero()[:, 0].tolist() == sorted(own)
        where = {column: column for column in range(start)}
        where |= {start + step: start + depth for depth, step in enumerate(own)}
        visible = {column for column, at in where.items() if window is None or position - at < window}
        assert set((mask[row] == 0).nonzero()[:, 0].tolist()) == visible
        assert set(mask[row].tolist()) <= {0.0, float("-inf")}


def test_a_batch_lays_spans_end_to_end():
    spans = [
        Span(1, 4, [10, 11, 12], logits=[2]),
        Span(2, 0, [20, 21, 22, 23], [-1, 0, 0, 2], logits=[0, 3]),
        Span(3, 7, [30], stored=2, parents=[-1, 0, 0]),
    ]
    batch = Batch(spans)
    assert batch.num_rows == 8
    assert batch.offsets == [0, 3, 7]
    assert batch.input_ids.tolist() == [10, 11, 12, 20, 21, 22, 23, 30]
    assert batch.positions.tolist() == [4, 5, 6, 0, 1, 1, 2, 8]
    assert batch.logit_rows.tolist() == [2, 3, 6]
    assert batch.num_logits == 3


def sequence(key, tokens, cached, scheduled):
    made = RequestState(key, list(range(100, 100 + tokens)), tokens, SamplingParams(), 0)
    made.num_computed_tokens, made.scheduled = cached, scheduled
    return made


def test_one_batch_for_prefill_decoding_and_verification():
    sequences = [sequence(0, 9, 2, 4), sequence(1, 9, 8, 1), sequence(2, 9, 8, 1), sequence(3, 9, 6, 3)]
    drafts = [Draft(), Draft(), Draft.chain([5, 6]), Draft.tree([5, 6, 7], [-1, -1, 0])]
    chunk, plain, chain, tree = pack(sequences, drafts)
    assert (chunk.tokens, chunk.start, chunk.parents, chunk.logits) == ([102, 103, 104, 105], 2, None, [])
    assert (plain.tokens, plain.start, plain.parents, plain.logits) == ([108], 8, None, [0])
    assert (chain.tokens, chain.parents, chain.logits) == ([108, 5, 6], None, [0, 1, 2])
    assert (tree.tokens, tree.start) == ([106, 107, 108, 5, 6, 7], 6)
    assert (tree.parents, tree.logits) == ([-1, 0, 1, 2, 2, 3], [2, 3, 4, 5])
    sequences[0].params = SamplingParams(prompt_logprobs=0)
    assert pack(sequences[:1], drafts[:1])[0].logits == [0, 1, 2, 3]
