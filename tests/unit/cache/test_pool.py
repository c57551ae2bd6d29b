"""The KV pool against the simplest possible account of it: a list of values per sequence."""

import re
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from forerun.cache.pool import KVShape, OutOfPages, Pages, Pool
from refusals import refused

SHAPES = [KVShape(1, 1, 2), KVShape(2, 3, 1)]


def write(pool, key, values, at=None):
    """What a forward does: reserve, store the same number in every component, advance."""
    start = pool.length(key) if at is None else at
    pool.reserve(key, start + len(values))
    places = pool.slot_mapping(key, range(start, start + len(values)))
    for layer, shape in enumerate(pool.layers):
        rows = torch.tensor(values, dtype=torch.float32)[:, None, None]
        heads = (len(values), shape.heads)
        pool.write(layer, places, rows.expand(*heads, shape.key_dim), -rows.expand(*heads, shape.value_dim))
    pool.advance(key, start + len(values))


def read(pool, key):
    """The stored numbers, once every component of every layer has been seen to hold them."""
    length = pool.length(key)
    result = set()
    for layer in range(len(pool.layers)):
        keys, values = pool.gather(layer, torch.tensor(pool.block_tables[key], dtype=torch.long))
        result |= {tuple(row.tolist()) for row in keys[:, :length].transpose(1, 2).reshape(-1, length)}
        result |= {tuple((-row).tolist()) for row in values[:, :length].transpose(1, 2).reshape(-1, length)}
    assert len(result) == 1
    return [int(value) for value in result.pop()]


