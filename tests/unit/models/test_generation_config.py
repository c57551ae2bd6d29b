"""A model's own sampling settings, against transformers and a file that the gguf package wrote."""

import json

import gguf
import pytest
from transformers import GenerationConfig

from forerun.core.errors import ModelError
from forerun.models.files.open import Checkpoint
from refusals import refused

OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@pytest.mark.parametrize("written", [
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]},
    {"temperature": 1, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048},
    {"temperature": None, "top_k": None, "bos_token_id": 1},
    {},
])  # fmt: skip
def test_json_is_read_as_transformers_does(tmp_path, written):
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    theirs = GenerationConfig.from_pretrained(tmp_path).to_diff_dict()
    assert Checkpoint.at(tmp_path).sampling == {name: theirs[name] for name in OPTIONS if theirs.get(name) is not None}


def test_a_folder_without_the_file_sets_nothing(tmp_path):
    assert Checkpoint.at(tmp_path).sampling == {}


def test_gguf_keys(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32(gguf.Keys.General.SAMPLING_TEMP, 0.6)
    writer.add_float32(gguf.Keys.General.SAMPLING_TOP_P, 0.95)
    writer.add_float32(gguf.Keys.General.SAMPLING_MIN_P, 0.0)
    writer.add_int32(gguf.Keys.General.SAMPLING_TOP_K, 20)
    writer.add_float32(gguf.Keys.General.SAMPLING_PENALTY_REPEAT, 1.1)
    writer.add_int32(gguf.Keys.General.SAMPLING_MIROSTAT, 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.0, "top_k": 20, "repetition_penalty": 1.1}
    assert Checkpoint.at(path).sampling == expected


@pytest.mark.parametrize(("written", "words"), [
    ('{"temperature": -1}', "temperature must be"),
    ('{"top_p": "high"}', "top_p must be"),
    ('{"top_k": 1.5}', "top_k must be"),
    ('{"temperature"', "generation_config.json cannot be used"),
    ("[]", "generation_config.json cannot be used"),
])  # fmt: skip
def test_damaged_settings_are_one_line(tmp_path, written, words):
    (tmp_path / "generation_config.json").write_text(written)
    refused(ModelError, words, lambda: Checkpoint.at(tmp_path).sampling)
