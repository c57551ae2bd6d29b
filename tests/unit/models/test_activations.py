"""Activations that round alike at every place, and what happens where a library's do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.models.run import activations
from forerun.models.run.hf import HFModel
from forerun.models.run.invariance import self_test
from modules import requested

OWN = {
    activations.silu: F.silu,
    activations.sigmoid: torch.sigmoid,
    activations.gelu: F.gelu,
    activations.quick_gelu: lambda x: x * torch.sigmoid(1.702 * x),
    activations.gelu_tanh: lambda x: F.gelu(x, approximate="tanh"),
}
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 352,
    "max_position_embeddings": 256,
}  # fmt: skip


def model(act, dtype=torch.float16):
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_neox", **SIZES, hidden_act=act)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="forerun").to(dtype).eval()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return HFModel(module, requested(dtype, invariant=True, weights="plain"))


@pytest.mark.parametrize("own", OWN, ids=lambda function: function.__name__)
def test_they_are_what_their_names_say(own):
    x = torch.linspace(-12.0, 12.0, 4097)
    assert own(x).double() == pytest.approx(OWN[own](x.double()), abs=2e-6)
    assert own(x.half()).dtype is torch.float16


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "quick_gelu", "sigmoid", "silu"])
def test_models_use_them_whatever_row_they_are_in(act):
    """In float16 and near 0, torch's gelu rounds otherwise in two rows than in one."""
    assert self_test(model(act), rows=60, chunks=(2, 5, 33)) == []


def uneven(x):
    """Another last bit in the tail of a loop over sixteen numbers."""
    y = torch.exp(x)
    tail = y.shape[-1] % 16
    if tail:
        y[..., -tail:] = torch.nextafter(y[..., -tail:], torch.tensor(torch.inf))
    return y


def test_functions_that_round_by_place_are_found_out(monkeypatch, tmp_path):
    assert activations.steady()
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(activations, "FUNCTIONS", (torch.tanh, uneven))
    assert not activations.steady()
    assert model("gelu").tiles.rows == (1,)


def test_an_operation_that_nobody_vouches_for_keeps_single_rows_only(monkeypatch, tmp_path):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    assert model("gelu").tiles.together > 1
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(activations, "make_row_independent", lambda module: None)
    assert model("gelu").tiles.together == 1
