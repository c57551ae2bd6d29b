"""Machines with less: the command answers with the same tokens, and says in one line what it does without."""

import json
import os
from pathlib import Path

import pytest

from compiler import install_compiler
from forerun import LLM, SamplingParams, kernels
from here import where
from warm import PROGRAM

pytestmark = pytest.mark.slow

OPTIONS = ["--max-tokens", "8", "--ignore-eos", "--json", "--speculative-config", '{"method": "ngram"}']
ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
MOUNTED = """
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0
for arguments in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "noexec", "tmpfs", {!r}]):
    subprocess.run(["mount", *arguments], check=True)
"""
CARRYING = "import pathlib; from forerun import kernels; kernels.PREBUILT = pathlib.Path({!r})\n"


@pytest.fixture(scope="module")
def answered(warm, tiny_target):
    """The tokens that the command gives after the code ``before``, and the lines on standard error."""

    def call(before="", **around):
        done = warm.run("generate", "def parse(", "--model", tiny_target, *OPTIONS, code=before + PROGRAM, **around)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["token_ids"], done.stderr.splitlines()

    return call


def test_an_affinity_mask_of_one_core(answered, tiny_target):
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (expected,) = LLM(tiny_target).generate(["def parse("], asked, use_tqdm=False)
    assert answered(ONE_CORE) == (list(expected.outputs[0].token_ids), [])


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def of_another_processor():
    """The kernels with another machine in ELF's header, and a seal that is right."""
    import hashlib

    whole = kernels.library()
    assert whole is not None
    content = bytearray(Path(whole._name).read_bytes()[: -kernels.HASH_SIZE])
    content[18:20] = b"\xb7\x00"  # ARM64
    return bytes(content) + hashlib.sha256(content).digest()


def test_a_library_that_cannot_be_loaded_and_no_compiler(answered, tmp_path, no_compiler):
    carried = tmp_path / "carried"
    carried.mkdir()
    for name in kernels.VARIANTS:
        kernels.prebuilt(name, carried).write_bytes(of_another_processor())
    hidden = "from forerun import kernels; kernels.zig = lambda: ()\n"
    got, said = answered(hidden + CARRYING.format(str(carried)))
    assert len(got) == 8
    assert len(said) == 2
    assert said[0].startswith("warning: the kernels of this installation cannot be loaded")
    assert "cannot open shared object file" in said[0] or "wrong ELF" in said[0]
    assert said[1].startswith("warning: no C++ compiler, so torch runs the models")


ROOT = where(os.geteuid() == 0, ["root"], "only root mounts a folder without the right to execute")


@pytest.mark.parametrize("_", ROOT)
def test_folders_from_which_nothing_may_be_executed(answered, tmp_path, monkeypatch, _):
    install_compiler(tmp_path / "compiler", monkeypatch)
    folder = tmp_path / "mounted"
    folder.mkdir()
    around = {"FORERUN_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    got, said = answered(MOUNTED.format(str(folder)), **around)
    assert len(got) == 8
    assert [line for line in said if line.startswith("warning")] == said[-1:]
    assert "no CPU kernels of our own, torch's serve instead" in said[-1]
    assert "failed to map segment" in said[-1]
    assert said[-1].endswith("FORERUN_CACHE names another folder for them")
