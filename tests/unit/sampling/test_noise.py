"""Keyed noise: a function of its key and the token id alone, and clean across neighbouring keys."""

import itertools

import numpy
import pytest
import torch
from scipy import stats

from built import torch_threads
from forerun.sampling.noise import Gumbel, fold, target_key, uniform

GOOD = 1e-4
"""Least p-value of a fixed set of tests; noise that fails one of them is far below."""


@pytest.fixture(params=["kernel", "torch"], scope="module", autouse=True)
def way(request):
    """Noise from our kernel where it is here, then from torch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("forerun.sampling.noise.can_sample", lambda device: False)
        yield request.param


def gumbel_cdf(x):
    return numpy.exp(-numpy.exp(-x))


def uniforms(noise, keys):
    return gumbel_cdf(noise.rows(keys).double().numpy())


@pytest.fixture(scope="module")
def rows():
    """Uniforms [16 neighbouring positions of 4 neighbouring seeds, 20,000 ids]."""
    keys = [target_key(seed, position) for seed in range(4) for position in range(16)]
    return uniforms(Gumbel(20_000), keys)


@pytest.fixture(scope="module")
def columns():
    """Uniforms [30,000 keys, 16 ids]: neighbouring seeds and positions."""
    keys = [target_key(seed, position) for seed in range(300) for position in range(100)]
    return numpy.concatenate([uniforms(Gumbel(16), keys[i : i + 2500]) for i in range(0, len(keys), 2500)])


@pytest.mark.slow
def test_uniform_distribution(rows, columns):
    """Kolmogorov-Smirnov against Gumbel, along ids and along keys."""
    tests = [stats.kstest(row, "uniform").pvalue for row in rows]
    tests += [stats.kstest(column, "uniform").pvalue for column in columns.T]
    assert min(tests) > GOOD
    assert stats.kstest(tests, "uniform").pvalue > GOOD


def test_fine_bins(columns):
    for column in columns.T:
        counts = numpy.bincount((column * 1024).astype(int).clip(0, 1023), minlength=1024)
        assert stats.chisquare(counts).pvalue > GOOD


def pair_test(one, other):
    """Chi-square of the joint distribution of two uniforms on a grid: 1 if independent."""
    counts = numpy.histogram2d(one, other, bins=16, range=[[0, 1], [0, 1]])[0]
    return stats.chisquare(counts.ravel()).pvalue


def test_neighbouring_positions_seeds_and_ids_are_independent(rows, columns):
    tests = [pair_test(rows[i], rows[i + 1]) for i in range(15)]
    tests += [pair_test(rows[i], rows[i + 16]) for i in range(0, 48, 3)]
    tests += [pair_test(rows[i][:-lag], rows[i][lag:]) for i in range(4) for lag in (1, 2, 4, 64, 256, 4096)]
    tests += [pair_test(columns[:, a], columns[:, b]) for a, b in itertools.pairwise(range(16))]
    tests += [pair_test(columns[:-1, a], columns[1:, a]) for a in range(16)]
    assert min(tests) > GOOD
    assert stats.kstest(tests, "uniform").pvalue > GOOD


@pytest.mark.slow
def test_no_correlation_between_any_rows(rows):
    off = numpy.corrcoef(stats.norm.ppf(rows))[numpy.triu_indices(len(rows), 1)]
    tests = 2 * stats.norm.sf(numpy.abs(off) * numpy.sqrt(rows.shape[1]))
    assert tests.min() > GOOD / 100
    assert stats.kstest(tests, "uniform").pvalue > GOOD


def test_the_winner_is_uniform_and_independent(columns):
    """The argmax over ids, and pairs of it at neighbouring keys: what sampling sees."""
    winners = columns.argmax(axis=1)
    assert stats.chisquare(numpy.bincount(winners, minlength=16)).pvalue > GOOD
    pairs = numpy.bincount(winners[:-1] * 16 + winners[1:], minlength=256)
    assert stats.chisquare(pairs).pvalue > GOOD


@pytest.mark.slow
def test_upper_tail():
    """Rare tokens are sampled by large noise: the tail must not stop at float32's 1 - 2^-24."""
    noise = Gumbel(100_000)
    total = torch.cat([noise.rows([target_key(seed, 0)])[0] for seed in range(100)])
    for level in (8, 10, 12):
        expected = len(total) * -numpy.expm1(-numpy.exp(-level))
        assert abs(int((total > level).sum()) - expected) < 4 * numpy.sqrt(expected)
    assert bool(torch.isfinite(total).all())
    assert 14 < float(total.max()) < 22.5
    assert float(total.min()) > -3


