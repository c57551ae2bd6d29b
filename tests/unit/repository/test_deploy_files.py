"""The examples beside ``docs/deploy.md``: systemd takes the unit, and every option in them is the server's."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from forerun.cli.main import load
from here import where

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples"
UNIT = (EXAMPLES / "forerun.service").read_text(encoding="utf-8")
IMAGE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def options(*arguments):
    """What the server makes of a command line; raises where it refuses it."""
    with load("serve").make_context("serve", list(arguments)) as context:
        return context.params


def instruction(name):
    return json.loads(re.findall(rf"^{name} (\[.*\])$", IMAGE, re.MULTILINE)[-1])


def test_the_example_configuration_is_taken():
    taken = options("--config", str(EXAMPLES / "forerun.yaml"))
    assert taken["allowed_host"] == ["llm.example.org"]


def test_the_units_command_is_the_servers_and_may_finish():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(UNIT)
    program, command, *rest = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("forerun", "serve")
    taken = options(*(word.replace("/etc/forerun", str(EXAMPLES)) for word in rest))
    assert int(unit["Service"]["TimeoutStopSec"]) > float(str(taken["drain_timeout"]))


@pytest.mark.parametrize("verify", where(bool, [shutil.which("systemd-analyze")], "systemd-analyze is not installed"))
def test_systemd_takes_the_unit(tmp_path, verify):
    program = tmp_path / "forerun"
    program.touch(mode=0o755)

    def verified(text):
        path = tmp_path / "forerun.service"
        path.write_text(text.replace("/opt/forerun/bin/forerun", str(program)), encoding="utf-8")
        done = subprocess.run([verify, "verify", "--man=no", str(path)], capture_output=True, text=True, check=False)
        return done.stderr

    assert verified(UNIT) == ""
    assert "'KillMood'" in verified(UNIT.replace("KillMode", "KillMood"))


def test_compose_runs_the_image_as_it_is():
    service = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))["services"]["forerun"]
    program, command, *rest = instruction("ENTRYPOINT")
    assert (program, command) == ("forerun", "serve")
    mounts = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in service["volumes"])
    inside = [
        word.replace("/etc/forerun.yaml", str(EXAMPLES / mounts["/etc/forerun.yaml"])) for word in service["command"]
    ]
    taken = options(*rest, *inside)
    assert taken["host"] == "0.0.0.0"
    assert f"EXPOSE {taken['port']}" in IMAGE
    assert service["ports"] == [f"127.0.0.1:{taken['port']}:{taken['port']}"]
    assert re.findall(r"^VOLUME (\S+)$", IMAGE, re.MULTILINE) == [
        path for path in mounts if path != "/etc/forerun.yaml"
    ]
    assert (EXAMPLES / service["build"] / "Dockerfile").is_file()
    assert int(service["stop_grace_period"].removesuffix("s")) > float(str(taken["drain_timeout"]))


def test_the_image_starts_by_itself():
    assert options(*instruction("ENTRYPOINT")[2:], *instruction("CMD"))["model"] == "forerun:target"
    stage = IMAGE.split("\nFROM ")[-1]
    assert not re.search(r"gcc|g\+\+|ziglang|compiler|build-essential", stage)
    assert stage.index("USER forerun") < stage.index("ENTRYPOINT")
    assert "/health" in stage


def makefile():
    """Every target of the Makefile, with the variables before them."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^(\w+):", text, re.MULTILINE)), dict(re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE))


def test_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in done.stdout.splitlines()} == makefile()[0]


def test_the_workflow_makes_what_the_makefile_has():
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8"))["jobs"]
    targets, variables = makefile()
    made = [step["run"] for job in jobs.values() for step in job["steps"] if step.get("run", "").startswith("make ")]
    asked = {word for line in [*made, *jobs["check"]["strategy"]["matrix"]["target"]] for word in line.split()}
    assert {word for word in asked if word.isalpha()} - {"make", "matrix"} <= targets
    assert asked >= {"check", "quick", "docs", "wheels"}
    assert jobs["wheels"]["strategy"]["matrix"]["platform"] == variables["PLATFORMS"].split()


def test_one_version_of_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (version,) = [repo["rev"].removeprefix("v") for repo in hooks if repo["repo"].endswith("ruff-pre-commit")]
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
        "dev"
    ]
    assert f"ruff=={version}" in dev


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_forms_of_issues_have_what_github_asks_for(form):
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert content.keys() >= {"name", "description", "body"}
    for item in content["body"]:
        assert item["type"] in ("input", "textarea", "markdown", "dropdown", "checkboxes")
        assert item["attributes"]["label"]
