"""Tensor parallelism with processes: one engine over two of them for the whole file."""

import asyncio
import os
import signal
from time import monotonic

import pytest
import torch

from forerun import LLM, BeamSearchParams, SamplingParams
from forerun.core.batch import Batch, Span
from forerun.core.errors import RankError
from forerun.engine.async_engine import AsyncEngine
from forerun.models.base import new_attention
from forerun.models.invariance import self_test
from forerun.models.load import load_model
from forerun.models.ranks import leader

pytestmark = pytest.mark.slow

PROMPTS = ["the cat sat on the mat", "the cat sat on", "(a + b) * (a + b)", "x"]


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
        with pytest.raises(RankError, match=r"rank 1 of 2 was killed by signal 9: this engine has ended") as caught:
            engine.generate(PROMPTS)
        assert "\n" not in str(caught.value)
    assert monotonic() - began < 10

    async def ask():
        server = AsyncEngine(engine.engine)
        deltas = [delta async for delta in server.generate([5, 6], SamplingParams(max_tokens=4))]
        ready = server.ready
        server.close()
        return ready, str(deltas[-1].finish)

    ready, end = asyncio.run(ask())
    assert not ready  # a server's /health says so
    assert "rank 1 of 2 was killed by signal 9" in end


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("raise SystemExit(3)", "rank 1 of 2 ended with status 3"),
        ("import time; time.sleep(60)", "rank 1 of 2 did not come up within 1 s"),
    ],
)
def test_a_rank_that_does_not_come_up(tiny_target, monkeypatch, command, reason):
    monkeypatch.setattr(leader, "COMMAND", command)
    monkeypatch.setattr(leader, "START", 1.0)
    monkeypatch.setattr(leader, "LAST_WORDS", 0.5)
    with pytest.raises(RankError, match=reason):
        load_model(tiny_target, tensor_parallel_size=2)
