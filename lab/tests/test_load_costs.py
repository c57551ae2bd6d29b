"""Costs from measured rounds, and the command, with costs that it measures or is given."""

import json
from dataclasses import asdict

import pytest

from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.planner import Curve
from forerun.measure.rounds import Measured, Sample
from forerun_lab.load.arrivals import Arrival
from forerun_lab.load.costs import LoadCosts, Way
from forerun_lab.load.measured import LoadBench, _way
from forerun_lab.load.replica import Limits


def timed(*rounds, k=0):
    """Rounds of so many requests, that took so many seconds."""
    return Measured(rounds=[Sample((k,) * n, n * (1 + k), n, 0.0, 0.0, 0.0, seconds) for n, seconds in rounds])


def test_a_price_is_that_of_as_many_as_it_says():
    result = _way("none", 0, {1: timed((1, 1.0)), 2: timed((1, 9.0), (2, 3.0), (2, 3.0)), 4: timed((2, 3.0), (3, 4.0))})
    assert result.seconds.points == {1: 1.0, 2: 3.0}
    assert result.tokens == 1.0


def test_a_price_of_one_is_none_of_several():
    alone = {1: timed((1, 1.0)), 2: timed((1, 1.0)), 3: timed((1, 1.0))}
    with pytest.raises(ConfigError, match="2, 3 never decoded together: raise kv_cache_memory"):
        _way("none", 0, alone)
    assert _way("none", 0, {1: timed((1, 1.0))}).seconds.points == {1: 1.0}
    assert _way("ngram", 3, {count: timed((1, 1.0), k=3) for count in (1, 2, 3)}) is None
    assert _way("ngram", 3, {1: timed((1, 1.0), k=3), 2: timed((2, 1.5), k=3)}).seconds.points == {1: 1.0, 2: 1.5}


def test_a_round_costs_what_rounds_cost_at_the_mean_though_most_draft_nothing():
    plain, drafted = timed((1, 1.0), (1, 1.0), (1, 9.0)), timed((1, 4.0), k=3)
    plain.rounds += drafted.rounds
    assert _way("ngram", 3, {1: plain}).seconds.points == {1: pytest.approx(1.75)}


def test_how_well_each_request_is_guessed():
    runs = {1: timed((1, 1.0), k=3), 2: timed((2, 1.5), k=3)}
    runs[1].metrics = [RequestMetrics(rounds=4, decode_tokens=12)]
    runs[2].metrics = [RequestMetrics(rounds=5, decode_tokens=5), RequestMetrics()]
    result = _way("ngram", 3, runs)
    assert result.spread == [1.0, 3.0]
    price = LoadCosts([Way("none", 0, Curve({1: 1.0}), 1.0), result], Curve({1: 1.0}))
    assert LoadCosts.from_report(json.loads(json.dumps(price.describe()))).describe() == price.describe()
    assert _way("none", 0, runs).spread == []


@pytest.mark.slow
def test_requests_decode_together_whose_prompts_take_longer_than_their_answers(tiny_target):
    llm = LLM(tiny_target, page_size=16, prefix_caching=False, max_num_seqs=4, max_num_batched_tokens=48)

    def prompts(count, length):
        return [[2 + (7 * i + j) % 90 for j in range(length)] for i in range(count)]

    result = LoadBench(llm, Arrival(0.0, 200, 8), 200, prompts).costs([])
    assert list(result.ways[0].seconds.points) == [1, 2, 4]


def test_each_way_of_a_method_has_costs_of_its_own(tiny_target, tiny_draft):
    def prompts(count, length):
        return [[2 + (7 * i + j) % 90 for j in range(length)] for i in range(count)]

    llm = LLM(str(tiny_target), max_num_seqs=1)
    models = [str(tiny_target), str(tiny_draft)]
    options = [{"method": "draft_model", "model": model} for model in models]
    plain, *ways = LoadBench(llm, Arrival(0.0, 8, 8), 8, prompts).costs(options).ways
    assert plain.method == "none"
    tokens = {way.method: way.tokens for way in ways if way.k == 7}
    same, other = (tokens[f"draft_model model={model}"] for model in models)
    assert other < same


@pytest.fixture
def costs_file(tmp_path):
    price = LoadCosts(
        [Way("none", 0, Curve({1: 0.010, 8: 0.020}), 1.0), Way("ngram", 3, Curve({1: 0.012, 8: 0.050}), 1.9)],
        Curve({1: 0.010, 2048: 0.9}),
    )
    about = {"model": "a model", "processor": "a processor", "threads": 1}
    path = tmp_path / "costs.json"
    told = {"costs": price.describe(), "limits": asdict(Limits(positions=512)), "environment": about}
    path.write_text(json.dumps(told))
    return path


