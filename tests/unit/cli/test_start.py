"""What is imported when: help and mistakes load neither torch nor transformers, a name of the package loads itself."""

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import forerun
from forerun import ConfigError, DrafterConfig, ForerunError, drafters
from forerun.cli.main import COMMANDS, LAB
from forerun.core.registry import Registry
from forerun.speculate.names import KEYS, LAB_KEYS, SHARED_KEYS, policies, rules
from refusals import refused

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "prompt_toolkit")
CHILD = """
import json, sys
{}
print(json.dumps([name for name in {} if name in sys.modules]))
"""
CALLS = {
    "version": ["--version"],
    "help": ["--help"],
    "nothing": [],
    "unknown option": ["--bogus"],
    "unknown command": ["generat"],
    **{f"{name} --help": [name, "--help"] for name in (*COMMANDS, *LAB)},
    **{f"{name} --bogus": [name, "--bogus"] for name in (*COMMANDS, *LAB)},
    "train medusa --help": ["train", "medusa", "--help"],
    "an option's value": ["generate", "x", "--top-p", "3"],
    "no prompt": ["generate"],
    "no folder": ["train", "medusa"],
}


def loaded(code):
    """Which heavy packages a child process has imported after ``code``, and what it printed before."""
    command = [sys.executable, "-c", CHILD.format(code, HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(printed) + done.stderr


ONE_AFTER_ANOTHER = """
import contextlib, io
from forerun.cli.main import run
for case, arguments in {!r}.items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        run(arguments)
    assert "error: " in out.getvalue() or "forerun" in out.getvalue(), case
    assert not [name for name in {!r} if name in sys.modules], case
"""


def test_help_and_mistakes_import_nothing_heavy():
    """One after another in one process: what is imported stays, and the first case that imports it is named."""
    assert loaded(ONE_AFTER_ANOTHER.format(CALLS, HEAVY)) == ([], "")


def test_the_package_imports_a_name_when_it_is_used():
    assert loaded("import forerun")[0] == []
    assert loaded("from forerun import SamplingParams, Draft, EngineConfig; SamplingParams(), Draft()")[0] == []
    assert loaded("import forerun; forerun.pretrained.path('target')")[0] == []


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = forerun.nothing
    assert set(dir(forerun)) >= set(forerun.__all__)


def test_types_see_what_the_package_imports_later():
    tree = ast.parse(Path(forerun.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == {name: f"forerun.{index}" for name, index in forerun._MODULES.items()}
    assert set(typed) == set(forerun.__all__) - {"__version__"}


def test_names_and_keys_that_help_shows_are_those_of_the_classes():
    shared = {item.name for item in fields(DrafterConfig)}
    assert set(SHARED_KEYS.split()) == shared
    for name, keys in {**KEYS, **LAB_KEYS}.items():
        assert drafters[name].name == name
        assert set(keys.split()) == {item.name for item in fields(drafters[name].config_class)} - shared, name
    for registry in (drafters, rules, policies):
        classes = {name: registry[name] for name in registry}
        ours = {name for name, kind in classes.items() if kind.__module__.startswith("forerun.")}
        assert ours == registry._names == {name for name in registry._items if name in ours}


def test_a_builtin_name_is_taken_before_its_class_is_imported():
    registry = Registry("method", "forerun.nothing", "forerun.speculate.draft", ["ngram"])
    assert "ngram" in registry
    assert list(registry) == ["ngram"]

    class Other:
        pass

    refused(ConfigError, "duplicate method 'ngram'", registry.register("ngram"), Other)
    with pytest.raises(ConfigError, match="unknown method 'other': choose one of ngram"):
        registry["other"]


def test_a_name_of_the_laboratory_says_how_to_install_it(monkeypatch):
    registry = Registry("method", "forerun.nothing", of_lab=LAB_KEYS)
    for name in LAB_KEYS:
        assert name not in registry
        with pytest.raises(ConfigError, match=rf"method '{name}' is part of forerun-lab: pip install \./lab"):
            registry[name]
    assert "medusa" in forerun.pretrained.folders()
    monkeypatch.setattr("forerun.pretrained.has_lab", lambda name: False)
    monkeypatch.setattr("forerun.pretrained.folders", forerun.pretrained.folders.__wrapped__)  # without its cache
    refused(ForerunError, r"no bundled model is called 'medusa'.*pip install \./lab", forerun.pretrained.path, "medusa")


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("no_such_module:Bad", "No module"),
        ("broken_one:Bad", "at import"),
        ("broken_one_more:Bad", "invalid syntax"),
        ("time:sleep", "time:sleep is not a class"),
        ("time:nothing", "AttributeError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_an_error_of_whoever_asks_for_it(tmp_path, monkeypatch, point, why):
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('at import')", encoding="utf-8")
    (tmp_path / "broken_one_more.py").write_text("def", encoding="utf-8")
    record = tmp_path / "broken_plugin-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1\n", encoding="utf-8")
    (record / "entry_points.txt").write_text(f"[forerun.broken]\nbad = {point}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry("method", "forerun.broken")
    assert list(registry) == ["bad"]
    refused(
        ConfigError, f"'bad' of the installed package broken-plugin cannot be loaded: {why}", lambda: registry["bad"]
    )
    registry.register("good")(Registry)
    assert [*registry.loadable()] == ["good"]  # whoever names another method is told of that one


@pytest.mark.parametrize(
    ("command", "code", "printed"),
    [
        ("ls 2>&-", 0, ""),
        ("generate - <&-", 2, "error: the prompt is empty"),
        ("generate abc --spec-method ngram --max-tokens 2 2>&-", 0, "ngram: nothing was drafted"),
        ("--version >&-", 0, ""),
    ],
)
def test_standard_streams_may_be_closed_and_the_width_unknown(command, code, printed):
    command = f"COLUMNS=0 {sys.executable} -m forerun {command}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert printed in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["~nosuch/x", "circle"])
def test_a_cache_folder_that_cannot_be(tmp_path, name):
    (tmp_path / "circle").symlink_to("circle")
    around = {**os.environ, "FORERUN_CACHE": name}
    done = subprocess.run(
        [sys.executable, "-m", "forerun", "ls"], cwd=tmp_path, env=around, capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_an_interrupt_while_modules_are_imported(tmp_path):
    """Its modules are slow here: the command ends as its signal says, and prints no traceback."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "forerun", "ls"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
