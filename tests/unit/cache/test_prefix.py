"""The prefix tree against a plain list of the token sequences it has been given; and through engines."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forerun import SamplingParams
from forerun.cache.pool import KVShape, Pool
from forerun.cache.prefix import PrefixTree
from harness import until_idle

Run = tuple[int, ...]


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class PrefixMachine(RuleBasedStateMachine):
    """Sequences come, share, draft, roll back and go while the pool is short.

    A cache entry holds the number of the token it belongs to, so what a sequence reads must be its own tokens. The
    account is a list of known runs of whole pages with the time each was last used.
    """

    @initialize(page_size=st.integers(1, 4), num_pages=st.integers(4, 12))
    def start(self, page_size, num_pages):
        self.pool = Pool([KVShape(1, 1, 1)], num_pages, page_size, torch.float32)
        self.tree = PrefixTree(self.pool)
        self.tokens = {}
        self.known = {}
        self.time = 0
        self.keys = 0

    def use(self, run):
        """A run was used, and with it everything that it begins with."""
        self.time += 1
        for end in range(self.pool.page_size, len(run) + 1, self.pool.page_size):
            self.known[run[:end]] = self.time

    def room(self, key, length):
        """Reserve, and check which runs had to go for it: the least recently used of those that nobody has."""
        if not self.pool.can_reserve(key, length):
            return False
        before = set(self.known)
        self.pool.reserve(key, length)
        gone = before - self.entered()
        held = [self.pool.block_tables[key], *self.pool.block_tables.values()]
        used = {page for table in held for page in table}
        unused = [run for run in before if run in gone or self.page_of(run) not in used]
        unused.sort(key=lambda run: (self.known[run], -len(run)))
        assert set(unused[: len(gone)]) == gone
        for run in gone:
            del self.known[run]
        return True

    def entered(self):
        result = set()
        open_nodes = [((), self.tree.root)]
        while open_nodes:
            run, node = open_nodes.pop()
            for child in node.children.values():
                result.add(run + child.tokens)
                open_nodes.append((run + child.tokens, child))
        return result

    def page_of(self, run):
        node, size = self.tree.root, self.pool.page_size
        for start in range(0, len(run), size):
            node = node.children[run[start : start + size]]
        return node.page

    def write(self, key, start, values):
        places = self.pool.slot_mapping(key, range(start, start + len(values)))
        rows = torch.tensor(values, dtype=torch.float32)[:, None, None]
        self.pool.write(0, places, rows, rows)
        self.pool.advance(key, start + len(values))

    @rule(data=st.data(), length=st.integers(1, 14), partial=st.booleans())
    def begin(self, data, length, partial):
        """A request whose prompt may begin like an earlier one; all but its last token may be reused."""
        like = data.draw(st.sampled_from([(), *sorted(self.known)]))
        rest = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        prompt = (*like, *rest)[: max(length, len(like))]
        self.keys += 1
        key, limit, size = self.keys, len(prompt) - 1, self.pool.page_size
        shared = [(common(run, prompt[:limit]), run) for run in self.known]
        longest = max((count for count, _ in shared), default=0)
        expected = longest if partial else longest // size * size
        reused = self.tree.match_prefix(key, prompt, limit, partial=partial)
        assert reused == expected
        if reused:
            pages = -(-reused // size) * size
            self.use(next(run[:pages] for run in self.entered() if common(run, prompt[:limit]) >= reused))
        if not self.room(key, len(prompt)):
            self.pool.free(key)
            return
        self.tokens[key] = list(prompt[:reused])
        self.feed(key, list(prompt[reused:]))

    def feed(self, key, values):
        self.write(key, len(self.tokens[key]), values)
        self.tokens[key] += values
        self.commit(key)

    def commit(self, key):
        size, tokens = self.pool.page_size, self.tokens[key]
        whole = tuple(tokens[: len(tokens) // size * size])
        new = len(whole) // size > getattr(self, "ends", {}).get(key, 0)
        self.tree.insert(key, tokens, len(tokens))
        if new:
            self.__dict__.setdefault("ends", {})[key] = len(whole) // size
            self.use(whole)

    @rule(data=st.data(), draft=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def round(self, data, draft):
        """Drafted entries are written and some of them kept; only those may enter the tree."""
        if not self.tokens:
            return
        key = data.draw(st.sampled_from(sorted(self.tokens)))
        start = len(self.tokens[key])
        if not self.room(key, start + len(draft)):
            return
        self.write(key, start, draft)
        kept = sorted(data.draw(st.sets(st.integers(0, len(draft) - 1))))
        self.pool.keep(key, start, kept)
        self.tokens[key] += [draft[node] for node in kept]
        self.commit(key)

    @rule(data=st.data())
    def end(self, data):
        if self.tokens:
            key = data.draw(st.sampled_from(sorted(self.tokens)))
            self.pool.free(key)
            del self.tokens[key]

    @invariant()
    def everyone_reads_their_own_tokens(self):
        for key, tokens in self.tokens.items():
            assert self.pool.length(key) == len(tokens)
            keys, _ = self.pool.gather(0, torch.tensor(self.pool.block_tables[key], dtype=torch.long))
            assert keys[0, : len(tokens), 0].tolist() == tokens

    @invariant()
    def the_tree_is_what_was_committed(self):
        self.pool.check()
        assert self.entered() == set(self.known)
        assert self.pool.num_pages - self.pool.num_free >= len(self.known)
        for run in self.known:
            page = self.pool.keys[0][self.page_of(run), 0, :, 0].tolist()
            assert tuple(page) == run[-self.pool.page_size :]

    def teardown(self):
        if hasattr(self, "pool"):
            for key in list(self.tokens):
                self.pool.free(key)
            assert self.pool.num_evictable == len(self.known)
            self.tree.clear()
            assert self.pool.num_free == self.pool.num_pages
            self.pool.check()


TestPrefixTree = PrefixMachine.TestCase
TestPrefixTree.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_pages_computed_twice_are_kept_once():
    """Two sequences that read the same prompt side by side end up on the same pages, so that the tree can give up
    neither of them while one is in use."""
    pool = Pool([KVShape(1, 1, 1)], 8, 2, torch.float32)
    tree = PrefixTree(pool)
    for key in (1, 2):
        pool.reserve(key, 4)
        pool.advance(key, 4)
    assert pool.num_free == 4
    for key in (1, 2):
        tree.insert(key, [7, 8, 9, 10], 4)
    assert pool.block_tables[1] == pool.block_tables[2]
    assert pool.num_free == 6
    pool.free(1)
    assert pool.num_evictable == 0
    pool.free(2)
    assert pool.num_evictable == 2
    pool.check()


@pytest.mark.parametrize("reused", [3, 4])
def test_pages_of_which_a_part_is_reused_go_last(reused):
    pool = Pool([KVShape(1, 1, 1)], 8, 2, torch.float32)
    tree = PrefixTree(pool)
    for key, tokens in enumerate(([1, 2, 3, 4], [5, 6, 7, 8])):
        pool.reserve(key, 4)
        pool.advance(key, 4)
        tree.insert(key, tokens, 4)
        pool.free(key)
    assert tree.match_prefix(2, [1, 2, 3, 4, 9], reused) == reused
    pool.free(2)
    tree.evict(2)
    assert tree.match_length([1, 2, 3, 4], 4) == 4


def test_taking_entries_back_starts_from_the_root_again():
    pool = Pool([KVShape(1, 1, 1)], 8, 2, torch.float32)
    tree = PrefixTree(pool)
    pool.reserve(1, 4)
    pool.advance(1, 4)
    tree.insert(1, [1, 2, 3, 4], 4)
    pool.truncate(1, 1)
    tree.insert(1, [1, 2], 1)
    pool.reserve(1, 4)
    pool.advance(1, 4)
    tree.insert(1, [1, 5, 6, 7], 4)
    assert tree.match_prefix(2, [1, 2, 3, 4, 9], 4) == 4
    assert tree.match_prefix(3, [1, 5, 6, 7, 9], 4) == 4
    assert set(pool.block_tables[2]).isdisjoint(pool.block_tables[3])
    pool.check()


TEXT = "the quick brown fox jumps over the lazy dog; "
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def paged(llm, tiny_draft):
    return llm({**DRAFT, "model": tiny_draft}, page_size=8, invariant=True)


def fresh(model):
    for drafter in model.engine.router.drafters.values():
        drafter.tree.clear()
    model.engine.scheduler.tree.clear()
    model.engine.check()
    assert all(pool.num_free == pool.num_pages for pool in model.engine.pools)


def test_a_known_prompt_recomputes_its_last_token_only(paged):
    """Whether or not the prompt fills its last page."""
    for length in (16, 17, 23, 24):
        fresh(paged)
        prompt = paged.tokenizer.encode(TEXT)[:length]
        before = paged.engine.stats.prefix_hits
        paged.generate(prompt, GREEDY)
        assert paged.generate(prompt, GREEDY)[0].metrics.num_cached_tokens == length - 1
        assert paged.engine.stats.prefix_hits - before == length - 1


def test_the_draft_starts_on_its_prefix_too(paged, monkeypatch):
    fresh(paged)
    drafter = paged.engine.router.drafters["draft_model"]
    rows = []
    missing = drafter._missing

    def counting(*given):
        spans, ready = missing(*given)
        rows.extend(span.count for span in spans)
        return spans, ready

    monkeypatch.setattr(drafter, "_missing", counting)
    paged.generate(TEXT, GREEDY)
    cold = max(rows)
    rows.clear()
    paged.generate(TEXT, GREEDY)
    assert cold >= len(TEXT)
    assert max(rows) <= 8


@pytest.mark.parametrize("paused", [False, True])
def test_a_request_that_is_set_aside_holds_no_page_and_counts_once(paged, paused):
    fresh(paged)
    engine, before = paged.engine, paged.engine.stats.prefix_queries
    job = engine.add(paged.tokenizer.encode(TEXT), GREEDY)[0]
    for _ in range(3):
        engine.step()
    if paused:
        engine.pause(job)
    else:
        engine.scheduler.preempt(job.sequence)
    assert not any(pool.block_tables for pool in engine.pools)
    if paused:
        engine.resume(job)
    until_idle(engine)
    assert job.metrics.num_cached_tokens == 0
    assert engine.stats.prefix_queries - before == len(TEXT)
    engine.check()


def test_prompt_logprobs_read_the_whole_prompt(paged):
    fresh(paged)
    asked = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    first, again = paged.generate(TEXT, asked)[0], paged.generate(TEXT, asked)[0]
    assert again.metrics.num_cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
    assert len(again.prompt_logprobs) == len(again.prompt_token_ids)


def test_a_prompt_that_is_read_again_has_its_logprobs_once(llm, paged):
    engine, result = llm(page_size=8, max_num_batched_tokens=24).engine, []
    for preempted in (False, True):
        prompt = paged.tokenizer.encode(TEXT)
        job = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1))[0]
        engine.step()
        if preempted:  # and read in other chunks
            engine.scheduler.preempt(job.sequence)
            engine.scheduler.max_num_batched_tokens = 20
        until_idle(engine)
        result.append(job.prompt_logprobs)
    assert result[0] == result[1]
    assert len(result[1]) == len(prompt)


def test_off_means_off(llm):
    off = llm(page_size=8, prefix_caching=False)
    for _ in range(2):
        assert off.generate(TEXT, GREEDY)[0].metrics.num_cached_tokens == 0
    assert off.engine.stats.prefix_queries == 0
    assert off.engine.pools[0].num_free == off.engine.pools[0].num_pages


def test_answers_to_one_prompt_read_it_once(paged, listen):
    """Four answers queued at once: the prompt's pages are computed by the first of them."""
    fresh(paged)
    rows = []

    def counting(batch, attention):
        rows.append(sum(span.count for span in batch.spans if span.start + span.count <= len(TEXT)))

    params = SamplingParams(temperature=0.9, seed=1, n=4, max_tokens=6, ignore_eos=True)
    listen(paged.model, "forward", counting)
    got = paged.generate(TEXT, params)[0]
    assert len({tuple(output.token_ids) for output in got.outputs}) > 1
    assert len(TEXT) <= sum(rows) <= len(TEXT) + 3 * paged.engine.config.page_size
