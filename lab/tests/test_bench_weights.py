"""What formats cost and what they change, measured on a tiny model."""

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun import kernels
from forerun.models.load import load_model
from forerun_lab.bench import costs, fidelity
from here import where

TEXT = "".join(f"line {number}: what was said, and what was not\n" for number in range(40))
WINDOW, WINDOWS = 64, 4


@pytest.mark.parametrize("form", where(kernels.library() is not None, ["q4_0"]))
def test_fidelity_tells_exact_weights_from_rounded_ones(form, tiny_target, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    options = {
        "model": tiny_target, "text": tmp_path / "text", "window": WINDOW, "windows": WINDOWS,
        "formats": f"none,{form}", "text-tokens": 8, "out": tmp_path / "out",
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["fidelity", *arguments])
    fidelity.main()
    exact, same, rounded = json.loads((tmp_path / "out").read_text())["rows"]
    ids = fidelity.windows_of(TEXT, tiny_target, WINDOW, WINDOWS)
    module = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.inference_mode():
        losses = [module(torch.tensor([window]), labels=torch.tensor([window])).loss.item() for window in ids]
    assert exact["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert same["perplexity"] == pytest.approx(exact["perplexity"], rel=1e-4)
    assert same["error"] < 1e-4 < rounded["error"]
    assert same["kl"] < 1e-6 < rounded["kl"]
    assert same["same_choices"] == 1 > rounded["same_choices"]
    assert same["same_texts"] == exact["same_texts"] == WINDOWS
    assert rounded["bytes"] < same["bytes"]
    assert capsys.readouterr().out.startswith("| weights |")


def test_a_text_without_a_window_is_one_line(tiny_target, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("short", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["fidelity", "--model", tiny_target, "--text", str(tmp_path / "text")])
    with pytest.raises(SystemExit, match=r"^error: the text has 5 tokens, fewer than a window of 512$"):
        fidelity.main()


def test_forwards_leave_their_cache_as_it_was(tiny_target):
    model = load_model(tiny_target, dtype="float32", invariant=True)
    forwards = costs.Forwards("none", model, 4, [5 + row % 80 for row in range(costs.CONTEXT + 4)])
    rows = costs.costs([forwards], [1, 4], turns=6)
    assert forwards.attention.pool.length(0) == costs.CONTEXT
    assert [row.rows for row in rows] == [1, 4]
    assert (rows[0].over_one, rows[0].interval) == (1, [1, 1])
    assert all(row.milliseconds > 0 for row in rows)


def test_streams_share_out_the_time(tiny_target):
    rows = costs.streams(tiny_target, "none", [1, 3], 6, [[5, 6, 7]])
    assert [(row.streams, row.sampling) for row in rows] == [(n, name) for n in (1, 3) for name in costs.SAMPLINGS]
    for row in rows:
        assert row.forward + row.sampler + row.rest == pytest.approx(1)
        assert min(row.forward, row.sampler, row.rest) > 0


def test_prompts_are_read_in_turns_beside_packed_layers(tiny_target):
    """A stand-in for packed layers, which are not everywhere: what it is compared with is itself."""
    model = load_model(tiny_target, dtype="float32", invariant=True)
    rows = costs.prefills({"own": model, costs.PACKED: model}, [8, 20], 6, range(5, 25))
    assert [(row.format, row.tokens) for row in rows] == [(n, k) for k in (8, 20) for n in ("own", costs.PACKED)]
    assert all(row.tokens_per_second > 0 for row in rows)
    assert all(row.over_packed == 1 and row.interval == [1, 1] for row in rows[1::2])
    assert costs.prefill_table(rows).count("\n") == 3
