"""Packed and plain layers give the same numbers; packed rows the same bits beside any others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from forerun.core.errors import ConfigError
from forerun.models import linear

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
LAYERS = [(d, packed) for d in DTYPES for packed in (False, True) if not packed or linear.can_pack(d)]
"""What this torch runs on this processor."""


def cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and rows whose products cancel, so that what is left shows the order of the additions."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(outputs, inputs // 2, generator=generator).to(dtype)
    rows = torch.randn(70, inputs // 2, generator=generator).to(dtype)
    order = torch.randperm(inputs // 2 * 2, generator=generator)
    return torch.cat([half, -half], 1)[:, order].contiguous(), torch.cat([rows, rows], 1)[:, order].contiguous()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "packed"), LAYERS)
def test_same_numbers(dtype, packed, bias):
    torch.manual_seed(0)
    weight, offset = torch.randn(300, 260, dtype=dtype), torch.randn(300, dtype=dtype) if bias else None
    layer = linear.make_linear(weight, offset, packed=packed)
    assert layer.kind == ("packed" if packed else "plain")
    for rows in (1, 2, 5, 64):
        x = torch.randn(rows, 260, dtype=dtype)
        wanted = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
        assert (layer(x).float() - wanted).abs().max() < (1e-4 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize(("dtype", "packed"), LAYERS)
@pytest.mark.parametrize("shape", [(640, 384), (384, 1024), (1000, 520), (300, 2048)])
def test_a_row_has_the_same_bits_beside_any_others(shape, dtype, packed):
    weight, x = cancelling(*shape, dtype)
    layer = linear.make_linear(weight, None, packed=packed)
    whole = layer(x[:64])
    multiples = range(2, 40) if layer.rows == 2 else range(layer.rows, 64, layer.rows)
    for rows in multiples:
        for start in (0, 7, 64 - rows):
            if start + rows <= 64:
                assert torch.equal(layer(x[start : start + rows]), whole[start : start + rows])


def test_small_layers_stay_plain():
    assert linear.make_linear(torch.randn(100, 100), None, packed=True).kind == "plain"


def test_the_option():
    assert not linear.packs(torch.float32, CPU, "plain")
    assert linear.packs(torch.float32, CPU, "auto") == linear.can_pack(torch.float32)
    assert not linear.packs(torch.float16, CPU, "auto")
    assert not linear.packs(torch.bfloat16, torch.device("cuda"), "auto")
    for dtype, device in ((torch.float16, CPU), (torch.bfloat16, torch.device("cuda"))):
        with pytest.raises(ConfigError, match="auto"):
            linear.packs(dtype, device, "packed")
    with pytest.raises(ConfigError, match="quick"):
        linear.packs(torch.float32, CPU, "quick")


def test_without_the_private_operations(monkeypatch):
    linear.can_pack.cache_clear()
    monkeypatch.setattr(linear, "pack", lambda weight: torch.ops.mkldnn._no_such_operation(weight))
    try:
        assert not linear.can_pack(torch.float32)
        assert not linear.packs(torch.float32, CPU, "auto")
        with pytest.raises(ConfigError, match="float32"):
            linear.packs(torch.float32, CPU, "packed")
    finally:
        linear.can_pack.cache_clear()


def test_the_description_names_what_holds_most_of_the_weights():
    layers = [linear.make_linear(torch.randn(8, 8), None, packed=True) for _ in range(3)]
    assert linear.describe(layers, torch.float32) == "plain float32"
    if linear.can_pack(torch.float32):
        layers.append(linear.make_linear(torch.randn(300, 300), None, packed=True))
        assert linear.describe(layers, torch.float32) == "packed float32"
        layers.append(linear.make_linear(torch.randn(200, 200), None, packed=True))
        assert linear.describe(layers, torch.float32) == "packed float32 and plain float32"


class Timed(linear.Packed):
    """A layer whose call takes a said time per number of rows, on a clock of its own."""

    def __init__(self, clock: list[float], seconds: dict[int, float], nbytes: int) -> None:
        self.weight, self.kind, self.nbytes = torch.zeros(4, 8), "packed", nbytes
        self.clock, self.seconds = clock, seconds

    def __call__(self, x):
        self.clock[0] += self.seconds[len(x)]
        return x


@pytest.mark.parametrize(
    ("seconds", "nbytes", "wanted"),
    [
        ({2: 3.0, 4: 2.0}, linear.CACHED_BYTES, 4),
        ({2: 2.0, 4: 3.0}, linear.CACHED_BYTES, 2),
        ({2: 3.0, 4: 2.0}, linear.CACHED_BYTES - 1, 2),
    ],
)
def test_a_lone_row_is_padded_to_what_is_read_fastest(monkeypatch, seconds, nbytes, wanted):
    clock = [0.0]
    monkeypatch.setattr(linear, "perf_counter", lambda: clock[0])
    assert linear.quickest_rows([Timed(clock, seconds, nbytes)], 2) == wanted