class Shelf:
    """A prefix tree that gives up its oldest idle page first."""

    def __init__(self, pool):
        self.pool = pool
        self.pages = {}

    def keep(self, page, values):
        self.pool.cache_page(page)
        self.pages[page] = values

    def evict(self, count):
        idle = [page for page in self.pages if self.pool.ref_counts[page] == 1]
        for page in idle[:count]:
            del self.pages[page]
            self.pool.uncache_page(page)

    def forget(self, key):
        pass

    def check(self):
        assert all(self.pool.cached[page] for page in self.pages)


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations: contents, tables and free pages are those of the account."""

    sequences = Bundle("sequences")

    @initialize(page_size=st.integers(1, 5), num_pages=st.integers(4, 14))
    def start(self, page_size, num_pages):
        self.pool = Pool(SHAPES, num_pages, page_size, torch.float32)
        self.shelf = self.pool.prefix_tree = Shelf(self.pool)
        self.account = {}
        self.counter = 0

    def fresh(self, count):
        self.counter += count
        return list(range(self.counter - count + 1, self.counter + 1))

    @rule(target=sequences)
    def begin(self):
        key = self.counter = self.counter + 1
        self.account[key] = []
        self.pool.reserve(key, 0)
        return key

    @rule(key=sequences, count=st.integers(1, 8))
    def append(self, key, count):
        values = self.fresh(count)
        before = {other: list(table) for other, table in self.pool.block_tables.items()}
        fits = self.pool.can_reserve(key, len(self.account[key]) + count)
        if fits:
            write(self.pool, key, values)
            self.account[key] += values
        else:
            refused(OutOfPages, "the KV cache is full", self.pool.reserve, key, len(self.account[key]) + count)
            assert before == self.pool.block_tables

    @rule(key=sequences, data=st.data())
    def truncate(self, key, data):
        length = data.draw(st.integers(0, len(self.account[key])))
        refs, whole = list(self.pool.ref_counts), -(-length // self.pool.page_size)
        kept, held = self.pool.block_tables[key][:whole], self.pool.block_tables[key][whole:]
        self.pool.truncate(key, length)
        del self.account[key][length:]
        assert self.pool.block_tables[key] == kept
        assert all(self.pool.ref_counts[page] == refs[page] - 1 for page in held)

    @rule(key=sequences, count=st.integers(1, 7), data=st.data())
    def draft_and_keep(self, key, count, data):
        """Tree rollback: some of the entries written last stay, moved together."""
        start = len(self.account[key])
        if not self.pool.can_reserve(key, start + count):
            return
        values = self.fresh(count)
        write(self.pool, key, values)
        chosen = sorted(data.draw(st.sets(st.integers(0, count - 1))))
        self.pool.keep(key, start, chosen)
        self.account[key] += [values[offset] for offset in chosen]
        assert len(self.pool.block_tables[key]) == -(-len(self.account[key]) // self.pool.page_size)

    @rule(target=sequences, source=sequences, data=st.data())
    def fork(self, source, data):
        length = data.draw(st.integers(0, len(self.account[source])))
        key = self.counter = self.counter + 1
        free = self.pool.num_free
        self.pool.fork(source, key, length)
        self.account[key] = self.account[source][:length]
        assert self.pool.num_free == free
        return key

    @rule(key=sequences, index=st.integers(0, 3))
    def shelve(self, key, index):
        """The prefix tree takes an interest in a full page."""
        size = self.pool.page_size
        values = self.account[key][index * size : (index + 1) * size]
        if len(values) == size and self.pool.block_tables[key][index] not in self.shelf.pages:
            self.shelf.keep(self.pool.block_tables[key][index], values)

    @precondition(lambda self: bool(self.shelf.pages))
    @rule(target=sequences, data=st.data())
    def adopt(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.shelf.pages)), max_size=3, unique=True))
        values = [value for page in pages for value in self.shelf.pages[page]]
        length = data.draw(st.integers(max(0, len(values) - self.pool.page_size + 1), len(values)))
        key = self.counter = self.counter + 1
        self.pool.adopt(key, pages, length)
        self.account[key] = values[:length]
        return key

    @rule(key=consumes(sequences))
    def free(self, key):
        self.pool.free(key)
        self.pool.free(key)
        del self.account[key]
        assert self.pool.length(key) == 0

    @invariant()
    def contents_are_those_of_the_account(self):
        assert set(self.pool.block_tables) == set(self.account)
        for key, values in self.account.items():
            assert self.pool.length(key) == len(values)
            if values:
                assert read(self.pool, key) == values

    @invariant()
    def pages_are_accounted_for(self):
        self.pool.check()
        used = {page for table in self.pool.block_tables.values() for page in table} | set(self.shelf.pages)
        assert self.pool.num_free == self.pool.num_pages - len(used)
        for key, values in self.account.items():
            assert len(self.pool.block_tables[key]) == -(-len(values) // self.pool.page_size)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_truncation_also_drops_what_was_reserved_and_never_written():
    pages = Pages(8, 4)
    pages.reserve(1, 5)
    pages.advance(1, 5)
    pages.reserve(1, 17)
    assert pages.num_free == 3
    pages.truncate(1, 9)
    assert (pages.length(1), pages.num_free) == (5, 5)


def test_check_notices_what_is_wrong():
    def broken(change):
        pages = Pages(4, 4)
        pages.reserve(1, 6)
        pages.advance(1, 6)
        pages.check()
        change(pages)
        return pages

    def leak(pages):
        del pages.block_tables[1]

    def double(pages):
        pages.free_pages.append(pages.free_pages[-1])

    def too_long(pages):
        pages.lengths[1] = 9

    def freed_in_use(pages):
        pages.free_pages.append(pages.block_tables[1][0])

    for change in (leak, double, too_long, freed_in_use):
        refused(AssertionError, None, broken(change).check)


def test_misuse_is_an_error():
    pages = Pages(4, 4)
    pages.reserve(1, 4)
    refused(ValueError, "5 entries were written where 1 pages are reserved", pages.advance, 1, 5)
    refused(ValueError, "already has pages", pages.adopt, 1, [0], 1)


def test_entries_take_memory_when_they_are_used():
    def resident():
        """Bytes of the pool's own mappings: those of the whole process change with whatever else it does."""
        places, total, ours = [each.data_ptr() for each in (*pool.keys, *pool.values)], 0, False
        for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                ours = any(int(found[1], 16) <= place < int(found[2], 16) for place in places)
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
        return total

    pool = Pool([KVShape(4, 64, 64)] * 8, 4, 8192, torch.bfloat16)
    size = 8 * 2 * 4 * 64 * 4 * 8192 * 2
    assert sum(tensor.numel() * tensor.element_size() for tensor in [*pool.keys, *pool.values]) == size
    assert all(tensor.data_ptr() % 64 == 0 for tensor in pool.keys)
    assert resident() < size / 4
    assert not any(tensor.any() for tensor in [*pool.keys, *pool.values])
    for layer in range(8):
        for key in range(4):
            pool.reserve(key, 3)
            ones = torch.ones(3, 4, 64, dtype=torch.bfloat16)
            pool.write(layer, pool.slot_mapping(key, range(3)), ones, ones)
    assert 0 < resident() < size / 4
    assert sum(tensor.sum(dtype=torch.float32) for tensor in [*pool.keys, *pool.values]) == 8 * 2 * 4 * 3 * 4 * 64
