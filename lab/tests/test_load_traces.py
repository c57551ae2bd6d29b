"""Loads as they are given: what is no trace is one clear line, before a model is loaded."""

import json
from collections import Counter

import pytest

from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun_lab.load.arrivals import Arrival, SyntheticLoad, Trace, read_trace

GOOD = {"arrival": 1.5, "prompt_tokens": 100, "output_tokens": 20}


def written(folder, *lines):
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_what_its_lines_say(tmp_path):
    path = written(tmp_path, GOOD, "", {**GOOD, "arrival": 2, "prefix": "system", "prefix_tokens": 64})
    expected = [Arrival(1.5, 100, 20), Arrival(2.0, 100, 20, "system", 64)]
    assert read_trace(path).arrivals == expected


def test_a_line_ends_where_json_may(tmp_path):
    name = "a\u2028b\x85c"
    line = json.dumps({**GOOD, "prefix": name, "prefix_tokens": 64}, ensure_ascii=False)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{line}\r\n{line}\n".encode())
    assert [one.prefix for one in read_trace(path).arrivals] == [name, name]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "has no requests"),
        (["", "  "], "has no requests"),
        (["arrival prompt output"], "line 1: no JSON"),
        ([GOOD, "{"], "line 2: no JSON"),
        (["[1, 2, 3]"], "an object with arrival"),
        (["3"], "an object with arrival"),
        ([{**GOOD, "arrival": -1}], "arrival must be seconds, from 0 to 1e+12, not -1"),
        (['{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}'], "not nan"),
        (['{"arrival": 1e999, "prompt_tokens": 1, "output_tokens": 1}'], "not inf"),
        (['{"arrival": 1%s, "prompt_tokens": 1, "output_tokens": 1}' % ("0" * 400)], "arrival must be seconds"),
        (['{"arrival": 1%s, "prompt_tokens": 1, "output_tokens": 1}' % ("0" * 5000)], "line 1: no JSON"),
        ([{**GOOD, "arrival": "soon"}], "not 'soon'"),
        ([{**GOOD, "arrival": True}], "not True"),
        ([{"prompt_tokens": 1, "output_tokens": 1}], "arrival must be seconds"),
        ([{**GOOD, "prompt_tokens": 0}], "prompt_tokens must be a whole number, 1 or more, not 0"),
        ([{**GOOD, "prompt_tokens": 2.5}], "not 2.5"),
        ([{**GOOD, "output_tokens": -3}], "output_tokens must be a whole number, 1 or more, not -3"),
        ([{**GOOD, "output_tokens": 10**12}], "output_tokens must be a whole number"),
        ([{"arrival": 0, "prompt_tokens": 5}], "output_tokens must be"),
        ([GOOD, {**GOOD, "arrival": 1.0}], "line 2: arrival 1 is before the last one's, 1.5"),
        ([{**GOOD, "prefix": "a"}], "prefix_tokens must be"),
        ([{**GOOD, "prefix_tokens": 3}], "prefix must be a name or a number"),
        ([{**GOOD, "prefix": [1], "prefix_tokens": 3}], "prefix must be a name"),
        ([{**GOOD, "prefix": "a", "prefix_tokens": 101}], "prefix_tokens is 101, more than the 100"),
        ([{**GOOD, "colour": 3}], "unknown key 'colour'"),
    ],
)
def test_what_is_no_trace(tmp_path, capsys, lines, told):
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert told in str(caught.value)
    assert run(["plan", "--load", str(path), "--ttft-p95", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read(tmp_path, capsys, content):
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert run(["plan", "--load", str(path), "--ttft-p95", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cannot read the trace" in error


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--rate 3", "say what is to be kept"),
        ("--ttft-p95 1", "there is no load"),
        ("--rate 3 --load x --ttft-p95 1", "give one of them"),
        ("--rate 0 --ttft-p95 1", "the rate of a load must be above 0, not 0.0"),
        ("--rate nan --ttft-p95 1", "the rate of a load must be above 0, not nan"),
        ("--rate -2 --ttft-p95 1", "the rate of a load must be above 0, not -2.0"),
        ("--rate 2 --ttft-p95 0", "--ttft-p95 must be seconds above 0, not 0.0"),
        ("--rate 2 --latency-p95 nan", "--latency-p95 must be seconds above 0, not nan"),
        ("--rate 2 --tpot-p95 -1", "--tpot-p95 must be seconds above 0"),
        ("--rate 2 --replicas 0", "--replicas must be from 1 to 10000, not 0"),
        ("--rate 2 --replicas 10001", "--replicas must be from 1 to 10000, not 10001"),
        ("--rate 2 --replicas 2 --router best", "--router must be one of affine, random, not 'best'"),
        ("--rate 2 --replicas 2 --spread -1", "the spread of a load must be 0 or more"),
        ("--rate 2 --replicas 2 --shared-prefix 1.5", "a share from 0 to 1, not 1.5"),
        ("--rate 2 --replicas 2 --prefixes 0", "1 or more prefixes"),
        ("--rate 2 --replicas 2 --concurrency 4", "--concurrency is for a plan without a load"),
        ("--rate 2 --replicas 2 --trees 4", "--trees is for a plan without a load"),
        ("--rate 2 --replicas 2 --outside -1", "--outside must be seconds, 0 or more"),
    ],
)
def test_loads_that_cannot_be(capsys, options, told):
    assert run(["plan", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


def test_a_trace_for_a_model_with_fewer_positions():
    trace = Trace([Arrival(0, 10, 5), Arrival(1, 90, 20)])
    assert trace.within(110) is trace
    with pytest.raises(
        ConfigError, match="request 2 of the trace has 90 prompt and 20 output tokens; the model has 109"
    ):
        trace.within(109)


def test_drawn_requests_have_the_means_that_were_asked_for():
    part = SyntheticLoad(4.0, 300, 80, spread=0.7, shared=0.4, prefixes=8, limit=4096, seed=1).part(64)
    arrivals = part.arrivals
    assert part.replicas == 16
    count = len(arrivals)
    assert arrivals[-1].at / count == pytest.approx(1 / 1.0, rel=0.05)
    assert sum(one.prompt for one in arrivals) / count == pytest.approx(300, rel=0.05)
    assert sum(one.output for one in arrivals) / count == pytest.approx(80, rel=0.05)
    assert {one.shared for one in arrivals} == {120}
    assert len({one.prefix for one in arrivals}) == 2
    tight = SyntheticLoad(4.0, 100, 100, spread=2.0, limit=256).part(1)
    assert all(one.prompt + one.output <= 256 and min(one.prompt, one.output) > 0 for one in tight.arrivals)


@pytest.mark.parametrize(
    ("prompt", "shared", "limit"), [(100, 1.0, None), (2, 0.9, None), (1, 1.0, None), (90, 0.9, 100)]
)
def test_a_drawn_answer_is_nobody_elses(prompt, shared, limit):
    """A prompt that is all shared would be a conversation's."""
    load = SyntheticLoad(1.0, prompt, 10, spread=1.0, shared=shared, limit=limit)
    assert all(one.shared < one.prompt for one in [*load.part(1).arrivals, load.typical()])


def test_a_share_of_a_trace_keeps_prefixes_whole():
    arrivals = [Arrival(i * 0.01, 200, 5, i % 400, 64) for i in range(40_000)]
    part = Trace(arrivals).part(100)
    assert 5 < part.replicas < 100
    assert len(part.arrivals) == round(part.replicas / 100 * len(arrivals))
    kept = Counter(one.prefix for one in part.arrivals)
    # One prefix is there in part, so that the number is right.
    assert sorted(kept.values())[1:] == [100] * (len(kept) - 1)


@pytest.mark.parametrize(
    ("prefixes", "replicas", "router"), [(1, 40, "affine"), (20, 10, "affine"), (400, 100, "random")]
)
def test_a_share_of_a_trace_has_frequent_prefixes_as_often_as_before(prefixes, replicas, router):
    arrivals = [Arrival(i * 0.01, 200, 5, i % prefixes, 64) for i in range(40_000)]
    part = Trace(arrivals).part(replicas, router)
    assert part.replicas < replicas
    assert len(part.arrivals) == round(part.replicas / replicas * len(arrivals))
    kept = Counter(one.prefix for one in part.arrivals)
    assert len(kept) == prefixes
    assert max(kept.values()) < 2.5 * len(part.arrivals) / prefixes
