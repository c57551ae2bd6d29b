"""The benchmark's figures: where they come from, and that a row says what was measured."""

import json
import re
from itertools import groupby
from statistics import median
from time import perf_counter

import pytest

from forerun import SamplingParams, SpeculativeConfig
from forerun.cli.main import run
from forerun.cli.options import split
from forerun.core.errors import ConfigError
from forerun.measure import environment
from forerun.measure.bench import acceptance_by_position, run_interleaved
from forerun.measure.config import BenchConfig, CheckConfig, PlanConfig
from forerun.measure.methods import method_configs, runnable, shape, with_trees
from forerun.measure.planner import Estimate, cost_curve, predict, recommend
from forerun.measure.prompts import make_prompts, repetition_rate
from forerun.measure.rounds import ROUNDS, EngineContender, Interleaved, Measured, RoundCosts, Sample, measure, shares
from forerun.models.text.tokenizer import load_tokenizer
from forerun.speculate.accept.synthetic import profile
from forerun.speculate.draft import drafters
from forerun.theory import predicted_speedup
from refusals import refused

pytestmark = pytest.mark.slow

CONTRACT = {
    "method", "accept", "temperature", "concurrency", "tokens_per_second", "speedup", "alpha", "cost_coefficient",
    "predicted_speedup", "identical",
}  # fmt: skip
MORE = {
    "acceptance_by_position", "nodes_per_draft", "over_chain", "tree", "match_rate", "verify_cost", "tokens_per_round",
    "repetition_rate", "synthetic", "invariant", "model_path",
}  # fmt: skip
SMALL = ["--prompts", "2", "--prompt-tokens", "12", "--max-tokens", "12", "--prompt-set", "random", "--repeats", "2"]


@pytest.fixture
def bench(capsys, tiny_target):
    def call(*options, command="bench"):
        code = run([command, "--model", tiny_target, *options, "--json"])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return json.loads(captured.out)

    return call


def test_rows_say_what_was_measured(bench, tiny_draft):
    result = bench(
        *SMALL, "--spec-model", tiny_draft, "--methods", "draft_model,ngram", "--accept", "coupled,token",
        "--concurrency", "1,2", "--temperature", "0,1", "--peers", "transformers",
    )  # fmt: skip
    rows = result["rows"]
    assert all(set(row) >= CONTRACT | MORE for row in rows)
    settings = [(row["method"], row["accept"], row["temperature"], row["concurrency"]) for row in rows]
    assert len(set(settings)) == len(settings)
    for temperature in (0.0, 1.0):
        for batch in (1, 2):
            here = {
                (r["method"], r["accept"]): r
                for r in rows
                if (r["temperature"], r["concurrency"]) == (temperature, batch)
            }
            plain = here["none", None]
            assert (plain["speedup"], plain["identical"], plain["alpha"]) == (1.0, True, None)
            assert plain["tokens_per_round"] == 1.0
            assert here["draft_model", "coupled"]["identical"] is True
            assert here["draft_model", "token"]["identical"] is (True if temperature == 0.0 else None)
            assert here["none_fastest", None]["invariant"] is False
            drafted = here["draft_model", "coupled"]
            assert 0 < drafted["match_rate"] <= 1
            assert drafted["cost_coefficient"] > 0
            assert drafted["predicted_speedup"] > 0
            assert sum(drafted["shares"].values()) == pytest.approx(1.0)
            peers = [method for method, _ in here if method.startswith("transformers")]
            assert len(peers) == (3 if batch == 1 else 0)
    assert result["environment"]["model_path"].startswith("native")
    assert result["environment"]["threads"] == 1
    assert result["environment"]["seed"] == 0
    assert all(row["tokens_per_second"] == median(row["speeds"]) and row.get("lossless") is not False for row in rows)
    assert set(result["environment"]["speculative_configs"]) >= {"none", "draft_model"}


def test_a_lossy_rule_is_named_and_the_seed_is_shown(capsys, tiny_target):
    options = ["--methods", "ngram", "--accept", "coupled,lenient", "--seed", "5", "--no-fastest"]
    assert run(["bench", "--model", tiny_target, *SMALL, *options]) == 0
    out, err = capsys.readouterr()
    assert "seed 5" in " ".join(out.split())
    assert [line for line in err.splitlines() if "not lossless" in line] == [
        "warning: rule lenient is not lossless: drafts may change what the model says"
    ]


