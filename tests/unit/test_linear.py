"""Plain, packed and streamed layers give the same numbers; rows the same bits beside any others."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

from forerun import kernels
from forerun.core.errors import ConfigError
from forerun.models import linear, streamed
from here import NO_PACKING, where

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
PACKED = where(lambda layer: linear.can_pack(layer[0]), [(d, "packed") for d in DTYPES], NO_PACKING)
STREAMED = where(lambda layer: streamed.can_stream(layer[0]), [(d, "streamed") for d in DTYPES])
LAYERS = [*((d, "plain") for d in DTYPES), *PACKED, *STREAMED]
"""What this torch runs on this processor."""


def cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and rows whose products cancel, so that what is left shows the order of the additions."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(outputs, inputs // 2, generator=generator).to(dtype)
    rows = torch.randn(70, inputs // 2, generator=generator).to(dtype)
    order = torch.randperm(inputs // 2 * 2, generator=generator)
    return torch.cat([half, -half], 1)[:, order].contiguous(), torch.cat([rows, rows], 1)[:, order].contiguous()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "how"), LAYERS)
def test_same_numbers(dtype, how, bias):
    torch.manual_seed(0)
    weight, offset = torch.randn(300, 260, dtype=dtype), torch.randn(300, dtype=dtype) if bias else None
    layer = linear.make_linear(weight, offset, how)
    assert layer.kind == how
    for rows in (1, 2, 5, 64):
        x, more = torch.randn(rows, 260, dtype=dtype), torch.randn(rows, 300, dtype=dtype)
        wanted = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
        assert (layer(x).float() - wanted).abs().max() < (1e-4 if dtype == torch.float32 else 0.3)
        assert (layer(x, more).float() - wanted - more.float()).abs().max() < (1e-4 if dtype == torch.float32 else 0.4)


@pytest.mark.parametrize("dtype", where(streamed.can_stream, DTYPES))
@pytest.mark.parametrize("shape", [(640, 384), (384, 1024), (1000, 520), (300, 2048)])
def test_a_row_has_the_same_bits_beside_any_others(shape, dtype):
    weight, x = cancelling(*shape, dtype)
    layer = linear.make_linear(weight, None, "streamed")
    assert layer.exact
    whole = layer(x[:64])
    for rows in range(1, 40):
        for start in (0, 7, 64 - rows):
            if start + rows <= 64:
                assert torch.equal(layer(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize("dtype", where(streamed.can_stream, DTYPES))
def test_streamed_weights_lie_side_by_side(dtype, monkeypatch):
    monkeypatch.setattr(streamed, "BLOCK", 1 << 20)
    monkeypatch.setattr(streamed, "shelf", streamed._Shelf())
    made, shapes = [], [(300, 270), (64, 256), (2000, 1024), (96, 130)]
    for index, (outputs, inputs) in enumerate(shapes):
        torch.manual_seed(index)
        weight, x = torch.randn(outputs, inputs, dtype=dtype), torch.randn(3, inputs, dtype=dtype)
        with torch.inference_mode(index % 2 == 0):
            made.append((streamed.Streamed(weight, None), weight, x))
    first, second, large, last = (layer.tiles for layer, *_ in made)
    assert 0 <= second.data_ptr() - first.data_ptr() - first.nbytes < 64
    assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()  # no room was left
    for tiles in (first, second, large, last):
        assert tiles.data_ptr() % 64 == 0
        assert tiles.data_ptr() + tiles.nbytes <= tiles.untyped_storage().data_ptr() + tiles.untyped_storage().nbytes()
    for layer, weight, x in made:
        wanted = F.linear(x.double(), weight.double())
        assert (layer(x) - wanted).norm() < (1e-5 if dtype == torch.float32 else 0.01) * wanted.norm()


@pytest.mark.parametrize("dtype", where(linear.can_pack, DTYPES, NO_PACKING))
def test_packed_layers_meet_few_row_counts(dtype):
    weight, x = cancelling(256, 256, dtype)
    layer = linear.make_linear(weight, None, "packed")
    call, met = layer.call, set()
    layer.call = lambda x, *rest: (met.add(len(x)), call(x, *rest))[1]
    many = x.repeat(32, 1)
    whole = layer(many[:2048])
    for rows in range(1, 2049, 7):
        got = layer(many[:rows])
        assert got.shape == (rows, 256)
        assert rows == 1 or torch.equal(got, whole[:rows])
    assert len(met) < 80


def test_small_layers_stay_plain():
    assert linear.make_linear(torch.randn(100, 100), None, "packed").kind == "plain"
    assert linear.make_linear(torch.randn(100, 101, dtype=torch.bfloat16), None, "streamed").kind == "plain"


def test_the_option():
    assert linear.choose(torch.float32, CPU, "plain") == "plain"
    able = {"streamed": streamed.can_stream, "packed": linear.can_pack, "plain": lambda dtype: True}
    best = next(how for how, can in able.items() if can(torch.float32))
    assert linear.choose(torch.float32, CPU, "auto") == best
    assert linear.choose(torch.float16, CPU, "auto") == "plain"
    assert linear.choose(torch.bfloat16, torch.device("cuda"), "auto") == "plain"
    for dtype, device in ((torch.float16, CPU), (torch.bfloat16, torch.device("cuda"))):
        for how in ("packed", "streamed"):
            with pytest.raises(ConfigError, match="auto"):
                linear.choose(dtype, device, how)
    with pytest.raises(ConfigError, match="quick"):
        linear.choose(torch.float32, CPU, "quick")


@pytest.fixture
def nothing_compiled():
    """Forget, before and after, what could be compiled."""
    kept = kernels.library, streamed.can_stream
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("lacking", ["compiler", "folder", "processor", "success"])
def test_without_our_kernels(lacking, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kernels"))
    if lacking == "compiler":
        monkeypatch.setattr(kernels, "COMPILERS", ("no-such-compiler",))
    elif lacking == "folder":
        (tmp_path / "kernels").write_text("a file where the folder should be")
    elif lacking == "processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    else:
        (tmp_path / "broken.cpp").write_text("not C++")
        monkeypatch.setattr(kernels, "SOURCES", (tmp_path / "broken.cpp",))
    assert kernels.library() is None
    compiles = lacking in ("folder", "success") and any(map(shutil.which, kernels.COMPILERS))
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert ("torch's serve instead" in caplog.text) == (compiles and avx512)
    assert linear.choose(torch.float32, CPU, "auto") == ("packed" if linear.can_pack(torch.float32) else "plain")
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        linear.choose(torch.float32, CPU, "streamed")


@pytest.mark.parametrize(("dtype", "how"), STREAMED)
def test_streamed_layers_refuse_what_the_kernels_would_misread(dtype, how):
    layer = linear.make_linear(torch.randn(64, 64).to(dtype), None, how)
    with pytest.raises(ValueError, match="64 inputs"):
        layer(torch.randn(2, 63).to(dtype))
    with pytest.raises(TypeError, match="float16"):
        layer(torch.randn(2, 64).half())
    with pytest.raises(ValueError, match="add"):
        layer(torch.randn(2, 64).to(dtype), torch.randn(3, 64).to(dtype))
    x = torch.randn(3, 5, 64).to(dtype)
    assert torch.equal(layer(x), layer(x.view(15, 64)).view(3, 5, 64))
    assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "how"), STREAMED)
def test_threads_change_no_bit(dtype, how, threads):
    weight, x = cancelling(500, 260, dtype)
    layer, before = linear.make_linear(weight, None, how), torch.get_num_threads()
    wanted = layer(x)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(layer(x), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", where(streamed.can_stream, DTYPES))
def test_streamed_norms(dtype):
    weight, x = torch.randn(3, 70), torch.randn(5, 3, 70).to(dtype) * 3
    got = streamed.Norm(weight.to(dtype), 1e-5)(x)
    wanted = F.rms_norm(x.double(), (70,), None, 1e-5) * weight.to(dtype).double()
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert ((got - wanted).abs() <= bound * wanted.abs() + 1e-12).all()
    for head in range(3):
        assert torch.equal(streamed.Norm(weight[head].to(dtype), 1e-5)(x[:, head]), got[:, head])


@pytest.mark.parametrize("dtype", where(streamed.can_stream, DTYPES))
def test_streamed_silu(dtype):
    gate = torch.cat([torch.linspace(-30, 30, 400), torch.tensor([-200.0, 200.0, 0.0, -100.0])])
    rows = torch.stack([gate, torch.full_like(gate, 1.7)]).to(dtype).view(1, -1)
    got = streamed.SiluTimes(dtype)(rows)
    wanted = F.silu(rows[:, :404].double()) * rows[:, 404:].double()
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert ((got - wanted).abs() <= bound * wanted.abs() + 1e-30).all()
    assert torch.isnan(streamed.SiluTimes(dtype)(torch.tensor([[float("nan"), 1.0]], dtype=dtype))).all()


def test_without_the_private_operations(monkeypatch):
    monkeypatch.setattr(linear, "can_stream", lambda dtype: False)
    linear.can_pack.cache_clear()
    monkeypatch.setattr(linear, "pack", lambda weight: torch.ops.mkldnn._no_such_operation(weight))
    try:
        assert not linear.can_pack(torch.float32)
        assert linear.choose(torch.float32, CPU, "auto") == "plain"
        with pytest.raises(ConfigError, match="float32"):
            linear.choose(torch.float32, CPU, "packed")
    finally:
        linear.can_pack.cache_clear()


def test_the_description_names_what_holds_most_of_the_weights():
    layers = [linear.make_linear(torch.randn(8, 8), None, "packed") for _ in range(3)]
    assert linear.describe(layers, torch.float32) == "plain float32"
    if linear.can_pack(torch.float32):
        layers.append(linear.make_linear(torch.randn(300, 300), None, "packed"))
        assert linear.describe(layers, torch.float32) == "packed float32"
        layers.append(linear.make_linear(torch.randn(200, 200), None, "packed"))
        assert linear.describe(layers, torch.float32) == "packed float32 and plain float32"
