"""Mixtures of experts: how many experts rounds read, what they cost by that, and how far drafts go."""

import random
from contextlib import contextmanager
from itertools import cycle

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun import LLM, SamplingParams
from forerun.core.batch import Batch, Span
from forerun.models.load import load_model
from forerun.models.run.base import MixtureInfo, new_attention
from forerun.speculate.length.experts import ExpertReads
from forerun.speculate.length.prices import Prices, Timed
from simulated import Machine, play

SPARSE = MixtureInfo(count=64, chosen=4, layers=6, share=0.7)


class Text:
    """Rows that choose experts one by one, each layer by its own likings in this text."""

    def __init__(self, draw):
        self.draw = draw
        self.likes = [[draw.gammavariate(0.3, 1.0) for _ in range(SPARSE.count)] for _ in range(SPARSE.layers)]

    def row(self):
        chosen = []
        for likes in self.likes:
            mine = set()
            while len(mine) < SPARSE.chosen:
                mine.update(self.draw.choices(range(SPARSE.count), likes))
            chosen.append(mine)
        return chosen


def union(rows):
    return sum(len(set().union(*layer)) for layer in zip(*rows))


def rounds(draw, rows, texts, count=100):
    return [union([row for text in [Text(draw) for _ in range(texts)] for row in [text.row() for _ in range(rows)]])
            for _ in range(count)]  # fmt: skip


@pytest.mark.slow
def test_what_more_rows_read_is_known_from_what_few_rows_read():
    draw, reads = random.Random(1), ExpertReads(SPARSE)
    for rows in [2, 3] * 60:
        reads.learn(rows, 1, *rounds(draw, rows, 1, 1))
    for _ in range(60):
        reads.learn(3, 3, *rounds(draw, 1, 3, 1))
    for rows, texts in ((2, 1), (5, 1), (9, 1), (17, 1), (1, 8), (3, 4)):
        seen = rounds(draw, rows, texts)
        mean = sum(seen) / len(seen) / SPARSE.layers / SPARSE.chosen
        assert reads.times(rows * texts, texts) == pytest.approx(mean, rel=0.1)
    chance = ExpertReads(SPARSE)
    assert chance.times(9, 1) > 1.3 * reads.times(9, 1)


def seconds(rows, experts):
    return 0.001 * (2.0 + 0.1 * rows + 0.25 * experts)


@pytest.mark.parametrize("mixture", [SPARSE, None])
def test_a_price_follows_the_experts_that_rounds_read(mixture):
    """Made-up requests read other experts than a text does, whose rows choose alike; and not by rows alone."""
    draw = random.Random(2)

    @contextmanager
    def trials(sequences):
        def time_round(method, depth, rows, long=False):
            (experts,) = rounds(draw, 1, rows, 1)
            return Timed(rows, depth, 1e-4, seconds(rows, experts), experts if mixture else 0)

        yield time_round, {}

    prices = Prices({"m": [*range(9)]}, 1, mixture, trials, clock=lambda: 0.0)
    table = prices.at(1)
    for _ in range(200):
        rows = draw.choice((2, 3, 5))
        (experts,) = rounds(draw, rows, 1, 1)
        prices.observe(table, 1, rows, seconds(rows, experts), experts if mixture else 0, True)
    off = {}
    for rows in (1, 3, 5, 9):
        seen = rounds(draw, rows, 1)
        truth = sum(seconds(rows, experts) for experts in seen) / len(seen)
        off[rows] = abs(prices.verify(table, rows, 1) / truth - 1.0)
    assert max(off.values()) < 0.12 if mixture is not None else max(off.values()) > 0.15


@pytest.mark.slow
@pytest.mark.usefixtures("prices_as_delivered")
@pytest.mark.parametrize(("count", "rate", "seeds", "least"), [
    (1, 0.0, 1, 0.93), (1, 0.4, 1, 0.93), (1, 0.9, 8, 0.907),
    (4, 0.0, 1, 0.93), (4, 0.4, 1, 0.93), (4, 0.9, 1, 0.93),
])  # fmt: skip
def test_drafts_go_as_far_as_their_experts_pay(count, rate, seeds, least):
    """A mixture in which a row more costs half of a plain round; drafts are free, so plain lengths can be tried."""
    machine = Machine(
        base=1.0, per_row=0.1, per_sequence=0.05, per_expert=0.15, multiple=1, mixture=SPARSE, again=0.25,
        draft=0.0, per_level=0.01, per_draft_token=0.01, per_token_behind=0.0,
    )  # fmt: skip

    def speed(policy, seed, depth=5):
        given = {"depth": depth, "requests": 8 * count, "length": 128, "seed": seed}
        return play(machine, policy, count, lambda *_: rate, **given).speed

    shares = []
    for seed in range(seeds):
        fixed = [speed("fixed", seed, depth) for depth in range(1, 6)]
        shares.append(speed("adaptive", seed) / max(*fixed, speed(None, seed)))
    assert sum(shares) / seeds > least, shares


def test_forwards_count_the_experts_that_transformers_chooses(described):
    folder = described("qwen3_moe")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 90, (9,), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        scores = theirs(ids[None], output_router_logits=True, use_cache=False).router_logits
    top = [layer.topk(theirs.config.num_experts_per_tok, dim=-1).indices for layer in scores]
    for form in ("auto", "plain"):
        model = load_model(folder, dtype="float32", invariant=False, weights=form)
        with torch.inference_mode():
            for rows in (1, 4, 9):
                span = Span(0, 0, ids[:rows].tolist(), logits=list(range(rows)))
                output = model.forward(Batch([span]), new_attention(model, max_seqs=1, max_len=16))
                assert output.experts == sum(len(layer[:rows].unique()) for layer in top)
        mixture = model.info.mixture
        assert (mixture.count, mixture.chosen, mixture.layers) == (6, 3, len(top))


def test_a_round_tells_its_policy_what_its_forward_read_and_how_long_each_step_took(described, monkeypatch):
    engine, read = LLM(described("qwen3_moe"), invariant=False).engine, []
    monkeypatch.setattr(engine.policy, "observe", lambda *given: read.append(given[-1]))
    monkeypatch.setattr("forerun.kernels.gpu.perf_counter", cycle([0.0, 1.0, 3.0, 7.0]).__next__)
    engine.add([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    while engine.busy:
        engine.step()
    mixture = engine.model.info.mixture
    assert [each.experts for each in read[1:]] == [mixture.chosen * mixture.layers] * 2
    assert {(each.draft, each.verify, each.accept) for each in read} == {(1.0, 2.0, 4.0)}
