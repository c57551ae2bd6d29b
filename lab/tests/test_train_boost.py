"""Drafts trained in sequence, each on what the earlier ones miss."""

import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forerun import LLM, ConfigError, SamplingParams
from forerun_lab.train.config import ModelShape
from forerun_lab.train.distill import DistillConfig, coverage, mean_over, missed, train_draft_model
from forerun_lab.train.losses import kl
from forerun_lab.train.target import forward
from forerun_lab.tune.config import LoopSettings
from forerun_lab.tune.loop import run
from tiny import ALPHABET, save_tokenizer

pytestmark = pytest.mark.slow

TOKENS = 40


class Bigram(nn.Module):
    """Next-token logits from the last token through ``width`` numbers: too few for all tokens at once."""

    def __init__(self, width, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Parameter(torch.randn(TOKENS, width, generator=generator))
        self.lm_head = nn.Parameter(torch.randn(width, TOKENS, generator=generator))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.inner[input_ids] @ self.lm_head)


class Every:
    """All tokens, as contexts, in every batch."""

    def batch(self, consumed, rows, length):
        return torch.arange(TOKENS).repeat(2)[:TOKENS, None].expand(-1, 2)


def train(target, folder, seed, earlier=()):
    draft = Bigram(2, seed)

    def loss(model, batch):
        with torch.no_grad():
            p = forward(target, batch[:, :-1])
            kept = missed(p, [forward(other, batch[:, :-1]) for other in earlier])
        return mean_over(kl, p, forward(model, batch[:, :-1]), kept)

    plan = LoopSettings(
        folder, tokens=250 * TOKENS, batch_tokens=TOKENS, length=1, long_length=1, lr=0.1, matrix_lr=0.0,
        weight_decay=0.0, threads=1, progress=False,
    )  # fmt: skip
    run(draft, Every(), loss, plan)
    return draft


def test_a_second_draft_covers_what_the_first_misses(tmp_path):
    """Against two trained alike from different seeds, which err at the same places."""
    target = Bigram(12, 101)
    contexts = torch.arange(TOKENS)[:, None]
    first = train(target, tmp_path / "first", 2)
    alike = train(target, tmp_path / "alike", 3)
    boosted = train(target, tmp_path / "boosted", 3, [first])
    third = train(target, tmp_path / "third", 9, [first, boosted])
    _, both = coverage(target, [first, alike], contexts)
    _, more, most = coverage(target, [first, boosted, third], contexts)
    assert more > both + 0.1
    assert most > more + 0.1


def test_what_is_missed_is_what_a_loop_finds():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(3, 50, 4, generator=generator)
    earlier = [torch.randn(3, 50, 4, generator=generator) for _ in range(2)]

    def likeliest(logits):
        values = logits.tolist()
        return values.index(max(values))

    expected = [
        [all(likeliest(q[i, j]) != likeliest(p[i, j]) for q in earlier) for j in range(50)] for i in range(3)
    ]  # fmt: skip
    assert missed(p, earlier).tolist() == expected
    assert missed(p, []).all()
    assert 0.4 < missed(p, earlier).float().mean() < 0.7


def test_the_loss_is_the_mean_over_what_is_kept():
    p, q = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 0.0]])

    def divergence(i):
        exps = [[math.exp(x) for x in row] for row in (p[i].tolist(), q[i].tolist())]
        one, other = ([x / sum(row) for x in row] for row in exps)
        return sum(a * math.log(a / b) for a, b in zip(one, other))

    result = mean_over(kl, p, q, torch.tensor([True, False, True]))
    assert float(result) == pytest.approx((divergence(0) + divergence(2)) / 2, rel=1e-5)
    nothing = mean_over(kl, p, q.requires_grad_(), torch.tensor([False] * 3))
    nothing.backward()
    assert (float(nothing.detach()), float(q.grad.abs().sum())) == (0.0, 0.0)


def test_coverage_is_what_counting_says():
    target, drafts = Bigram(3, 0), [Bigram(3, seed) for seed in (1, 2, 3)]
    contexts = torch.arange(TOKENS).view(4, 10)
    best = [[forward(m, contexts[i : i + 1, j : j + 1]).argmax().item() for i in range(4) for j in range(10)]
            for m in (target, *drafts)]  # fmt: skip
    expected = [sum(t in seen for t, *seen in zip(*best[: k + 2])) / TOKENS for k in range(3)]
    assert coverage(target, drafts, contexts) == pytest.approx(expected)
    assert expected[0] < expected[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for name in "abcd":
        (folder / f"{name}.py").write_text("".join(rng.choice("abcdefgh") for _ in range(2000)))
    return folder


def distil(target, corpus, out, after=()):
    config = DistillConfig(
        out=out, target=Path(target), corpus=corpus, tokens=4_000, batch_tokens=256, length=32, long_share=0.0,
        held_out=1, generated_tokens=0, threads=1, progress=False, loss="kl", after=after,
        shape=ModelShape(hidden_size=8, layers=1, heads=1, kv_heads=1, intermediate_size=8, positions=256),
    )  # fmt: skip
    return train_draft_model(config)


@pytest.fixture(scope="module")
def first(tiny_target, corpus, tmp_path_factory):
    return distil(tiny_target, corpus, tmp_path_factory.mktemp("first"))


def test_drafts_trained_in_sequence_serve_in_one_tree(tiny_target, corpus, first, tmp_path):
    second = distil(tiny_target, corpus, tmp_path / "second", [first])
    result = [json.loads((folder / "training.json").read_text()) for folder in (first, second)]
    assert [len(record["coverage"]) for record in result] == [1, 2]
    assert result[0]["coverage"][0] == result[1]["coverage"][0] == result[0]["alpha"]["held_out_text"]["t0"]
    assert result[1]["coverage"][1] >= result[1]["alpha"]["held_out_text"]["t0"]
    assert result[1]["recipe"]["after"] == [str(first)]
    parts = [{"method": "draft_model", "model": str(folder)} for folder in (first, second)]
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True) for temperature in (0.0, 0.8)
    ]
    prompts = ["abcdabcd", "hgfe"]
    plain = LLM(str(tiny_target)).generate(prompts, params)
    merged = LLM(str(tiny_target), speculative_config={"method": "merged", "drafters": parts}).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in merged] == [o.outputs[0].token_ids for o in plain]
    assert all(o.metrics.num_draft_tokens > 0 and o.metrics.draft_error is None for o in merged)


def test_a_draft_with_other_tokens_cannot_be_complemented(tiny_target, corpus, first, tmp_path):
    other = Path(shutil.copytree(first, tmp_path / "other"))
    save_tokenizer(other, [*ALPHABET[:-2], ALPHABET[-1], ALPHABET[-2]])
    with pytest.raises(ConfigError, match=r"after: the draft in .* has another tokenizer than the target"):
        distil(tiny_target, corpus, tmp_path / "second", [other])
