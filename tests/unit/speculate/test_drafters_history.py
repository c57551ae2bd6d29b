"""Drafters that learn from tokens alone, against brute force over the same tokens; best-first trees."""

import math
import random
from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from drafting import build, noisy_text, occurrences, sequence
from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.core.tree import POINT_MASS, Verdict
from forerun.speculate.draft.best_first import GrowingTree, best_first, depth_first, shaped
from forerun.speculate.draft.ngram import NgramIndex
from forerun.speculate.draft.suffix import ROOT, TextBlock
from refusals import refused

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
            assert again.tokens == build(method).propose([sequence(text)], [5])[0].tokens


def test_a_lookup_behind_a_tail_continues_the_tail():
    places = NgramIndex(2, 3)
    places.update([1, 2, 3, 4, 1, 2, 9])
    index, length = places.lookup([1, 2])
    assert (index, length) == (6, 2)
    assert places.copy(index, [1, 2], 5) == [9, 1, 2, 9, 1]


# ngram with counts as q


@pytest.mark.slow
def test_counts_are_the_distribution_that_ngram_draws_from():
    text = [1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 1]
    drafter = build("ngram", "token", counts_as_q=True, max_order=2, num_speculative_tokens=1)
    drawn = Counter()
    for seed in range(3000):
        draft = drafter.propose([sequence(text, temperature=0.7, seed=seed)], [1])[0]
        drawn[draft.tokens[0]] += 1
        row = draft.trials[0][0].q_row
        assert draft.q[row].nonzero()[:, 0].tolist() == [2, 3, 4]
        torch.testing.assert_close(draft.q[row][[2, 3, 4]], torch.tensor([0.6, 0.2, 0.2]))
    assert chisquare([drawn[2], drawn[3], drawn[4]], [1800, 600, 600]).pvalue > 1e-4


def test_ngram_with_one_continuation_or_a_greedy_request_is_a_point_mass():
    drafter = build("ngram", "token", counts_as_q=True)
    single = drafter.propose([sequence([1, 2, 3, 1, 2], temperature=1.0)], [3])[0]
    assert single.tokens[:1] == [3]
    assert single.trials[0][0].q_row == POINT_MASS or single.q[single.trials[0][0].q_row][3] == 1.0
    greedy = drafter.propose([sequence([1, 2, 1, 3, 1, 3, 1], temperature=0.0, key=2)], [2])[0]
    assert greedy.tokens[0] == 3
    assert all(trial.q_row == POINT_MASS for trials in greedy.trials for trial in trials)


# random and table


# suffix automaton


def automaton_of(lists):
    block = TextBlock()
    for number, tokens in enumerate(lists):
        block.add(number, tokens)
    return block.automaton


@pytest.mark.parametrize("seed", range(6))
def test_automaton_counts_every_substring_of_every_list(seed):
    rng = random.Random(seed)
    lists = [noisy_text(rng, rng.randrange(1, 28), letters=3) for _ in range(rng.randrange(1, 4))]
    automaton = automaton_of(lists)
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
    automaton = automaton_of([known])
    state = length = 0
    for end in range(1, len(text) + 1):
        state, length = automaton.advance(state, length, [text[end - 1]])
        longest = max(n for n in range(end + 1) if n == 0 or occurrences(text[end - n : end], known))
        assert length == longest
    for end in range(1, len(known) + 1):
        prefix = automaton_of([known[:end]])
        result = max(n for n in range(end) if n == 0 or len(occurrences(known[end - n : end], known[:end])) > 1)
        assert prefix.suffix()[1] == result


def test_a_run_of_one_token_costs_no_more_than_other_text():
    automaton = automaton_of([[1] * 3000])
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
    assert build("suffix").propose([sequence(text)], [3])[0].tokens[0] == 8


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


def test_second_choices_that_followed_before_are_branches_beside_the_chain():
    drafter = build("suffix", second_choices=3, num_speculative_tokens=4)
    text = [1, 2, 3, 4, 9, 1, 5, 6, 7, 9, 1, 2, 3, 8, 1]
    assert drafter.propose([sequence(text)], [4])[0].tokens == [2]
    drafter.choices[1] = [5, 7, 2]
    draft = drafter.propose([sequence(text)], [4])[0]
    assert [draft.path_tokens(node) for node in range(len(draft))] == [
        [2], [5], [5, 6], [5, 6, 7], [2, 3], [2, 3, 8],
    ]  # fmt: skip
    assert drafter.propose([sequence(text)], [1])[0].tokens == [2, 5]
    assert drafter.config.nodes_by_depth() == [0, 4, 8, 12, 13]
    drafter.release(sequence(text))
    assert drafter.propose([sequence(text)], [4])[0].tokens == [2]
    refused(ConfigError, "beside a chain", build, "suffix", second_choices=1, tree=[2, 1])
    assert build("suffix", second_choices=1).config.branches


def test_second_choices_are_the_targets_next_best_tokens(tiny_target):
    llm = LLM(tiny_target, speculative_config={"method": "suffix", "second_choices": 2})
    model, drafter = AutoModelForCausalLM.from_pretrained(tiny_target), llm.engine.router.drafters["suffix"]
    accepted = []

    def check(result):
        (one,), (verdict,) = result.verification.scores.sequences, result.verdicts
        if one.id not in llm.engine.jobs:  # it has ended
            return
        logits = model(torch.tensor([one.tokens[:-1]])).logits[0, -1]
        best = [token for token in logits.topk(3).indices.tolist() if token != one.tokens[-1]][:2]
        assert drafter.choices[one.id] == best
        accepted.append(verdict.accepted)

    llm.engine.on_round = check
    llm.generate([[5, 6, 7] * 5], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert sum(accepted) > 3
    assert not drafter.choices


def finish(drafter, tokens, prompt, key):
    drafter.propose([sequence(tokens, prompt=prompt, key=key)], [3])
    drafter.release(sequence(tokens, prompt=prompt, key=key))


def test_past_outputs_are_searched_and_prompts_are_not():
    drafter = build("suffix")
    finish(drafter, [30, 31, 32, 1, 2, 3, 4, 5, 6], 3, key=1)
    assert drafter.propose([sequence([9, 8, 1, 2, 3], key=2)], [3])[0].tokens == [4, 5, 6]
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
        growing = GrowingTree(size)
        growing.offer(-1, *zip(*[(token, log_q) for token, log_q, _ in ranked(distributions)], strict=True))
        for _ in range(2):
            frontier = growing.frontier()
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