@pytest.mark.parametrize(
    ("policy", "runtime", "expected"), [(1, 950_000, 0.05), (2, 900_000, 0.1), (1, -1, 0.0), (0, 950_000, 0.0)]
)
def test_a_real_time_process_is_reported_that_it_is_stopped(monkeypatch, tmp_path, policy, runtime, expected):
    (tmp_path / "sched_rt_period_us").write_text("1000000\n")
    (tmp_path / "sched_rt_runtime_us").write_text(f"{runtime}\n")
    monkeypatch.setattr(environment, "KERNEL", tmp_path)
    monkeypatch.setattr(environment.os, "sched_getscheduler", lambda process: policy)
    assert environment.stopped() == pytest.approx(expected)


def test_the_table_fits_a_terminal(capsys, tiny_target, tiny_draft):
    """Every figure of a row that varies in all settings, and the same figures as --markdown in one table."""
    options = [
        "bench", "--model", tiny_target, "--spec-model", tiny_draft, *SMALL, "--methods", "none,draft_model,ngram",
        "--accept", "coupled,token", "--concurrency", "1,2", "--temperature", "0,1", "--trees", "4",
        "--spec-tokens", "2,3",
    ]  # fmt: skip
    assert run(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if " " in line.strip()) <= 100
    heads = {word for line in lines if line.startswith("method") for word in re.split(r"  +", line)}
    assert run([*options, "--markdown"]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| method"))
    assert {word.strip() for word in head.strip("| ").split("|")} - heads <= {"policy"}
    assert "all methods: policy fixed" in lines


def test_the_table_says_so(monkeypatch, capsys):
    monkeypatch.setattr(environment, "stopped", lambda: 0.05)
    assert run(["bench", *SMALL, "--methods", "none", "--temperature", "0", "--no-fastest"]) == 0
    assert "for 50 ms in every second" in capsys.readouterr().err


def test_synthetic_acceptance_is_marked_and_reached(bench):
    rates = '{"synthetic_acceptance_rates": [1.0, 1.0], "num_speculative_tokens": 2}'
    rows = bench(*SMALL, "--methods", "random", "--temperature", "0", "--speculative-config", rates, "--no-fastest")[
        "rows"
    ]
    assert [(row["method"], row["synthetic"], row["identical"]) for row in rows] == [
        ("none", False, True),
        ("random", True, None),
    ]
    assert rows[1]["match_rate"] == 1.0
    assert rows[1]["tokens_per_round"] > 2


def test_profiles_are_cut_and_continued():
    assert profile("humaneval", 8) == [0.837, 0.685, 0.562, 0.460, 0.368, 0.283, 0.217, 0.161]
    assert profile("chat", 2) == [0.630, 0.389]
    longer = profile("chat", 6)
    assert longer[:4] == [0.630, 0.389, 0.243, 0.158]
    assert longer[4:] == pytest.approx([0.158 * 0.158 / 0.243, 0.158 * (0.158 / 0.243) ** 2])
    options = {"method": "random", "num_speculative_tokens": 6, "synthetic_acceptance_rates": "chat"}
    assert [*SpeculativeConfig.parse(options).synthetic] == longer
    refused(ConfigError, "choose one of humaneval, chat", profile, "poems", 3)


def test_synthetic_options_of_one_method_are_reported(bench):
    more = {"random": [{"synthetic_acceptance_length": 2.0}, {"synthetic_acceptance_rates": "chat"}]}
    options = ["--methods", "none,ngram,random", "--temperature", "0", "--no-fastest"]
    result = bench(*SMALL, *options, "--speculative-config", json.dumps(more))
    assert result["environment"]["synthetic"] == [2.0, "chat"]
    assert all(row["synthetic"] is row["method"].startswith("random") for row in result["rows"])


def sample(depths, rows, draft, verify, tokens=1, total=None):
    return Sample(tuple(depths), rows, tokens, draft, verify, 0.1, total or draft + verify + 0.2)


@pytest.mark.parametrize("kind", [BenchConfig, CheckConfig, PlanConfig])
def test_a_seed_of_minus_one_is_one_random_seed(kind):
    assert kind(seed=-1).seed != kind(seed=-1).seed
    assert (kind(seed=-2).seed, kind(seed=0).seed) == (-2, 0)


def test_every_request_gets_the_sampling_options():
    seen = []

    class Spy:
        def run(self, prompts, params):
            seen.extend(params)
            return Measured()

    config = BenchConfig(sampling={"top_p": 0.9, "ignore_eos": False}, max_tokens=7, repeats=2, seed=3)
    run_interleaved([Spy()], [[1], [2]], config, temperature=0.5, concurrency=1)
    assert {(p.top_p, p.temperature, p.ignore_eos) for p in seen} == {(0.9, 0.5, False)}
    assert [p.seed for p in seen if p.max_tokens == 7][-2:] == [3, 4]


def test_prediction_is_the_theorys_for_constant_drafts():
    plain = [sample([0], 1, 0.0, seconds) for seconds in (1.9, 2.0, 2.5)]
    rounds = [sample([3], 4, draft, verify) for draft, verify in ((0.55, 2.5), (0.6, 2.6), (0.7, 2.9))]
    costs = RoundCosts.of(rounds, plain, 1)
    assert (costs.c, costs.typical) == (pytest.approx(0.1), pytest.approx(1.3))
    assert costs.predict(rounds, 0.7) == pytest.approx(predicted_speedup(0.7, 3, 0.1, 1.3))


def test_prediction_weighs_rounds_without_a_draft():
    plain = [sample([0, 0], 2, 0.0, 1.0)] * 3
    rounds = [sample([2, 0], 4, 0.2, 1.5), sample([0, 0], 2, 0.0, 1.0)]
    tokens = (1 + 0.5 + 0.25) + 1 + 1 + 1
    assert RoundCosts.of(rounds, plain, 2).predict(rounds, 0.5) == pytest.approx(tokens / 2 / (0.2 + 1.5 + 1.0))


def test_rounds_of_other_sizes_are_left_out_of_prices():
    plain = [sample([0, 0], 2, 0.0, 1.0), sample([0], 1, 0.0, 9.0)]
    rounds = [sample([1, 1], 4, 0.3, 1.2), sample([1], 2, 9.0, 9.0)]
    costs = RoundCosts.of(rounds, plain, 2)
    assert (costs.c, costs.verify) == (pytest.approx(0.3), {4: 1.2})
    assert RoundCosts.of([], plain, 2) is None


def test_shares_add_up():
    parts = shares([sample([1], 2, 0.2, 0.5, total=1.0), sample([1], 2, 0.4, 0.3, total=1.0)])
    assert parts == pytest.approx({"draft": 0.3, "verify": 0.4, "accept": 0.1, "host": 0.2})


def test_measuring_counts_decoding_rounds_only(llm):
    engine = llm(max_num_seqs=2).engine
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (6, 4)]
    result = measure(engine, [[5, 6, 7, 8], [9, 10, 11]], params)
    assert [len(answer) for answer in result.answers] == [6, 4]
    assert result.tokens == sum(r.tokens for r in result.rounds) == 6 + 4 - 2  # the first ones come with the prompts
    assert result.seconds == pytest.approx(sum(r.total for r in result.rounds))
    assert all(r.rows == len(r.depths) and r.depth == 0 for r in result.rounds)
    assert engine.on_round is None


