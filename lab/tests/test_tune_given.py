"""``forerun tune`` with text that the model wrote before."""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from chat_model import QUICK
from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.speculate.draft import datastore
from forerun_lab.tune import run as stages
from forerun_lab.tune.config import TuneConfig
from forerun_lab.tune.data import Data
from forerun_lab.tune.features import Features, Writer
from forerun_lab.tune.kinds import PARALLEL_DEPTH
from forerun_lab.tune.state import TuneState
from refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_turns")]


def test_text_that_is_there_is_read_and_none_is_written(tuned_folder, tuned_target, tmp_path):
    """What one tuning wrote is what another learns from, behind an empty turn, with what transformers sees there."""
    out = tmp_path / "again"
    settings = {**QUICK, "hours": 20 / 3600, "cpu_minutes": 0.03}
    stages.tune(TuneConfig(model=tuned_target, out=out, text=tuned_folder / "text.safetensors", **settings))
    given = {tuple(answer.tolist()) for answer in datastore.read(tuned_folder / "text.safetensors")}
    result = Features(out / "run" / "text")
    assert {tuple(answer.tolist()[:-1]) for answer in result.answers()} == {
        answer for answer in given if len(answer) >= PARALLEL_DEPTH
    }
    part, start, length, prompt = next(result.sample(1))
    ids = part["tokens"][start : start + length].long()
    assert LLM(tuned_target).tokenizer.decode(ids[:prompt]).replace(" ", "") == "u:;a:"
    reference = AutoModelForCausalLM.from_pretrained(tuned_target, dtype=torch.float32)
    with torch.no_grad():
        states = reference(ids[None], output_hidden_states=True).hidden_states[-1][0, :-1]
    kept = part["hidden"][start : start + length - 1, -states.shape[1] :].float()
    assert float((kept - states).abs().max()) < 0.05 * float(states.abs().max())
    mask = os.umask(0)
    os.umask(mask)
    for name in ("eagle/model.safetensors", "text.safetensors"):
        assert (tuned_folder / name).stat().st_mode & 0o777 == 0o666 & ~mask


def test_what_was_refused_leaves_nothing_in_the_way(tuned_folder, tuned_target, tmp_path):
    path, out = tmp_path / "text", tmp_path / "out"
    path.write_bytes(b"")
    refused(ConfigError, "cannot read", stages.tune, TuneConfig(model=tuned_target, out=out, text=path, **QUICK))
    with pytest.raises(ConfigError, match="quantization 'bogus' is not one of"):
        stages.tune(TuneConfig(model=tuned_target, out=out, quantization="bogus", **QUICK))
    text = tuned_folder / "text.safetensors"
    stages.tune(TuneConfig(model=tuned_target, out=out, text=text, quantization="none", **QUICK))
    stages.tune(TuneConfig(model=tuned_target, out=out, text=text, **QUICK))
    datastore.save(tmp_path / "other", [[5, 6, 7, 8, 9]])
    for other in (tmp_path / "other", None):
        with pytest.raises(ConfigError, match="has a tuning with another text: choose another --out"):
            stages.tune(TuneConfig(model=tuned_target, out=out, text=other, **QUICK))
    shutil.copytree(tuned_folder, tmp_path / "written")
    with pytest.raises(ConfigError, match="has a tuning with no text: choose another --out"):
        stages.tune(TuneConfig(model=tuned_target, out=tmp_path / "written", text=text, **QUICK))


REFUSED = {
    "absent": "there is no text in", "foreign": "with tokens it has not", "empty": "none of at least 4 tokens",
    "short": "none of at least 4 tokens", "bfloat16": "cannot read",
    "few": r"makes [\d,]+ tokens to read, and from fewer than 1,000,000 \(--min-tokens\)",
    "untrained": "--text has no effect", "both": "--data has no effect", "own": "choose another --out",
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_text_that_cannot_be_learnt_from_is_said(kind, tuned_target, tmp_path):
    path, more = tmp_path / "text.safetensors", {}
    texts = {"foreign": [[10**6] * 9], "short": [[5, 6, 7]] * 9, "few": [[5, 6, 7, 8, 9]] * 9}
    if kind != "absent":
        datastore.save(path, texts.get(kind, []))
    if kind == "bfloat16":
        numbers = torch.zeros(3, dtype=torch.bfloat16)
        save_file({"tokens": numbers, "lengths": numbers.clone()}, path, metadata={"format": datastore.FORMAT})
    elif kind == "few":
        more = {"min_tokens": 10**6}
    elif kind == "both":
        more = {"data": path}
    elif kind == "untrained":
        more = {"train": ("none",)}
    before = path.read_bytes() if path.exists() else None
    out = tmp_path if kind == "own" else tmp_path / "out"
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        stages.tune(TuneConfig(model=tuned_target, out=out, text=path, **{**QUICK, **more}))
    assert before is None or path.read_bytes() == before


def test_a_text_is_read_for_its_share_of_the_time(tuned_folder, tuned_target, tmp_path, monkeypatch):
    """What reading takes is not left to learn in, and the whole text is looked things up in all the same."""
    monkeypatch.setattr(stages, "ROWS", 4)
    seconds = []
    settings = stages._settings
    monkeypatch.setattr(stages, "_settings", lambda *given: seconds.append(given[2]) or settings(*given))
    text = tuned_folder / "text.safetensors"
    config = TuneConfig(model=tuned_target, out=tmp_path / "out", text=text, **{**QUICK, "hours": 0.01 / 3600})
    out = stages.tune(config)
    assert len(list((out / "run" / "text").iterdir())) == 1
    assert (out / "text.safetensors").read_bytes() == text.read_bytes()
    assert seconds == [1.0]
    state = TuneState(out / "run", json.loads((out / "run" / "state.json").read_text("utf-8"))["marks"])
    state.seconds["write"] = 3.0
    config = replace(config, out=out, text=out / "tuned.json", hours=8 / 3600)
    assert stages._draft_seconds(config, state) == pytest.approx(3.0)
    assert stages._draft_seconds(replace(config, text=None), state) == pytest.approx(0.35 * 8)


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_as_the_models_texts_do(begins):
    """Of a model without a template."""
    llm = SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=2), encode=lambda text: (text, [2] if begins else []))
    writer = Writer(llm, SimpleNamespace(), Data())
    assert writer.prefix == ([2] if begins else [])
    assert writer.tokens_to_read([[5] * 10, [5] * 10**4]) == 11 + begins + 700 + 256
