"""Checkpoints that cannot be used: one clear line each, naming the folder."""

import json

import pytest

from damage import CONFIG, DAMAGES, edit
from forerun import LLM
from forerun.core.errors import ConfigError, ModelError
from forerun.models.files import hub
from forerun.models.load import load_model
from refusals import refused
from tiny import save_tokenizer, tiny_llama


def refuse(path, message, kind=ModelError, **options):
    error = refused(kind, message, LLM, str(path), **options)
    assert len(str(error)) < 400


def test_a_folder_that_is_not_there(tmp_path):
    refuse(tmp_path / "nowhere", "no checkpoint folder at .*nowhere")
    refuse("./nowhere", r"no checkpoint folder at \./nowhere")
    refuse("nowhere.gguf", r"no GGUF file at nowhere\.gguf")


def test_a_file_instead_of_a_folder(folder):
    refuse(folder / "config.json", "no checkpoint folder at")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    refuse(tmp_path, "has no config.json: not a Hugging Face checkpoint")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(hub.hf.constants, "ENDPOINT", "http://127.0.0.1:9")
    refuse("somebody/some-model", "no folder 'somebody/some-model' here, and the hub .* cannot be reached")
    refuse("smolm2", r"no folder 'smolm2' here \(did you mean smollm2\?\), and the hub .* \(ConnectError: [^)]*\)$")


def test_a_download_that_has_begun_goes_on(monkeypatch, tmp_path):
    """The next call is promised to continue it only where it has begun."""
    monkeypatch.setattr(hub.hf.constants, "ENDPOINT", "http://127.0.0.1:9")
    for begun in (False, True):
        error = refused(
            ModelError, "cannot be reached", hub.download, hub.ModelSource("own/m", None), None, str(tmp_path)
        )
        assert str(error).endswith("; the next call continues the download of hf:own/m") is begun
        blobs = tmp_path / hub.hf.file_download.repo_folder_name(repo_id="own/m", repo_type="model") / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / "abc.incomplete").write_text("")


def test_a_bundled_model_of_another_name():
    refuse("forerun:oracle", "oracle")


@pytest.mark.parametrize("text", ["{", "[]", "", '{"model_type": "llama"', '{"hidden_size": 3}'])
def test_a_broken_config(folder, text):
    (folder / "config.json").write_text(text)
    refuse(folder, "config.json cannot be used")


@pytest.mark.parametrize(("damage", "message"), [
    ("weights cut at 0", "a safetensors file is truncated or damaged"),
    ("weights cut at 200", "a safetensors file is truncated or damaged"),
    ("no weights", "has no safetensors weights$"),
    ("a tensor is missing", "lacks 1 weights, model.layers.1.mlp.up_proj.weight among them"),
    ("a tensor has another shape", r"up_proj.weight has shape \[63, 32\]; its config asks for \[64, 32\]"),
    ("generation_config.json is half an object", "generation_config.json cannot be used"),
])  # fmt: skip
def test_what_is_damaged_is_named(folder, damage, message):
    DAMAGES[damage](folder)
    refuse(folder, message)


def test_an_unknown_architecture(folder):
    edit(CONFIG, model_type="telepath")(folder)
    refuse(folder, "telepath")


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'exit 3'\ntR.")
    refuse(folder, r"has no safetensors weights \(it has pytorch_model.bin; pickled weights are not loaded")


def test_a_missing_shard(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    save_tokenizer(tmp_path)
    load_model(tmp_path)
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    refuse(tmp_path, "lacks model-00002-of-00008.safetensors, which its model.safetensors.index.json names")


def test_the_lean_path_on_another_family(tiny_target, folder):
    assert load_model(tiny_target).info.path.startswith("native")
    assert load_model(tiny_target, model_path="hf").info.path.startswith("hf")
    edit(CONFIG, hidden_act="gelu")(folder)
    refuse(folder, "the native path does not support .*: activation 'gelu'", ConfigError, model_path="native")
    assert load_model(folder).info.path.startswith("hf")


@pytest.mark.parametrize(("generation", "expected"), [(None, {0}), (5, {5}), ([5, 6], {5, 6})])
def test_every_id_that_ends_a_text(folder, generation, expected):
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_model(folder).info.eos_ids == expected