def test_a_whole_run_counts_what_prompts_took_and_brought(llm):
    engine = llm(max_num_seqs=1).engine
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (6, 4)]
    began = perf_counter()
    result = measure(engine, [[5, 6, 7, 8], [9, 10, 11]], params, whole=True)
    assert result.tokens == 6 + 4
    assert sum(r.tokens for r in result.rounds) == 6 + 4 - 2
    assert sum(r.total for r in result.rounds) < result.seconds < perf_counter() - began


@pytest.mark.parametrize(("fresh", "kept"), [(False, 1), (True, 3)])
def test_what_a_length_policy_has_measured_stays_unless_it_is_to_be_forgotten(llm, fresh, kept):
    policies = []

    class Noting(EngineContender):
        def run(self, prompts, params):
            policies.append(self.engine.policy)
            return super().run(prompts, params)

    contender = Noting(llm(), {"method": "ngram", "length": "adaptive"}, max_num_seqs=1)
    config = BenchConfig(lengths=["adaptive"], fresh=fresh, whole=True, max_tokens=3, repeats=3)
    run_interleaved([contender], [[1, 2, 3], [4, 5, 6]], config, temperature=0.0, concurrency=1)
    assert len({id(policy) for policy in policies}) == kept


def test_contenders_with_several_requests_take_turns_in_their_midst(llm):
    class Noting(EngineContender):
        def rounds(self, prompts, params, result):
            for _ in super().rounds(prompts, params, result):
                turns.append(self.name)
                yield

    turns = []
    prompts, params = [[1, 2, 3], [4, 5, 6]], SamplingParams(temperature=0.0, max_tokens=ROUNDS + 9, ignore_eos=True)
    contenders = [Noting(llm(), {"method": "none"}, name, max_num_seqs=2) for name in ("a", "b")]
    result = Interleaved(contenders, first=1).side_by_side(prompts, [params] * 2)
    assert [name for name, _ in groupby(turns)] == ["b", "a", "b", "a"]
    assert turns[: 2 * ROUNDS] == ["b"] * ROUNDS + ["a"] * ROUNDS
    alone = contenders[0].run(prompts, [params] * 2)
    assert result[0].answers == result[1].answers == alone.answers
    assert result[0].tokens == alone.tokens == 2 * (ROUNDS + 9) - 2


