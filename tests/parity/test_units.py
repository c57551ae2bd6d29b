"""Whole decoders with kernels compiled for AVX2 and for this processor: the same bits in float32."""

import pytest
import torch

from built import kernels_for
from described import MAIN, UNEVEN
from forerun import kernels
from forerun.core.batch import Batch, Span
from forerun.models.load import load_model
from forerun.models.run.base import new_attention
from here import where

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def avx2():
    return kernels_for("-march=x86-64-v3", dtype="float32")


def logits(folder):
    model = load_model(folder, invariant=True)
    assert model.fused is not None
    spans = [Span(0, 0, [(7 * index + 2) % 98 for index in range(40)], logits=list(range(40)))]
    return model.forward(Batch(spans), new_attention(model, max_seqs=1, max_len=64)).logits


@pytest.mark.parametrize("name", where(kernels.has("decode_float32"), sorted({*MAIN} - {"lfm2", *UNEVEN})))
def test_avx2_gives_the_bits_of_this_processor(avx2, monkeypatch, described, name):
    expected = logits(described(name))
    called = []
    monkeypatch.setattr(kernels, "library", lambda: called.append(1) or avx2)
    assert torch.equal(logits(described(name)), expected)
    assert called
