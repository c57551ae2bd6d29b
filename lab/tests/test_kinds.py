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


@pytest.fixture(scope="module")
def learned(tuned_folder, tuned_target, tmp_path_factory):
    """A finished tuning that was given the other kinds: nothing is written again. Learning ends when its processor time
    is over."""
    out = Path(shutil.copytree(tuned_folder, tmp_path_factory.mktemp("kinds") / "out"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features.Writer, "write_part", lambda *_: pytest.fail("wrote again"))
        stages.tune(TuneConfig(model=tuned_target, out=out, **QUICK, train=tuple(KINDS), cpu_minutes=1 / 60))
    return out, json.loads((out / "run" / "state.json").read_text("utf-8"))["results"]


def test_all_are_compared(learned):
    _, state = learned
    assert set(state["train"]) == set(KINDS)
    assert {row["config"]["method"] for row in state["choose"]["measured"]} > set(KINDS)
    assert 1 <= state["train"]["medusa"]["seconds"] < 2


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "eagle"])
def test_every_kind_learns_from_the_same_text(learned, tuned_target, kind):
    """And changes no token."""
    out, state = learned
    assert state["train"][kind]["tokens"] > 0
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
