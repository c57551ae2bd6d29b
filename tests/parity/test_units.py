"""Whole decoders with kernels compiled for AVX2 and for this processor: the same bits in float32."""

import pytest
import torch

from built import kernels_for
from described import MAIN, UNEVEN
from forerun import kernels
from forerun.models.load import load_model
from here import where
from modules import logits_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def avx2():
    return kernels_for("-march=x86-64-v3", dtype="float32")


def logits(folder):
    model = load_model(folder, invariant=True)
    assert model.fused is not None
    return logits_of(model, [(7 * index + 2) % 98 for index in range(40)])


@pytest.mark.parametrize("name", where(kernels.has("decode_float32"), sorted({*MAIN} - {"lfm2", *UNEVEN})))
def test_avx2_gives_the_bits_of_this_processor(avx2, monkeypatch, described, name):
    expected = logits(described(name))
    called = []
    monkeypatch.setattr(kernels, "library", lambda: called.append(1) or avx2)
    assert torch.equal(logits(described(name)), expected)
    assert called
