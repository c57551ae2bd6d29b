"""Every sampling option, alone and together, against an independent computation of one row at a time."""

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from built import torch_threads
from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.sampling.compiled import can_sample
from forerun.sampling.warp import Row, warp
from sampling_oracle import edited, kept

VOCAB = 40
EOS = frozenset({0, 7})
tokens = st.integers(0, VOCAB - 1)


@st.composite
def options(draw):
    """Any mix of options; each is off half the time."""

    def maybe(off, some):
        return draw(st.one_of(st.just(off), some))

    words = maybe((), st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple))
    return SamplingParams(
        temperature=maybe(1.0, st.sampled_from([0.0, 0.3, 0.7, 1.6])), top_k=maybe(0, st.integers(1, VOCAB + 3)),
        top_p=maybe(1.0, st.floats(0.01, 0.999)), min_p=maybe(0.0, st.floats(0.001, 1.0)),
        repetition_penalty=maybe(1.0, st.floats(0.5, 2.0)), presence_penalty=maybe(0.0, st.floats(-2.0, 2.0)),
        frequency_penalty=maybe(0.0, st.floats(-2.0, 2.0)),
        logit_bias=maybe(None, st.dictionaries(tokens, st.floats(-5.0, 5.0), min_size=1, max_size=4)),
        bad_words_ids=words, min_tokens=maybe(0, st.integers(1, 8)),
        stop_token_ids=maybe([], st.lists(tokens, max_size=3)),
    )  # fmt: skip


@st.composite
def row(draw):
    prompt = draw(st.lists(tokens, min_size=1, max_size=6))
    output = draw(st.lists(st.integers(0, 5), max_size=6))
    params = draw(options())
    if params.bad_words_ids and output and draw(st.booleans()):
        # Bans matter where the output ends like the word begins.
        word = (*output[-draw(st.integers(1, 2)) :], draw(tokens))
        params = SamplingParams(**{**vars(params), "bad_words_ids": (*params.bad_words_ids, word)})
    committed = draw(st.integers(0, len(output)))
    sequence = RequestState(0, prompt + output[:committed], len(prompt), params, seed=0, eos_ids=EOS)
    return Row(sequence, output[committed:])


def expected(logits, row, slack):
    """Logits before the filters, and which of them stay."""
    sequence, params = row.sequence, row.sequence.params
    output = [*sequence.tokens[sequence.num_prompt :], *row.path]
    values = edited(logits, params, sequence.tokens[: sequence.num_prompt], output, sorted(EOS))
    if params.greedy:
        return values, values > -numpy.inf
    values = values / row.effective_temperature
    return values, kept(values, params, slack)


@pytest.fixture(params=["kernels", "torch"] if can_sample(torch.device("cpu")) else ["torch"], autouse=True)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr("forerun.sampling.compiled.can_sample", lambda device: False)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(row(), min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_any_mix_of_options(rows, seed):
    """A batch whose rows have options and contexts of their own."""
    logits = numpy.random.default_rng(seed).normal(scale=3.0, size=(len(rows), VOCAB)).astype(numpy.float32)
    warped = warp(torch.tensor(logits), rows).numpy()
    for line, each, got in zip(logits, rows, warped):
        values, stay = expected(line, each, 0.0)
        if not numpy.isfinite(values).any():
            assert not numpy.isfinite(got).any()
            continue
        finite = numpy.isfinite(got)
        if not numpy.array_equal(finite, stay):
            assert any(numpy.array_equal(finite, expected(line, each, slack)[1]) for slack in (1e-5, -1e-5))
        assert numpy.allclose(got[finite], values[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [VOCAB, 600, 5000, 20000])
@pytest.mark.parametrize("flat", [True, False])
def test_top_p_of_wide_rows(size, flat):
    """Nuclei of a few tokens and of thousands."""
    generator = numpy.random.default_rng(size)
    logits = generator.normal(scale=0.2 if flat else 3.0, size=(6, size)).astype(numpy.float32)
    params = [SamplingParams(top_p=p, top_k=k) for p in (0.1, 0.9, 0.999) for k in (0, size // 3)]
    rows = [Row(RequestState(i, [1], 1, each, seed=0)) for i, each in enumerate(params)]
    for line, each, got in zip(logits, params, warp(torch.tensor(logits), rows).numpy()):
        exact = numpy.float64(line)
        finite = numpy.isfinite(got)
        assert any(numpy.array_equal(finite, kept(exact, each, slack)) for slack in (0.0, 1e-7, -1e-7, 1e-5, -1e-5))


def test_rows_without_a_distribution_spoil_no_other():
    """NaN, and nothing permitted: both are reported later, by the rules."""
    logits = torch.randn(3, 10000, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[1] = float("nan"), float("-inf")
    rows = [Row(RequestState(i, [1], 1, SamplingParams(top_p=0.9), seed=0)) for i in range(3)]
    alone = warp(logits[2:].clone(), rows[2:])
    warped = warp(logits, rows)
    assert torch.isnan(warped[0]).any()
    assert torch.isneginf(warped[1]).all()
    assert torch.equal(warped[2:], alone)


def test_a_bad_word_that_begins_in_the_prompt_may_go_on():
    params = SamplingParams(bad_words_ids=((5, 6, 7),))
    for prompt, path, banned in [([5, 6], [], False), ([5], [6], False), ([1], [5, 6], True), ([1, 5, 6], [6], False)]:
        for committed in range(len(path) + 1):
            sequence = RequestState(0, prompt + path[:committed], len(prompt), params, seed=0)
            warped = warp(torch.zeros(1, 9), [Row(sequence, path[committed:])])
            assert bool(torch.isinf(warped[0, 7])) == banned
            assert int(torch.isinf(warped).sum()) == banned


def test_ties_at_the_edge_stay():
    logits = torch.tensor([[2.0, 2.0, 2.0, 1.0], [2.0, 2.0, 2.0, 1.0]])
    rows = [Row(RequestState(0, [1], 1, p, seed=0)) for p in (SamplingParams(top_k=2), SamplingParams(top_p=0.5))]
    assert torch.isfinite(warp(logits, rows)).tolist() == [[True, True, True, False]] * 2


MIXES = [
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.95, "temperature": 1.3},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.02},
    {"min_p": 0.01, "top_p": 0.97, "top_k": 300, "temperature": 0.8},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.1, "temperature": 0.9},
    {"logit_bias": {3: 2.0}, "top_p": 0.99},
    {"temperature": 0.0},
]


@pytest.mark.parametrize(("size", "count", "threads"), [(98, 60, 1), (4096, 60, 1), (5003, 60, 1), (4096, 10, 2)])
def test_a_row_is_warped_alike_alone_and_among_others(size, count, threads):
    """Bit by bit: a sum or a sort that depends on the batch would change which tokens top-p leaves."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(count, size, generator=generator) * torch.rand(count, 1, generator=generator) * 4
    rows = [
        Row(RequestState(i, [1, 2, 3, 4], 2, SamplingParams(**MIXES[(i + i // 10) % len(MIXES)]), seed=0))
        for i in range(count)
    ]
    with torch_threads(threads):
        together = warp(logits.clone(), rows)
        thresholds = torch.softmax(together, dim=-1)
        for i, each in enumerate(rows):
            alone = warp(logits[i : i + 1].clone(), [each])
            assert torch.equal(alone[0], together[i])
            assert torch.equal(torch.softmax(alone, dim=-1)[0], thresholds[i])
        for first in range(0, count, 5):
            part = slice(first, first + 5)
            assert torch.equal(warp(logits[part].clone(), rows[part]), together[part])
