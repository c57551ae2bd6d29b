"""8-bit weights: how large, how far off, and whose rows depend on their batch."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.engine.config import SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.models import formats
from forerun.models.formats import ON_CPU, blocks, int8
from forerun.models.formats.base import size
from forerun.models.kinds import KINDS
from forerun.models.run.invariance import self_test
from forerun.speculate.draft import drafters
from modules import logits_of, native
from refusals import refused
from rounding import by_chance, rounded_inputs

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BACKENDS = ["ours", "fbgemm"] if int8.can_run() else ["fbgemm"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "fbgemm":
        monkeypatch.setattr(int8, "can_run", lambda *_: False)
    return request.param


def layer(outputs=300, inputs=250):
    torch.manual_seed(0)
    return torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(40, inputs)


def module():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, attention_bias=True,
    )  # fmt: skip
    result = LlamaForCausalLM(config).eval()
    for parameter in result.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return result


def model(quantization, invariant=False, dtype=torch.float32):
    return native(module().to(dtype), invariant=invariant, quantization=quantization)


IDS = torch.randint(512, (50,), generator=torch.Generator().manual_seed(1))


def logits(built):
    return logits_of(built, IDS.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("backend")
def test_a_layer_is_close_and_small(kind, dtype):
    weight, bias, x = (tensor.to(dtype) for tensor in layer())
    quantized = ON_CPU[kind].make(weight, bias)
    expected, got = F.linear(x.float(), weight.float(), bias.float()), quantized(x)
    assert got.dtype == dtype
    # Weights have a step for each row; inputs one for each row, or in FBGEMM one for the whole call.
    levels = 127 if int8.can_run() or kind != "int8" else int8._levels()
    steps = weight.float().abs().amax(1) / levels, x.float().abs().amax() / levels
    rounding = (steps[0].square()[None] * x.float().square().sum(1, keepdim=True)
                + steps[1].square() * weight.float().square().sum(1)) / 12  # fmt: skip
    rounding += (torch.finfo(dtype).eps * expected).square() / 12
    assert (got.float() - expected).norm() < by_chance(len(x)) * rounding.sum().sqrt()
    assert size([quantized]) <= weight.numel() * 1.05


@pytest.mark.usefixtures("backend")
def test_rows_of_int8_rows_are_their_own():
    weight, bias, x = layer()
    x[3] *= 1000
    x[5] = 0
    quantized = ON_CPU["int8_rows"].make(weight, bias)
    whole = quantized(x)
    for count in (1, 2, 3, 5, 8, 17):
        for start in range(0, 40 - count, count):
            assert torch.equal(quantized(x[start : start + count]), whole[start : start + count])
    assert torch.equal(whole[5], bias)


def test_an_outlier_row_spoils_fbgemm_s_int8_but_not_int8_rows(backend):
    weight, _, x = layer()
    x[3] *= 100
    expected = F.linear(x, weight)[:3]
    by_call, by_row = (
        make(x)[:3] for make in (int8.FbgemmInt8(weight, None, by_rows=False), ON_CPU["int8_rows"].make(weight, None))
    )
    assert (by_row - expected).norm() < 0.1 * (by_call - expected).norm()


@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.float32), ("int8_rows", torch.float32),
                                             ("int8_rows", torch.bfloat16), ("int8_rows", torch.float16)])  # fmt: skip
@pytest.mark.usefixtures("backend")
def test_a_model_s_size_and_error(kind, dtype):
    plain, quantized = model(None), model(kind, dtype=dtype)
    assert size(quantized.linears()) / size(plain.linears()) < 0.30
    coarse = 1 if int8.has_kernels(CPU, dtype) else 127 / int8._levels()  # FBGEMM without VNNI has half the levels
    with torch.inference_mode():
        usual = formats.error(logits(plain), rounded_inputs(module(), weights=True)(IDS[None]).logits[0])
    assert formats.error(logits(plain), logits(quantized)) < by_chance(len(IDS)) * coarse * usual
    assert quantized.info.path == f"native, {'int8' if kind == 'int8' else 'int8 by rows'}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("backend")
def test_int8_rows_is_invariant(dtype):
    assert self_test(model("int8_rows", invariant=True, dtype=dtype)) == []


def test_int8_is_not():
    refused(ConfigError, "int8_rows", model, "int8", invariant=True)


def test_unknown_kinds_are_refused():
    for kind in ("fp8", "int3"):
        refused(ConfigError, kind, model, kind)
    refused(ConfigError, "int8_rows", formats.check, "int8_rows", torch.device("cuda"), torch.bfloat16, invariant=False)


def test_kernels_of_ours_are_for_cpus_and_their_dtypes():
    assert int8.has_kernels(CPU, torch.float32) == int8.has_kernels(CPU, torch.bfloat16) == int8.can_run()
    assert int8.has_kernels(CPU, torch.float16) == int8.can_run()
    assert not int8.has_kernels(CPU, torch.float64)
    assert not int8.has_kernels(torch.device("cuda"), torch.bfloat16)


def test_without_fbgemm_a_wish_for_8_bits_names_the_dtype(monkeypatch):
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", [])
    refused(ConfigError, "float64 needs FBGEMM", formats.check, "int8_rows", CPU, torch.float64, invariant=True)


def test_without_our_kernels_blocks_are_refused(monkeypatch):
    monkeypatch.setattr(blocks, "can_run", lambda *_: False)
    refused(ConfigError, r"'q4_0' in float32 needs kernels of ours .*: remove it", model, "q4_0")


def test_none_leaves_a_target_as_it_is():
    assert "int8" not in LLM("forerun:target", quantization="none").model.info.path


def bundled(speculative, **options):
    """The bundled pair, and how the draft's weights are stored."""
    llm = LLM("forerun:target", speculative_config={"method": "draft_model", **speculative}, **options)
    (drafter,) = llm.engine.router.drafters.values()
    return llm, drafter.model.info.path


