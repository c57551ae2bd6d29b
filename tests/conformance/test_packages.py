"""A drafter from a package of its own: the one that docs/add_a_drafter.md shows, as it stands there."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "add_a_drafter.md"
PROMPT = "abcabcabcabcabcabcabc"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


COMMANDS = """
import sys
sys.path.insert(0, {folder!r})
import pytest
from forerun.speculate.draft import drafters
vars(drafters).pop("_points", None)  # read before the package was there
options = ["-n", "0", "-p", "no:cacheprovider", "--assert", "plain", "-vv", "-k", "periodic"]
assert pytest.main(["tests/conformance/test_identity.py", *options]) == 0
print("END")
from forerun.cli.main import run
for method in ("periodic", "none"):
    assert run(["generate", *sys.argv[1:], "--spec-method", method]) == 0
    print("END")
"""


@pytest.fixture(scope="module")
def said(warm, tiny_target, tmp_path_factory):
    """What a process prints that has the document's package installed: a run of the conformance matrix, an answer by
    the drafter, one without it, and the document's example."""
    folder = tmp_path_factory.mktemp("installed")
    module, example = blocks("python")
    assert module.count("\n") < 60
    (folder / "my_drafter.py").write_text(module, encoding="utf-8")
    project = tomllib.loads(blocks("toml")[0])["project"]
    record = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    record.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (record / "METADATA").write_text(metadata, encoding="utf-8")
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in members.items())
        for group, members in project["entry-points"].items()
    )
    (record / "entry_points.txt").write_text(points, encoding="utf-8")
    options = ["--model", tiny_target, "--max-tokens", "40", "--temperature", "0.8", "--seed", "3", "--json"]
    done = warm.run(PROMPT, *options, code=COMMANDS.format(folder=str(folder)) + example)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("END\n")


def test_it_can_be_built_beside_other_scripts(tmp_path):
    pytest.importorskip("setuptools")
    files = {"my_drafter.py": blocks("python")[0], "try_it.py": "", "pyproject.toml": blocks("toml")[0]}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    build = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "build" / "lib").iterdir()] == ["my_drafter.py"]


def test_it_is_found_by_name_and_changes_no_token_and_the_documents_example_runs(said):
    _, *answers, gain = said
    assert float(gain) >= 1
    result = dict(zip(("periodic", "none"), map(json.loads, answers), strict=True))
    assert result["periodic"]["token_ids"] == result["none"]["token_ids"]
    assert result["periodic"]["metrics"]["num_draft_tokens"] > 0
    assert result["none"]["metrics"]["num_draft_tokens"] == 0


def test_the_conformance_matrix_covers_it_unasked(said):
    passed = re.findall(r"\[periodic-(chain|tree)-(\w+)-\w+-\w+-\w+\] PASSED", said[0])
    assert {shape for shape, _ in passed} == {"chain", "tree"}
    assert "FAILED" not in said[0]