@pytest.mark.slow
def test_the_command_on_paper(costs_file, tmp_path, capsys):
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    lines = [json.dumps({"arrival": i / 50, "prompt_tokens": 120, "output_tokens": 30}) for i in range(40)]
    trace.write_text("\n".join(lines))
    asked = ["plan", "--costs", str(costs_file), "--load", str(trace)]
    assert run([*asked, "--ttft-p95", "0.3", "--json", "--html", str(page)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kept"]
    assert result["costs"]["switched"] == {"1": "ngram 3", "8": "none"}
    assert f"<b>{result['replicas']}</b>" in page.read_text()
    assert run([*asked, "--ttft-p95", "0.3"]) == 0
    assert f"replicas: {result['replicas']}" in capsys.readouterr().out
    assert run([*asked, "--ttft-p95", "0.001"]) == 0
    assert "not even 10000 replicas keep this: ttft takes" in capsys.readouterr().out
    assert run([*asked, "--replicas", "1", "--ttft-p95", "0.3"]) == 0
    assert "1 replicas do not keep this: ttft takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda result: result.pop("limits"), "cannot read a plan's costs"),
        (lambda result: result["limits"].update(colour=3), "cannot read a plan's costs"),
        (lambda result: result["limits"].update(seats="8"), "cannot read a plan's costs"),
        (lambda result: result["limits"].update(page=0), "a replica's page must be a whole number, 1 or more, not 0"),
        (lambda result: result["limits"].update(seats=None), "seats must be an integer, not None"),
        (lambda result: result["limits"].update(rows=-1), "a replica's rows must be"),
        (lambda result: result["limits"].update(chunk=0), "a replica's chunk must be"),
        (lambda result: result.update(limits=[1]), "cannot read a plan's costs"),
        (lambda result: result.update(environment={}), "KeyError: 'model'"),
        (lambda result: result.update(environment=[]), "cannot read a plan's costs"),
        (lambda result: result["environment"].update(processor=None), "its environment has no processor, but None"),
        (lambda result: result["costs"]["ways"][1].update(k=-1), "-1 is no number of requests or tokens"),
        (lambda result: result["costs"]["ways"][0]["seconds"].update({"0": 1.0}), "'0' is no number of requests"),
        (lambda result: result["costs"]["ways"][0]["seconds"].update({"9": 10**400}), "not the costs of a plan"),
        (lambda result: result["costs"].pop("ways"), "not the costs of a plan"),
        (lambda result: result["costs"]["ways"].pop(0), "not the costs of a plan: plain decoding is not among them"),
        (lambda result: result["costs"]["ways"][0]["seconds"].update({"1": -1}), "-1 is no time"),
        (lambda result: result["costs"]["ways"][0].update(seconds={}), "no points"),
        (lambda result: result["costs"]["ways"][1].update(spread=[2.0, 0]), "0 is no number of tokens that a round"),
        (lambda result: result["costs"]["ways"][1].update(spread=[4.5]), "4.5 is no number of tokens that a round"),
        (lambda result: result["costs"]["ways"][0].update(tokens_per_round=2), "2 is no number of tokens"),
        (lambda result: result["costs"]["ways"][1].update(spread="123"), "spread must be a list of tokens, not '123'"),
        (lambda result: result["costs"]["ways"][1].update(spread={"2": 1}), "spread must be a list"),
        (lambda result: result["costs"].update(prompt_seconds=[1]), "not the costs of a plan"),
        (lambda result: result["costs"].update(deep=float("nan")), "nan"),
    ],
)
def test_costs_that_are_none(costs_file, capsys, damage, told):
    result = json.loads(costs_file.read_text())
    damage(result)
    costs_file.write_text(json.dumps(result))
    assert run(["plan", "--costs", str(costs_file), "--rate", "6", "--ttft-p95", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


@pytest.mark.parametrize(
    "asked",
    [
        "--max-num-seqs 3",
        "--methods ngram",
        "--accept token",
        "--temperature 0.5",
        "--prompt-set random",
        "--prompts-file x",
        "--threads 2",
    ],
)
def test_costs_are_of_one_engine(costs_file, capsys, asked):
    given = ["--costs", str(costs_file), "--rate", "6", "--ttft-p95", "1", *asked.split()]
    assert run(["plan", *given]) == 2
    error = capsys.readouterr().err
    assert f"--costs conflicts with {asked.split()[0]}: remove one" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_replica_is_measured(tmp_path, tiny_target, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(json.dumps({"arrival": i, "prompt_tokens": 9, "output_tokens": 4}) + "\n" for i in range(3))
    )
    asked = [
        "plan",
        "--model",
        str(tiny_target),
        "--load",
        str(trace),
        "--replicas",
        "1",
        "--methods",
        "ngram",
        "--json",
    ]
    assert run([*asked, "--prompt-set", "random", "--max-num-seqs", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["costs"]["ways"][0]["seconds"]) == ["1", "2", "3"]
    assert result["limits"]["seats"] == 3
    assert result["fleets"][0]["requests"] == 3
    assert run(["plan", "--model", str(tiny_target), "--rate", "1", "--prompt-tokens", "9999", "--replicas", "1"]) == 2
    assert "do not fit into the model's" in capsys.readouterr().err
