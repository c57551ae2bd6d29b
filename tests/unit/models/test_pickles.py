"""Only safetensors of the folder itself are read: no pickle, no other folder's file, by whatever name it goes."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, ConfigError, ModelError, SamplingParams, drafters
from forerun.models.text.tokenizer import load_tokenizer
from forerun_lab.tune.loop import load_checkpoint
from forerun_lab.tune.state import load_target
from refusals import refused

pytestmark = pytest.mark.slow

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Trap:
    """Its pickle makes a folder when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "the code has run"


def test_the_trap_works(mark):
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.is_dir()


def write_index(folder, name):
    names = load_file(folder / WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("trapped", [False, True])
@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "pytorch_model.bin", "weights"])
def test_an_index_that_names_a_pickle(folder, mark, name, trapped):
    result = load_file(folder / WEIGHTS)
    torch.save({**result, **({"trap": Trap(mark)} if trapped else {})}, folder / name)
    write_index(folder, name)
    for read in (LLM, load_target):
        refused(ModelError, "only safetensors files in the same folder are loaded", read, folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    "where", ["../elsewhere.safetensors", "{}/elsewhere.safetensors", "sub/../../elsewhere.safetensors"]
)
def test_an_index_that_names_a_file_elsewhere(folder, tmp_path, where):
    (folder / "sub").mkdir()
    shutil.copy(folder / WEIGHTS, tmp_path / "elsewhere.safetensors")
    write_index(folder, where.format(tmp_path))
    refused(ModelError, "only safetensors files in the same folder are loaded", LLM, str(folder))


@pytest.mark.parametrize("indexed", [False, True])
def test_the_hubs_links_into_its_cache_work(tiny_target, folder, tmp_path, indexed):
    """The hub's cache keeps a snapshot's files as links to blobs in another folder."""
    expected = LLM(tiny_target).generate("the cat", GREEDY)[0].outputs[0].token_ids
    if indexed:
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        names = load_file(folder / "part.safetensors")
        content = {"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}
        (folder / INDEX).write_text(json.dumps(content))
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert LLM(str(snapshot)).generate("the cat", GREEDY)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("method", ["medusa", "eagle", "parallel", "draft_model"])
def test_a_drafter_of_pickled_weights(tiny_target, tmp_path, mark, method):
    head = tmp_path / "head"
    drafters["medusa" if method == "draft_model" else method].example(Path(tiny_target), head)
    if method == "draft_model":
        shutil.rmtree(head)
        shutil.copytree(tiny_target, head)
    torch.save({"trap": Trap(mark)}, head / "pytorch_model.bin")
    torch.save({"trap": Trap(mark)}, head / "weights.bin")
    options = {"method": method, "model": str(head)}
    for prepare in (lambda: write_index(head, "weights.bin"), lambda: (head / INDEX).unlink()):
        prepare()
        with pytest.raises(ModelError, match=r"only safetensors|has no safetensors weights .it has pytorch_model.bin"):
            LLM(tiny_target, speculative_config=options)
    assert not mark.exists()


def test_code_beside_a_tokenizer_or_a_target_never_runs(folder, mark):
    code = f"import os\nos.mkdir({str(mark)!r})\nclass Tokenizer: pass\nclass Config: pass\n"
    (folder / "evil.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map, "model_type": "evil"}))
    (folder / "tokenizer.json").unlink()
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    evil = r"a model of type .evil. that runs code of its own \(auto_map in config.json\).*"
    for read, said in ((LLM, evil), (load_target, evil), (load_tokenizer, "which ")):
        refused(ModelError, said + "is never run", read, folder)
    assert not mark.exists()


def test_nothing_but_tensors_is_unpickled_where_training_goes_on(tmp_path, mark):
    path = tmp_path / "checkpoint.pt"
    torch.save({"trap": Trap(mark)}, path)
    refused(ConfigError, None, load_checkpoint, path, torch.nn.Linear(1, 1), [])
    assert not mark.exists()


def test_weights_of_a_head_that_do_not_fit(tiny_target, tmp_path):
    drafters["medusa"].example(Path(tiny_target), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    for name in list(weights):
        save_file({**weights, name: weights[name][:-1].clone()}, tmp_path / WEIGHTS)
        with pytest.raises(ModelError, match=f"the weights do not fit their config: {name} has shape"):
            LLM(tiny_target, speculative_config={"method": "medusa", "model": str(tmp_path)})


FIELDS = {
    "hidden_size": (0, "32", None, 3.5, True, 2**40), "vocab_size": (0, [], 2**40), "depth": (0, "x", 2**40),
    "num_layers": (-1, "x", None), "options": (3, [], None, {"heads": 0}, {"width": 7}, {"theta": "x"}, {"layers": 3}),
}  # fmt: skip


@pytest.mark.parametrize("method", ["medusa", "eagle", "parallel", "blockwise", "lookahead"])
def test_the_config_of_a_head(tiny_target, tmp_path, method):
    drafters[method].example(Path(tiny_target), tmp_path)
    config = {"method": method, "model": str(tmp_path)}
    path = tmp_path / "config.json"
    original = json.loads(path.read_text())
    changes = [{**original, name: value} for name, values in FIELDS.items() for value in values]
    changes += [{key: original[key] for key in original if key != name} for name in FIELDS]
    for content in [*changes, [], None, "x"]:
        path.write_text(json.dumps(content))
        refused((ModelError, ConfigError), None, LLM, tiny_target, speculative_config=config)
