"""Trained heads: what a lesson is, what they learn from it, and what their training is told."""

import json
from pathlib import Path

import pytest
import torch

from forerun import ConfigError
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.train.heads import HEADS, HeadTrainConfig, train_head
from forerun_lab.train.material import lesson
from unrolled import SOME, narrowed, sizes_of

PROMPT = [5, 9, 12, 7, 7, 3, 5, 9, 12, 11, 4]


@torch.no_grad()
def test_a_reduced_vocabulary_learns_from_its_own_tokens(tiny_target, reference):
    """Its loss is the cross entropy over its tokens, of the target's distribution among them."""
    head = MedusaHead(sizes_of(Path(tiny_target), depth=1))
    rows = narrowed(head, reference, SOME)
    tokens = torch.tensor([PROMPT])
    result = lesson(reference, tokens)
    state = result.hidden[head.sizes.num_layers][0, :-1]
    said = (state + torch.nn.functional.silu(head.blocks[0](state))) @ rows.T
    distribution = result.logits[0, 1:][:, SOME].double().softmax(-1)
    expected = torch.nn.functional.cross_entropy(said.double(), distribution)
    assert abs(float(head.loss(result)) - float(expected)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(HEADS))
def test_training_beats_an_untrained_head(tiny_target, tmp_path, method):
    text = tmp_path / "corpus"
    text.mkdir()
    for name in "abcd":
        (text / f"{name}.py").write_text("def f(x):\n    return x + 1\n" * 100)
    options = {"heads": 4, "kv_heads": 2, "width": 8, "inner_size": 32} if method in ("eagle", "parallel") else {}
    config = HeadTrainConfig(
        method=method, target=Path(tiny_target), corpus=text, held_out=1, out=tmp_path / "head", tokens=6000,
        depth=None if method == "layerskip" else 3,
        batch_tokens=512, length=64, threads=1, progress=False, options=options, lr=5e-3, matrix_lr=0.02,
    )  # fmt: skip
    folder = train_head(config)
    record = json.loads((folder / "config.json").read_text())
    assert record["forerun_head"] == HEADS[method].method
    assert record["held_out_loss"] < record["untrained_loss"]


@torch.no_grad()
def test_lesson_is_the_targets_own_view(tiny_target, reference):
    tokens = torch.tensor([PROMPT])
    result = lesson(reference, tokens)
    out = reference(tokens, output_hidden_states=True)
    pair = torch.stack([result.logits.flatten(), out.logits.flatten()])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.999
    assert sorted(result.hidden) == list(range(len(out.hidden_states)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "medusa", "options": {"inner_size": 8}}, "medusa has no option 'inner_size'; it has none"),
        ({"method": "parallel", "options": {"iner_size": 8}}, "it has blocks, heads, inner_size"),
        ({"method": "medusa", "exit_layer": 1}, "only layerskip leaves the target early"),
        ({"method": "layerskip", "depth": 3}, "guesses one token at a time"),
    ],
)
def test_nothing_that_a_training_is_reported_is_ignored(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        HeadTrainConfig(out=tmp_path, **options)
