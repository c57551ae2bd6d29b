"""Prompts by category: what they are, and what their figures mean."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy
import pytest

from forerun import SamplingParams
from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun.engine.metrics import RequestMetrics
from forerun.measure.bench import run_interleaved
from forerun.measure.config import CATEGORIES, HUMANEVAL, BenchConfig
from forerun.measure.rounds import Measured
from forerun.models.text.chat import render_chat
from forerun_lab.intervals import median_interval, quantile_interval, ratio_error
from forerun_lab.written import FOLDER, RecordedConversation, Texts, by_category, make_texts, read_set, stops
from tasks import TASKS, save_tasks

pytestmark = pytest.mark.slow


@pytest.fixture
def tasks_file(tmp_path):
    return save_tasks(tmp_path / "tasks.jsonl")


def test_the_categories_are_eleven_times_ten_and_the_small_set_two_of_each():
    result = read_set(CATEGORIES)
    assert set(Counter(each.category for each in result).values()) == {10}
    assert len({each.category for each in result}) == 11
    assert len({each.turns[0] for each in result}) == 110
    small = read_set("categories-small")
    assert small == result[:22]
    assert set(Counter(each.category for each in small).values()) == {2}
    assert all(len(each.turns) == 1 and len(each.turns[0]) < 500 for each in small)
    turns = Counter(len(each.turns) for each in result)
    assert turns[2] >= 10
    assert turns[3] >= 10
    lengths = [sum(map(len, each.turns)) for each in result]
    assert sum(length > 3_500 for length in lengths) >= 20  # some 1,000 tokens
    assert max(lengths) < 24_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 250_000


def test_prompts_quote_the_running_pythons_manual_and_source():
    turns = [turn for each in read_set(CATEGORIES) for turn in each.turns]
    assert not any(kind in turn for turn in turns for kind in ("{file:", "{topic:", "{source:"))
    assert any("def insort_right(" in turn for turn in turns)
    assert any("Format String Syntax" in turn for turn in turns)
    cut = next(turn for turn in turns if "each command of the debugger" in turn)
    assert 15_000 < len(cut) < 21_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", "line 1: not valid JSON"),
        pytest.param("[" * 100_000, "line 1: not valid JSON", id="brackets"),
        ('{"category": "a", "turns": ["b"]}\n\n[1]', "line 3: a prompt is an object with category and turns"),
        ('{"category": "a", "turns": ["b"], "more": 1}', "line 1: a prompt is an object"),
        ('{"category": " ", "turns": ["b"]}', "category must be a name"),
        ('{"category": "a", "turns": "b"}', "turns must be a list"),
        ('{"category": "a", "turns": []}', "turns must be a list"),
        ('{"category": "a", "turns": ["b", " "]}', "none of them empty"),
    ],
)
def test_a_file_of_prompts_is_checked(tmp_path, text, message):
    file = tmp_path / "mine.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_set(CATEGORIES, file)
    with pytest.raises(ConfigError, match="cannot read prompts from"):
        read_set(CATEGORIES, tmp_path)


def test_places_in_a_file_of_ones_own_are_plain_text(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"category": "a", "turns": ["see {file:minutes.txt}"]}', encoding="utf-8")
    assert read_set(CATEGORIES, file) == [RecordedConversation("a", ["see {file:minutes.txt}"])]


def test_a_turn_follows_plain_decodings_answer_to_the_one_before(llm, chat_model):
    target = llm(model=chat_model, max_model_len=200)
    talks = [
        RecordedConversation("a", ["one", "two", "three"]),
        RecordedConversation("b", ["x" * 150]),
        RecordedConversation("b", ["four"]),
    ]
    config = BenchConfig(prompt_set=CATEGORIES, max_tokens=48)
    texts = make_texts(config, target, talks)
    said = []
    params = SamplingParams(temperature=0.0, max_tokens=48)
    expected = []
    for turn in talks[0].turns:
        said.append({"role": "user", "content": turn})
        ids = target.tokenizer.encode(render_chat(target.tokenizer, said))
        if len(ids) > 200 - 48:
            break
        expected.append(ids)
        said.append({"role": "assistant", "content": target.chat(said, params, use_tqdm=False)[0].outputs[0].text})
    assert len(expected) == 3
    assert texts.prompts[:3] == expected
    assert texts.owners == [0, 0, 0, 2]
    assert texts.left_out == 1  # the one that leaves no room for its answer
    assert texts.chat
    with pytest.raises(ConfigError, match="3 prompts of categories fit into 200 tokens"):
        make_texts(BenchConfig(prompt_set=CATEGORIES, max_tokens=48, concurrency=[4]), target, talks[:2])


def test_a_model_without_a_template_reads_plain_text(llm, tasks_file):
    target = llm()
    talk = make_texts(
        BenchConfig(prompt_set=CATEGORIES, max_tokens=8), target, [RecordedConversation("a", ["one", "two"])]
    )
    first, second = (target.tokenizer.decode(prompt) for prompt in talk.prompts)
    assert first == "one\n\n"
    assert second.startswith(first)
    assert second.endswith("\n\ntwo\n\n")
    assert stops(talk) == []
    code = make_texts(BenchConfig(prompt_set=HUMANEVAL, max_tokens=8), target, read_set(HUMANEVAL, tasks_file))
    assert target.tokenizer.decode(code.prompts[0]) == TASKS[0]["prompt"]
    assert "\ndef " in stops(code)


def test_answers_of_written_sets_end_where_the_model_ends_them():
    seen = []

    class Spy:
        def run(self, prompts, params):
            seen.extend(params)
            return Measured()

    for name in ("random", CATEGORIES):
        run_interleaved([Spy()], [[1], [2]], BenchConfig(prompt_set=name, repeats=1), temperature=0.0, concurrency=1)
    assert [params.ignore_eos for params in seen] == [True] * 3 + [False] * 3


@dataclass
class Fake:
    name: str
    promised: bool = True
    about: dict[str, Any] = field(default_factory=lambda: {"synthetic": False})

    def facts(self):
        return self.about

    def promises_identity(self, temperature):
        return self.promised


def test_figures_by_category_by_hand():
    """Three conversations, the first with two turns; a method that takes 2, 4 and 5 tokens a round."""
    texts = Texts(
        [[1], [1, 2], [3], [4]],
        [0, 0, 1, 2],
        [RecordedConversation("a", ["t", "u"]), RecordedConversation("a", ["v"]), RecordedConversation("b", ["w"])],
    )

    def measured(rounds, tokens, seconds, drafted, last=9):
        result = Measured(answers=[[7] * 8] * 3 + [[7] * 7 + [last]])
        for count, time in zip(rounds, seconds):
            kept = tokens // count - 1
            metrics = RequestMetrics(rounds=count, decode_tokens=tokens)
            if drafted:
                metrics.num_drafts, metrics.num_accepted_draft_tokens = count, kept * count
                metrics.acceptance_histogram = [0] * kept + [count]
            result.metrics.append(metrics)
            result.parts.append((tokens, time))
        return result

    plain = [measured([20] * 4, 20, [1.0] * 4, False), measured([20] * 4, 20, [2.0] * 4, False)]
    mine = [measured([10, 10, 5, 4], 20, [0.5, 0.5, 0.2, 0.4], True, last=5) for _ in range(2)]
    rows = by_category([Fake("none"), Fake("fast")], [plain, mine], texts, 0.0, 1, None)
    assert [(row["method"], row["category"]) for row in rows] == [
        (name, kind) for name in ("none", "fast") for kind in ("a", "b", "all")
    ]
    first, second, both = rows[3:]
    assert (first["conversations"], first["prompts"], first["tokens"]) == (2, 3, 24)
    assert first["tokens_per_round"] == first["mean_acceptance_length"] == pytest.approx(60 / 25)
    residuals = [80 - 2.4 * 40, 40 - 2.4 * 10]
    assert first["tokens_per_round_error"] == pytest.approx((sum(r * r for r in residuals) * 2) ** 0.5 / 50)
    assert first["acceptance_by_position"] == pytest.approx([1.0, 0.2, 0.2])
    assert second["tokens_per_round_error"] is None
    assert second["acceptance_by_position"] == [1.0] * 4
    # pairs of repeats: conversation 0 is 2 and 4 times as fast, conversation 1 5 and 10 times, conversation 2 2.5 and 5
    assert [row["speedup"] for row in (first, second, both)] == pytest.approx([(3 + 7.5) / 2, 3.75, 3.75])
    assert both["speedup_interval"] is None
    assert [(row["same_answers"], row["identical"]) for row in (first, second, both)] == [
        (3, True), (0, False), (3, False),
    ]  # fmt: skip
    assert rows[0]["speedup"] == 1.0
    assert rows[0]["acceptance_by_position"] is None
    assert first["repetition_rate"] == pytest.approx((4 + 4 + 4) / (6 + 7 + 6))


def test_a_peer_is_compared_with_its_own_plain_answers():
    texts = Texts([[1]], [0], [RecordedConversation("a", ["t"])])
    names = ("none", "openvino", "openvino prompt_lookup", "server -md d")
    answers = ([1, 2], [1, 3], [1, 3], [1, 4])
    runs = [[Measured(answers=[answer], tokens=1, seconds=1.0)] for answer in answers]
    rows = by_category([Fake(name, promised=False) for name in names], runs, texts, 0.0, 1, None)
    assert [row["same_answers"] for row in rows] == [1, 0, 0, 0]
    assert [row["same_as_own_plain"] for row in rows] == [1, 1, 1, 1]
    runs[2] = [Measured(answers=[[1, 2]], tokens=1, seconds=1.0)]
    rows = by_category([Fake(name, promised=False) for name in names], runs, texts, 0.0, 1, None)
    assert (rows[2]["same_answers"], rows[2]["same_as_own_plain"]) == (1, 0)


def test_prompts_that_were_answered_together_have_no_speed_of_their_own():
    texts = Texts([[1]], [0], [RecordedConversation("a", ["t"])])
    together = Measured(answers=[[7]], metrics=[RequestMetrics(rounds=1, decode_tokens=1)], tokens=1, seconds=1.0)
    rows = by_category([Fake("none", promised=False)], [[together]], texts, 0.0, 4, None)
    assert (rows[0]["speedup"], rows[0]["identical"], rows[0]["same_answers"]) == (None, None, 1)
    assert rows[0]["tokens_per_round"] == 1.0


def test_the_error_of_a_ratio_is_what_repetitions_show():
    """Against many samples of the same distribution."""
    generator = numpy.random.default_rng(0)
    rounds = generator.integers(10, 40, size=(4000, 30))
    tokens = rounds * generator.uniform(1.0, 3.0, size=rounds.shape)
    seen = (tokens.sum(1) / rounds.sum(1)).std()
    said = numpy.mean([ratio_error(list(zip(t, r))) for t, r in zip(tokens[:400], rounds[:400])])
    assert said == pytest.approx(seen, rel=0.06)
    assert ratio_error([(3, 2)]) is None
    assert ratio_error([(3, 2), (0, 0)]) is None


def test_the_interval_holds_the_median():
    assert median_interval([1.0] * 5) is None
    assert median_interval(list(range(1, 11))) == [2, 9]  # the tables' ranks for 10 and 30 values
    assert median_interval(list(range(30, 0, -1))) == [10, 21]
    generator = numpy.random.default_rng(1)
    truth = numpy.exp(NormalDist().inv_cdf(0.5))
    bounds = [median_interval(list(values)) for values in generator.lognormal(size=(2000, 22))]
    assert 0.95 <= numpy.mean([low <= truth <= high for low, high in bounds]) < 0.99
    assert quantile_interval(list(range(60)), 0.95) is None
    truth = numpy.exp(NormalDist().inv_cdf(0.95))
    bounds = [quantile_interval(list(values), 0.95) for values in generator.lognormal(size=(2000, 200))]
    assert 0.95 <= numpy.mean([low <= truth <= high for low, high in bounds]) < 0.99


def bench(capsys, *options):
    assert run(["bench", *options, "--no-fastest", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_synthetic_profiles_are_marked_everywhere(capsys, chat_model, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"category": "a", "turns": ["one"]}\n{"category": "b", "turns": ["two"]}', encoding="utf-8")
    options = ["--model", chat_model, "--max-model-len", "200", "--methods", "none,random", "--synthetic", "humaneval"]
    options += ["--prompt-set", "categories", "--prompts-file", str(file), "--max-tokens", "60"]
    result = bench(capsys, *options)
    assert result["environment"]["synthetic"] == "humaneval"
    for row in [*result["rows"], *result["categories"]]:
        assert row["synthetic"] is (row["method"] == "random")
    whole = next(row for row in result["categories"] if (row["method"], row["category"]) == ("random", "all"))
    assert 2.0 < whole["mean_acceptance_length"] < 4.0  # k = 3: 1 + .837 + .685 + .562
    assert run(["bench", *options, "--no-fastest"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("random (synthetic)") == 5  # the table of speeds is in two parts
    assert "synthetic acceptance (humaneval)" in shown.err
    draft = ["--spec-method", "random", "--synthetic", "chat"]
    assert run(["generate", "one", "--model", chat_model, "--max-tokens", "20", *draft, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["synthetic"] is True
    twice = ["--speculative-config", '{"synthetic_acceptance_rates": [1, 1, 1]}']
    assert run(["bench", *options, *twice]) == 2
    assert "is in --speculative-config and in --synthetic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-set", "categories", "--prompt-tokens", "9"], "remove --prompt-tokens"),
        (["--execute"], "execute needs prompt_set humaneval"),
        (["--prompt-set", "humaneval"], "pip install './lab[humaneval]'"),
        (["--prompt-set", "categories", "--prompts-file", "nowhere.jsonl"], "cannot read prompts from nowhere.jsonl"),
    ],
)
def test_bad_options_are_one_line(capsys, options, message):
    assert run(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
