"""Kernels that a platform wheel carries: chosen by what the processor has, never half loaded."""

import logging
import platform
import shutil
import subprocess
import sys
from contextvars import Context
from pathlib import Path

import pytest

from border import ALL_KERNELS
from forerun import kernels
from here import where

pytestmark = ALL_KERNELS


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """A folder as in a wheel, with this machine's own kernels under every name."""
    monkeypatch.setattr(kernels, "PREBUILT", tmp_path / "carried")
    monkeypatch.delenv("FORERUN_SANITIZE", raising=False)
    kernels.PREBUILT.mkdir()
    result = kernels.library()
    assert result is not None
    for name in kernels.VARIANTS:
        shutil.copy(result._name, kernels.prebuilt(name))
    return kernels.PREBUILT


def chosen():
    result = kernels._load_prebuilt()
    return "" if result is None else Path(result._name).name.rsplit("-", 1)[0]


AVX512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(("units", "expected"), [
    ({"avx2", "fma"}, ""),
    ({"avx2", "fma", "f16c"}, "avx2"),
    ({"avx2", "fma", "f16c", "avx_vnni"}, "avx_vnni"),
    (AVX512 - {"avx512dq"}, "avx2"),
    (AVX512, "avx512"),
    (AVX512 | {"avx512_vnni", "avx_vnni"}, "avx512_vnni"),
    (AVX512 | {"avx512_vnni", "avx512_bf16"}, "avx512_vnni_bf16"),
    ({"asimd"}, "neon"),
    ({"asimd", "asimddp"}, "neon_dotprod"),
    ({"asimd", "i8mm"}, "neon"),
    ({"asimd", "asimddp", "i8mm"}, "neon_i8mm"),
])  # fmt: skip
def test_the_best_that_the_processor_has_is_loaded(carried, monkeypatch, units, expected):
    monkeypatch.setattr(kernels, "_cpu_features", lambda: frozenset(units))
    assert chosen() == expected


ARM_UNITS = {
    b"hw.optional.neon": "asimd", b"hw.optional.arm.FEAT_DotProd": "asimddp", b"hw.optional.arm.FEAT_I8MM": "i8mm"
}  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), [
    ({16: 0b10, 26: 0}, {"asimd"}),
    ({16: 1 << 20 | 0b10, 26: 1 << 12}, {"asimd", "asimddp"}),
    ({16: 1 << 20 | 0b10, 26: 1 << 13}, {"asimd", "asimddp", "i8mm"}),
    ({16: 1 << 13, 26: 0b10}, set()),
])  # fmt: skip
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_on_arm_the_system_says_what_the_processor_has(monkeypatch, system, words, expected):
    class System:
        def __init__(self, path):
            assert path is None

        def sysctlbyname(self, name, value, size, new, length):
            unit = ARM_UNITS[name]
            if unit != "asimd" and unit not in expected:
                return -1  # as older systems do, which do not know it
            value._obj.value = unit in expected
            return 0

    System.getauxval = staticmethod(lambda which: words[which])
    monkeypatch.setattr(kernels, "ON_ARM", True)
    monkeypatch.setattr(kernels.sys, "platform", system)
    monkeypatch.setattr(kernels.ctypes, "CDLL", System)
    assert kernels._cpu_features() == expected


def test_nothing_is_compiled_where_they_are_carried(carried, monkeypatch):
    monkeypatch.setattr(kernels, "compile_kernels", lambda *arguments, **how: pytest.fail("compiled"))
    monkeypatch.setattr(kernels, "COMPILERS", ())
    monkeypatch.setattr(kernels, "ZIG", "no_such_module")
    result = kernels.library.__wrapped__()
    assert result is not None
    assert Path(result._name).parent == carried


def test_kernels_of_other_sources_or_damaged_ones_are_left(carried, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_source_texts", lambda: ["other sources"])
    assert chosen() == ""
    whole = next(carried.iterdir()).read_bytes()
    for content in (b"no library", b"", whole[: len(whole) // 2], whole[:-1]):
        for name in kernels.VARIANTS:
            kernels.prebuilt(name).write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert chosen() == ""
        assert "is damaged" in caplog.text
        assert "cannot be loaded, they are compiled instead" in caplog.text


ZIG = """import pathlib, sys
assert sys.argv[1] == "c++"
to = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
to.write_bytes(pathlib.Path({kernels!r}).read_bytes()[: -{seal}] if to.suffix == ".so" else b"")
"""


def test_without_a_compiler_of_the_system_the_extras_one_compiles(tmp_path, monkeypatch):
    """Also where every program is out of reach: it is called as a module of this Python."""
    whole = kernels.library()
    assert whole is not None
    package = tmp_path / "packages" / "zig_like"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(ZIG.format(kernels=whole._name, seal=kernels.HASH_SIZE), encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "ZIG", "zig_like")
    result = kernels.library.__wrapped__()
    assert result is not None
    assert Path(result._name).parent == tmp_path / "cache"


def test_a_compiler_that_takes_too_long_is_one_short_line(tmp_path, monkeypatch, caplog):
    def compile_for_ever(command, **how):
        raise subprocess.TimeoutExpired([*command, "x" * 5000], how["timeout"])

    monkeypatch.setattr(kernels.subprocess, "run", compile_for_ever)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):  # a command in an earlier test watches in this context
        assert Context().run(kernels.library.__wrapped__) is None
    said = "no CPU kernels of our own, torch's serve instead: the compiler was not done with a file after 600 s"
    assert caplog.messages == [kernels.COMPILING, said]


ANSWERS = """
import ctypes, sys
from forerun import LLM, SamplingParams, kernels

if len(sys.argv) > 1:
    made = ctypes.CDLL(sys.argv[1])
    kernels._bind(made)
    kernels.library = lambda: made
how = SamplingParams(seed=3, temperature=0.9, max_tokens=40, ignore_eos=True, logprobs=5, prompt_logprobs=3)
for name in ("float32", "bfloat16", "q4_0", "q4_k", "q8_0", "int8_rows"):
    options = {"quantization" if "_" in name else "dtype": name}
    for out in LLM(speculative_config={"method": "ngram"}, **options).generate(["def parse(", "import os"], how):
        print(options, out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "other", where(bool(kernels.zig() and shutil.which("g++")), ["g++"], "ziglang and g++ are not both here")
)
def test_ziglangs_kernels_give_the_bits_of_the_systems_compiler(tmp_path, monkeypatch, other):
    """A whole model's log-probabilities, to the last digit, by what a wheel carries for this processor."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / ".ci"))
    from prebuild import TARGETS, zig_flag

    machine = next(flags for needed, flags in kernels.VARIANTS.values() if kernels._cpu_features() >= needed)
    how = ("-target", TARGETS[f"manylinux_2_28_{platform.machine()}"][0], zig_flag(machine))
    library = kernels.Library(tmp_path / "kernels.so", kernels.all_units())
    assert kernels.compile_kernels(kernels.zig(), [library], how, timeout=None) == {}

    def answers(*library):
        command = [sys.executable, "-c", ANSWERS, *library]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    ours = answers()
    assert len(ours.splitlines()) == 12
    assert answers(str(tmp_path / "kernels.so")) == ours
