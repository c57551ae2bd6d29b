"""The server's overhead is measured on the same requests, through a real client process."""

from unittest.mock import Mock

import pytest

from forerun.core.errors import ForerunError
from forerun.sampling.params import SamplingParams
from forerun_lab.bench import overhead

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def uncollected(monkeypatch):
    """As for a bench."""
    monkeypatch.setattr(overhead, "gc", Mock())


@pytest.mark.parametrize("stream", [True, False])
def test_engine_and_server_answer_the_same_requests(llm, monkeypatch, stream):
    """The times are made up, the requests are real. Turns: all queued, served, the engine with the same arrivals."""
    model = llm({"method": "ngram"}, max_num_seqs=2)
    seen = []
    times = iter([(6.0, 3.0), (10.0, 5.0), (8.0, 4.0)] * 3)

    def alone(engine, arrivals, params, speculate):
        seen.append((arrivals, params, speculate))
        return next(times)

    through = overhead.served

    def served(engine, bodies, streams):
        result = through(engine, bodies, streams)
        assert not engine.jobs
        assert result.processor > 0
        assert sorted(prompt for _, prompt in result.arrivals) == sorted(body["prompt"] for body in bodies)
        seen.append(result.arrivals)
        seconds, processor = next(times)
        return overhead.ServedRun(seconds, processor, result.tokens, result.arrivals)

    monkeypatch.setattr(overhead, "alone", alone)
    monkeypatch.setattr(overhead, "served", served)
    result = overhead.measure(model, 2, requests=3, tokens=5, temperature=0.5, stream=stream, repeats=2)
    assert result == overhead.Overhead(
        2,
        alone=15 / 6,
        alike=15 / 8,
        served=1.5,
        wall=pytest.approx(0.2),
        processor=pytest.approx(0.2),
        of_round=result.of_round,
        error=result.error,
        alone_of_round=None,
    )
    for queued, arrivals, (again, params, speculate) in zip(seen[::3], seen[1::3], seen[2::3]):
        assert [rounds for rounds, _ in queued[0]] == [0, 0, 0]
        assert again == arrivals
        assert arrivals[0][0] == 0
        assert arrivals[2][0] >= 2, "the third of two streams' requests comes when an answer of 5 tokens has ended"
        assert (params.temperature, params.max_tokens, speculate) == (0.5, 5, True)
    model.engine.check()


def test_the_engine_alone_takes_requests_when_they_came(llm):
    """The second one joins after two rounds; the third, due long after everybody has ended, is not waited for."""
    engine = llm(max_num_seqs=2).engine
    rounds = []
    engine.on_round = lambda done: rounds.append([verdict.fed for verdict in done.verdicts])
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    wall, spent = overhead.alone(engine, [(0, [5, 6]), (2, [7]), (99, [8, 9, 10])], params, False)
    engine.on_round = None
    assert [max(fed) for fed in rounds] == [2, 1, 1, 1, 1, 1, 3, 1, 1, 1]
    assert [len(fed) for fed in rounds] == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert wall > 0
    assert spent > 0


def test_a_refused_request_is_an_error(llm):
    with pytest.raises(ForerunError, match=r"load client failed: RuntimeError: status 400: .*top_p"):
        overhead.served(llm(max_num_seqs=2).engine, [{"prompt": [5], "top_p": 2}], 1)


def test_rounds_count_where_everybody_decodes(llm, monkeypatch):
    """Three sequences of 6, 4 and 9 tokens, two at a time, on a clock that ticks when it is read; its thread computes
    for three quarters of the time."""
    engine, ticks = llm(max_num_seqs=2).engine, iter(range(10_000))
    now = 0.0

    def clock():
        nonlocal now
        now = float(next(ticks))
        return now

    monkeypatch.setattr(overhead, "perf_counter", clock)
    monkeypatch.setattr(overhead, "thread_time", lambda: 0.75 * now)
    rounds = []
    for prompt, tokens in (([5, 6], 6), ([7, 8], 4), ([8, 9, 10], 9)):
        engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), speculate=False)
    with overhead.RoundTimes(engine, 2) as beats:
        assert beats.share is None
        while engine.busy:
            engine.step()
            rounds.append(beats.rounds)
    # Prompts in round 1; both decode in 2 to 4; the third prompt joins in 5; both decode in 6; one is left.
    assert rounds[:6] == [0, 0, 1, 2, 2, 2]
    assert (beats.between, beats.idle) == (2.0, 0.5)
    assert 0 < beats.inside < 1
    beats.inside = 1.25
    assert beats.share == (2.0 - 1.25 + 0.5) / 2.0
    beats.idle = 1.5
    assert beats.share == 1.0
    assert engine.on_round is None


def test_shares_of_turns_are_averaged(llm, monkeypatch):
    """The first turn warms up; one without such rounds has no share."""
    fractions = iter([(0.9, 0.9), (0.1, 0.05), (None, None), (0.2, 0.07)])
    through = overhead.ServedRun(2.0, 1.0, 10, [])
    monkeypatch.setattr(overhead, "_turn", lambda *given: overhead.Turn(1.0, (1.0, 0.5), through, *next(fractions)))
    result = overhead.measure(llm(), 1, requests=2, tokens=5, temperature=0.0, stream=True, repeats=3)
    assert result.of_round == pytest.approx(0.15)
    assert result.error == pytest.approx(0.05)  # of two: half their difference
    assert result.alone_of_round == pytest.approx(0.06)
    assert (result.alone, result.served, result.wall, result.processor) == (10.0, 5.0, 0.5, 0.5)