def test_what_has_commas_stands_in_quotes():
    text = 'transformers, "llama-server=x --spec-type a:b=1,c=2" ,llama-server=y "z"'
    assert split("peers", text, str) == ["transformers", "llama-server=x --spec-type a:b=1,c=2", 'llama-server=y "z"']
    refused(ConfigError, "comma-separated", split, "peers", "transformers\nvllm", str)


def test_an_unknown_prompt_set_is_refused_with_those_there_are():
    known = "choose one of held_out, repetitive, random, categories, categories-small, humaneval"
    refused(ConfigError, known, BenchConfig, prompt_set="poems")


def test_whole_runs_have_no_peers():
    refused(ConfigError, "whole", BenchConfig, whole=True, peers=["transformers"])


def test_there_must_be_something_to_forget():
    refused(ConfigError, "fresh", BenchConfig, fresh=True, lengths=["fixed"])


def test_every_method_runs_or_is_left_out_with_a_reason(llm, tiny_draft):
    named = {"draft_model": {"model": tiny_draft}, "staged": {"model": tiny_draft}}
    configs = method_configs(["all"], ["coupled"], ["fixed"], [], named)
    kept, left_out = runnable(llm(), with_trees(configs, 6))
    methods = [config["method"] for config in kept]
    assert methods[0] == "none"
    assert set(methods) | {name.split()[0] for name in left_out} == {"none", *drafters}
    assert {"draft_model", "staged", "ngram", "layerskip"} <= set(methods)
    assert "structured output" in left_out["pattern"]
    assert "forerun train medusa" in left_out["medusa"]
    assert methods.count("draft_model") == methods.count("layerskip") == 2  # a chain and a tree


def test_a_rule_for_chains_leaves_trees_out(llm, tiny_draft):
    configs = method_configs(["all"], ["token"], ["fixed"], [], {"draft_model": {"model": tiny_draft}})
    kept, left_out = runnable(llm(), with_trees(configs, 6))
    assert not any("tree" in config or "tree_nodes" in config for config in kept)
    assert "supports chains only" in left_out["merged"]


def test_tree_shapes_narrow_and_stay_within_their_nodes():
    assert shape(3, 8) == [2, 1, 1]
    assert shape(2, 12) == [3, 3]
    assert shape(4, 3) == [1, 1, 1, 1]
    configs = [{"method": "none"}, {"method": "suffix", "num_speculative_tokens": 4}, {"method": "random"}]
    trees = with_trees(configs, 7)
    assert [config.get("tree_nodes") for config in trees] == [None, None, 7, None, None]
    assert trees[4]["tree"] == [2, 1, 1]
    assert with_trees(configs, 0) == configs


def test_acceptance_by_position_is_the_tail_of_the_histogram():
    assert acceptance_by_position([2, 1, 0, 5]) == pytest.approx([6 / 8, 5 / 8, 5 / 8])
    assert acceptance_by_position([]) is None
    assert acceptance_by_position([3]) == []


def test_trees_stand_beside_their_chains(bench, tiny_draft):
    rows = bench(
        *SMALL, "--spec-model", tiny_draft, "--methods", "draft_model", "--spec-tokens", "3", "--trees", "6",
        "--no-fastest",
    )["rows"]  # fmt: skip
    for temperature in (0.0, 1.0):
        _, chain, tree = [row for row in rows if row["temperature"] == temperature]
        assert (chain["tree"], tree["tree"]) == (None, "best 6")
        assert tree["over_chain"] == pytest.approx(tree["tokens_per_round"] / chain["tokens_per_round"])
        assert chain["over_chain"] is None
        assert tree["identical"] is True
        assert tree["nodes_per_draft"] > chain["nodes_per_draft"]
        assert chain["acceptance_by_position"][0] >= chain["acceptance_by_position"][-1]


