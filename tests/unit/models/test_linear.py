"""Plain, packed and streamed layers give the same numbers; rows the same bits beside any others."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from built import torch_threads
from forerun import kernels
from forerun.core.errors import ConfigError
from forerun.models import formats
from forerun.models.formats import blocks, compiled, int8, plain, tiled
from forerun.models.run import parts
from here import NO_PACKING, where
from refusals import refused

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
PACKED = where(lambda layer: plain.can_pack(layer[0]), [(d, "packed") for d in DTYPES], NO_PACKING)
STREAMED = where(lambda layer: tiled.can_tile(layer[0]), [(d, "streamed") for d in tiled.DTYPES])
SERVED = where(tiled.can_tile, tiled.DTYPES)
LAYERS = [*((d, "plain") for d in DTYPES), *PACKED, *STREAMED]
"""What this torch runs on this processor."""


def cancelling(outputs, inputs, dtype):
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
    layer = formats.make_linear(weight, offset, how)
    assert layer.kind == how
    for rows in (1, 2, 5, 64):
        x, more = torch.randn(rows, 260, dtype=dtype), torch.randn(rows, 300, dtype=dtype)
        expected = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
        summed = math.sqrt(260) * torch.finfo(torch.float32).eps * (x.float().abs() @ weight.float().abs().T)
        one = torch.finfo(dtype).eps * expected.abs()  # what is returned is rounded once, and twice with what is added
        assert ((layer(x).float() - expected).abs() <= summed + one).all()
        both = expected + more.float()
        assert ((layer(x, more).float() - both).abs() <= summed + one + torch.finfo(dtype).eps * both.abs()).all()


def test_what_is_compiled_serves_every_dtype():
    served = [*tiled.DTYPES] if kernels.library() is not None else []
    assert [dtype for dtype in (*tiled.DTYPES, torch.int8, torch.float64) if tiled.can_tile(dtype)] == served
    assert int8.can_run() == blocks.can_run() == bool(served)


@pytest.mark.parametrize("shape", [(70, 64), (5, 7), (33, 1), (98, 65)], ids=str)
@pytest.mark.parametrize("dtype", SERVED)
def test_rows_of_a_streamed_layer_are_those_of_its_weights(dtype, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    layer, ids = tiled.TiledLinear(weight, None), torch.randint(0, shape[0], (4, 9))
    assert torch.equal(layer.rows(ids, dtype), weight[ids.flatten()])
    refused(kernels.KernelError, "row", layer.rows, torch.tensor([shape[0]]), dtype)
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    refused(TypeError, "of weights in", layer.rows, ids, other)


@pytest.mark.parametrize(("outputs", "inputs"), [(97, 512), (97, 700), (300, 2048)])
@pytest.mark.parametrize("kind", ["int8", *SERVED] if int8.can_run() else where(False, ["int8"]))
def test_a_row_of_a_streamed_layer_has_one_result(kind, outputs, inputs):
    """Among 1 to 70 rows, wherever it stands among them."""
    weight, x = cancelling(outputs, inputs, torch.float32 if kind == "int8" else kind)
    layer = int8.TiledInt8(weight, None, kind) if kind == "int8" else tiled.TiledLinear(weight, None)
    expected = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, 71):
        assert torch.equal(layer(x[:rows]), expected[:rows])
        assert torch.equal(layer(x[70 - rows :]), expected[70 - rows :])


@pytest.mark.parametrize("dtype", SERVED)
def test_streamed_layers_of_any_shape(dtype):
    for outputs, inputs in ((1, 1), (1, 2), (17, 3), (31, 33), (33, 31), (48, 515)):
        weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(14, inputs).to(dtype)
        expected = x.double() @ weight.double().T
        unit = {torch.float32: 0, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
        for rows in (1, 2, 3, 14):
            off = (tiled.TiledLinear(weight, None)(x[:rows]) - expected[:rows]).abs()
            assert (off <= unit * expected[:rows].abs() + 1e-4).all()


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("inputs", [1, 4, 31, 4099])
def test_8_bits_are_sums_of_integers(dtype, inputs):
    """The kernel's arithmetic in whole numbers: levels of either sign at their ends too."""
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (37, inputs)).float()
    weight[:, 0], weight[5] = 127, -127
    x = torch.randint(-127, 128, (9, inputs)).float()
    x[:, 0], x[3], x[4] = 127, 127, -127
    x[3:5] = x[3:5].sign() * 127
    got = int8.TiledInt8(weight, None, "int8")(x.to(dtype))  # both have a step of 1 between levels
    assert torch.equal(got, (x.double() @ weight.double().T).float().to(dtype))


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_8_bits_do_not_hide_what_is_not_finite(dtype, bad):
    x = torch.randn(3, 70).to(dtype)
    x[1, 33] = bad
    got = int8.TiledInt8(torch.randn(40, 70), None, "int8")(x)
    assert not got[1].isfinite().any()
    assert got[0::2].isfinite().all()


