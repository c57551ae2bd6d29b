"""Paths in folders that were read: none is written to, and none leads out of its folder."""

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from forerun import LLM, ConfigError, SamplingParams, drafters
from forerun.core.errors import ModelError
from forerun.engine import tuned
from forerun.models.files.open import Checkpoint
from forerun.models.text.tokenizer import load_tokenizer
from forerun_lab.heads.adapt import Adaptation
from forerun_lab.tune import choose
from forerun_lab.tune import run as stages
from forerun_lab.tune.config import TuneConfig
from refusals import refused

NO_PATHS = {"dtype", "quantization", "heterogeneous_vocab_method"}
TABLE = {"method": "table", "adapt": True}
WRITES = {
    "a file": {**TABLE, "adapt_save": "VICTIM"},
    "a file in the folder": {**TABLE, "adapt_save": "counts.json"},
    "a head": {"method": "eagle", "model": "head", "adapt": {"save": "VICTIM"}},
    "in a drafter inside": {"method": "merged", "drafters": [{"method": "ngram"}, {**TABLE, "adapt_save": "VICTIM"}]},
    "in the drafter inside": {"method": "staged", "model": "head", "drafter": {**TABLE, "adapt_save": "VICTIM"}},
}
LEAVES = {
    "above": {"method": "draft_model", "model": "../target"},
    "elsewhere": {"method": "draft_model", "model": "TARGET"},
    "by a link": {"method": "eagle", "model": "link"},
    "by a link inside": {"method": "eagle", "model": "linking"},
    "a datastore": {"method": "suffix", "datastore": "../text.safetensors"},
    "a text": {"method": "table", "table_file": "VICTIM"},
    "a text inside": {"method": "cascade", "drafters": [{"method": "table", "table_file": "../victim"}]},
    "an exit head": {"method": "layerskip", "exit_head": "../head"},
    "no name": {"method": "eagle", "model": "a\0b"},
}


@pytest.fixture
def folder(tmp_path, tiny_target):
    """A tuned folder with a head, two links that lead out of it, and what they lead to."""
    made = tmp_path / "tuned"
    (made / "head").mkdir(parents=True)
    (made / "linking").mkdir()
    shutil.copytree(tiny_target, tmp_path / "target")
    (made / "link").symlink_to(tmp_path / "target")
    (made / "linking" / "config.json").symlink_to(tmp_path / "target" / "config.json")
    (tmp_path / "victim").write_text("precious", encoding="utf-8")
    return made


def sealed(folder, target, config, files=None):
    """Somebody seals a folder with this in it."""
    text = json.dumps(config).replace("VICTIM", str(folder.parent / "victim"))
    given = json.loads(text.replace("TARGET", str(folder.parent / "target")))
    tuned.save(folder, target, given, files or [])
    return given


@pytest.mark.parametrize("case", WRITES)
def test_a_tuned_folder_names_no_place_to_write(folder, tiny_target, case):
    sealed(folder, tiny_target, WRITES[case])
    with pytest.raises(ConfigError, match=r"names a place to write \((adapt_save|save)\), which only you may do"):
        LLM(tiny_target, tuned=folder)
    assert (folder.parent / "victim").read_text("utf-8") == "precious"


@pytest.mark.parametrize("case", LEAVES)
def test_no_path_of_a_tuned_folder_leaves_it(folder, tiny_target, case):
    sealed(folder, tiny_target, LEAVES[case])
    refused(ConfigError, r"which leads out of it|which cannot be used", tuned.load, folder, tiny_target)


def test_nor_does_a_file_that_it_is_sealed_with(folder, tiny_target):
    for name in ("../victim", "link/config.json", str(folder.parent / "victim")):
        refused(ConfigError, "leads out of it", sealed, folder, tiny_target, {"method": "ngram"}, [name])


def test_a_drafter_of_another_package_is_not_named(folder, tiny_target):
    sealed(folder, tiny_target, {"method": "cascade", "drafters": [{"method": "theirs", "log": "VICTIM"}]})
    with pytest.raises(ConfigError, match="names the method 'theirs', which forerun tune does not write"):
        tuned.load(folder, tiny_target)


def test_a_text_inside_is_read_and_learnt_from_without_a_place_to_write(folder, tiny_target):
    (folder / "text").write_text("the cat sat on the mat", encoding="utf-8")
    sealed(folder, tiny_target, {**TABLE, "table_file": "text"}, ["text"])
    before = sorted(folder.rglob("*"))
    llm = LLM(tiny_target, tuned=folder)
    llm.generate("the", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    llm.close()
    assert sorted(folder.rglob("*")) == before


def test_every_key_that_names_a_path_is_known():
    """Every option of a drafter that is text is a path to read, a place to write, or known to be neither."""
    classes = [drafters[name].config_class for name in drafters]
    texts = {item.name for kind in (*classes, Adaptation) for item in fields(kind) if "str" in str(item.type)}
    assert texts == {*tuned.READ, *tuned.WRITTEN, *NO_PATHS}


def test_a_tuning_that_goes_on_believes_no_path_either(folder, tiny_target, monkeypatch):
    """``run/state.json`` of a foreign folder says what was chosen."""
    config = TuneConfig(model=tiny_target, out=folder, train=("none",), hours=1 / 3600, probe=2, progress=False)
    victim = str(folder.parent / "victim")
    chosen = {"chosen": {**TABLE, "adapt_save": victim}, "measured": []}
    monkeypatch.setattr(stages, "_write", lambda config, data, state, *_: state.keep("held", [[1]]))
    monkeypatch.setattr(choose, "choose", lambda *_, **__: chosen)
    refused(ConfigError, "names a place to write", stages.tune, config)
    assert Path(victim).read_text("utf-8") == "precious"


NAMES = {
    "vocab": {"vocab": "OUT/vocab.json", "merges": "OUT/merges.txt"},
    "init_inputs": {"init_inputs": ["OUT/vocab.json", "OUT/merges.txt"]},
    "fast_tokenizer_files": {"fast_tokenizer_files": ["../out/tokenizer.1.0.0.json"]},
}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", NAMES)
def test_a_tokenizer_names_no_other_files(tmp_path, tiny_target, key, file):
    """Whatever the library would read there, as GPT-2's class reads its vocabulary."""
    own, out = Path(shutil.copytree(tiny_target, tmp_path / "model")), tmp_path / "out"
    out.mkdir()
    os.rename(own / "tokenizer.json", out / "tokenizer.1.0.0.json")
    (out / "vocab.json").write_text(json.dumps({"secret": 0, "a": 1}), encoding="utf-8")
    (out / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    config = json.loads((own / "tokenizer_config.json").read_text("utf-8"))
    named = json.loads(json.dumps(NAMES[key]).replace("OUT", str(out)))
    (own / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}), "utf-8")
    path = own / file
    before = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(before | named), encoding="utf-8")
    refused(ModelError, rf"{file} names other files \({key}\), which are not loaded", load_tokenizer, own)


def test_a_config_names_no_other_config(tmp_path, tiny_target):
    own = Path(shutil.copytree(tiny_target, tmp_path / "model"))
    config = json.loads((own / "config.json").read_text("utf-8"))
    (tmp_path / "config.4.0.0.json").write_text(json.dumps(config | {"num_hidden_layers": 1}), encoding="utf-8")
    (own / "config.json").write_text(json.dumps(config | {"configuration_files": ["../config.4.0.0.json"]}), "utf-8")
    refused(ModelError, r"names other files \(configuration_files\)", Checkpoint.at(own).transformers_config)
