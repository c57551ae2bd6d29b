"""A model's layers over ranks: two threads that swap parts, so that every architecture is quick; then two processes."""

import asyncio
import gc
import math
import os
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import monotonic
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig

from described import SIZES
from forerun import LLM, BeamSearchParams, SamplingParams
from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError, RankError
from forerun.engine.async_engine import AsyncEngine
from forerun.models.architectures.spec import bind
from forerun.models.files.open import Checkpoint
from forerun.models.formats.base import size
from forerun.models.formats.tiled import can_tile
from forerun.models.load import load_model
from forerun.models.ranks import leader, split
from forerun.models.ranks.team import Team
from forerun.models.run.base import new_attention
from forerun.models.run.fused import PartialSums
from forerun.models.run.invariance import self_test
from forerun.models.run.native import NativeModel
from forerun.models.weights.transform import CheckpointWeights, transform
from here import where
from modules import logits_of, requested
from refusals import refused
from rounding import apart, bound, by_chance

pytestmark = pytest.mark.slow

TOKENS, ROWS = 97, 40
CASES = {
    "llama-biases": {},
    "llama": {"num_key_value_heads": 1},
    "qwen3": {},
    "gemma2": {},
    "gemma3": {},
    "phi3": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe-some": {"num_experts": 6, "num_experts_per_tok": 3},
}
"""Of ``described.CASES``, with what differs."""


class Swap:
    """What two threads' teams meet through."""

    def __init__(self):
        self.shards = [torch.empty(0)] * 2
        self.barrier = Barrier(2, timeout=20)


class Thread(Team):
    def __init__(self, rank, swap):
        super().__init__(rank, 2)
        self.leads, self.swap = rank == 0, swap

    def shards(self, shard):
        if self._apart:
            return [shard] * 2
        self.swap.shards[self.rank] = shard
        self.swap.barrier.wait()
        result = [each.clone() for each in self.swap.shards]
        self.swap.barrier.wait()
        return result


@pytest.fixture(scope="module")
def checkpoint(described):
    """Case name -> folder of a random checkpoint."""
    return lambda name: Path(described(name, vocab_size=TOKENS, **CASES[name]))


def two(folder, dtype=torch.float32, weights="auto"):
    """Both ranks' models."""
    config, swap, asked = Checkpoint.at(folder).config, Swap(), requested(dtype, invariant=True, weights=weights)
    weights = transform(Checkpoint.at(folder).files(), config)
    models = [NativeModel(config, weights, asked, Thread(rank, swap)) for rank in range(2)]
    models[1].tiles = models[0].tiles
    return models


def together(models, work):
    """``work`` of every rank's model at once: what rank 0 gets, and that rank 1 got the same."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, models)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    return first


def logits(model):
    return logits_of(model, [(7 * index + 1) % TOKENS for index in range(ROWS)], page_size=8)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does_and_each_row_by_itself(checkpoint, name):
    folder = checkpoint(name)
    one, ranks = load_model(folder, invariant=True), two(folder)
    expected, got = logits(one), together(ranks, logits)
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    assert not together(ranks, lambda model: self_test(model, rows=30, page_size=8))
    ids = torch.arange(TOKENS)
    assert torch.equal(together(ranks, lambda model: model.embed(ids)), one.embed(ids))


@pytest.mark.parametrize("dtype", where(can_tile, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("name", CASES)
def test_a_ranks_layers_in_one_call_give_the_bits_of_layer_by_layer(checkpoint, name, dtype):
    ranks = two(checkpoint(name), dtype)
    if name == "olmo2":  # its norms go over the heads of all ranks
        assert ranks[0].ranges is None
        return
    result = []
    for _ in range(2):
        result.append(together(ranks, pieces))
        for model in ranks:
            model.ranges = None
    for one, other in zip(*result, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert one.hidden.keys() == other.hidden.keys()
        assert all(torch.equal(one.hidden[layer], other.hidden[layer]) for layer in one.hidden)


@torch.inference_mode()
def pieces(model):
    attention = new_attention(model, max_seqs=2, max_len=64, page_size=4)
    nodes = Span(0, 12, [9, 8, 7, 6], [-1, 0, 0, 1], logits=[1, 3])
    batches = [
        Batch([Span(0, 0, [*range(3, 15)], logits=[11]), Span(1, 0, [5, 6])], hidden=(0, 1)),
        Batch([nodes, Span(1, 2, [5], logits=[0])], hidden=(1, 2)),
        Batch([Span(1, 3, [6, 7])]),
        Batch([Span(1, 5, [6, 7], logits=[1])], layers=(1,)),
    ]
    return [model.forward(batch, attention) for batch in batches]


def test_what_sums_is_gone_with_its_model():
    """Other ranks end when the first one's team does, which must not wait for a search for cycles."""
    sums = PartialSums(lambda shard: shard, 16, torch.float32)
    seen = weakref.ref(sums)
    gc.disable()
    try:
        del sums
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", where(can_tile, [torch.float32]))
def test_a_sum_that_fails_ends_the_forward(checkpoint, dtype):
    first, _ = two(checkpoint("llama"), dtype)
    first.team.shards = lambda shard: [shard, shard]
    logits(first)

    first.ranges.sums.total = Mock(side_effect=RankError("rank 1 has gone"))
    refused(RankError, "rank 1 has gone", logits, first)
    first.ranges.sums.total = lambda shard: shard.float()
    assert logits(first).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_that_torch_computes(checkpoint, name):
    """Rank 0 finds row counts whose results agree; they hold for the others."""
    ranks = two(checkpoint(name), weights="plain")
    assert ranks[0].tiles is not None
    assert (together(ranks, logits) - logits(load_model(checkpoint(name)))).abs().max() < 1e-3
    assert not together(ranks, lambda model: self_test(model, rows=20, page_size=8, chunks=(3, 8)))


