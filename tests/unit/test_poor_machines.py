"""Machines with less: the command answers with the same tokens, and says in one line what it does without."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compiler import install_compiler
from forerun import LLM, SamplingParams, kernels
from here import where

pytestmark = pytest.mark.slow

OPTIONS = ["--max-tokens", "8", "--ignore-eos", "--json", "--speculative-config", '{"method": "ngram"}']
ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
RUN = "import sys; from forerun.cli.main import run; sys.exit(run(sys.argv[1:]))"
CARRYING = "import pathlib; from forerun import kernels; kernels.PREBUILT = pathlib.Path({!r})\n"


@pytest.fixture(scope="module")
def answered(tiny_target):
    """The tokens that the command gives after the code ``before``, and the lines on standard error."""

    def call(before="", wrapper=(), **around):
        asked = ["generate", "def parse(", "--model", tiny_target, *OPTIONS]
        command = [*wrapper, sys.executable, "-c", before + RUN, *asked]
        done = subprocess.run(command, env={**os.environ, **around}, capture_output=True, text=True, check=False)
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
    got, said = answered(hidden + CARRYING.format(str(carried)), OMP_NUM_THREADS="1")
    assert len(got) == 8
    assert len(said) == 2
    assert said[0].startswith("warning: the kernels of this installation cannot be loaded")
    assert "cannot open shared object file" in said[0] or "wrong ELF" in said[0]
    assert said[1].startswith("warning: no C++ compiler, so torch runs the models")


MOUNTS = shutil.which("unshare") is not None and os.geteuid() == 0


@pytest.mark.parametrize(
    "unshare", where(MOUNTS, ["unshare"], "only root mounts a folder without the right to execute")
)
def test_folders_from_which_nothing_may_be_executed(answered, tmp_path, monkeypatch, unshare):
    install_compiler(tmp_path / "compiler", monkeypatch)
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = f'mount -t tmpfs -o noexec tmpfs {folder} && exec "$@"'
    around = {"FORERUN_CACHE": str(folder / "cache"), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    got, said = answered(wrapper=[unshare, "-m", "sh", "-c", mount, "sh"], **around)
    assert len(got) == 8
    assert [line for line in said if line.startswith("warning")] == said[-1:]
    assert "no CPU kernels of our own, torch's serve instead" in said[-1]
    assert "failed to map segment" in said[-1]
    assert said[-1].endswith("FORERUN_CACHE names another folder for them")
