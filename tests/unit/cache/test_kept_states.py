"""What layers keep of sequences beside keys and values: room, records, rollback."""

import pytest
import torch

from forerun.cache.pool import KVShape, Pool
from forerun.cache.prefix import PrefixTree
from forerun.cache.states import States, StateShape
from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.engine.memory import share
from refusals import refused

SHAPES = [None, StateShape(6, 2, (3, 4)), StateShape(5, 2)]


def states(count=2, depth=4, kept=0):
    return States(SHAPES, count, depth, torch.float32, torch.device("cpu"), kept)


def pool(count=2, **options):
    made = Pool([KVShape(1, 4, 4), KVShape(0, 4, 4), KVShape(0, 4, 4)], 8, 4, torch.float32)
    made.states = states(count, **options)
    return made


def feed(of, span):
    """As a forward does it, each record holding its entry."""
    of.reserve(span.key, span.end)
    assert of.states is not None
    replay = of.states.plan(Batch([span]))
    assert len({*replay.written.tolist()}) == len(replay.written)
    for records in of.states.records.values():
        entries = torch.arange(span.start + span.stored, span.end).float()[:, None]
        records.view(-1, records.shape[-1])[replay.written] = entries[replay.kept].expand(-1, records.shape[-1])
    of.advance(span.key, span.end)
    of.states.commit(replay)


def held(of, key, entry):
    assert of.states is not None
    return float(of.states.records[1][of.states.slots[key], entry % of.states.ring, 0])


def test_bytes_are_those_of_checkpoints_and_records():
    assert states().bytes_per_sequence == 4 * (3 * 4 + (2 + 4) * (6 + 5))


@pytest.mark.parametrize(("state", "layers", "token"), [
    (StateShape(1024, 2), 10, 6 * 2 * 8 * 64),
    (StateShape(6144 + 32, 3, (16, 128, 128)), 18, 6 * 2 * 2 * 256),
    (StateShape(1792 + 48, 3, (48, 128, 32)), 28, 4 * 2 * 4 * 64),
], ids=["LFM2-350M", "Qwen3.5-0.8B", "Granite-4.0-H-350M"])  # fmt: skip
def test_eight_drafted_tokens_take_little_memory(state, layers, token):
    """Of a sequence of 256 tokens, in bfloat16."""
    plain, drafted = (States([state] * layers, 1, back, torch.bfloat16, torch.device("cpu")) for back in (1, 9))
    pages = 256 * 2 * token
    assert drafted.bytes_per_sequence + pages <= 1.3 * (plain.bytes_per_sequence + pages)


def test_there_is_room_for_so_many_sequences_and_a_new_one_begins_at_nothing():
    of = pool(count=2, kept=1)  # a slot that is free is not for a sequence
    feed(of, Span(0, 0, [1] * 3, settled=3))
    feed(of, Span(1, 0, [1] * 3, settled=3))
    assert not of.try_reserve(2, 1)
    assert not of.can_reserve(2, 1)
    assert of.try_reserve(1, 5)
    of.states.records[2].fill_(float("nan"))
    assert of.has_nan(0)
    of.free(0)
    assert of.try_reserve(2, 1)
    assert not of.has_nan(2)
    assert of.has_nan(1)


def test_a_draft_larger_than_the_records_and_a_row_before_the_checkpoint_are_refused():
    of = pool()
    feed(of, Span(0, 0, [1] * 3, settled=3))
    of.reserve(0, 12)
    with pytest.raises(ValueError, match="5 entries that may be taken back, where 4 are kept"):
        of.states.plan(Batch([Span(0, 3, [1] * 6, [-1, 0, 1, 1, 1, 1], settled=4)]))
    refused(ValueError, "from entry 2 on, where the state covers 3", of.states.plan, Batch([Span(0, 2, [1])]))


def test_a_marked_state_is_stored_by_the_forward_that_settles_it_and_a_sequence_begins_with_it():
    """The records in front of it are those of the forward, of the one before, and of the state that it began with."""
    of = pool(kept=2)
    feed(of, Span(0, 0, [1] * 5, settled=5))
    early, late = of.states.allocate_kept(), of.states.allocate_kept()
    assert of.states.allocate_kept() is None
    of.states.store_at(0, 7, early)
    of.states.store_at(0, 8, late)  # read, and not settled
    of.reserve(0, 12)
    replay = of.states.plan(Batch([Span(0, 5, [1] * 3, settled=7)]))
    assert replay.runs[0].copies == [(1, early)]
    feed(of, Span(0, 5, [1] * 3, settled=7))
    assert [of.states.pop_stored(0) for _ in range(2)] == [[(7, early)], []]
    of.states.checkpoints[1][early] = 7.0
    of.states.start_from(1, early, 7)
    of.states.allocate(1)
    assert of.states.lengths[1] == 7
    assert [held(of, 1, entry) for entry in (5, 6)] == [5, 6]
    assert bool((of.states.checkpoints[1][of.states.slots[1]] == 7.0).all())
    of.free(0)
    of.states.release(1)
    assert of.states.kept == {early}
    of.check()