def test_bfloat16(checkpoint):
    folder = checkpoint("llama")
    exact, ranks = load_model(folder), two(folder, torch.bfloat16)
    one = (logits(load_model(folder, dtype="bfloat16", invariant=True)) - logits(exact)).norm()
    assert (together(ranks, logits) - logits(exact)).norm() < by_chance(ROWS) * one  # what rounding does to one rank
    assert not together(ranks, lambda model: self_test(model, rows=20, page_size=8, chunks=(3, 8)))


class Noting(CheckpointWeights):
    """Remembers which tensors were asked for."""

    def values(self, name):
        self.__dict__.setdefault("asked", set()).add(name)
        return super().values(name)


def test_each_rank_asks_for_its_part(checkpoint):
    folder = checkpoint("mixtral")
    one, ranks = load_model(folder), two(folder)
    routers = sum(layer.experts.router.nbytes for layer in one._layers)
    assert size(one.linears()) + routers == pytest.approx(sum(size(model.linears()) for model in ranks), rel=0.01)
    assert [model.info.kv_shapes[0].heads for model in (one, *ranks)] == [2, 1, 1]
    config = Checkpoint.at(folder).config
    weights = Noting(Checkpoint.at(folder).files(), config)
    NativeModel(config, weights, requested(invariant=True), Thread(1, Swap()))
    experts = {int(name.split(".experts.")[1][0]) for name in weights.asked if ".experts." in name}
    assert experts == {2, 3}


HYBRIDS = {
    "lfm2": ("lfm2", {}),
    "qwen3_5": ("qwen3_5", {}),
    "granite": ("granite-h", {"mamba_n_groups": 2}),
    "granite, one group": ("granite-h", {"mamba_n_groups": 1, "mamba_proj_bias": True}),
    "falcon": ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon, two groups": ("falcon_h1", {"mamba_n_groups": 2}),
    "nemotron": ("nemotron_h", {}),
}


@pytest.fixture(scope="module")
def hybrid_folder(hybrid):
    return lambda name: Path(hybrid(HYBRIDS[name][0], **HYBRIDS[name][1]))


@torch.inference_mode()
def rounds(model):
    """A prompt in two pieces, trees of which one path is kept, and rows behind."""
    attention = new_attention(model, max_seqs=2, max_len=64, page_size=4, slack=6)
    pool, result = attention.pool, []
    first = [Span(0, 0, [*range(3, 15)], logits=[11]), Span(1, 0, [5, 6], logits=[1])]
    tree = [Span(0, 12, [9, 8, 7, 6], [-1, 0, 0, 1], logits=[0, 1, 2, 3]), Span(1, 2, [5, 9], logits=[0, 1])]
    for number, spans in enumerate((first, tree)):
        for span in spans:
            assert pool.try_reserve(span.key, span.end)
        result.append(model.forward(Batch(spans), attention).logits)
        if number:
            pool.keep(0, 12, [0, 2])
            pool.truncate(1, 3)
    assert pool.try_reserve(0, 16)
    assert pool.try_reserve(1, 4)
    result.append(
        model.forward(Batch([Span(0, 14, [4, 3], logits=[0, 1]), Span(1, 3, [7], logits=[0])]), attention).logits
    )
    return torch.cat(result)


def condition(model):
    """How many times larger a change of the embeddings is in the logits: what a state remembers, norms may enlarge."""
    expected, table, eps = rounds(model), model._embedding, torch.finfo(torch.float32).eps
    generator = torch.Generator().manual_seed(0)

    def changed(ids):
        rows = table(ids)
        return rows * (1 + eps * torch.randn(rows.shape, generator=generator).sign())

    model._embedding = changed
    return max(1.0, apart(rounds(model), expected) / eps)


