"""Acceptance by position: what of a draft is kept, counted by hand."""

import pytest
import torch

from forerun.speculate.draft.heads.head import Guess
from forerun.tune.losses import of_chains, of_head, table


def test_a_heads_figures_by_position_are_those_counted_by_hand():
    torch.manual_seed(0)
    logits, expected = torch.randn(2, 3, 4, 7), torch.randn(2, 3, 4, 7)  # position, row, place, vocabulary
    logits[:, :, :2] = expected[:, :, :2]
    result = of_head(
        lambda row: (Guess(logits[p, row[0, :1]], expected[p, row[0, :1]]) for p in (0, 1)), torch.arange(3)[:, None]
    )
    p, q = expected.softmax(-1), logits.softmax(-1)
    hits = (p.argmax(-1) == q.argmax(-1)).float()
    fraction = torch.minimum(p, q).sum(-1)
    losses = -(p * q.log()).sum(-1)
    assert result["accepted_at_0"] == pytest.approx([float(hits[0].mean()), float((hits[0] * hits[1]).mean())])
    assert result["accepted_at_1"] == pytest.approx(
        [float(fraction[0].mean()), float((fraction[0] * fraction[1]).mean())]
    )
    assert result["loss_by_position"] == pytest.approx([float(losses[0].mean()), float(losses[1].mean())])
    assert result["held_out_loss"] == pytest.approx(float(losses[0].mean() + 0.8 * losses[1].mean()))
    lines = table(result, first=2)
    assert (
        f"position 2   {hits[0].mean():4.0%}   {fraction[0].mean():4.0%}   loss {losses[0].mean():6.3f} nats"
        in lines[1]
    )
    assert "beside the 1 before" in lines[-1]


def test_a_part_of_the_vocabulary_is_compared_with_all_of_it():
    expected = torch.tensor([[0.1, 0.6, 0.3]]).log()
    guess = Guess(torch.tensor([[0.5, 0.5]]).log(), expected, torch.tensor([0, 2]))
    result = of_head(lambda row: iter([guess]), torch.zeros(1, 1))
    assert result["accepted_at_0"] == [0.0]
    assert result["accepted_at_1"] == pytest.approx([0.1 + 0.3])
    assert result["loss_by_position"] == pytest.approx([-float(torch.tensor(0.5).log())])


def test_a_draft_models_acceptance_by_position_is_that_of_runs():
    hits = torch.tensor([[1, 1, 0, 1, 1, 1]]).bool()
    result = of_chains(hits, torch.full((1, 6), 0.5), depth=3)
    assert result["accepted_at_0"] == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert result["accepted_at_1"] == pytest.approx([0.5, 0.25, 0.125])