def test_the_state_of_a_sequence_that_goes_stays_where_it_is():
    of = pool(kept=2)
    feed(of, Span(0, 0, [1] * 5, settled=4))
    slot = of.states.slots[0]
    of.states.store_at(0, 9, of.states.allocate_kept())
    assert of.states.keep_own(0) == slot
    of.free(0)
    assert of.states.allocate_kept() is not None
    feed(of, Span(1, 0, [1] * 2, settled=2))
    assert of.states.keep_own(1) is None
    of.states.free_kept(slot)
    of.check()


def test_a_prompt_keeps_states_behind_its_last_page_and_at_doubling_distances_before():
    of = pool(kept=16)
    tree = PrefixTree(of)
    for of.lengths[0], end in ((0, 92), (92, 100)):  # read in two parts, one of which ends at such a place
        tree.keep_states(0, end, 100)
    assert (sorted(of.states.to_store[0]), len(of.states.kept)) == ([88, 92, 96], 3)


@pytest.mark.parametrize(
    ("computed", "known", "expected"),
    [(0, 0, 88), (87, 0, 88), (88, 0, 92), (90, 0, 92), (96, 0, 0), (0, 88, 92), (0, 95, 96), (0, 96, 0)],
)
def test_others_wait_for_the_next_state_that_neither_is_known_nor_computed(computed, known, expected):
    assert PrefixTree(pool(kept=16)).next_start(0, 100, computed, known) == expected
    assert PrefixTree(pool()).next_start(0, 100, computed, known) == 0


@pytest.mark.parametrize("partial", [False, True])
def test_a_sequence_starts_at_a_state_one_page_behind_what_is_known(partial):
    of, tokens = pool(kept=2), [*range(12)]
    tree = PrefixTree(of)
    for _ in range(2):  # the same again: one state is enough
        of.states.store_at(0, 4, of.states.allocate_kept())
        feed(of, Span(0, 0, tokens[:8], settled=8))
        tree.insert(0, tokens, 8)
        of.free(0)
    (slot,) = of.states.kept
    assert tree.match_length(tokens, 11) == tree.match_prefix(1, tokens, 11, partial=partial) == 4
    assert (of.states.origins, tree.matched) == ({1: (slot, 4)}, {1: 8})
    of.free(1)
    of.check()


@pytest.mark.parametrize(("read", "settled", "whole"), [(4, 4, 4), (8, 4, 4), (8, 8, 8), (6, 6, 0)])
def test_a_sequence_that_ends_leaves_its_state(read, settled, whole):
    of, tokens = pool(kept=1), [*range(12)]
    tree = PrefixTree(of)
    feed(of, Span(0, 0, tokens[:read], settled=settled))
    tree.insert_finished(0, tokens, read)
    of.free(0)
    of.check()
    assert (tree.match_length(tokens, 11), tree.match_prefix(1, tokens, 11)) == (whole, settled)
    assert tree.matched == ({1: read} if settled < read else {})


def test_the_state_that_was_used_longest_ago_makes_room():
    of = pool(kept=2)
    tree = PrefixTree(of)

    def end(token):
        feed(of, Span(0, 0, [token] * 4, settled=4))
        tree.insert_finished(0, [token] * 4, 4)
        of.free(0)
        of.check()
        return [each for each in range(5) if tree.match_length([each] * 5, 4)]

    assert [end(0), end(1)] == [[0], [0, 1]]
    assert tree.match_prefix(1, [0] * 5, 4) == 4
    of.free(1)
    assert [end(2), end(0), end(3)] == [[0, 2], [0, 2], [0, 3]]
    tree.keep_states(1, 5, 5)
    assert [*of.states.to_store[1]] == [4]


def test_half_of_the_memory_is_for_states_at_most():
    of = pool(count=16)
    each, page = of.states.bytes_per_sequence, of.page_bytes
    share([of], 4 * each + page, None)
    assert of.states.count == 4
    assert of.num_pages == (2 * each + page) // page
    with pytest.raises(ConfigError, match=f"less than a sequence's state and one page .*{each + page} bytes"):
        share([pool()], each, None)


def test_a_quarter_of_the_memory_is_for_kept_states_at_most():
    of = pool(count=16, kept=9)
    each, page = of.states.bytes_per_sequence, of.page_bytes
    share([of], 12 * each, None)
    assert (of.states.count, of.states.max_kept) == (12, 3)
    assert of.num_pages == 3 * each // page
