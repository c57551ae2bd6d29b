"""The suffix automaton, the suffix drafter and best-first trees, against brute force."""

import math
import random
from itertools import combinations
from types import SimpleNamespace

import pytest
from drafting import build, noisy_text, occurrences, sequence

from forerun.core.tree import Verdict
from forerun.speculate.draft.best_first import Growing, best_first, depth_first, shaped
from forerun.speculate.draft.suffix import ROOT, Automaton

# suffix automaton


@pytest.mark.parametrize("seed", range(6))
def test_automaton_counts_every_substring_of_every_list(seed):
    rng = random.Random(seed)
    lists = [noisy_text(rng, rng.randrange(1, 28), letters=3) for _ in range(rng.randrange(1, 4))]
    automaton = Automaton.of(lists)
    parts = {tuple(text[i:j]) for text in lists for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for part in parts:
        state = ROOT
        for token in part:
            state = automaton.next[state][token]
        assert automaton.counts[state] == sum(len(occurrences(list(part), text)) for text in lists)
        assert automaton.length[automaton.link[state]] < len(part) <= automaton.length[state]
        followers = {other[-1] for other in parts if other[:-1] == part}
        assert {token for token, _, _ in automaton.continuations(state)} == followers
    assert len(automaton) <= 2 * sum(map(len, lists)) + 1


@pytest.mark.parametrize("seed", range(6))
def test_automaton_follows_the_longest_match_of_another_text(seed):
    rng = random.Random(100 + seed)
    known, text = noisy_text(rng, 50, letters=3), noisy_text(rng, 60, letters=4)
    automaton = Automaton.of([known])
    state = length = 0
    for end in range(1, len(text) + 1):
        state, length = automaton.advance(state, length, text[end - 1])
        longest = max(n for n in range(end + 1) if n == 0 or occurrences(text[end - n : end], known))
        assert length == longest
    for end in range(1, len(known) + 1):
        prefix = Automaton.of([known[:end]])
        result = max(n for n in range(end) if n == 0 or len(occurrences(known[end - n : end], known[:end])) > 1)
        assert prefix.suffix()[1] == result


def test_a_run_of_one_token_costs_no_more_than_other_text():
    automaton = Automaton.of([[1] * 3000])
    assert automaton.suffix()[1] == 2999
    assert len(automaton) == 3001


# suffix


def check_suffix_draft(draft, texts, text, budget, config):
    """Every path continues some suffix of ``text`` as one of ``texts`` did; returns the shortest such suffix that
    explains the whole draft."""
    depth = draft.depth
    assert depth <= min(budget, config.suffix_decoding_max_tree_depth - 1)
    for length in range(len(text), 0, -1):
        suffix = text[-length:]
        if depth > max(1, int(length * config.suffix_decoding_max_spec_factor)):
            break
        paths = [draft.path_tokens(node) for node in range(len(draft))]
        if all(any(occurrences(suffix + path, known) for known in texts) for path in paths):
            return length
    raise AssertionError(f"no match of the text's end explains {draft.tokens}")


@pytest.mark.parametrize("options", [{}, {"tree": (3, 2, 1)}, {"tree_nodes": 9}, {"num_speculative_tokens": 4}])
def test_suffix_drafts_continue_a_match(options):
    rng = random.Random(5)
    drafter = build("suffix", **options)
    drafted = 0
    for _ in range(60):
        text = noisy_text(rng, rng.randrange(2, 80))
        draft = drafter.propose([sequence(text)], [drafter.config.num_speculative_tokens])[0]
        drafter.indices.clear()
        if len(draft):
            drafted += len(draft)
            check_suffix_draft(draft, [text], text, drafter.config.num_speculative_tokens, drafter.config)
    assert drafted > 100


def test_suffix_takes_the_most_frequent_continuation():
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 8, 7, 1, 2, 3]
    draft = build("suffix").propose([sequence(text)], [3])[0]
    assert draft.tokens[0] == 8


def test_suffix_drafts_deeper_behind_longer_matches():
    known = list(range(1, 31))
    for matched in (1, 3, 8):
        text = [*known, 40, *known[5 : 5 + matched]]
        draft = build("suffix", num_speculative_tokens=20).propose([sequence(text)], [20])[0]
        assert draft.tokens == known[5 + matched : 5 + 2 * matched]


def test_improbable_tokens_are_not_drafted():
    text = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert len(build("suffix", suffix_decoding_min_token_prob=0.1).propose([sequence(text)], [4])[0]) == 1
    assert not len(build("suffix", suffix_decoding_min_token_prob=0.5).propose([sequence(text)], [4])[0])


def finish(drafter, tokens, prompt, key):
    drafter.propose([sequence(tokens, prompt=prompt, key=key)], [3])
    drafter.release(sequence(tokens, prompt=prompt, key=key))


def test_past_outputs_are_searched_and_prompts_are_not():
    drafter = build("suffix")
    finish(drafter, [30, 31, 32, 1, 2, 3, 4, 5, 6], 3, key=1)
    draft = drafter.propose([sequence([9, 8, 1, 2, 3], key=2)], [3])[0]
    assert draft.tokens == [4, 5, 6]
    assert not len(drafter.propose([sequence([9, 30, 31], key=3)], [3])[0])
    none = build("suffix", suffix_decoding_max_cached_requests=0)
    finish(none, [30, 31, 32, 1, 2, 3, 4, 5, 6], 3, key=1)
    assert not len(none.propose([sequence([9, 8, 1, 2, 3], key=2)], [3])[0])