@pytest.mark.parametrize("dtype", SERVED)
def test_streamed_weights_lie_side_by_side(dtype, monkeypatch):
    monkeypatch.setattr(compiled, "BLOCK", 1 << 20)
    monkeypatch.setattr(tiled, "arena", compiled.Arena())
    made, shapes = [], [(300, 270), (64, 256), (2000, 1024), (96, 130)]
    for index, (outputs, inputs) in enumerate(shapes):
        torch.manual_seed(index)
        weight, x = torch.randn(outputs, inputs, dtype=dtype), torch.randn(3, inputs, dtype=dtype)
        with torch.inference_mode(index % 2 == 0):
            made.append((tiled.TiledLinear(weight, None), weight, x))
    first, second, large, last = (layer.tiles for layer, *_ in made)
    assert 0 <= second.data_ptr() - first.data_ptr() - first.nbytes < 64
    assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()  # no room was left
    for tiles in (first, second, large, last):
        assert tiles.data_ptr() % 64 == 0
        assert tiles.data_ptr() + tiles.nbytes <= tiles.untyped_storage().data_ptr() + tiles.untyped_storage().nbytes()
    for layer, weight, x in made:
        expected = F.linear(x.double(), weight.double())
        assert (layer(x) - expected).norm() < (1e-5 if dtype == torch.float32 else 0.01) * expected.norm()


@pytest.mark.parametrize("dtype", where(plain.can_pack, DTYPES, NO_PACKING))
def test_packed_layers_meet_few_row_counts(dtype):
    weight, x = cancelling(256, 256, dtype)
    layer = formats.make_linear(weight, None, "packed")
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
    assert formats.make_linear(torch.randn(100, 100), None, "packed").kind == "plain"
    assert formats.make_linear(torch.randn(100, 101, dtype=torch.bfloat16), None, "streamed").kind == "plain"


def test_the_option():
    assert formats.choose(torch.float32, CPU, "plain") == "plain"
    able = {"streamed": tiled.can_tile, "packed": plain.can_pack, "plain": lambda dtype: True}
    best = next(how for how, can in able.items() if can(torch.float32))
    assert formats.choose(torch.float32, CPU, "auto") == best
    assert formats.choose(torch.float16, CPU, "auto") == ("streamed" if tiled.can_tile(torch.float16) else "plain")
    assert formats.choose(torch.bfloat16, torch.device("cuda"), "auto") == "plain"
    for dtype, device in ((torch.float64, CPU), (torch.bfloat16, torch.device("cuda"))):
        for how in ("packed", "streamed"):
            refused(ConfigError, "auto", formats.choose, dtype, device, how)
    refused(ConfigError, "quick", formats.choose, torch.float32, CPU, "quick")


@pytest.fixture
def nothing_compiled():
    """Forget, before and after, what could be compiled."""
    kept = kernels.library, tiled.can_tile, int8.can_run
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("lacking", ["compiler", "folder", "processor", "success", "wish"])
def test_without_our_kernels(lacking, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("FORERUN_KERNELS", "0" if lacking == "wish" else "1")
    if lacking == "compiler":
        monkeypatch.setattr(kernels, "COMPILERS", ("no-such-compiler",))
        monkeypatch.setattr(kernels, "ZIG", "no_such_module")
    elif lacking == "folder":
        (tmp_path / "kernels").write_text("a file where the folder should be")
    elif lacking == "processor":
        monkeypatch.setattr(kernels, "NEEDED", frozenset(["no-such-flag"]))
    elif lacking == "success":
        (tmp_path / "broken.cpp").write_text("not C++")
        monkeypatch.setattr(kernels, "units_of", lambda part: [(str(tmp_path / "broken.cpp"),)])
    serves = kernels._supported()
    assert kernels.library() is None
    compiles = bool(kernels.compiler())
    assert ("torch's serve instead" in caplog.text) == (lacking in ("folder", "success") and serves and compiles)
    assert ("kernels need Linux" in caplog.text) == (not serves and lacking != "wish")
    assert ("apt-get install g++" in caplog.text) == (serves and not compiles and lacking != "wish")
    assert formats.choose(torch.float32, CPU, "auto") == ("packed" if plain.can_pack(torch.float32) else "plain")
    refused(ConfigError, "C\\+\\+ compiler", formats.choose, torch.float32, CPU, "streamed")


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("name", ["FORERUN_KERNELS", "FORERUN_TILES"])
def test_a_switch_is_0_or_1(monkeypatch, name):
    monkeypatch.setenv(name, "off")
    refused(ConfigError, rf"{name} is 1 or, .* 0; not 'off'", kernels.library)


@pytest.mark.parametrize(("dtype", "how"), STREAMED)
def test_streamed_layers_refuse_what_the_kernels_would_misread(dtype, how):
    layer = formats.make_linear(torch.randn(64, 64).to(dtype), None, how)
    refused(ValueError, "64 inputs", layer, torch.randn(2, 63).to(dtype))
    refused(TypeError, "float64", layer, torch.randn(2, 64).double())
    refused(ValueError, "add", layer, torch.randn(2, 64).to(dtype), torch.randn(3, 64).to(dtype))
    x = torch.randn(3, 5, 64).to(dtype)
    assert torch.equal(layer(x), layer(x.view(15, 64)).view(3, 5, 64))
    assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))


