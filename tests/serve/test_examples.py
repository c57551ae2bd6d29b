"""Every file of ``examples/`` runs, and prints what it is for."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from running import HERMES, run_server
from test_code_completion import QWEN, coder_folder  # noqa: F401 - one is a fixture

from forerun import LLM, SamplingParams, drafters
from forerun.serve.app import ServerOptions

FILES = {path.stem: path for path in (Path(__file__).parents[2] / "examples").glob("*.py")}
OFFLINE = ["batch", "chat", "completion", "own_drafter", "stream"]
WITH_SERVER = ["server_client", "tools"]


@pytest.fixture
def run(monkeypatch, capsys):
    def start(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FILES[name]), run_name="__main__")
        return capsys.readouterr().out

    yield start
    drafters.remove("echo")


def test_all_are_tried():
    assert sorted(FILES) == sorted(OFFLINE + WITH_SERVER)


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLINE)
def test_without_a_server(run, name, chat_model):
    printed = run(name, *([chat_model] if name == "chat" else []))
    assert len(printed.splitlines()) >= (4 if name == "batch" else 2)
    if name == "stream":
        (whole,) = LLM().generate("def fibonacci(n):\n", SamplingParams(temperature=0, max_tokens=60))
        *lines, last = re.sub(r"\x1b\[\d+m", "", printed).splitlines()
        assert "\n".join(lines) == whole.outputs[0].text
        assert last.endswith("tokens per drafted round")
        assert "\x1b[4m" in printed
    if name == "own_drafter":
        assert re.search(r"mean acceptance length \d", printed)
    if name == "chat":
        assert "What is a prime number?" in printed


def test_completion_reads_what_is_after_the_cursor(run, coder_folder):  # noqa: F811
    told = runpy.run_path(str(FILES["completion"]))
    before, after = told["BEFORE"], told["AFTER"]
    prefix, suffix, middle = QWEN[:3]
    (expected,) = LLM(str(coder_folder), speculative_config=None).generate(
        f"{prefix}{before}{suffix}{after}{middle}", told["LINE"], use_tqdm=False
    )
    assert run("completion", str(coder_folder)) == f"{before}{expected.outputs[0].text}{after}\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SERVER)
def test_with_a_server(run, name, served):
    with run_server(served, ServerOptions(served_model_name="tiny", chat_template=HERMES)) as running:
        printed = run(name, f"{running.url}/v1")
    said = {"server_client": "'method': 'draft_model'", "tools": r'weather \{"city": ?"(Paris|Rome)"'}
    assert re.search(said[name], printed)
