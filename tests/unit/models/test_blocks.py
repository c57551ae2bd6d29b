"""Layers in 2 to 8 bits with scales by blocks: exact weights and sums, and the same bits for any rows, on any unit."""

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from built import kept, torch_threads
from forerun import kernels
from forerun.core.errors import ConfigError
from forerun.kernels import KernelError, structs
from forerun.models.formats import ON_CPU, blocks
from forerun.models.formats.blocks import Blocked, Blocks
from forerun.models.formats.compiled import Joined
from forerun.models.formats.gguf_types import PACKED, sizes
from forerun.models.formats.tiled import TiledLinear
from gguf_files import weights
from here import where
from refusals import refused

KINDS = where(blocks.can_run(), PACKED)
ROUNDED = where(blocks.can_run(), [kind for kind in ON_CPU if kind in PACKED])
FLAGS = {"haswell": "avx2", "skylake-avx512": "avx512bw", "alderlake": "avx_vnni"}
"""Processors for which the compiler is asked, and a flag in which those that can run its code differ."""
CALL = """
#include "kernels.h"
extern "C" void run(int64_t kind, const char *w, const float *x, float *y, int64_t rows, int64_t outputs,
                    int64_t inputs) {
  linear_quants<float>(kind, w, x, y, nullptr, nullptr, rows, outputs, inputs, outputs, 1);
}
"""


EXTREME = {
    "q4_0": slice(2, None), "q4_1": slice(4, None), "q4_k": slice(4, None), "q5_0": slice(2, None),
    "q5_1": slice(4, None), "q5_k": slice(4, None), "q8_0": slice(2, None), "iq4_nl": slice(2, None),
    "iq4_xs": slice(2, None), "mxfp4": slice(1, None), "q2_k": slice(80), "q3_k": slice(108),
}  # fmt: skip
"""Where levels and whole scales are in a block."""


def extreme(kind, outputs, inputs):
    """Weights whose levels, and whole scales, are all the least or all the highest there are."""
    result = weights(kind, outputs, inputs)
    view = result.raw.reshape(outputs, -1, sizes(kind)[1])[..., EXTREME[kind]]
    view[0::3], view[1::3] = {"q8_0": (128, 127), "mxfp4": (0x77, 0xFF)}.get(kind, (0, 255))
    return result


SPANS = {"q4_k": 256, "q5_k": 256}
"""Inputs of a row that share a step, where it is not 32: those whose scales are multiplied as whole numbers."""


def levels_of(x, span):
    """Rows in 255 levels by so many inputs, in float64: the step is largest / 127 in float32."""
    parts = x.float().numpy().reshape(len(x), -1, span)
    step = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
    step[step <= np.float32(1e-30) / 127] = 1
    levels = np.rint(parts * (np.float32(1) / step))
    return (levels.astype(np.float64) * step.astype(np.float64)).reshape(len(x), -1)


