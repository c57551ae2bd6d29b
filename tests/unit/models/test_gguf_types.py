"""Types of GGUF files: the weights that the gguf package makes of them, bit by bit, however the kernels have them."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kinds
from gguf import dequantize

from forerun import LLM
from forerun.cli.main import run
from forerun.measure.environment import logits
from forerun.models.files.open import Checkpoint
from forerun.models.formats import blocks, error, gguf_types
from forerun.models.formats.blocks import Blocked, Blocks
from forerun.models.formats.gguf_types import EXPANDED, PACKED, sizes
from forerun.models.run.hf import read_module
from gguf_files import TOKENS, write_model
from gguf_files import blocks as made
from here import where
from rounding import by_chance, rounded_inputs

INPUTS = 512
MIXED = {
    "attn_q": Kinds.Q4_K, "attn_k": Kinds.IQ4_XS, "attn_v": Kinds.Q6_K, "attn_output": Kinds.Q5_K,
    "ffn_gate": Kinds.MXFP4, "ffn_up": Kinds.IQ4_XS, "ffn_down": Kinds.Q8_0, "token_embd": Kinds.IQ4_XS,
}  # fmt: skip
OF_FLOATS = {"q4_1": [0, 2], "q4_k": [0, 2], "q5_1": [0, 2], "q5_k": [0, 2], "q6_k": [208], "q3_k": [108],
             "q2_k": [80, 82], "tq1_0": [52], "tq2_0": [64]}  # fmt: skip
"""Where the float16 of a block are, if not at its begin."""
KINDS = where(blocks.can_run(), PACKED)


def with_scales(kind, scales, seed=0):
    """Blocks of random bytes in 48 rows, the levels of some all zeros or all ones, with ``scales`` among them."""
    of, size = sizes(kind)
    noise = np.random.default_rng(seed)
    raw = noise.integers(0, 256, (48, INPUTS // of, size), np.uint8)
    raw[0::4], raw[1::4] = 0, 255
    chosen = noise.choice(scales, raw.shape[:-1])
    if kind == "mxfp4":
        raw[..., 0] = chosen
    elif kind == "iq1_m":
        bits = chosen.astype(np.float16).view(np.uint16)
        for index in range(4):
            raw[..., 49 + 2 * index] = raw[..., 49 + 2 * index] & 15 | (bits >> 4 * index & 15) << 4
    else:
        for index in OF_FLOATS.get(kind, [0]):
            halves = noise.permuted(chosen).astype(np.float16)
            raw[..., index : index + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(48, -1)


def usual(kind):
    """Scales of either sign, 0, the least and the largest among them."""
    if kind == "mxfp4":
        return np.arange(253)  # larger ones times 12 are infinite
    least, most = 2.0**-24, 65504.0
    result = np.exp(np.random.default_rng(1).uniform(np.log(least), np.log(most), 400))
    return np.concatenate([[0.0, least, -least, most], result, -result])


def both(kind, raw):
    """What the gguf package makes of blocks, and what a layer of ours has."""
    expected = torch.from_numpy(np.array(dequantize(raw, Kinds[kind.upper()])))
    return expected, Blocked(Blocks(kind, raw, INPUTS), None).rows(torch.arange(len(raw)), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_have_every_bit_of_their_weights(kind, monkeypatch):
    for seed in range(3):
        raw = with_scales(kind, usual(kind), seed)
        expected, result = both(kind, raw)
        assert (expected != 0).float().mean() > 0.5
        assert torch.equal(result, expected)
        monkeypatch.setattr(blocks, "CHUNK", 16 * INPUTS)  # in pieces
    order = torch.randperm(48)
    assert torch.equal(Blocks(kind, raw, INPUTS).rows(order).values(), expected[order])


@pytest.mark.parametrize("kind", where(blocks.can_run(), sorted({*PACKED} - {"mxfp4"})))
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(kind, bad):
    with np.errstate(invalid="ignore"):  # of what the gguf package multiplies
        expected, result = both(kind, with_scales(kind, np.array([bad])))
    assert not expected.isfinite().all(-1).any()
    assert not result.isfinite().all(-1).any()


@pytest.mark.parametrize("kind", where(blocks.can_run(), [Kinds.MXFP4, Kinds.TQ1_0, Kinds.TQ2_0]))
def test_what_the_gguf_package_rounds(kind):
    raw = made(kind, (48, INPUTS), np.random.default_rng(0))
    expected, result = both(kind.name.lower(), raw)
    assert torch.equal(result, expected)


def test_every_type_that_the_gguf_package_dequantizes_is_read():
    for kind in Kinds:
        _, size = sizes(kind.name)
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            assert kind.name not in gguf_types.TYPES
            continue
        assert kind.name in gguf_types.TYPES


@pytest.mark.parametrize("kinds", where(blocks.can_run(), [MIXED]))
def test_a_file_of_mixed_types_has_one_result_among_1_to_512_rows(tmp_path, kinds, caplog):
    path = write_model(tmp_path / "model.gguf", {"llama.context_length": 600}, kinds=kinds, width=256)
    with caplog.at_level(logging.INFO, "forerun"):
        llm = LLM(str(path))
    assert "more room" not in caplog.text
    assert llm.model.fused is not None
    parts = {kind for linear in llm.model.linears() for kind in linear.kind.split(" and ")}
    assert parts == {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4"}
    ids = [*np.random.default_rng(0).integers(3, 49, 512).tolist()]
    expected = logits(llm.model, [ids])
    for rows in (*range(1, 34), 48, 63, 64, 65, 100, 128, 255, 256, 257, 400, 511):
        assert torch.equal(logits(llm.model, [ids[:rows]]), expected[:rows])
    exact, rounded = (read_module(Checkpoint.at(path), torch.float32, attention=None) for _ in range(2))
    rounded_inputs(rounded, 256)  # the longest blocks here
    with torch.inference_mode():
        true, usual = (module(torch.tensor([ids])).logits[0] for module in (exact, rounded))
    assert error(true, expected) < by_chance(len(ids)) * error(true, usual)


@pytest.mark.slow
@pytest.mark.parametrize("kind", where(blocks.can_run(), sorted({*PACKED, *EXPANDED} - {"q4_k", "q5_k"})))
def test_a_model_in_any_type(tmp_path, kind, caplog):
    """Layers and embedding, near what dequantized weights give: nearer than where a step is that of 256 inputs."""
    kinds = {"norm": Kinds.F32, "blk": Kinds[kind.upper()], "token": Kinds[kind.upper()]}
    path = write_model(tmp_path / "model.gguf", kinds=kinds, width=256)
    exact, *rounded = (read_module(Checkpoint.at(path), torch.float32, attention=None) for _ in range(3))
    ids = [*range(3, 40)]
    with torch.inference_mode():
        expected = exact(torch.tensor([ids])).logits[0]
        short, long = (
            error(expected, rounded_inputs(module, size)(torch.tensor([ids])).logits[0])
            for module, size in zip(rounded, (32, 256))
        )
    assert error(expected, logits(LLM(str(path)).model, [ids])) < math.sqrt(short * long)
    own = kind in PACKED and PACKED[kind].form == kind
    assert (f"{kind.upper()} in " in caplog.text) is not own
    caplog.clear()
    assert error(expected, logits(LLM(str(path), quantization="float32").model, [ids])) < 1e-4
    assert "more room" not in caplog.text


def test_show_tells_the_types_and_how_they_are_held(tmp_path, capsys):
    path = write_model(tmp_path / "model.gguf", kinds={"attn_v": Kinds.IQ3_S, "attn_k": Kinds.NVFP4}, width=256)
    assert run(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "types         Q4_1 " in said
    held = "IQ3_S in 4.66 bits a weight instead of 3.44, NVFP4 in 16 bits a weight instead of 4.5"
    assert f"in memory     {held}\n" in said
    assert run(["show", "--json", str(path)]) == 0
    types = json.loads(capsys.readouterr().out)["types"]
    assert types == {"Q4_1": types["Q4_1"], "Q8_0": len(TOKENS) * 272, "NVFP4": 2 * 128 * 144, "IQ3_S": 2 * 128 * 110}
    assert run(["show", str(write_model(tmp_path / "usual.gguf"))]) == 0
    assert "in memory" not in capsys.readouterr().out
