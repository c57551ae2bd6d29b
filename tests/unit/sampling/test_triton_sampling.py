"""Sampling in Triton, under its interpreter, against torch."""

import pytest
import torch

from forerun.sampling import triton as ours
from forerun.sampling.noise import Gumbel, fold
from forerun.sampling.params import SamplingParams
from forerun.sampling.warp import _filter

pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_filters_are_those_of_torch(monkeypatch):
    monkeypatch.setattr(ours, "BLOCK", 32)  # several blocks
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 70, generator=generator)
    logits[4, :40] = float("-inf")
    logits[5] = logits[5].round()  # ties
    params = [
        SamplingParams(temperature=0.7, top_k=5), SamplingParams(temperature=1.3, top_p=0.6),
        SamplingParams(temperature=0.9, min_p=0.2), SamplingParams(temperature=0.8, top_k=30, top_p=0.8, min_p=0.01),
        SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=1.0, top_k=4, top_p=0.9),
        SamplingParams(temperature=0.0),
    ]  # fmt: skip
    scales = [each.temperature for each in params]
    thresholds = [threshold for each in params for threshold in (each.min_p, each.top_p)]
    got = ours.restrict(logits.to(DEVICE), scales, thresholds, [each.top_k for each in params]).cpu()
    expected = _filter(logits[:-1] / torch.tensor(scales[:-1])[:, None], params[:-1])
    assert torch.equal(got[:-1], expected)
    assert torch.equal(got[-1], logits[-1])


def test_choices_are_those_of_the_noise(monkeypatch):
    monkeypatch.setattr(ours, "BLOCK", 32)
    noise = Gumbel(70, DEVICE)
    scores = torch.randn(6, 70, generator=torch.Generator().manual_seed(1))
    scores[3, 65], scores[4] = float("nan"), float("-inf")
    scores[5, 20:] = scores[5, 20]
    keys = [fold(1, 2), fold(3), None, fold(4), fold(5), None]
    tops, ids = noise.on_gpu.choose(scores.to(DEVICE), keys)
    noisy = scores.clone()
    for row, key in zip(noisy, keys):
        if key is not None:
            row += noise.rows([key])[0].cpu()
    good = [0, 1, 2, 5]
    assert [ids[row] for row in good] == noisy[good].argmax(1).tolist()
    torch.testing.assert_close(torch.tensor(tops)[good], noisy[good].amax(1), rtol=1e-5, atol=1e-5)
    assert torch.tensor(tops[3]).isnan()
    assert tops[4] == float("-inf")


def test_noise_is_accurate_in_both_tails():
    """Against ``Gumbel`` in torch, over so many ids that the largest are rare."""
    size = 1 << 15
    noise = Gumbel(size, DEVICE)
    expected = noise.rows([fold(7)])[0].cpu()
    for token in (int(expected.argmax()), int(expected.argmin())):
        scores = torch.full((1, size), float("-inf"))
        scores[0, token] = 0.0
        top, index = noise.on_gpu.choose(scores.to(DEVICE), [fold(7)])
        assert index == [token]
        assert top[0] == pytest.approx(float(expected[token]), rel=1e-5)
