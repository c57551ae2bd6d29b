"""Weights that are kept for the next start: the same logits, made again wherever they are not this model's."""

import errno
import os
import shutil
from unittest.mock import Mock

import pytest
import torch
from gguf import GGMLQuantizationType as Kinds

from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun.measure.environment import logits
from forerun.models.files.gguf import GGUFFile
from forerun.models.formats import blocks, weight_cache
from forerun.models.load import load_model
from gguf_files import TOKENS, write_model
from here import where
from refusals import refused

MIXED = {"attn_v": Kinds.Q6_K, "token_embd": Kinds.Q6_K, "ffn_up": Kinds.Q8_0, "blk": Kinds.Q4_K}
SOME = torch.arange(0, len(TOKENS), 3)
CASES = [{}, {"quantization": "q4_0"}, {"quantization": "q8_0", "outputs": SOME}]
IDS = [5, 9, 3, 40, 17]
PROMPTS = [IDS]
HERE = where(blocks.can_run(), [True])


class Laid:
    """Counts the weights that are laid out."""

    def __init__(self, monkeypatch):
        blocks.can_run()  # packs blocks itself, once
        self.count, self.pack = 0, blocks.pack
        monkeypatch.setattr(blocks, "pack", self)

    def __call__(self, *arguments):
        self.count += 1
        self.pack(*arguments)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_cache, "LARGE", 0)
    return write_model(tmp_path / "model.gguf", kinds=MIXED, width=256)


@pytest.fixture
def laid(monkeypatch):
    return Laid(monkeypatch)


def said(path, **options):
    return logits(load_model(path, **options), PROMPTS)


def fresh(monkeypatch, path, **options):
    with monkeypatch.context() as patch:
        patch.setenv(weight_cache.VARIABLE, "0")
        return said(path, **options)


@pytest.mark.parametrize("options", where(blocks.can_run(), CASES))
def test_a_second_start_lays_nothing_out_and_says_the_same(model, laid, monkeypatch, options):
    expected = fresh(monkeypatch, model, **options)
    assert weight_cache.files() == []
    first = laid.count
    assert first > 0
    assert torch.equal(said(model, **options), expected)
    assert laid.count == 2 * first
    assert len(weight_cache.files()) == 1
    assert torch.equal(said(model, **options), expected)
    assert laid.count == 2 * first


@pytest.mark.parametrize("quantization", where(blocks.can_run(), ["q4_0", "q8_0"]))
def test_an_embedding_keeps_the_blocks_of_its_file(model, quantization):
    result = load_model(model, quantization=quantization, dtype="bfloat16").embed(torch.tensor(IDS))
    assert torch.equal(result, GGUFFile(model).values("token_embd.weight")[IDS].bfloat16())


@pytest.mark.parametrize("case", where(blocks.can_run(), ["layout", "weights", "time", "options"]))
def test_what_another_model_has_is_not_taken(model, laid, monkeypatch, case):
    said(model)
    laid.count, options = 0, {}
    about = model.stat()
    if case == "layout":
        monkeypatch.setattr(weight_cache, "_layout", lambda: "another")
    elif case == "weights":
        tensor = GGUFFile(model).tensors["blk.1.ffn_up.weight"]
        content = bytearray(model.read_bytes())
        content[tensor.start + 5] ^= 3
        model.write_bytes(content)
        os.utime(model, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif case == "time":
        os.utime(model, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    else:
        options = {"dtype": "float32"}
    result = said(model, **options)
    assert laid.count > 0
    assert torch.equal(result, fresh(monkeypatch, model, **options))
    assert len(weight_cache.files()) == (2 if case == "options" else 1)  # what was made of the file as it was is gone


@pytest.mark.parametrize("here", HERE)
def test_a_model_keeps_its_weights_when_the_file_goes(model, here):
    said(model)
    second = load_model(model)
    expected = logits(second, PROMPTS)
    weight_cache.clear(model)
    assert weight_cache.files() == []
    assert torch.equal(logits(second, PROMPTS), expected)


@pytest.mark.parametrize("here", HERE)
def test_the_oldest_goes_first_where_the_limit_is_reached(model, monkeypatch, here):
    said(model)
    said(model, quantization="q4_0")
    first, second = weight_cache.files()
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    said(model)  # use makes it young
    monkeypatch.setenv(weight_cache.VARIABLE, str((first.stat().st_size + 1.5 * second.stat().st_size) / 1e9))
    said(model, quantization="q4_k")
    assert first in weight_cache.files()
    assert second not in weight_cache.files()
    assert sum(path.stat().st_size for path in weight_cache.files()) <= weight_cache.limit()
    before = weight_cache.files()
    monkeypatch.setenv(weight_cache.VARIABLE, "0.000001")
    said(model, quantization="q8_0")
    assert weight_cache.files() == before


@pytest.mark.parametrize("here", HERE)
def test_a_full_disk_is_no_error(model, monkeypatch, here):
    expected = fresh(monkeypatch, model)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
        assert torch.equal(said(model), expected)
        assert weight_cache.files() == []

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(weight_cache, "replace_with", Mock(side_effect=full))
    assert torch.equal(said(model), expected)
    assert weight_cache.files() == []


@pytest.mark.parametrize("said_so", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(monkeypatch, said_so):
    monkeypatch.setenv(weight_cache.VARIABLE, said_so)
    error = refused(ConfigError, "FORERUN_KEPT_GB is how many GB", weight_cache.limit)
    assert said_so in str(error)


@pytest.mark.parametrize("here", HERE)
def test_ls_says_how_much_is_kept(model, capsys, here):
    assert run(["ls"]) == 0
    assert "FORERUN_KEPT_GB" not in capsys.readouterr().out
    said(model)
    assert run(["ls"]) == 0
    assert "prepared for a quick start: " in capsys.readouterr().out


def test_small_models_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    said(write_model(tmp_path / "model.gguf"))
    assert weight_cache.files() == []
