"""8-bit weights on GPU, through torchao, whose layers run on CPU too: as far as it is installed."""

import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from forerun.core.errors import ConfigError
from forerun.models import formats
from forerun.models.formats import plain
from forerun.models.formats.base import size
from forerun.models.kinds import TORCHAO_KINDS
from here import where
from refusals import refused

KINDS = where(find_spec("torchao") is not None, TORCHAO_KINDS, "torchao is not installed")
LIMIT = {"int8": 0.02, "fp8": 0.05}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_layer_is_close_and_small(kind, dtype):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(300, 250).to(dtype), torch.randn(300).to(dtype), torch.randn(40, 250).to(dtype)
    with torch.inference_mode():
        layer = plain.through_torchao(weight, bias, name=kind)
        expected, got = F.linear(x.float(), weight.float(), bias.float()), layer(x)
        added = layer(x, torch.ones_like(got))
    assert type(layer.numbers) is not torch.nn.Parameter
    assert (got.dtype, layer.kind) == (dtype, f"{kind} weights")
    assert 1e-4 < formats.error(expected, got.float()) < LIMIT[kind]
    assert torch.equal(added, got + 1)
    assert size([layer]) <= weight.numel() * 1.05


def test_without_it_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    refused(ConfigError, r"pip install 'forerun\[gpu\]'", plain.through_torchao, torch.ones(4, 4), None, name="int8")
