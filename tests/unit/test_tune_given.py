"""``forerun tune`` with text that the model wrote before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_tune import QUICK, few_turns, folder, model
from transformers import AutoModelForCausalLM

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.speculate.draft import datastore
from forerun.tune import run as stages
from forerun.tune.config import TuneConfig
from forerun.tune.features import Features

__all__ = ["few_turns", "folder", "model"]

pytestmark = pytest.mark.slow


def test_text_that_is_there_is_read_and_none_is_written(folder: Path, model: str, tmp_path: Path) -> None:
    """What one tuning wrote is what another learns from, behind an empty turn, with what transformers sees there."""
    out = tmp_path / "again"
    stages.tune(TuneConfig(model=model, out=out, text=folder / "text.safetensors", **QUICK))
    given = {tuple(answer.tolist()) for answer in datastore.read(folder / "text.safetensors")}
    found = Features(out / "run" / "text")
    assert {tuple(answer.tolist()[:-1]) for answer in found.answers()} == {answer for answer in given if answer}
    part, start, length, prompt = next(found.each())
    ids = part["tokens"][start : start + length].long()
    assert LLM(model).tokenizer.decode(ids[:prompt]).replace(" ", "") == "u:;a:"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        states = reference(ids[None], output_hidden_states=True).hidden_states[-1][0, :-1]
    kept = part["hidden"][start : start + length - 1, -states.shape[1] :].float()
    assert float((kept - states).abs().max()) < 0.05 * float(states.abs().max())
    assert (out / "eagle" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["absent", "foreign", "empty", "untrained", "both"])
def test_text_that_cannot_be_learnt_from_is_said(kind: str, model: str, tmp_path: Path) -> None:
    path, more = tmp_path / "text.safetensors", {}
    if kind == "foreign":
        datastore.save(path, [[10**6]])
    elif kind == "empty":
        datastore.save(path, [])
    elif kind == "both":
        path.write_bytes(b"")
        more = {"data": path}
    elif kind == "untrained":
        more = {"train": ("none",)}
    with pytest.raises(ConfigError, match=r"there is no text|no text of this model|nothing learns|no use"):
        stages.tune(TuneConfig(model=model, out=tmp_path / "out", text=path, **{**QUICK, **more}))
