"""GGUF files as the gguf package writes and reads them, and files that lie."""

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kinds

from forerun.core.errors import ModelError
from forerun.models.files.gguf import GGUFFile
from gguf_files import add, finish, write_model
from refusals import refused

QUANTIZED = [Kinds.F32, Kinds.F16, Kinds.BF16, Kinds.Q4_0, Kinds.Q4_1, Kinds.Q8_0]


def write_small(path, kinds=[Kinds.Q8_0, Kinds.F32]):  # noqa: B006 - not changed
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"a.text": "grüße", "a.list": ["x", "", "yz"], "a.ids": [1, -2, 3], "a.flag": True}.items():
        add(writer, key, value)
    values = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    for kind in kinds:
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    return finish(writer, path)


def test_metadata_and_tensors_are_those_of_the_gguf_package(tmp_path):
    path = write_small(tmp_path / "a.gguf", QUANTIZED)
    theirs, ours = gguf.GGUFReader(path), GGUFFile(path)
    keys = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == keys
    assert list(ours.tensors) == [kind.name for kind in QUANTIZED]
    for tensor in theirs.tensors:
        values = ours.values(tensor.name)
        assert values.dtype == torch.float32
        assert values.shape == (2, 64)
        assert np.array_equal(values.numpy(), gguf.quants.dequantize(tensor.data, tensor.tensor_type)), tensor.name
        assert ours.packed(tensor.name).tobytes() == tensor.data.tobytes()


@pytest.mark.slow
def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path):
    whole = write_small(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        error = refused(ModelError, r"is empty|does not begin with GGUF|truncated or damaged", GGUFFile, path)
        assert str(path) in str(error)


@pytest.mark.slow
def test_no_damaged_byte_makes_anything_but_an_error_or_other_values(tmp_path):
    whole = write_small(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    outcomes = set()
    for index in range(len(whole)):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(whole[:index] + bytes([value]) + whole[index + 1 :])
            try:
                file = GGUFFile(path)
                for name, tensor in file.tensors.items():
                    assert tensor.start + tensor.nbytes <= len(whole)
                    assert file.values(name).shape == tensor.shape
                outcomes.add("read")
            except ModelError:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("index", [8, 16], ids=["tensors", "keys"])
def test_counts_that_lie_cost_nothing(tmp_path, index):
    whole = bytearray(write_small(tmp_path / "a.gguf").read_bytes())
    whole[index : index + 8] = struct.pack("<Q", 2**62)
    (tmp_path / "a.gguf").write_bytes(whole)
    refused(ModelError, "list of keys and tensors ends beyond", GGUFFile, tmp_path / "a.gguf")


def keyed(*values, name=b"k"):
    """A file of one key, with each of the values."""
    keys = [struct.pack("<Q", len(name)) + name + value for value in values]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(keys) + bytes(64)


def described(shape, kind=0, offset=0, names=("t",)):
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(names), 0)]
    for name in names:
        parts += [struct.pack("<Q", len(name)), name.encode(), struct.pack("<I", len(shape))]
        parts += [struct.pack(f"<{len(shape)}Q", *shape), struct.pack("<IQ", kind, offset)]
    return b"".join(parts) + bytes(4096)


@pytest.mark.parametrize(("content", "message"), [
    (b"GGML" + bytes(60), "does not begin with GGUF"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "its version is 1, not 2 or 3"),
    (described((2**40, 2**40)), "truncated or damaged: t ends at byte"),
    (described((8,), offset=2**50), "truncated or damaged: t ends at byte"),
    (described((8,), offset=8), "not at a multiple of 32"),
    (described((8,), kind=99), "unknown type 99; F32, .*NVFP4 are read"),
    (described((48,), kind=8), "48 values, not a multiple of Q8_0's 32"),
    (described((1,) * 5), "5 dimensions"),
    (described(()), "0 dimensions"),
    (described((0, 8)), "shape"),
    (described((8,), names=("t", "t")), "tensor t is there twice"),
    (keyed(*[struct.pack("<II", 4, 7)] * 2), "k is there twice"),
    (keyed(struct.pack("<II", 4, 0), name=b"general.alignment"), "general.alignment is 0, not a power of two"),
    (keyed(struct.pack("<II", 4, 24), name=b"general.alignment"), "general.alignment is 24, not a power of two"),
    (keyed(struct.pack("<IQ", 8, 2**61)), "k ends beyond its"),  # before anything is read
    *((keyed(struct.pack("<IIQ", 9, element, 2**61)), "k ends beyond its") for element in (8, 4, 12)),
])  # fmt: skip
def test_what_cannot_be_is_named(tmp_path, content, message):
    (tmp_path / "a.gguf").write_bytes(content)
    refused(ModelError, message, GGUFFile, tmp_path / "a.gguf")


def test_tensors_without_values(tmp_path):
    (tmp_path / "a.gguf").write_bytes(described((8,), kind=Kinds.I32))
    refused(ModelError, "kind I32, which cannot be dequantized", GGUFFile(tmp_path / "a.gguf").values, "t")
    refused(ModelError, "no tensor other", GGUFFile(write_model(tmp_path / "b.gguf")).values, "other")
    refused(ModelError, "No such file", GGUFFile, tmp_path / "nowhere.gguf")


def test_a_list_of_texts_is_looked_at_when_it_is_asked_for(tmp_path):
    texts = struct.pack("<Q", 2) + b"\xc3\xa9" + struct.pack("<Q", 1) + b"\xff"
    (tmp_path / "a.gguf").write_bytes(keyed(struct.pack("<IIQ", 9, 8, 2) + texts))
    file = GGUFFile(tmp_path / "a.gguf")
    assert list(file.metadata) == ["k"]
    with pytest.raises(ModelError, match="k is not UTF-8 text"):
        file.metadata["k"]
