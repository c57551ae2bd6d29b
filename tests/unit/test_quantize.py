"""8-bit weights: how large, how far off, and whose rows depend on their batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from forerun import LLM
from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.models import quantize
from forerun.models.base import new_cache
from forerun.models.invariance import self_test
from forerun.models.native import NativeModel
from forerun.models.streamed import can_stream

CPU = torch.device("cpu")
BACKENDS = ["ours", "fbgemm"] if can_stream(torch.int8) else ["fbgemm"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "fbgemm":
        monkeypatch.setattr(quantize, "can_stream", lambda dtype: False)
    return request.param


def layer(outputs: int = 300, inputs: int = 250) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(40, inputs)


def model(quantization: str | None, invariant: bool = False, dtype: torch.dtype = torch.float32) -> NativeModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, attention_bias=True,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    options = {"name": "t", "eos_ids": frozenset(), "invariant": invariant, "quantization": quantization}
    return NativeModel(module.to(dtype), **options)


def logits(built: NativeModel) -> torch.Tensor:
    tokens = torch.randint(512, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = new_cache(built, max_seqs=1, max_len=64)
    return built.forward(Batch([Span(0, 0, tokens, logits=list(range(50)))]), cache).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", quantize.CPU_KINDS)
@pytest.mark.usefixtures("backend")
def test_a_layer_is_close_and_small(kind, dtype):
    weight, bias, x = (tensor.to(dtype) for tensor in layer())
    quantized = quantize.quantize(weight, bias, kind)
    wanted, got = F.linear(x.float(), weight.float(), bias.float()), quantized(x)
    assert got.dtype == dtype
    assert (got.float() - wanted).norm() < 0.02 * wanted.norm()
    assert quantize.size([quantized]) <= weight.numel() * 1.05


@pytest.mark.usefixtures("backend")
def test_rows_of_int8_rows_are_their_own():
    weight, bias, x = layer()
    x[3] *= 1000
    x[5] = 0
    quantized = quantize.quantize(weight, bias, "int8_rows")
    whole = quantized(x)
    for count in (1, 2, 3, 5, 8, 17):
        for start in range(0, 40 - count, count):
            assert torch.equal(quantized(x[start : start + count]), whole[start : start + count])
    assert torch.equal(whole[5], bias)


def test_an_outlier_row_spoils_fbgemm_s_int8_but_not_int8_rows(backend):
    weight, _, x = layer()
    x[3] *= 100
    wanted = F.linear(x, weight)[:3]
    by_call, by_row = (
        make(x)[:3] for make in (quantize.Int8(weight, None), quantize.quantize(weight, None, "int8_rows"))
    )
    assert (by_row - wanted).norm() < 0.1 * (by_call - wanted).norm()


@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.float32), ("int8_rows", torch.float32),
                                             ("int8_rows", torch.bfloat16)])  # fmt: skip
@pytest.mark.usefixtures("backend")
def test_a_model_s_size_and_error(kind, dtype):
    plain, quantized = model(None), model(kind, dtype=dtype)
    share = quantize.size(quantized.linears()) / quantize.size(plain.linears())
    assert share < 0.30
    assert quantize.error(logits(plain), logits(quantized)) < 0.08
    assert quantized.info.path == f"native, {'int8' if kind == 'int8' else 'int8 by rows'}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("backend")
def test_int8_rows_is_invariant(dtype):
    assert self_test(model("int8_rows", invariant=True, dtype=dtype)) == []


def test_int8_is_not():
    with pytest.raises(ConfigError, match="int8_rows"):
        model("int8", invariant=True)


def test_unknown_kinds_are_refused():
    for kind in ("fp8", "int3"):
        with pytest.raises(ConfigError, match=kind):
            model(kind)
    with pytest.raises(ConfigError, match="int8_rows"):
        quantize.check("int8_rows", torch.device("cuda"), invariant=False)


@pytest.mark.parametrize(
    ("options", "quantized"),
    [
        ({}, True),
        ({"quantization": "none"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"model": "forerun:target"}, False),
    ],
)
def test_the_bundled_draft_runs_in_8_bits_unless_told_otherwise(options, quantized):
    llm = LLM("forerun:target", dtype="bfloat16", speculative_config={"method": "draft_model", **options})
    (drafter,) = llm.engine.router.drafters.values()
    assert ("int8" in drafter.model.info.path) == (quantized and can_stream(torch.int8))