def key_of(word):
    """A key whose hash of the word 0 is ``word``."""
    inverse = pow(0x7FEB352D, -1, 1 << 32)

    def fold_high(x):  # its own inverse
        return x ^ (x >> 16)

    return fold_high(fold_high(word) * inverse % (1 << 32)) << 32


@pytest.mark.parametrize("word", [0, 1, 2, 1 << 31, (1 << 31) - 1, (1 << 31) + 1, (1 << 32) - 1, 123456789])
def test_extreme_words_are_finite_and_exact(word):
    """The hash may give any 32-bit word, also the most negative one, whose absolute value int32 lacks."""
    noise = Gumbel(64)
    noise._ids.zero_()
    result = noise._compute([key_of(word)])[0]
    signed = word - (1 << 32) if word >= 1 << 31 else word
    u = min((float(numpy.float32(abs(signed))) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    assert torch.allclose(result.double(), torch.tensor(-numpy.log(-numpy.log1p(-u))), rtol=1e-6, atol=1e-6)


def test_every_entry_is_the_formula(way):
    """The hash and its uniform in single precision, then logarithms in double, by numpy."""
    size, key = 5003, target_key(11, 7)

    def fold_high(x):
        return x ^ (x >> numpy.uint32(16))

    words = numpy.arange(1, size + 1, dtype=numpy.uint32)
    for factor in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35):
        words = fold_high(words * numpy.uint32(factor))
    words = fold_high(words * numpy.uint32((key | 1) & 0xFFFFFFFF) + numpy.uint32(key >> 32))
    words = fold_high(words * numpy.uint32(0x7FEB352D)).view(numpy.int32)
    u = (numpy.abs(words.astype(numpy.float32)) + numpy.float32(0.5)).astype(numpy.float64) * 2.0**-31
    expected = -numpy.log(-numpy.log1p(-numpy.minimum(u, 1 - 2.0**-24)))
    assert numpy.abs(Gumbel(size).rows([key])[0].double().numpy() - expected).max() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "count", "threads"), [(5, 19, 1), (98, 19, 1), (4096, 19, 1), (33_000, 19, 1), (40_001, 3, 2)]
)
def test_a_row_is_the_same_alone_and_among_others(vocab, count, threads):
    with torch_threads(threads):
        keys = [target_key(3, position) for position in range(count)]
        together = Gumbel(vocab).rows(keys)
        mixed = Gumbel(vocab)
        mixed.rows(keys[1:2], ahead=keys[2:9])
        assert torch.equal(mixed.rows(keys), together)
        for key, row in zip(keys, together):
            assert torch.equal(Gumbel(vocab).rows([key])[0], row)


def test_a_full_store_forgets_without_changing():
    noise, fresh = Gumbel(50, capacity=4), Gumbel(50)
    keys = [target_key(0, position) for position in range(9)]
    assert torch.equal(noise.rows(keys), fresh.rows(keys))
    assert torch.equal(noise.rows(keys[::-1]), fresh.rows(keys[::-1]))
    assert sum(key in noise for key in keys) <= 4


def test_uniform_stays_below_one():
    assert uniform((1 << 64) - 1) < 1.0
    assert uniform(0) == 0.0


def test_fold_separates_its_parts():
    keys = {fold(*parts) for parts in itertools.product(range(-3, 9), repeat=3)}
    assert len(keys) == 12**3
    assert fold(1, 2) != fold(2, 1)
    assert fold(1) != fold(1, 0)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_folded_keys_are_uniform():
    values = numpy.array([uniform(fold(seed, 3, position)) for seed in range(200) for position in range(200)])
    assert stats.kstest(values, "uniform").pvalue > GOOD
    assert pair_test(values[:-1], values[1:]) > GOOD
    assert pair_test(values[:-200], values[200:]) > GOOD
