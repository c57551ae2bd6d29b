"""Linear layers in Triton, under its interpreter: a row's bits, and every format against float64."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from forerun.models.formats import triton as ours
from forerun.models.formats.blocks import Blocks
from forerun.models.formats.gguf_types import larger_in_memory
from forerun.models.formats.int8 import Levels
from forerun.models.kinds import TRITON_BLOCKS
from forerun.models.run.rows import TritonNorm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("interpreted")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
COUNTS = (1, 2, 5, 16, 17, 64)


def random_six(outputs, inputs):
    """Any bits of a type that weights are not rounded to, with steps that are as large as in files."""
    raw = np.random.default_rng(outputs).integers(0, 256, (outputs, inputs // 256, 210), np.uint8)
    raw[..., 208:] = np.array([3e-5], np.float16).view(np.uint8)
    return Blocks("q6_k", raw.reshape(outputs, -1), inputs)


def layer(kind, outputs, inputs, dtype, bias=False):
    """A layer, and the float64 weights that it stands for."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    shift = torch.randn(outputs, generator=generator) if bias else None
    if kind == "numbers":
        weight = weight.to(dtype)
        return ours.make(weight.to(DEVICE), None if shift is None else shift.to(DEVICE)), weight.double(), shift
    if kind == "int8_rows":
        levels = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scales = torch.rand(outputs, generator=generator) / 1000
        made = ours.kept(Levels(levels, scales), shift, dtype, torch.device(DEVICE))
        return made, levels.double() * scales[:, None].double(), shift
    blocks = random_six(outputs, inputs) if kind == "q6_k" else Blocks.of(weight, kind)
    made = ours.kept(blocks, None if shift is None else shift.to(DEVICE), dtype, torch.device(DEVICE))
    exact = dequantize(blocks.raw[:], GGMLQuantizationType[kind.upper()])[:, :inputs]
    return made, torch.from_numpy(np.array(exact)).double(), shift


KINDS = ("numbers", "int8_rows", *TRITON_BLOCKS)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("numbers", dtype) for dtype in TOLERANCE]
    + [(kind, torch.float32) for kind in KINDS[1:]]
    + [("int8_rows", torch.bfloat16), ("q4_k", torch.bfloat16), ("q6_k", torch.bfloat16)],
    ids=str,
)
def test_a_row_has_the_same_bits_in_every_call_and_its_value(kind, dtype):
    inputs = 512 if kind in TRITON_BLOCKS else 768
    made, weight, bias = layer(kind, 40, inputs, dtype, bias=True)
    assert made.cut.parts > 1
    x = torch.randn(65, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    every = made(x)  # one program adds all parts of the inputs; below, several do
    for count in COUNTS:
        assert torch.equal(made(x[-count:]), every[-count:])  # fewer rows, and each of them in another place
    expected = x.cpu().double() @ weight.T + bias.double()
    assert (every.cpu().double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (3, 96), (300, 40), (40, 1088)])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_fill_no_tile(kind, outputs, inputs):
    if kind in ("q4_k", "q6_k") and inputs % 256:
        inputs = 256
    made, weight, _ = layer(kind, outputs, inputs, torch.float32)
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected = x.cpu().double() @ weight.T
    assert (made(x).cpu().double() - expected).norm() <= 2e-6 * expected.norm() + 1e-9


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kind", ["numbers", "int8_rows", "q4_k", "q6_k", "q8_0"])
def test_norm_gate_and_residual_in_one_call(kind, gate):
    made, weight, bias = layer(kind, 96, 256, torch.float32, bias=True)
    generator = torch.Generator().manual_seed(3)
    gain = torch.rand(256, generator=generator) + 0.5
    x, residual = torch.randn(20, 256, generator=generator), torch.randn(20, 48, generator=generator)
    assert made.absorb(TritonNorm(gain.to(DEVICE), 1e-5, torch.float32), gate)
    got = made(x.to(DEVICE), residual.to(DEVICE))
    wide = x.double()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    first, up = (normed @ weight.T + bias.double()).chunk(2, -1)
    how = torch.nn.functional.silu if gate == "silu" else lambda z: torch.nn.functional.gelu(z, approximate="tanh")
    expected = how(first) * up + residual.double()
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(made(x[7:8].to(DEVICE), residual[7:8].to(DEVICE)), got[7:8])


@pytest.mark.parametrize("kind", TRITON_BLOCKS)
def test_rows_of_an_embedding(kind):
    made, weight, _ = layer(kind, 50, 256, torch.float32)
    ids = torch.tensor([[3, 49], [0, 3]], device=DEVICE)
    assert torch.equal(made.rows(ids, torch.float32).cpu().double(), weight[ids.flatten().cpu()])


def test_types_without_a_kernel_are_named():
    assert (
        larger_in_memory(["Q6_K", "Q4_K", "Q5_K", "F32", "Q3_K"], on_gpu=True) == "Q3_K, as numbers, Q5_K, as numbers"
    )


def test_the_fastest_tile_of_a_shape_is_measured_once_for_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    made = [layer("numbers", outputs, 96, torch.float32)[0] for outputs in (40, 40, 130)]
    before, timed = [each(x) for each in made], []

    def milliseconds(alike, tile):
        timed.append((len(alike), tile.outputs))
        return abs(tile.outputs - (16 if len(alike) == 2 else 32))

    monkeypatch.setattr(ours, "_milliseconds", milliseconds)
    ours.autotune([ours.TritonJoined(made[:2]), made[2]], "A GPU")
    assert [each.tile.outputs for each in made] == [16, 16, 32]
    assert {count for count, _ in timed} == {1, 2}
    assert all(map(torch.equal, before, [each(x) for each in made]))
    timed.clear()
    again = layer("numbers", 40, 96, torch.float32)[0]
    ours.autotune([again], "A GPU")
    assert timed == []
    assert again.tile == made[0].tile
    ours.autotune([again], "Another GPU")
    assert len(timed) == len(again.usable_tiles()) > 1
