"""Encoded sources beside a cache, and attention to them and with biases: our kernel against torch."""

from unittest.mock import Mock

import pytest
import torch

from forerun.attention.base import Query
from forerun.attention.kernel import KernelAttention, can_attend
from forerun.attention.sdpa import SdpaAttention
from forerun.cache.pool import KVShape, OutOfPages, Pool
from forerun.cache.prefix import PrefixTree
from forerun.cache.sources import Sources
from forerun.core.batch import Batch, Span
from here import where
from refusals import refused

pytestmark = pytest.mark.slow

HEADS, WIDTH, LONGEST = 3, 16, 300
SHAPE = KVShape(HEADS, WIDTH, WIDTH)
CPU = torch.device("cpu")
ONE, TWO, THREE = tuple(range(7)), tuple(range(290)), (4,)


def sources(count=2):
    return Sources([SHAPE] * 2, count, LONGEST, torch.float32, CPU)


def read(keeper, *pairs, seen=None):
    """Sequences that read sources take part in a forward; what was encoded for it."""
    calls = [] if seen is None else seen

    def encode(fresh):
        calls.append(fresh)
        rows = torch.tensor([float(token) for source in fresh for token in source])[:, None, None]
        sides = rows.expand(-1, HEADS, WIDTH)
        return [(sides + layer, -sides) for layer in range(2)]

    keeper.prepare([Span(key, 0, [1], source=source) for key, source in pairs], encode)
    keeper.check()
    return calls


def test_a_source_is_encoded_once_for_all_who_read_it():
    keeper = sources()
    assert read(keeper, (0, ONE), (1, TWO), (2, ONE)) == [[ONE, TWO]]
    assert read(keeper, (0, ONE), (1, TWO), (3, tuple(range(7)))) == []
    assert keeper.readers == {0: ONE, 1: TWO, 2: ONE, 3: ONE}
    page, length = keeper.page(1)
    assert length == len(TWO)
    assert keeper.pool.keys[1][page, 2, : len(TWO), 0].tolist() == [token + 1.0 for token in TWO]
    assert keeper.pool.values[0][page, 0, : len(TWO), 5].tolist() == [-float(token) for token in TWO]


def test_who_goes_makes_room_and_who_stays_does_not():
    keeper = sources()
    read(keeper, (0, ONE), (1, TWO))
    refused(OutOfPages, "2 encoded sources are in use", read, keeper, (2, THREE))
    keeper.release(0)
    keeper.release(7)
    assert read(keeper, (2, THREE)) == [[THREE]]
    assert keeper.keys.keys() == {TWO, THREE}
    keeper.release(1)
    assert read(keeper, (3, TWO)) == []
    assert read(keeper, (3, THREE)) == []
    assert keeper.readers == {2: THREE, 3: THREE}
    keeper.clear()
    assert keeper.keys.keys() == {THREE}


def test_the_source_that_was_read_least_recently_makes_room():
    keeper = sources()
    for pair in ((0, ONE), (1, TWO), (2, ONE)):
        read(keeper, pair)
        keeper.release(pair[0])
    assert read(keeper, (3, THREE)) == [[THREE]]
    assert keeper.keys.keys() == {ONE, THREE}


def test_a_failed_encoder_leaves_nothing():
    keeper, fail = sources(), Mock(side_effect=RuntimeError("no"))
    refused(RuntimeError, None, keeper.prepare, [Span(0, 0, [1], source=ONE)], fail)
    keeper.check()
    assert not keeper.keys
    assert not keeper.readers


def test_pages_and_readers_end_together():
    pool = Pool([SHAPE], 4, 8, torch.float32)
    pool.sources = sources()
    pool.reserve(5, 3)
    read(pool.sources, (5, ONE))
    pool.check()
    pool.free(5)
    assert not pool.sources.readers
    pool.scrub()
    assert not pool.sources.keys


def test_prefixes_by_source():
    pool = Pool([SHAPE], 8, 2, torch.float32)
    tree, tokens = PrefixTree(pool), [1, 2, 3, 4, 5]
    for key, source in enumerate((None, ONE, TWO)):
        pool.reserve(key, 5)
        pool.advance(key, 4)
        tree.insert(key, tokens, 4, source=source)
        pool.free(key)
    assert pool.num_free == 2
    result = {}
    for key, source in enumerate((None, ONE, TWO, THREE)):
        assert tree.match_prefix(10 + key, tokens, 4, source=source) == (0 if source is THREE else 4)
        result[source] = tuple(pool.block_tables.get(10 + key, ()))
        pool.free(10 + key)
    assert len({*result.values()}) == 4
    pool.check()
    tree.evict(4)
    assert len(tree.roots) == 2
    tree.clear()
    assert [*tree.roots] == [None]
    assert pool.num_free == 8


def attentions(page_size):
    made = []
    for kind in (SdpaAttention, KernelAttention):
        pool = Pool([SHAPE], 64, page_size, torch.float32)
        pool.sources = sources()
        made.append(kind(pool))
    return made


@pytest.mark.parametrize("page_size", where(can_attend(torch.float32, CPU, (SHAPE,)), [16, 400]))
def test_the_kernel_against_torch(page_size):
    """Biases by distance, for chains and trees over several blocks, and attention across."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(HEADS, 340, generator=generator)
    tree = [-1, 0, 0, 1, 2, -1]
    steps = [
        [Span(0, 0, [1] * 150, source=ONE), Span(1, 0, [1], source=TWO)],
        [Span(0, 150, [1] * 6, tree, source=ONE), Span(1, 1, [1] * 3, source=TWO)],
        [Span(0, 150, [1] * 180, source=ONE), Span(1, 4, [1] * 6, tree, source=TWO)],
    ]
    both = attentions(page_size)
    for spans in steps:
        batch = [Batch(spans), Batch(spans)]
        sides = torch.randn(3, batch[0].num_rows, HEADS, WIDTH, generator=generator)
        inside, across = [], []
        for attention, mine in zip(both, batch):
            read(attention.pool.sources, *((span.key, span.source) for span in spans))
            metadata = attention.begin(mine)
            inside.append(attention.run(Query(0, *sides, 0.3, bias=bias), metadata))
            across.append(attention.cross(0, sides[0] * 0.01, 0.3, metadata))
            for span in spans:
                attention.pool.advance(span.key, span.end if span.parents is None else span.start)
        assert torch.allclose(*inside, atol=2e-5)
        assert torch.allclose(*across, atol=2e-4)
        assert across[0].std() > 0.1
    attention = both[1]
    metadata = attention.begin(Batch([Span(0, 0, [1], source=ONE)]))
    for wrong in (bias.double(), bias[:2], bias.T, bias[:, ::2]):
        refused(ValueError, "a bias", attention.run, Query(0, *sides[:, :1], 0.3, bias=wrong), metadata)
