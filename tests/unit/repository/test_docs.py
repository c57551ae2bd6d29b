"""What README and docs name is there: commands and their flags, files, and what is imported from the package."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from forerun import LLM
from forerun.cli.chat import COMMANDS
from forerun.cli.main import COMMANDS as OURS
from forerun.cli.main import LAB, load, run
from forerun.engine.config import EngineConfig
from forerun.serve.schema import ChatRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
PROGRAMS = (*OURS, *LAB)
HISTORY = {"coming_from.md"}
"""Pages that name files and flags of other projects."""
PIP = {"--index-url", "--find-links"}
IMAGE = {"--isolation", "--format", "--build-arg"}
"""Of what builds the container."""
TOP = {"--version", "--install-completion", "--show-completion"}
PYTEST = {"--full"}
COSTS = {"--both"}
"""Flags of `python -m forerun_lab.bench.costs`."""
MADE = {
    "OUT/run/run.json", "my_rule.py", "my_family.py", "my_drafter.py", "pyproject.toml", "answer.json", "config.json",
    "chat.jinja",
}  # fmt: skip
"""Files that a reader makes, or a checkpoint has."""


def pages(*, history=True):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if history or page.name not in HISTORY]


@cache
def options(name):
    """Flags of a command, or of a group's commands together."""
    command = load(name)
    parts = command.commands.values() if hasattr(command, "commands") else [command]
    params = [param for part in parts for param in part.params]
    return {option for each in params for option in (*each.opts, *each.secondary_opts)} | {"--help"}


def commands(text):
    """Command lines of ``forerun`` in blocks and in quoted code, continued lines joined."""
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    lines = [*quoted, *"\n".join(blocks).replace("\\\n", " ").splitlines()]
    return [line.split("forerun ", 1)[1] for line in lines if re.search(r"(^|[ /])forerun [a-z]", line)]


@pytest.mark.parametrize("page", pages(history=False))
def test_commands_and_their_flags_exist(page):
    text = page.read_text(encoding="utf-8")
    for line in commands(text):
        name = line.split()[0]
        assert name in PROGRAMS, line
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line)) <= options(name), line
    everywhere = set().union(*(options(name) for name in PROGRAMS)) | TOP | PYTEST | COSTS | PIP | IMAGE
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - everywhere == set()


def ours_beside_others(heading):
    """The last cells of a table of ``coming_from.md``."""
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    _, _, *rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) > 4
    return [line.rstrip("| ").split("|")[-1] for line in rows]


def test_our_commands_and_flags_beside_those_of_others_exist():
    told = "\n".join(ours_beside_others("Commands"))
    names = {line.split()[0] for line in commands(told)}
    assert len(names) > 5
    assert names <= set(PROGRAMS)
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", told)) <= set().union(*(options(name) for name in names))
    flags = [re.findall(r"--[a-z][\w-]*", cell) for cell in ours_beside_others("Options of the server")]
    assert sum(map(len, flags)) >= len(flags) - 1  # one row needs none
    assert set().union(*flags) <= options("serve")


def test_our_fields_and_functions_beside_those_of_others_exist():
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    *named, same = ours_beside_others("Options of requests")
    assert same.strip() == "the same"
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    named.append(re.search(r"^\| (`temperature`.*?) \|", page, re.MULTILINE)[1])
    for cell in named:
        assert set(re.findall(r"`(\w+)`", cell)) <= fields, cell
    options = {*inspect.signature(LLM.__init__).parameters, *(field.name for field in dataclasses.fields(EngineConfig))}
    for cell in ours_beside_others("Python"):
        assert all(hasattr(LLM, name) for name in re.findall(r"`llm\.(\w+)", cell)), cell
        assert set(re.findall(r"(?:`|\()(\w+)=", cell)) <= options, cell


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", pages(history=False))
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`([\w./-]+\.(?:py|md|json|jinja|toml))`", page.read_text(encoding="utf-8")):
        places = [ROOT / index for index in ("src", "lab", "tests")]
        result = [ROOT / name, *(file for index in places for file in index.rglob(Path(name).name))]
        assert name in MADE or any(str(file).endswith(f"/{name}") and file.exists() for file in result), name


@pytest.mark.parametrize("page", pages())
def test_python_imports_what_is_there(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "forerun":
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_commands_of_a_conversation_are_all_listed():
    page = (ROOT / "docs/chat.md").read_text(encoding="utf-8").replace("\\|", "|")
    assert set(re.findall(r"^\| `/([^`]+)` \|", page, re.MULTILINE)) == {
        f"{name} {usage}".rstrip() for name, (usage, _) in COMMANDS.items()
    }


@pytest.mark.slow
def test_the_cookbooks_commands_on_the_bundled_models_run(tmp_path, monkeypatch, capsys):
    """All that name no model of the reader's, and no server that goes on for ever."""
    monkeypatch.chdir(tmp_path)
    said = []
    for page in sorted((ROOT / "docs" / "cookbook").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for content in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
            Path("requests.jsonl").write_text(content, encoding="utf-8")
        for words in map(shlex.split, commands("".join(re.findall(r"```bash\n.*?```\n", text, re.DOTALL)))):
            if words[0] not in ("fetch", "tune", "serve") and "--model" not in words:
                assert run(words) == 0, capsys.readouterr().err
                said.append((words[0], capsys.readouterr().out))
    assert [name for name, _ in said] == ["batch", "generate", "generate", "bench"]
    (answer,) = map(json.loads, Path("answers.jsonl").read_text(encoding="utf-8").splitlines())
    assert answer["response"]["status_code"] == 200
    _, drafted, plain, bench = (json.loads(out) if out else None for _, out in said)
    assert drafted["text"] == plain["text"]
    assert drafted["metrics"]["num_accepted_draft_tokens"] > plain["metrics"]["num_accepted_draft_tokens"] == 0
    assert [row["method"] for row in bench["rows"] if row["identical"]] == ["none", "suffix", "ngram"]