@pytest.mark.parametrize("weights", ["auto", "plain"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_with_state_are_split_by_heads_and_channels(hybrid_folder, name, weights):
    folder = hybrid_folder(name)
    one, ranks = load_model(folder, invariant=True), two(folder, weights=weights)
    expected, got = rounds(one), together(ranks, rounds)
    limit = condition(load_model(folder, invariant=False, weights="plain")) * bound(Checkpoint.at(folder).config)
    assert apart(got, expected) < limit
    assert not together(ranks, lambda model: self_test(model, rows=20, page_size=8))
    whole, parts = (sum(map(numbers_of, model.info.state_shapes)) for model in (one, ranks[1]))
    assert parts <= whole * (0.51 if HYBRIDS[name][1].get("mamba_n_groups") != 1 else 0.7)


def numbers_of(shape):
    return 0 if shape is None else shape.width + math.prod(shape.checkpoint or (0,))


def test_parts_of_a_weight_make_the_whole():
    whole = torch.arange(7 * 6).view(7, 6).float()
    rows = [split.shard(whole, split.vocabulary(7, rank, 3), None)[:] for rank in range(3)]
    assert torch.equal(torch.cat(rows), torch.cat([whole, torch.zeros(2, 6)]))
    columns = [split.shard(whole, None, split.indices(((3, 2),), rank, 3))[2:4] for rank in range(3)]
    assert torch.equal(torch.cat(columns, 1), whole[2:4])
    fused = ((4, 3), (2, 3), (2, 3))  # four heads, two of keys, two of values, three numbers each
    assert split.indices(fused, 1, 2).tolist() == [*range(6, 12), *range(15, 18), *range(21, 24)]
    gated = ((2, 3), (1, 2))  # two heads of three numbers, and two numbers that both read
    assert [split.indices(gated, rank, 2).tolist() for rank in (0, 1)] == [[0, 1, 2, 6, 7], [3, 4, 5, 6, 7]]
    assert split.indices(((2, 2),), 3, 4).tolist() == [2, 3]  # the second of two heads, on the last of four ranks


@pytest.mark.parametrize(("name", "ranks", "reason"), [
    ("llama", 3, "does not divide the model's heads, 4"),
    ("mixtral", 8, "does not divide the model's heads, 4"),
    ("qwen3_moe-some", 4, "does not divide the model's number of experts, 6"),
])  # fmt: skip
def test_ranks_that_cannot_have_equal_parts_are_refused(checkpoint, name, ranks, reason):
    refused(ConfigError, reason, load_model, checkpoint(name), tensor_parallel_size=ranks)


@pytest.mark.parametrize(("changed", "reason"), [
    ({"intermediate_size": 71}, "does not divide the model's intermediate size, 71"),
    ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
     "neither divides the model's key-value heads, 3"),
])  # fmt: skip
def test_sizes_that_two_do_not_divide(changed, reason):
    config = AutoConfig.for_model("llama", **{**SIZES, **changed})
    refused(ConfigError, reason, split.check, bind(config), config, 2)


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("qwen3_5", {"linear_num_value_heads": 3, "linear_num_key_heads": 3}, "the model's heads with state, 3"),
        ("granite-h", {"num_attention_heads": 8, "head_dim": 8, "size": 8}, "heads with state, 4"),
        ("nemotron_h", {"mamba_num_heads": 12, "n_groups": 3}, "divide the model's groups of heads with state, 3"),
        ("granite-h-experts", {}, "an MLP beside experts, which is not split"),
    ],
)  # fmt: skip
def test_states_that_ranks_do_not_divide(hybrid, kind, changed, reason):
    size = changed.pop("size", 2)
    refused(ConfigError, reason, load_model, hybrid(kind, **changed), tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"model_path": "hf"}, "needs the native path"), ({"quantization": "int8"}, "remove quantization=int8")],
)
def test_what_is_not_split(checkpoint, options, reason):
    refused(ConfigError, reason, load_model, checkpoint("llama"), tensor_parallel_size=2, **options)


