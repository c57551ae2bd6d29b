"""One memory budget for all KV caches, and the engine options about them."""

import pytest
import torch

from forerun import SamplingParams
from forerun.core.errors import ConfigError, RequestError
from forerun.engine import memory
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


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_one_budget_for_target_and_draft(llm, tiny_draft):
    """The bytes of all pools are within the budget, every pool holds the same tokens, and little is left over."""
    draft = {"method": "draft_model", "model": tiny_draft}
    engine = llm(draft, page_size=8, kv_cache_memory=200_000).engine
    sizes = [sum(t.nbytes for t in (*pool.keys, *pool.values)) for pool in engine.pools]
    assert len(sizes) == 2
    assert 190_000 < sum(sizes) <= 200_000
    assert engine.max_model_len <= engine.pools[0].num_tokens == engine.pools[1].num_tokens
    refused(ConfigError, "less than one page of every one", llm, draft, page_size=8, kv_cache_memory=2_000)


def test_without_a_budget_the_caches_take_what_is_spare(llm, monkeypatch):
    assert 1 << 20 < spare_bytes(torch.device("cpu")) < 1 << 45
    monkeypatch.setattr(memory, "spare_bytes", lambda device: 50_000)
    engine = llm(page_size=8, max_num_seqs=6).engine
    assert 45_000 < sum(t.nbytes for pool in engine.pools for t in (*pool.keys, *pool.values)) <= 50_000
    assert engine.max_model_len == engine.pools[0].num_tokens


V1 = {"memory.limit_in_bytes": "600000\n", "memory.usage_in_bytes": "300000\n"}
V2 = {"memory.max": "600000\n", "memory.high": "max\n", "memory.current": "300000\n"}
CACHED = {"memory.stat": "anon 5\ninactive_file 100000\nactive_file 7\n"}
CACHED_V1 = {"memory.stat": "inactive_file 3\ntotal_inactive_file 100000\n"}
UNLIMITED = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "300000\n"}


@pytest.mark.parametrize(("own", "files", "expected"), [
    ("0::/a/b", {"a/b": V2}, 150_000),
    ("0::/a/b", {"a/b": V2 | CACHED}, 200_000),
    ("0::/a/b", {"a/b": V2 | {"memory.high": "500000\n"}}, 100_000),
    ("0::/a/b", {"a/b": V2, "a": V2 | {"memory.max": "400000\n"}}, 50_000),
    ("0::/a/b", {"a/b": {"memory.max": "max\n"}, "a": V2}, 150_000),
    ("0::/a/b", {"": V2}, 150_000),  # a container that does not see its own path
    ("0::/", {"": V2 | {"memory.current": "700000\n"}}, 0),
    ("4:memory:/a", {"memory/a": V1}, 150_000),
    ("4:cpu:/a\n5:memory,hugetlb:/docker/x", {"memory": V1 | CACHED_V1}, 200_000),
    ("4:memory:/a", {"memory/a": UNLIMITED, "memory": V1}, 150_000),
])  # fmt: skip
def test_control_groups_limit_the_caches(own, files, expected, tmp_path):
    for folder, contents in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (tmp_path / folder / name).write_text(text)
    (tmp_path / "own").write_text(own + "\n")
    assert spare_bytes(torch.device("cpu"), tmp_path, tmp_path / "own") == expected


@pytest.mark.parametrize("own", ["0::/a/b", "4:memory:/a", "nonsense", ""])
def test_groups_without_a_limit_change_nothing(own, tmp_path):
    (tmp_path / "memory").mkdir()
    for name, text in UNLIMITED.items():
        (tmp_path / "memory" / name).write_text(text)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "own").write_text(own + "\n")
    assert spare_bytes(torch.device("cpu"), tmp_path, tmp_path / "own") > 1 << 20


LIMITED = """
import resource, sys
from pathlib import Path
from forerun import LLM, ForerunError, SamplingParams
import torch
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (1 << 29),) * 2)
def tokens(**options):
    llm = LLM(sys.argv[1], speculative_config=None, threads=1, **options)
    return len(llm.generate(["abab"], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids)
print(tokens(max_num_seqs=100_000, max_num_batched_tokens=100_000))
try:
    tokens(max_num_seqs=100_000, max_num_batched_tokens=100_000, kv_cache_memory="4GiB")
except ForerunError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_limit_of_address_space_means_smaller_caches_or_one_line(warm, tiny_target):
    """``ulimit -v`` half a GiB above what is mapped; that many sequences could use 10 GB."""
    ended = warm.run(tiny_target, code=LIMITED)
    assert ended.returncode == 0, ended.stderr
    answered, refusal = ended.stdout.splitlines()
    assert answered == "5"
    assert refusal.startswith("the system does not give 4,295 MB for KV caches: lower kv_cache_memory")


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
