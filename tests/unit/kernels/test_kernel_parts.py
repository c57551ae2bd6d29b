"""The kernels' libraries: what serves a dtype or a block-quantized type is compiled when a model first needs it."""

import json
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kinds

from compiler import install_compiler
from forerun import kernels
from gguf_files import write_model
from here import where

pytestmark = pytest.mark.slow

HERE = where(sys.platform == "linux" and kernels.library() is not None, [1], "on Linux the kernels are several parts")
MIXED = {"norm": Kinds.F32, "ffn_down": Kinds.Q6_K, "": Kinds.Q4_K}
MADE = """
import json, pathlib, sys
from forerun import LLM, SamplingParams
llm = LLM(sys.argv[1], speculative_config={"method": "draft_model", "model": sys.argv[1], "quantization": "q5_0"})
loaded = pathlib.Path("/proc/self/maps").read_text()
out = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
assert pathlib.Path("/proc/self/maps").read_text().count("/kernels-") == loaded.count("/kernels-"), "compiled late"
print(json.dumps([llm.model.info.path, list(out.outputs[0].token_ids)]))
"""
REFUSED = """
import torch
from forerun import kernels
from forerun.kernels import structs
library, at = kernels.library(), torch.zeros(4096).data_ptr()
assert kernels.has("linear_float32") and not kernels.has("linear_float64")
kind = structs.KINDS.index("q6_k")
for call, arguments in ((library.linear_quants_float32, (kind, at, at, at, None, None, 1, 16, 256, 16, 1)),
                        (library.get_rows_float32, (kind, at, at, at, 1, 16, 256))):
    try:
        call(*arguments)
    except kernels.KernelError as error:
        print(str(error).partition(": ")[2])
"""
FAILS = """#!/bin/sh
case "$*" in *COMPILED*q6_k*) echo "error: no such instruction" >&2; exit 1;; esac
exec {} "$@"
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and a compiler that takes no time. The log of its calls."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FORERUN_SANITIZE", raising=False)
    return install_compiler(tmp_path / "bin", monkeypatch)


def parts(cache):
    """The parts that lie in a cache folder, all of them whole; "" is what they share."""
    found = list(Path(cache).glob("kernels-*.so"))
    assert all(map(kernels.intact, found))
    return sorted("".join(path.stem.split("-")[2:]) for path in found)


def made(warm, model):
    done = warm.run(str(model), code=MADE)
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout), [line.removeprefix("warning: ") for line in done.stderr.splitlines()])


@pytest.mark.parametrize("_", HERE)
@pytest.mark.parametrize(("kinds", "expected"), [
    ({"norm": Kinds.F32, "": Kinds.BF16}, ["bfloat16", "q5_0"]),
    (MIXED, ["bfloat16", "q4_k", "q5_0", "q6_k"]),
])  # fmt: skip
def test_a_model_compiles_what_it_needs_before_its_first_request(warm, fresh, tmp_path, kinds, expected, _):
    path = write_model(tmp_path / "model.gguf", kinds=kinds, width=256)
    answers = made(warm, path)
    assert parts(tmp_path / "cache") == ["", *expected]
    assert answers[2] == [kernels.COMPILING]
    fresh.unlink()
    assert made(warm, path) == (*answers[:2], [])
    assert not fresh.exists(), "it was compiled again"


@pytest.mark.parametrize("_", HERE)
def test_weights_whose_kernels_cannot_be_compiled_are_dequantized(warm, fresh, tmp_path, _):
    path = write_model(tmp_path / "model.gguf", kinds=MIXED, width=256)
    whole = made(warm, path)
    for each in (tmp_path / "cache").glob("kernels-*.so"):
        each.unlink()
    real = fresh.parent / "c++"
    real.rename(real.with_name("real"))
    real.write_text(FAILS.format(real.with_name("real")), encoding="utf-8")
    real.chmod(0o755)
    layout, tokens, said = made(warm, path)
    assert ("Q6_K" in whole[0], "Q6_K" in layout, len(tokens)) == (True, False, len(whole[1]))
    (line,) = [line for line in said if "Compiling" not in line]
    assert "no CPU kernels of our own for q6_k, torch's serve instead: error: no such instruction" in line
    assert parts(tmp_path / "cache") == ["", "bfloat16", "q4_k", "q5_0"]


@pytest.mark.parametrize("_", HERE)
def test_two_processes_may_compile_the_same_at_once(warm, fresh, tmp_path, _):
    path = write_model(tmp_path / "model.gguf", kinds=MIXED, width=256)
    started = [warm.piped(str(path), code=MADE) for _ in range(3)]
    answers = [each.stdout.read() for each in started]
    assert [each.wait(120) for each in started] == [0, 0, 0]
    for each in started:
        each.close()
    assert len({text.splitlines()[-1] for text in answers}) == 1
    assert parts(tmp_path / "cache") == ["", "bfloat16", "q4_k", "q5_0", "q6_k"]


@pytest.mark.parametrize("_", HERE)
@pytest.mark.usefixtures("fresh")
def test_a_type_without_kernels_is_refused_and_not_called(warm, _):
    done = warm.run(code=REFUSED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["a layer is of an unknown kind or has too many parts"] * 2


def test_a_name_that_no_kernel_has_is_an_error():
    with pytest.raises(KeyError, match="no_such"):
        kernels.has("no_such_float32")