PROMPTS = ["the cat sat on the mat", "the cat sat on", "(a + b) * (a + b)", "x"]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "granite, one group"])
def test_two_ranks_with_states_give_the_tokens_of_one(hybrid_folder, name):
    """Drafts that are rejected, trees, shared beginnings, several turns, preemption and beams."""
    folder, options = (
        str(hybrid_folder(name)),
        {"page_size": 4, "num_pages": 40, "max_model_len": 96, "max_num_seqs": 4},
    )
    drafts = {"method": "draft_model", "model": folder, "quantization": "q8_0", "tree": [2, 2, 1]}
    one = LLM(folder, speculative_config=None, **options)
    shared = LLM(folder, tensor_parallel_size=2, speculative_config=[drafts, {"method": "ngram"}], **options)
    prompts = [f"the cat sat on the mat{end}" for end in ("", " and", " (a + b) * (a + b)", "!")]
    for temperature, methods in ((0.0, ("draft_model", None)), (0.9, ("draft_model", "ngram"))):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=30)
        for turn in range(2):
            expected = one.generate(prompts, params)
            for method in methods:
                jobs = [
                    job
                    for prompt in prompts
                    for job in shared.engine.add(
                        shared.tokenizer.encode(prompt), params, speculate=method is not None, method=method
                    )
                ]
                while shared.engine.busy:
                    shared.engine.step()
                assert [job.output_ids for job in jobs] == [answer.outputs[0].token_ids for answer in expected]
            prompts = [f"{prompt}{answer.outputs[0].text}" for prompt, answer in zip(prompts, expected)]
            prompts = [prompt[-40:] if turn else prompt for prompt in prompts]
    stats = shared.engine.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.preemptions
    assert stats.state_hits
    beams = [llm.beam_search(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=8)) for llm in (one, shared)]
    tokens = [[[beam.tokens for beam in answer.sequences] for answer in each] for each in beams]
    assert tokens[0] == tokens[1]
    shared.engine.check()


@pytest.fixture(scope="module")
def engine(tiny_target, tiny_draft):
    """Trees of a draft model, pages so few that requests lose theirs and so small that beginnings are shared."""
    drafts = {"method": "draft_model", "model": tiny_draft, "tree": [2, 2, 1]}
    return LLM(
        tiny_target, tensor_parallel_size=2, speculative_config=drafts, page_size=4, num_pages=40, max_model_len=96
    )


def test_the_same_seed_gives_the_same_tokens_with_and_without_drafts(engine):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, n=2)
    with_drafts = engine.generate(PROMPTS, params)
    plain = engine.generate(PROMPTS, params, speculate=False)
    got, expected = (
        [[each.token_ids for each in answer.outputs] for answer in result] for result in (with_drafts, plain)
    )
    assert got == expected
    assert sum(answer.metrics.num_accepted_draft_tokens for answer in with_drafts) > 10
    assert engine.engine.stats.preemptions
    engine.engine.check()


def test_beams(engine):
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    result = [engine.beam_search(PROMPTS[:2], params, speculate=drafts) for drafts in (True, False)]
    tokens = [[[beam.tokens for beam in answer.sequences] for answer in each] for each in result]
    assert tokens[0] == tokens[1]


def test_logits_are_close_to_one_process_and_the_same_for_every_row_count(engine, tiny_target):
    one, two = load_model(tiny_target, invariant=True), engine.model
    ids, result = [5 + index % 60 for index in range(50)], []
    for model in (one, two):
        attention = new_attention(model, max_seqs=1, max_len=64)
        batch = Batch([Span(0, 0, ids, logits=list(range(50)))], hidden=(1,))
        result.append(model.forward(batch, attention))
    assert (result[0].logits - result[1].logits).abs().max() < 1e-4
    assert (result[0].hidden[1] - result[1].hidden[1]).abs().max() < 1e-4
    assert not self_test(two, rows=30, page_size=4)
    rows = torch.tensor([3, 97, 0])
    assert torch.equal(one.embed(rows), two.embed(rows))
    assert (one.lm_head(one.embed(rows)) - two.lm_head(two.embed(rows))).abs().max() < 1e-4


def test_a_killed_rank_ends_the_engine_with_one_line(engine):
    """The last test with this engine."""
    os.kill(engine.model.team.others[0].process.pid, signal.SIGKILL)
    began = monotonic()
    for _ in range(2):
        refused(RankError, r"rank 1 of 2 was killed by signal 9: this engine has ended", engine.generate, PROMPTS)
    assert monotonic() - began < 10

    async def ask():
        server = AsyncEngine(engine.engine)
        deltas = [delta async for delta in await server.submit([5, 6], SamplingParams(max_tokens=4))]
        ready = server.ready
        server.close()
        return ready, str(deltas[-1].finish)

    ready, end = asyncio.run(ask())
    assert not ready  # a server's /health says so
    assert "rank 1 of 2 was killed by signal 9" in end


@pytest.mark.parametrize(("command", "reason"), [
    ("raise SystemExit(3)", "rank 1 of 2 ended with status 3"),
    ("import time; time.sleep(60)", "rank 1 of 2 did not come up within 1 s"),
])  # fmt: skip
def test_a_rank_that_does_not_come_up(tiny_target, monkeypatch, command, reason):
    monkeypatch.setattr(leader, "COMMAND", command)
    monkeypatch.setattr(leader, "START", 1.0)
    monkeypatch.setattr(leader, "LAST_WORDS", 0.5)
    refused(RankError, reason, load_model, tiny_target, tensor_parallel_size=2)