@pytest.mark.parametrize(("options", "quantized"), [
    ({}, True),
    ({"quantization": "none"}, False),
    ({"dtype": "bfloat16"}, False),
    ({"model": "forerun:target"}, False),
])  # fmt: skip
def test_the_bundled_draft_runs_in_8_bits_unless_reported_otherwise(options, quantized):
    _, path = bundled(options, dtype="bfloat16")
    assert ("int8" in path) == (quantized and int8.can_run())


@pytest.mark.parametrize(
    ("options", "quantized"), [({"model_path": "hf"}, False), ({"dtype": "float16"}, True), ({}, False)]
)
def test_that_default_gives_way_where_it_cannot_be_had(options, quantized, monkeypatch):
    if not options:
        monkeypatch.setattr(int8, "can_run", lambda *_: False)
    llm, path = bundled({}, **options)
    assert ("int8" in path) == (quantized and int8.can_run())
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
    drafted, plain = (llm.generate(["def parse("], params, speculate=expected)[0] for expected in (True, False))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.draft_error is None
    assert drafted.metrics.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(("options", "named"), [({"quantization": "int8"}, "forerun:target"), ({}, "forerun:draft")])
def test_a_wish_that_the_path_cannot_meet_is_refused(options, named):
    with pytest.raises(ConfigError, match=f"of {named} needs the native path: model_path is hf"):
        bundled({"quantization": "int8"}, model_path="hf", **options)


@pytest.fixture(scope="module")
def half():
    return LLM("forerun:target", dtype="float16")


@pytest.mark.parametrize(
    "method",
    [name for name in drafters if drafters[name].__module__.startswith("forerun.") and name not in ("mtp", "dflash")],
)
def test_every_method_drafts_for_a_float16_target(half, method):
    engine = Engine(half.model, half.tokenizer, half.config, SpeculativeConfig.parse({"method": method}))
    prompt = half.tokenizer.encode("def parse(a):\n    return a\n\ndef parse(")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    jobs = [engine.add(prompt, params, speculate=expected)[0] for expected in (True, False)]
    while engine.busy:
        engine.step()
    drafted, plain = jobs
    assert drafted.output_ids == plain.output_ids
    assert drafted.metrics.draft_error is None
    assert drafted.metrics.num_draft_tokens > 0 or drafters[method].needs.grammar
