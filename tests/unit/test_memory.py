"""One memory budget for all KV caches, and the engine options about them."""

import pytest
import torch

from forerun import SamplingParams
from forerun.core.errors import ConfigError, RequestError
from forerun.engine import memory
from forerun.engine.config import EngineConfig
from forerun.engine.memory import megabytes, parse_bytes, spare_bytes
from refusals import refused


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("512 MB", 512_000_000), (4096, 4096), ("1.5kib", 1536), ("77", 77)]
)
def test_memory_sizes(text, size):
    assert parse_bytes(text) == size


def test_sizes_as_they_are_shown():
    shown = [megabytes(size) for size in (40_000, 25_160_000, 99_900_000, 100_400_000, 2_471_000_000)]
    assert shown == ["0.0 MB", "25.2 MB", "99.9 MB", "100 MB", "2,471 MB"]


@pytest.mark.parametrize("text", ["much", "2 GiBs", "-1", "", True])
def test_memory_sizes_that_are_none(text):
    refused(ConfigError, "kv_cache_memory must be", EngineConfig, kv_cache_memory=text)


@pytest.mark.parametrize(("options", "says"), [
    ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "every running request needs a row"),
    ({"kv_cache_memory": "1MB", "num_pages": 4}, "give one of them"),
    ({"prefix_caching": True}, "set page_size"),
    ({"max_prefill_tokens": 0}, "max_prefill_tokens must be"),
])  # fmt: skip
def test_options_that_contradict_each_other(options, says):
    refused(ConfigError, says, EngineConfig, **options)


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_one_budget_for_target_and_draft(llm, tiny_draft):
    """The bytes of all pools are within the budget, every pool holds the same tokens, and little is left over."""
    draft = {"method": "draft_model", "model": tiny_draft}
    engine = llm(draft, page_size=8, kv_cache_memory=200_000).engine
    sizes = [sum(t.nbytes for t in (*pool.keys, *pool.values)) for pool in engine.pools]
    assert len(sizes) == 2
    assert 190_000 < sum(sizes) <= 200_000
    assert engine.pools[0].num_tokens == engine.pools[1].num_tokens == engine.kv_cache_tokens
    assert engine.max_model_len <= engine.kv_cache_tokens
    refused(ConfigError, "less than one page of every one", llm, draft, page_size=8, kv_cache_memory=2_000)


def test_without_a_budget_the_caches_take_what_is_spare(llm, monkeypatch):
    assert 1 << 20 < spare_bytes(torch.device("cpu")) < 1 << 45
    monkeypatch.setattr(memory, "spare_bytes", lambda device: 50_000)
    engine = llm(page_size=8, max_num_seqs=6).engine
    assert 45_000 < sum(t.nbytes for pool in engine.pools for t in (*pool.keys, *pool.values)) <= 50_000
    assert engine.max_model_len == engine.kv_cache_tokens


def test_a_pool_too_small_for_a_request_says_so(llm):
    small = llm(page_size=8, num_pages=4, max_model_len=64)
    refused(RequestError, "the pool holds 32", small.generate, "a" * 30, GREEDY)
    assert len(small.generate("a" * 12, GREEDY)[0].outputs[0].token_ids) == 20
    small.engine.check()


def test_a_full_draft_pool_means_plain_decoding(llm, tiny_draft):
    """Not an error, not a lost drafter: the next request drafts again."""
    model = llm(
        {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 3}, page_size=8, prefix_caching=False
    )
    pool = model.engine.pools[1]
    blocker = -1
    pool.reserve(blocker, 8 * (pool.num_pages - 1))
    crowded = model.generate("hello there", GREEDY)[0]
    pool.free(blocker)
    roomy = model.generate("hello there", GREEDY)[0]
    assert crowded.outputs[0].token_ids == roomy.outputs[0].token_ids
    assert crowded.metrics.num_drafts == 0
    assert crowded.metrics.draft_error is None
    assert roomy.metrics.num_drafts > 0
    model.engine.check()
