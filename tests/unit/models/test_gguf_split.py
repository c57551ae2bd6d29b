"""GGUF models in several files."""

from pathlib import Path

import gguf
import pytest

from forerun import LLM, ModelError, SamplingParams
from forerun.models.files.gguf import GGUFFile, shards_of
from forerun.models.files.open import Checkpoint, resolve
from gguf_files import finish, write_model
from refusals import refused

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PARTS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("whole") / "model.gguf")


def split(whole, folder, parts = PARTS, said = None,
          total = None, twice = False):  # fmt: skip
    """The file's tensors in turns over so many files; ``said``: other numbers and counts than a part's own."""
    reader, paths = gguf.GGUFReader(whole), []
    for number in range(parts):
        path = folder / f"model-{number + 1:05d}-of-{parts:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    kind, *inner = field.types
                    writer.add_key_value(field.name, field.contents(), kind, inner[0] if inner else None)
        slot, count = (said or {}).get(number, (number, parts))
        writer.add_uint16("split.no", slot)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total or len(reader.tensors))
        for index, tensor in enumerate(reader.tensors):
            if index % parts == number or (twice and index == 0):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        paths.append(finish(writer, path))
    return paths[0]


def test_parts_are_the_model(whole, tmp_path):
    first = split(whole, tmp_path)
    assert len(GGUFFile(first).tensors) < len(GGUFFile(whole).tensors)
    expected = LLM(str(whole))
    text = expected.generate("the 12", GREEDY)[0].outputs[0].token_ids
    assert resolve(tmp_path) == first
    for path in (tmp_path, first, shards_of(first)[1]):
        llm = LLM(str(path))
        assert llm.model.info.path == expected.model.info.path
        assert llm.model.info.weight_bytes == expected.model.info.weight_bytes
        assert llm.generate("the 12", GREEDY)[0].outputs[0].token_ids == text


def test_every_part_counts_for_the_fingerprint(whole, tmp_path):
    first = split(whole, tmp_path)
    before, last = Checkpoint.at(first).fingerprint(), shards_of(first)[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert Checkpoint.at(first).fingerprint() != before


def test_a_part_that_is_missing(whole, tmp_path):
    first = split(whole, tmp_path)
    shards_of(first)[1].unlink()
    refused(ModelError, "lacks model-00002-of-00003.gguf, a part of the model that model-00001", LLM, str(first))
    refused(ModelError, "lacks model-00002-of-00003.gguf", LLM, str(tmp_path))


@pytest.mark.parametrize("keep", [0, 10, 200, 3000])
def test_a_part_that_is_truncated(whole, tmp_path, keep):
    last = shards_of(split(whole, tmp_path))[-1]
    last.write_bytes(last.read_bytes()[:keep])
    message = "model-00003-of-00003.gguf (is not a GGUF file that can be used|cannot be read)"
    refused(ModelError, message, LLM, str(tmp_path))


def test_a_part_of_another_model(whole, tmp_path):
    other = write_model(tmp_path / "other.gguf", width=64)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = split(whole, tmp_path / "a")
    split(other, tmp_path / "b")
    foreign = shards_of(first)[2]
    foreign.write_bytes((tmp_path / "b" / foreign.name).read_bytes())
    refused(ModelError, "which its metadata contradict", LLM, str(first))
    foreign.write_bytes(b"PK" + bytes(100))
    refused(ModelError, "it does not begin with GGUF", LLM, str(first))


CASES = {
    "another place": ({"said": {1: (2, 3)}}, "is part 2 of 3, counted from 0, and its name that it is 1 of 3"),
    "another count": ({"said": {2: (2, 9)}}, "says that it is part 2 of 9"),
    "more tensors": ({"total": 99}, "says that there are 99 tensors, but its parts have 20"),
    "a tensor twice": ({"twice": True}, "is in model-00001-of-00003.gguf and in model-00002-of-00003.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_that_contradict_each_other(whole, tmp_path, name):
    options, message = CASES[name]
    refused(ModelError, message, LLM, str(split(whole, tmp_path, **options)))


def test_a_part_by_another_name(whole, tmp_path):
    only = split(whole, tmp_path).rename(tmp_path / "first.gguf")
    refused(ModelError, "one of several parts of a model: its name must end in", LLM, str(only))


def test_names_that_ask_for_too_much(tmp_path):
    assert len(shards_of(Path("m-00001-of-99999.gguf"))) == 99_999
    assert shards_of(Path("m-00004-of-00003.gguf")) == [Path("m-00004-of-00003.gguf")]
    write_model(tmp_path / "a-00001-of-00002.gguf")
    write_model(tmp_path / "b.gguf")
    refused(ModelError, "holds 2 GGUF files", LLM, str(tmp_path))
