"""Files of llama.cpp's own converter and quantizer, and what llama.cpp makes of them: ``tests/oracle``, written by
``lab/tools/llama_oracle.py`` and ``llama_words.py``."""

import json
import lzma
from pathlib import Path
from unicodedata import category

import numpy as np
import pytest
import torch

from forerun.measure.environment import logits
from forerun.models.formats import blocks
from forerun.models.gguf_tokenizer import PRE_TOKENIZERS, make_tokenizer
from forerun.models.load import load_model
from forerun.models.quantize import error
from here import where

KEPT = Path(__file__).parents[1] / "oracle"
FILES = [tuple(path.name.removesuffix(".gguf.xz").rsplit("-", 1)) for path in sorted(KEPT.glob("*.gguf.xz"))]
GELUS = ("gemma2", "gemma3", "gemma4", "gemma4-experts", "starcoder2")
"""llama.cpp looks gelu up in a table by half precision: two roundings of 2^-11, in every layer."""


@pytest.fixture
def opened(tmp_path):
    """The file of a case and a kind, ids, and llama.cpp's logits of some of them, by what they were made from."""

    def get(case, kind):
        path = tmp_path / f"{case}-{kind}.gguf"
        path.write_bytes(lzma.decompress((KEPT / f"{path.name}.xz").read_bytes()))
        kept = np.load(KEPT / f"{case}.npz")
        theirs = {name: torch.from_numpy(kept[name]) for name in kept.files if name.startswith(kind)}
        return path, kept["ids"].tolist(), torch.from_numpy(kept["rows"]), theirs

    return get


def same(case, expected, given):
    """The largest difference is small beside the largest logit."""
    return float((expected - given).abs().max() / expected.abs().max()) < (2e-3 if case in GELUS else 1e-4)


@pytest.mark.parametrize("case", [case for case, kind in FILES if kind == "f32"])
def test_numbers_are_read_and_computed_as_llama_cpp_does(opened, case):
    path, ids, rows, theirs = opened(case, "f32")
    model = load_model(path, dtype="float32")
    assert model.info.path.startswith("native")
    assert same(case, theirs["f32"], logits(model, [ids])[rows])


@pytest.mark.parametrize(("case", "kind"), where(blocks.can_run(), [each for each in FILES if each[1] != "f32"]))
def test_blocks_are_read_and_computed_as_llama_cpp_does(opened, case, kind):
    """From the same numbers in float32 both make the same logits. In blocks, both round the rows that they multiply to
    8 bits, Forerun in other blocks than llama.cpp: so both are as far from those logits, and as far from each other as
    two such errors that know nothing of each other."""
    path, ids, rows, theirs = opened(case, kind)
    exact, rounded = theirs[f"{kind}-numbers"], theirs[kind]
    assert same(case, exact, logits(load_model(path, dtype="float32", quantization="float32"), [ids])[rows])
    ours = logits(load_model(path, dtype="float32"), [ids])[rows]
    usual = error(exact, rounded)
    assert error(exact, ours) < 1.3 * usual
    assert error(rounded, ours) < 1.5 * usual
    first, second = exact.topk(2).values.unbind(-1)
    clear = first - second > 6 * usual * exact.std(-1)
    assert torch.equal(ours.argmax(-1)[clear], rounded.argmax(-1)[clear])


def has(text, *kinds):
    return any(category(letter) in kinds and ord(letter) > 127 for letter in text)


UNLIKE = {
    **dict.fromkeys(("gpt-4o", "llama4", "tekken"), ("Mn", "Mc", "Lu", "Ll", "Lt")),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), ("Zs",)),
}
"""Where Forerun follows the models' own rules and llama.cpp others: of which letters a word is made, and whether wide
spaces are among the CJK range."""


@pytest.fixture(scope="module")
def words():
    return json.loads(lzma.decompress((KEPT / "words.json.xz").read_bytes()))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_texts_are_cut_as_llama_cpp_does(words, pre):
    given = {"model": "gpt2", "pre": pre, "tokens": words["tokens"], "merges": words["merges"], "add_bos_token": False}
    tokenizer = make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in given.items()}, "words.gguf")
    like = [index for index, text in enumerate(words["texts"]) if not has(text, *UNLIKE.get(pre, ()))]
    assert len(like) > 150
    for index in like:
        assert tokenizer.encode(words["texts"][index]) == words["ids"][pre][index], words["texts"][index]
