"""GGUF types that the kernels do not read: the weights that the gguf package makes of them, exactly or nearly."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kinds
from gguf import dequantize

from forerun import LLM, SamplingParams
from forerun.cli.main import run
from forerun.core.errors import ModelError
from forerun.measure.environment import logits
from forerun.models.formats import blocks, gguf_types
from forerun.models.formats.blocks import Blocked
from forerun.models.formats.gguf_blocks import UNPACK, Blocks, sizes
from forerun.models.formats.gguf_types import RECODED, packed
from forerun.models.load import read_config
from forerun.models.modules import read_module
from forerun.models.quantize import error
from gguf_files import blocks as made
from gguf_files import write_model
from here import where

INPUTS = 512
STEPS = {"iq3_xxs": 2.0**-13, "iq1_s": 2.0**-11, "iq1_m": 2.0**-11, "iq2_xxs": 2.0**-11}
"""From where on scales keep all their bits when they are divided by what Q6_K's levels are larger."""
LEVELS = {"iq3_xxs": 31 * 31, "iq1_s": 15 * 9, "iq1_m": 15 * 9, "iq2_xxs": 43}
"""The largest whole number by which what is rounded, a scale or a step, is multiplied."""
EXACT = sorted({*RECODED} - {"iq4_xs", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k"})
NEAREST = ["q2_k", "iq2_xs", "iq2_s"]
MIXED = {
    "attn_q": Kinds.Q4_K, "attn_k": Kinds.IQ4_XS, "attn_v": Kinds.Q6_K, "attn_output": Kinds.Q5_K,
    "ffn_gate": Kinds.MXFP4, "ffn_up": Kinds.IQ4_XS, "ffn_down": Kinds.Q8_0, "token_embd": Kinds.IQ4_XS,
}  # fmt: skip
OTHERS = [Kinds[kind.upper()] for kind in (*RECODED, "nvfp4")]


def with_scales(kind: str, scales: np.ndarray, seed: int = 0) -> np.ndarray:
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
        at = {"q3_k": [108], "q2_k": [80, 82], "tq1_0": [52], "tq2_0": [64]}.get(kind, [0])
        for index in at:
            halves = noise.permuted(chosen).astype(np.float16)
            raw[..., index : index + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(48, -1)


def usual(kind: str, least: float = 2.0**-24) -> np.ndarray:
    """Scales of either sign, 0 and the largest among them."""
    if kind == "mxfp4":
        return np.arange(104, 144)
    most = 1000.0 if kind in ("iq4_xs", "iq2_xxs") else 65504.0
    result = np.exp(np.random.default_rng(1).uniform(np.log(least), np.log(most), 400))
    return np.concatenate([[0.0, least, -least, most], result, -result])


def both(kind: str, raw: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gguf package makes of blocks, and what we do."""
    held = packed(kind, raw, INPUTS, "here")
    assert held is not None
    assert held.kind == RECODED[kind].to
    return torch.from_numpy(np.array(dequantize(raw, Kinds[kind.upper()]))), held.values()


@pytest.mark.parametrize("kind", EXACT)
def test_types_without_loss_have_every_bit(kind, monkeypatch):
    for seed in range(3):
        expected, result = both(kind, with_scales(kind, usual(kind, STEPS.get(kind, 2.0**-24)), seed))
        assert (expected != 0).float().mean() > 0.5
        assert torch.equal(result, expected)
        monkeypatch.setattr(gguf_types, "CHUNK", 5 * INPUTS)  # in pieces


@pytest.mark.parametrize("kind", where(blocks.can_run(), EXACT))
def test_layers_of_such_types_have_their_weights(kind):
    raw = with_scales(kind, usual(kind, STEPS.get(kind, 2.0**-24)))
    held = packed(kind, raw, INPUTS, "here")
    assert torch.equal(Blocked(held, None).rows(torch.arange(48), torch.float32), both(kind, raw)[0])
    order = torch.randperm(48)
    assert torch.equal(held.rows(order).values(), both(kind, raw)[0][order])


@pytest.mark.parametrize("kind", ["iq4_xs", "iq2_xxs"])
def test_steps_are_rounded_to_float16_where_products_of_scales_are_not(kind):
    expected, result = both(kind, with_scales(kind, usual(kind, STEPS.get(kind, 2.0**-24))))
    off = (expected.double() - result.double()).abs()
    assert (off <= 2.0**-11 * expected.double().abs()).all()
    assert (off > 0).any()


@pytest.mark.parametrize("kind", NEAREST)
def test_what_no_type_holds_moves_by_half_a_step_at_most(kind):
    expected, result = (each.view(48, -1, 32).double() for each in both(kind, with_scales(kind, usual(kind))))
    assert ((expected - result).abs() <= 0.004 * expected.abs().amax(-1, keepdim=True) + 2.0**-25).all()


@pytest.mark.parametrize("kind", LEVELS)
def test_small_steps_are_off_by_less_than_one_of_float16(kind):
    scales = np.arange(-2048, 2049) * 2.0**-24
    expected, result = both(kind, with_scales(kind, scales))
    rounded = 2.0**-11 * expected.abs() if kind == "iq2_xxs" else 0.0  # larger steps are, of that type
    assert ((expected - result).abs() <= LEVELS[kind] * 2.0**-24 + rounded).all()
    single = both(kind, with_scales(kind, np.array([2.0**-24, -(2.0**-24)])))
    assert ((single[0] - single[1]).abs() <= 0.5 * 31 * 2.0**-24).all()  # half a step


def test_small_weights_of_mxfp4_are_off_by_half_of_the_least_number():
    expected, result = both("mxfp4", with_scales("mxfp4", np.arange(0, 104)))
    assert ((expected - result).abs() <= 2.0**-25).all()
    assert (result != 0).any()


@pytest.mark.parametrize(("kind", "scale"), [("mxfp4", 144), ("mxfp4", 254), ("iq4_xs", 60000.0), ("iq2_xxs", 6e4)])
def test_weights_beyond_float16_are_refused(kind, scale):
    held = packed(kind, with_scales(kind, np.array([scale])), INPUTS, "a file: a tensor")
    with pytest.raises(ModelError, match=rf"a file: a tensor is of type {kind.upper()} .* use quantization bfloat16"):
        held.values()


@pytest.mark.parametrize("kind", sorted({*RECODED} - {"mxfp4"}))
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(kind, bad):
    with np.errstate(invalid="ignore"):  # of what the gguf package multiplies
        expected, result = both(kind, with_scales(kind, np.array([bad])))
    assert not expected.isfinite().all(-1).any()
    assert not result.isfinite().all(-1).any()


@pytest.mark.parametrize("kind", [Kinds.MXFP4, Kinds.TQ1_0, Kinds.TQ2_0])
def test_what_the_gguf_package_rounds(kind):
    raw = made(kind, (48, INPUTS), np.random.default_rng(0))
    expected, result = both(kind.name.lower(), raw)
    assert torch.equal(result, expected)
    zeros = made(kind, (48, INPUTS), np.random.default_rng(0)) * 0
    assert not both(kind.name.lower(), zeros)[1].any() or kind is not Kinds.MXFP4


def test_every_type_that_the_gguf_package_dequantizes_is_read():
    for kind in Kinds:
        name = kind.name.lower()
        of, size = sizes(name)
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            assert kind.name not in gguf_types.TYPES
            continue
        assert kind.name in gguf_types.TYPES
        if name in UNPACK:
            assert isinstance(packed(name, np.zeros((1, size), np.uint8), of, ""), Blocks)


@pytest.mark.parametrize("kinds", where(blocks.can_run(), [MIXED]))
def test_a_file_of_mixed_types_has_one_result_among_1_to_64_rows(tmp_path, kinds, caplog):
    path = write_model(tmp_path / "model.gguf", kinds=kinds, width=256)
    with caplog.at_level(logging.INFO, "forerun"):
        llm = LLM(str(path), speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    (line,) = [record.getMessage() for record in caplog.records if "kept as others" in record.getMessage()]
    assert line == (f"{path} holds types that are kept as others: IQ4_XS as Q8_0 (within 0.05 %), "
                    "MXFP4 as Q8_0 (exact but for steps under 6e-8)")  # fmt: skip
    assert llm.model.fused is not None
    ids = [*np.random.default_rng(0).integers(3, 49, 64).tolist()]
    expected = logits(llm.model, [ids])
    for rows in range(1, 65):
        assert torch.equal(logits(llm.model, [ids[:rows]]), expected[:rows])
    exact = read_module(path, read_config(path), torch.float32, attention=None)
    with torch.inference_mode():
        assert error(exact(torch.tensor([ids])).logits[0], expected) < 0.08
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    drafted, plain = (llm.generate(["the 12 the 12"], params, speculate=wish)[0] for wish in (True, False))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("kind", where(blocks.can_run(), OTHERS))
def test_a_model_in_any_type(tmp_path, kind, caplog):
    """Layers and embedding, near what its dequantized weights give, which numbers are."""
    path = write_model(tmp_path / "model.gguf", kinds={"norm": Kinds.F32, "blk": kind, "token": kind}, width=256)
    exact = read_module(path, read_config(path), torch.float32, attention=None)
    ids = [*range(3, 40)]
    with torch.inference_mode():
        expected = exact(torch.tensor([ids])).logits[0]
    assert error(expected, logits(LLM(str(path)).model, [ids])) < 0.04
    assert f"{kind.name} as " in caplog.text
    caplog.clear()
    assert error(expected, logits(LLM(str(path), quantization="float32").model, [ids])) < 1e-4
    assert "kept as others" not in caplog.text


def test_show_tells_how_types_are_held(tmp_path, capsys):
    path = write_model(tmp_path / "model.gguf", kinds={"attn_v": Kinds.IQ4_XS, "attn_k": Kinds.NVFP4}, width=256)
    assert run(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "holds         IQ4_XS as Q8_0 (within 0.05 %), NVFP4 as numbers (exact in bfloat16)\n" in said
    assert run(["show", str(write_model(tmp_path / "usual.gguf"))]) == 0
    assert "holds" not in capsys.readouterr().out
