"""What ``forerun tune`` teaches beside EAGLE's heads, on tiny random models."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from chat_model import QUICK
from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun_lab.tune import features
from forerun_lab.tune import run as stages
from forerun_lab.tune.config import TRAINED, TuneConfig
from forerun_lab.tune.more_kinds import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_turns")]


def test_every_kind_is_here():
    assert tuple(KINDS) == TRAINED


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "eagle"])
def test_every_kind_learns_from_the_same_text(tuned_folder, tuned_target, tmp_path, monkeypatch, kind):
    """A finished tuning is given another kind: nothing is written again, it is compared, and it changes no token.
    Learning ends when its processor time is over."""
    out = Path(shutil.copytree(tuned_folder, tmp_path / "out"))
    monkeypatch.setattr(features.Writer, "write_part", lambda *_: pytest.fail("wrote again"))
    stages.tune(TuneConfig(model=tuned_target, out=out, **QUICK, train=("eagle", kind), cpu_minutes=1 / 60))
    state = json.loads((out / "run" / "state.json").read_text("utf-8"))["results"]
    assert set(state["train"]) == {"eagle", kind}
    assert state["train"][kind]["tokens"] > 0
    assert kind != "medusa" or 1 <= state["train"][kind]["seconds"] < 2
    assert {row["config"]["method"] for row in state["choose"]["measured"]} > {"eagle", kind}
    if kind != "draft_model":
        content = json.loads((out / kind / "config.json").read_text("utf-8"))
        assert content["options"]["draft_vocab_size"] == QUICK["rows"]
    config = {"method": kind, "model": str(out / kind), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0.9, max_tokens=40, seed=3, ignore_eos=True)
    said = [
        LLM(tuned_target, speculative_config=more).generate(["u:a dog;a:"], params, use_tqdm=False)[0]
        for more in (None, config)
    ]
    assert said[0].outputs[0].token_ids == said[1].outputs[0].token_ids
    assert said[1].metrics.num_draft_tokens > 10


def test_a_draft_model_that_cannot_start_is_refused():
    with pytest.raises(ConfigError, match="not for 'gemma3_text': --train eagle"):
        KINDS["draft_model"].require(Gemma3TextConfig())
    KINDS["draft_model"].require(LlamaConfig())