def test_a_preempted_request_is_not_a_past_output():
    drafter = build("suffix")
    preempted = sequence([30, 1, 2, 3, 4], prompt=1, key=1)
    drafter.propose([preempted], [3])
    preempted.num_computed_tokens = 0
    drafter.release(preempted)
    assert not len(drafter.propose([sequence([9, 1, 2], key=2)], [3])[0])


def test_past_outputs_stay_within_their_bounds_and_useful_ones_stay_longer():
    drafter = build("suffix", suffix_decoding_max_cached_tokens=80)
    rng = random.Random(0)
    useful = [41, 42, 43, 44, 45, 46, 47, 48]
    finish(drafter, [1, *useful], 1, key=0)
    for key in range(1, 60):
        finish(drafter, [1, *(rng.randrange(30) for _ in range(8))], 1, key=key)
        assert sum(block.tokens for block in drafter.past.blocks) <= 80
        reader = sequence([3, 41, 42], key=1000 + key)
        draft = drafter.propose([reader], [2])[0]
        assert draft.tokens == [43, 44], key
        drafter.observe([reader], [draft], [Verdict(path=[0], tokens=[0])], SimpleNamespace())
        drafter.indices.pop(reader.id)
        drafter.past.forget(reader.id)
    forgotten = build("suffix", suffix_decoding_max_cached_tokens=80)
    finish(forgotten, [1, *useful], 1, key=0)
    for key in range(1, 60):
        finish(forgotten, [1, *(rng.randrange(30) for _ in range(8))], 1, key=key)
    assert not len(forgotten.propose([sequence([3, 41, 42], key=1000)], [2])[0])


def test_cursors_survive_outputs_that_are_added_meanwhile():
    rng = random.Random(8)
    drafter = build("suffix")
    reader = sequence(noisy_text(rng, 12), prompt=1, key=500)
    texts = []
    for key in range(40):
        other = noisy_text(rng, 20)
        finish(drafter, [1, *other], 1, key=key)
        texts.append(other)
        reader.tokens.extend(noisy_text(rng, rng.randrange(1, 4)))
        drafter.propose([reader], [3])
        block = drafter.past.blocks[0]
        _, state, length = block.cursors[reader.id]
        longest = max(n for n in range(25) if n == 0 or any(occurrences(reader.tokens[-n:], text) for text in texts))
        assert min(length, 24) == longest
        assert block.automaton.length[block.automaton.link[state]] < length <= block.automaton.length[state]


# best-first trees


def ranked(tree, path=()):
    return sorted(
        ((token, math.log(q), (*path, token)) for token, q in tree.get(path, {}).items()), key=lambda t: -t[1]
    )


def path_of(nodes, index):
    return () if index < 0 else (*path_of(nodes, nodes[index].parent), nodes[index].token)


@pytest.mark.parametrize("seed", range(8))
def test_best_first_is_the_best_connected_tree(seed):
    rng = random.Random(seed)
    distributions = {}
    paths = {}
    for path in [(), *((i,) for i in range(3)), *((i, j) for i in range(3) for j in range(3))]:
        weights = [rng.random() ** 3 for _ in range(3)]
        distributions[path] = {i: w / sum(weights) for i, w in enumerate(weights)}
        for i, q in distributions[path].items():
            paths[(*path, i)] = paths.get(path, 1.0) * q
    for size in (1, 2, 3, 4):
        growing = Growing(size)
        growing.offer(-1, *zip(*[(token, log_q) for token, log_q, _ in ranked(distributions)], strict=True))
        for _ in range(2):
            frontier = growing.frontier()
            growing.begin_level()
            for index in frontier:
                known = ranked(distributions, path_of(growing.nodes, index))
                growing.offer(index, *zip(*[(token, log_q) for token, log_q, _ in known], strict=True))
        grown, kept = growing.finish()
        assert [growing.nodes[index].token for index in kept] == grown.tokens
        nodes = best_first(lambda path: ranked(distributions, path), (), size, 3)
        total = sum(math.exp(node.score) for node in nodes)
        subtrees = (c for c in combinations(paths, size) if all(p[:-1] in c for p in c if len(p) > 1))
        assert total == pytest.approx(max(sum(paths[p] for p in c) for c in subtrees))
        draft = depth_first(nodes)
        assert len(draft) == size
        paths_of = [{tuple(tree.path_tokens(n)) for n in range(size)} for tree in (draft, grown)]
        assert paths_of[0] == paths_of[1]
        assert sorted(paths[tuple(draft.path_tokens(n))] for n in range(size)) == pytest.approx(
            sorted(math.exp(node.score) for node in nodes)
        )


def test_depth_first_lays_branches_out_in_one_piece():
    distributions = {(): {1: 0.6, 2: 0.4}, (1,): {3: 0.7, 4: 0.3}, (2,): {5: 1.0}}
    draft = depth_first(shaped(lambda path: ranked(distributions, path), (), [2, 2]))
    assert draft.tokens == [1, 3, 4, 2, 5]
    assert draft.parents == [-1, 0, 0, -1, 3]


def test_best_first_stops_at_depth_and_floor():
    distributions = {(): {1: 0.9, 2: 0.1}, (1,): {1: 0.9, 2: 0.1}, (1, 1): {1: 0.9, 2: 0.1}}
    nodes = best_first(lambda path: ranked(distributions, path), (), 10, 2)
    assert len(nodes) == 4
    assert len(best_first(lambda path: ranked(distributions, path), (), 10, 3, math.log(0.5))) == 3