@pytest.mark.parametrize(("dtype", "how"), STREAMED)
def test_threads_change_no_bit(dtype, how):
    weight, x = cancelling(500, 260, dtype)
    layer = formats.make_linear(weight, None, how)
    with torch_threads(1):
        expected = layer(x)
    with torch_threads(2):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("dtype", SERVED)
def test_streamed_norms(dtype):
    weight, x = torch.randn(3, 70), torch.randn(5, 3, 70).to(dtype) * 3
    got = parts.KernelNorm(weight.to(dtype), 1e-5)(x)
    expected = F.rms_norm(x.double(), (70,), None, 1e-5) * weight.to(dtype).double()
    bound = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
    assert ((got - expected).abs() <= bound * expected.abs() + 1e-6).all()
    for head in range(3):
        assert torch.equal(parts.KernelNorm(weight[head].to(dtype), 1e-5)(x[:, head]), got[:, head])


@pytest.mark.parametrize("dtype", SERVED)
def test_streamed_norms_of_what_is_added(dtype):
    weight, x, add = torch.randn(70), torch.randn(5, 70).to(dtype) * 3, torch.randn(5, 70).to(dtype)
    got = parts.KernelNorm(weight, 1e-5, dtype)(x, add)
    expected = F.rms_norm(x.double(), (70,), None, 1e-5) * weight.double() + add.double()
    bound = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
    assert ((got - expected).abs() <= bound * expected.abs() + 1e-6).all()
    assert (parts.RMSNorm(weight, 1e-5, dtype)(x, add) - expected).abs().max() <= 2 * bound * expected.abs().max()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", SERVED)
def test_streamed_gates(dtype, activation):
    gate = torch.cat([torch.linspace(-30, 30, 400), torch.tensor([-200.0, 200.0, 0.0, -100.0])])
    rows = torch.stack([gate, torch.full_like(gate, 1.7)]).to(dtype).view(1, -1)
    got = parts.KernelGate(activation, dtype)(rows)
    function = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}[activation]
    expected = function(rows[:, :404].double()) * rows[:, 404:].double()
    bound = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
    least = 1e-7 if dtype == torch.float16 else 1e-14  # half of the smallest number; what the double tanh rounds off
    assert ((got - expected).abs() <= bound * expected.abs() + least).all()
    assert torch.isnan(parts.KernelGate(activation, dtype)(torch.tensor([[float("nan"), 1.0]], dtype=dtype))).all()


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps(cap):
    numbers = torch.cat([torch.linspace(-100, 100, 403), torch.tensor([1e30, -1e30, float("inf"), -float("inf"), 0.0])])
    expected = torch.tanh(numbers.double() / cap) * cap
    assert (parts.softcap(numbers.clone(), cap) - expected).abs().max() <= 3e-7 * cap
    assert torch.isnan(parts.softcap(torch.tensor([float("nan")]), cap)).all()
    refused(ValueError, "soft cap on", parts.softcap, numbers.double(), cap)
    apart = numbers.view(4, -1)[:, :5]
    assert torch.equal(parts.softcap(apart, cap), parts.softcap(apart.clone(), cap))


def test_without_the_private_operations(monkeypatch):
    monkeypatch.setattr(tiled, "can_tile", lambda dtype: False)
    plain.can_pack.cache_clear()
    monkeypatch.setattr(plain, "pack", lambda weight: torch.ops.mkldnn._no_such_operation(weight))
    try:
        assert not plain.can_pack(torch.float32)
        assert formats.choose(torch.float32, CPU, "auto") == "plain"
        refused(ConfigError, "float32", formats.choose, torch.float32, CPU, "packed")
    finally:
        plain.can_pack.cache_clear()


def test_the_description_names_what_holds_most_of_the_weights():
    layers = [formats.make_linear(torch.randn(40, 40), None, "packed") for _ in range(3)]
    assert formats.describe(layers, torch.float32) == "plain float32"
    if plain.can_pack(torch.float32):
        layers.append(formats.make_linear(torch.randn(300, 300), None, "packed"))
        assert formats.describe(layers, torch.float32) == "packed float32"
        layers.append(formats.make_linear(torch.randn(200, 200), None, "packed"))
        assert formats.describe(layers, torch.float32) == "packed float32 and plain float32"