def test_a_drafter_does_not_recite_what_an_earlier_repeat_answered(bench):
    """The answers of the first repeat would make the others' drafts perfect."""
    rows = bench(*SMALL[:-2], "--repeats", "3", "--methods", "suffix", "--temperature", "1", "--no-fastest")["rows"]
    assert rows[1]["mean_acceptance_length"] < 1.5


def test_tables_can_be_markdown(capsys, tiny_target):
    code = run(["bench", "--model", tiny_target, *SMALL, "--methods", "ngram", "--no-fastest", "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    table = [line for line in lines if line.startswith("|")]
    assert table[0].startswith("| method | ")
    assert len(table) == 2 + 4
    assert len({line.count("|") for line in table}) == 1


def test_repetition_rate_counts_runs_of_four():
    assert repetition_rate([[1, 2, 3, 4, 5, 6]]) == 0.0
    assert repetition_rate([[1, 1, 1, 1, 1, 1]]) == pytest.approx(2 / 3)
    assert repetition_rate([[1, 2, 3, 4, 9, 1, 2, 3, 4]], [5]) == pytest.approx(1 / 4)
    assert repetition_rate([[1, 2]]) is None


def test_prompt_sets_have_their_length_and_are_repeatable(tiny_target):
    tokenizer = load_tokenizer(tiny_target)
    rates = []
    for kind in ("random", "held_out", "repetitive"):
        prompts = make_prompts(kind, tokenizer, count=6, length=150, seed=3)
        assert [len(prompt) for prompt in prompts] == [150] * 6
        assert prompts == make_prompts(kind, tokenizer, count=6, length=150, seed=3)
        assert prompts != make_prompts(kind, tokenizer, count=6, length=150, seed=4)
        rates.append(repetition_rate(prompts))
    assert rates[0] < 0.01 < rates[1] < rates[2] - 0.1


def test_repetitive_prompts_are_edits_tables_and_json(tiny_target):
    tokenizer = load_tokenizer(tiny_target)
    prompts = make_prompts("repetitive", tokenizer, count=7, length=240, seed=1)
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    for edit in texts[::3]:
        listing, again = edit[:179], edit[180:]
        assert edit[179] == "\n"
        assert listing.startswith(again)
    for table in texts[1::3]:
        head, *rows = table.splitlines()[:-1]
        assert head == "MAPPING = {"
        assert len(rows) >= 4
        assert all(re.fullmatch(r"    '\w+': '\w+',", row) for row in rows)
    for records in texts[2::3]:
        result = json.loads(records[: records.rindex("},")] + "}]")
        assert len(result) >= 2
        assert {tuple(record) for record in result} == {("name", "type", "default")}
        assert len({record["name"] for record in result}) == len(result)
    for length in (1, 5, 14, 33):
        assert {len(prompt) for prompt in make_prompts("repetitive", tokenizer, count=6, length=length)} == {length}


def test_prompts_come_from_a_file(tiny_target, tmp_path):
    tokenizer = load_tokenizer(tiny_target)
    file = tmp_path / "prompts.txt"
    file.write_text("one two\n\nthree\n", encoding="utf-8")
    prompts = make_prompts("file", tokenizer, count=3, length=5, file=file)
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["one t", "three", "one t"]
    file.write_text("\n", encoding="utf-8")
    refused(ConfigError, "no prompts", make_prompts, "file", tokenizer, count=1, length=5, file=file)


def test_cost_curve_has_steps_and_lines():
    curve = cost_curve({4: 1.1, 5: 1.4, 8: 1.6, 16: 2.5}, sequences=1, multiple=4)
    assert [curve(rows) for rows in (1, 4, 5, 8, 12, 16)] == pytest.approx([1.0, 1.0, 1.5, 1.5, 2.0, 2.5])
    assert curve(24) == pytest.approx(3.5)
    assert cost_curve({}, sequences=2)(9) == 1.0


def test_planner_predicts_and_recommends():
    curve = cost_curve({2: 1.0, 3: 1.1, 4: 1.2, 5: 1.3})
    good = predict(Estimate("draft_model", 0.8, 0.75, 1.0, 0.1), curve, 4)
    assert [p.speedup for p in good] == pytest.approx(
        [predicted_speedup(0.75, k, 0.1, curve(k + 1)) for k in range(1, 5)]
    )
    rare = predict(Estimate("ngram", 0.8, 0.75, 0.0, 0.0), curve, 4)
    assert [p.speedup for p in rare] == [1.0] * 4
    best = max(good, key=lambda p: p.speedup)
    assert recommend([*good, *rare]) == {"method": "draft_model", "num_speculative_tokens": best.k}
    assert recommend(rare) == {"method": "none"}