def check(layer, values, x):
    """Sums over blocks of exact integers differ from float64 by float32's rounding of each block and no more."""
    rows, exact = levels_of(x, SPANS.get(layer.kind.lower(), 32)), values.double().numpy()
    expected, terms = rows @ exact.T, np.abs(rows) @ np.abs(exact).T
    assert (np.abs(layer(x).double().numpy() - expected) <= 3e-7 * terms + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_file(kind, monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK", 1 << 14)  # two pieces
    result = weights(kind, 50, 512)
    layer, expected = Blocked(result, None), result.values()
    assert torch.equal(layer.rows(torch.arange(50), torch.float32), expected)
    some = torch.tensor([[49, 0], [7, 7]])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(layer.rows(some, dtype), expected[some.flatten()].to(dtype))
    for bad in (-1, 50):
        refused(KernelError, "row is out of range", layer.rows, torch.tensor([bad]), torch.float32)
    of, size = structs.QUANTS[PACKED[kind].form]
    assert layer.nbytes == -(-50 // 16) * 512 // of * size


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_of_whole_numbers(kind):
    torch.manual_seed(0)
    result = weights(kind, 37, 512)
    x = torch.randn(40, 512) * torch.logspace(-6, 6, 40)[:, None]
    x[3], x[4], x[5] = 0, x[4].sign(), -1
    check(Blocked(result, None), result.values(), x)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_a_row_costs_half_a_step_at_most(kind):
    """Against float64 with the row as it is: below half a step of each input, and 0.8 % of a normal row."""
    torch.manual_seed(0)
    result, x = weights(kind, 37, 1024), torch.randn(20, 1024)
    got, exact = Blocked(result, None)(x).double(), result.values().double()
    expected, span = x.double() @ exact.T, SPANS.get(kind, 32)
    steps = x.double().reshape(20, -1, span).abs().amax(-1).div(127).repeat_interleave(span, 1)
    assert ((got - expected).abs() <= (0.501 * steps) @ exact.abs().T + 1e-30).all()
    assert (got - expected).norm() <= 0.008 * expected.norm()


@pytest.mark.parametrize("kind", where(blocks.can_run(), EXTREME))
def test_nothing_saturates(kind):
    result = extreme(kind, 33, 256)
    x = torch.ones(5, 256)
    x[1], x[2, ::2], x[3, 1::4] = -1, -1, -1
    check(Blocked(result, None), result.values(), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_one_result_among_1_to_512_rows(kind, dtype):
    torch.manual_seed(0)
    result = weights(kind, 40, 768)
    layer, x = Blocked(result, torch.randn(40)), torch.randn(512, 768).to(dtype)
    expected = torch.cat([layer(row[None]) for row in x])
    for rows in (*range(1, 34), 48, 63, 64, 65, 100, 128, 200, 255, 256, 300, 511, 512):
        assert torch.equal(layer(x[:rows]), expected[:rows])
        assert torch.equal(layer(x[512 - rows :]), expected[512 - rows :])


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (15, 33), (17, 100), (300, 250)])
def test_weights_of_any_shape_are_rounded(kind, outputs, inputs):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(9, inputs)
    layer = ON_CPU[kind].make(weight, bias)
    expected = x @ weight.T + bias
    assert layer.kind == kind.upper()
    assert (layer(x) - expected).norm() <= {"q4": 0.12, "q5": 0.06, "q8": 0.02}[kind[:2]] * expected.norm()
    more = torch.randn(9, outputs)
    assert torch.allclose(layer(x, more), layer(x) + more, atol=1e-5)


def test_inputs_that_do_not_fill_a_block_are_those_that_were_given():
    weight = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    held = Blocks.of(weight, "q8_0")
    assert held.shape == held[:].shape == weight.shape
    assert held.nbytes == 3 * 2 * 34
    assert torch.allclose(held[:], weight, atol=weight.abs().max() / 250)


def test_scales_of_scales_lose_less():
    """q4_k has 4.5 bits like q4_0, and about the error of q4_1 with its 5, or less."""
    torch.manual_seed(0)
    for weight in (torch.randn(64, 1024), torch.randn(64, 1024) ** 3, torch.rand(64, 1024)):
        off = {kind: (Blocks.of(weight, kind).values() - weight).norm() for kind in ("q4_0", "q4_1", "q4_k")}
        assert off["q4_k"] < min(1.05 * off["q4_1"], 0.9 * off["q4_0"])
    for weight in (torch.zeros(2, 256), torch.full((2, 256), 0.5), torch.full((2, 256), -3.0)):
        assert (Blocks.of(weight, "q4_k").values() - weight).abs().max() < 0.01


@pytest.mark.parametrize(
    "kind", where(blocks.can_run(), ["q4_0", "q4_1", "q4_k", "q6_k", "q8_0", "mxfp4", "q2_k", "iq3_s"])
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(kind, bad):
    x = torch.randn(3, 512)
    x[1, 333] = bad
    got = Blocked(weights(kind, 40, 512), None)(x)
    assert not got[1].isfinite().any()
    assert got[0::2].isfinite().all()


@pytest.mark.parametrize("kind", where(blocks.can_run(), ["q4_1", "q4_k", "q6_k", "iq4_xs", "q2_k"]))
def test_threads_change_no_bit(kind):
    layer, x = Blocked(weights(kind, 200, 512), None), torch.randn(70, 512)
    expected = layer(x)
    with torch_threads(2):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("dtype", where(blocks.can_run(), [torch.float32, torch.bfloat16]))
def test_layers_of_several_forms_are_one(dtype):
    numbers = torch.randn(24, 512).to(dtype)
    parts = [Blocked(weights("q4_k", 40, 512), None), TiledLinear(numbers, torch.randn(24)),
             Blocked(weights("q6_k", 7, 512), torch.randn(7))]  # fmt: skip
    layer, x = Joined(parts), torch.randn(11, 512).to(dtype)
    assert torch.equal(layer(x), torch.cat([part(x) for part in parts], dim=1))
    more = torch.randn(11, 71).to(dtype)
    pieces = zip(parts, more.split([40, 24, 7], dim=1))
    assert torch.equal(layer(x, more), torch.cat([part(x, piece.contiguous()) for part, piece in pieces], dim=1))
    assert (layer.kind, layer.outputs) == ("Q4_K and streamed and Q6_K", 71)
    refused(ValueError, "several", Joined, parts[:1])
    refused(ValueError, "same inputs", Joined, [parts[0], TiledLinear(torch.randn(4, 8), None)])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_another_order_and_parts_end_to_end(kind):
    first, second, order = weights(kind, 20, 256), weights(kind, 9, 256, 1), torch.randperm(20)
    whole = Blocks.join([first.rows(order), second])
    assert torch.equal(whole.values(), torch.cat([first.values()[order], second.values()]))


def test_kinds_that_only_files_bring():
    refused(ConfigError, "read in q6_k, but not rounded to it", Blocks.of(torch.randn(4, 256), "q6_k").values)


@pytest.mark.parametrize("kind", where(blocks.can_run(), ["q4_0"]))
def test_layers_refuse_what_the_kernels_would_misread(kind):
    layer = Blocked(weights(kind, 20, 64), None)
    refused(ValueError, "64 inputs", layer, torch.randn(2, 63))
    refused(TypeError, "float64", layer, torch.randn(2, 64).double())
    refused(ValueError, "bias", Blocked, weights(kind, 20, 64), torch.randn(19))
    refused(ValueError, "some", Blocked, Blocks(kind, np.zeros((0, 18), np.uint8), 32), None)


def _units():
    """Processors whose code runs here."""
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        ).split()
    except (OSError, StopIteration):
        return []
    return [unit for unit, flag in FLAGS.items() if flag in flags]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The kernels as compiled for each of them."""
    call = tmp_path_factory.mktemp("units") / "call.cpp"
    call.write_text(CALL)
    command = [*kernels.compiler(), "-O0", "-std=c++17", "-fPIC", "-pthread", "-shared", "-I", str(kernels.HERE)]
    parts = [call, *(kernels.HERE / f"{name}.cpp" for name in ("quants", "shared", "threads"))]
    around = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's

    def build(unit):
        def make(to):
            arguments = [*command, f"-march={unit}", *map(str, parts), "-o", str(to)]
            subprocess.run(arguments, check=True, capture_output=True, env=around)

        return ctypes.CDLL(str(kept(make, CALL, kernels.compiler()[0], unit)))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(_units(), pool.map(build, _units())))


@pytest.mark.parametrize("kind", KINDS)
def test_every_unit_gives_the_same_bits(kind, built):
    torch.manual_seed(0)
    layer, x = Blocked(weights(kind, 40, 512), None), torch.randn(13, 512) * 3
    expected = layer(x)
    for unit, library in built.items():
        got, call = torch.zeros(13, 40), library.run
        call.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3]
        call.restype = None
        call(structs.KINDS.index(PACKED[kind].form), layer.tiles.data_ptr(), x.data_ptr(), got.data_ptr(), 13, 40, 512)
        assert torch.equal(got, expected), unit
    assert "haswell" in built
