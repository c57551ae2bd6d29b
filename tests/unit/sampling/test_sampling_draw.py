"""Draws by inversion, the fast argmax, and the sampler's shared noise."""

import numpy
import pytest
import torch
from scipy import stats

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.sampling.draw import Sampler, invert
from forerun.sampling.noise import target_key
from forerun.sampling.warp import Row
from here import where

SIZES = [2, 127, 4096, 8193, 20_000, 128_256]


def sequence(temperature=1.0, seed=0, length=3):
    return RequestState(seed, [1] * length, length, SamplingParams(temperature=temperature), seed)


def kernel(weights, quantiles):
    compiled = Sampler(weights.shape[1]).compiled
    assert compiled is not None
    return torch.tensor(compiled.draw(weights, quantiles[:, 0].tolist()))


INVERSIONS = [invert] if Sampler(1).compiled is None else [invert, kernel]


@pytest.mark.parametrize("invert", INVERSIONS)
@pytest.mark.parametrize("size", SIZES)
def test_inversion_is_exact(size, invert):
    """The first id whose cumulative share exceeds the uniform, by an independent float64 search."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(7, size, generator=generator) ** 4 * 10.0 ** torch.arange(-3, 4)[:, None]
    quantiles = torch.rand(7, 1, dtype=torch.float64, generator=generator)
    result = invert(weights, quantiles)
    for row, quantile, token in zip(weights.double().numpy(), quantiles[:, 0].tolist(), result.tolist()):
        reach = numpy.cumsum(row)
        expected = int(numpy.searchsorted(reach, quantile * reach[-1], side="right"))
        assert abs(token - expected) <= 1
        assert reach[token] * (1 + 1e-6) >= quantile * reach[-1] >= (reach[token] - row[token]) * (1 - 1e-6)


@pytest.mark.parametrize("invert", INVERSIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0 - 2.0**-53])
def test_an_impossible_id_is_never_drawn(size, quantile, invert):
    places = torch.arange(0, size, max(1, size // 40))
    weights = torch.zeros(len(places), size)
    weights[torch.arange(len(places)), places] = 1e-30
    assert torch.equal(invert(weights, torch.full((len(places), 1), quantile, dtype=torch.float64)), places)


@pytest.mark.parametrize("invert", INVERSIONS)
def test_inversion_of_an_empty_row_stays_inside(invert):
    for size in SIZES:
        for value in (0.0, float("nan")):
            token = int(invert(torch.full((1, size), value), torch.tensor([[0.3]], dtype=torch.float64)))
            assert 0 <= token < size


@pytest.mark.parametrize("size", [5, 10_000])
def test_draws_follow_their_weights(size):
    weights = torch.zeros(1, size)
    weights[0, torch.tensor([0, 1, size // 2, size - 2, size - 1])] = torch.tensor([5.0, 1.0, 0.0, 2.0, 2.0])
    sampler = Sampler(size)
    drawn = sampler.draw(weights.expand(4000, size), list(range(0, 4000 << 52, 1 << 52)))
    assert set(drawn.tolist()) <= {0, 1, size - 2, size - 1}
    keys = [target_key(1, position) for position in range(4000)]
    drawn = sampler.draw(weights.expand(4000, size), keys)
    counts = [int((drawn == token).sum()) for token in (0, 1, size - 2, size - 1)]
    assert stats.chisquare(counts, [2000, 400, 800, 800]).pvalue > 1e-3


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr("forerun.sampling.noise.can_sample", lambda device: False)
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_a_pick_is_the_argmax_of_scores_and_noise(way, size):
    sampler, generator = Sampler(size), torch.Generator().manual_seed(size)
    warped = torch.randint(0, 50, (6, size), generator=generator) / 8
    warped[1, : size // 2] = -float("inf")
    rows = [Row(sequence(temperature=t, seed=i, length=3 + i)) for i, t in enumerate((1.0, 0.7, 0.0, 0.0, 1.0, 0.0))]
    tops, ids, distribution = sampler.sample(warped, rows, distribution=True)
    scores = sampler.couple(warped, rows)
    for row, top, token in zip(scores, tops, ids):
        assert top == float(row.max())
        assert token == int(row.numpy().argmax())  # the first of equals
    assert distribution is not None
    assert torch.allclose(distribution.double(), warped.double().softmax(dim=1), rtol=1e-5, atol=1e-9)
    assert bool((distribution[1, : size // 2] == 0).all())
    assert sampler.sample(warped, rows)[2] is None


def test_a_pick_shows_faulty_rows(way):
    warped = torch.zeros(3, 300)
    warped[0, 299] = float("nan")
    warped[1] = -float("inf")
    tops, ids, _ = Sampler(300).sample(warped, [Row(sequence(temperature=t)) for t in (0.0, 1.0, 1.0)])
    assert tops[0] != tops[0]
    assert tops[1] == -float("inf")
    assert ids[1] == 0


@pytest.mark.parametrize("size", where(Sampler(1).compiled is not None, SIZES))
def test_what_two_distributions_share(size):
    compiled, generator = Sampler(size).compiled, torch.Generator().manual_seed(size)
    scores, q = (torch.randn(4, size, generator=generator) * 3 for _ in range(2))
    scores[2, size // 2 :] = -float("inf")
    q = q.softmax(dim=1)
    result = compiled.overlaps(scores, [3, 2, 2, 0], [0, 0, size - 1, size - 1], [q[1], q[0].double(), None, None])
    p, q = scores.double().softmax(dim=1), q.double()
    expected = [torch.minimum(p[3], q[1]).sum(), torch.minimum(p[2], q[0]).sum(), 0.0, p[0, size - 1]]
    assert result == pytest.approx([float(value) for value in expected], rel=1e-4, abs=1e-9)
    assert result[2] == 0.0


def test_shared_noise_depends_on_seed_and_position_alone():
    """Target and drafter, prefix committed or drafted, alone or in a batch: one noise."""
    sampler, logits = Sampler(300), torch.randn(4, 300)
    grown = Row(sequence(length=3), [5, 6])
    committed = Row(sequence(length=5))
    other = Row(sequence(seed=1, length=5))
    rows = [grown, other, Row(sequence(temperature=0.0)), committed]
    noise = sampler.couple(logits, rows) - logits
    assert torch.equal(noise[2], torch.zeros(300))
    assert torch.allclose(noise[0], noise[3], atol=1e-5)
    assert not torch.allclose(noise[0], noise[1], atol=0.1)
    for row, line, together in zip(rows, logits, sampler.couple(logits, rows)):
        assert torch.equal(Sampler(300).couple(line[None], [row])[0], together)


def test_a_round_s_next_positions_are_ready(monkeypatch):
    """Where several rows of noise cost little more than one."""
    monkeypatch.setattr("forerun.sampling.noise.can_sample", lambda device: False)
    sampler = Sampler(300)
    sampler.couple(torch.zeros(1, 300), [Row(sequence(length=3))])
    assert all(target_key(0, position) in sampler.noise for position in range(3, 7))


def test_perturb_leaves_rows_without_a_key():
    logits = torch.randn(3, 20)
    scores = Sampler(20).perturb(logits, [None, 5, None])
    assert torch.equal(scores[[0, 2]], logits[[0, 2]])
    assert not torch.equal(scores[1], logits[1])
    assert Sampler(20).perturb(logits, [None] * 3) is logits


@pytest.mark.parametrize("kernels", [False] if Sampler(1).compiled is None else [False, True])
@pytest.mark.parametrize("size", [1, 5, 16, 17, 8192, 20_000])
def test_the_best_ids_and_the_logs_of_their_probabilities(size, kernels):
    """Against a sort and a log-softmax in float64; equals are equally good, banned ids never come."""
    sampler = Sampler(size)
    if not kernels:
        sampler.compiled = None
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(6, size, generator=generator) * 4
    scores[1, ::3] = float("-inf")
    scores[2, 3:] = float("-inf")
    scores[3] = scores[3].round()
    scores[4] = float("-inf")
    scores[5] += 300
    true = torch.log_softmax(scores.double(), dim=1).tolist()
    for row, ids, logs in zip(range(6), *sampler.rank(scores, 8)):
        best = sorted((value for value in scores[row].tolist() if value > float("-inf")), reverse=True)[:8]
        assert [scores[row, token].item() for token in ids] == best
        assert len(set(ids)) == len(ids)
        assert logs == pytest.approx([true[row][token] for token in ids], abs=3e-5)
