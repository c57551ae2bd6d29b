"""Kernels that a platform wheel carries: chosen by what the processor has, never half loaded."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from forerun import kernels


@pytest.fixture
def carried(tmp_path, monkeypatch) -> Path:
    """A folder as in a wheel, with this machine's own kernels under every name."""
    monkeypatch.setattr(kernels, "CARRIED", tmp_path / "carried")
    monkeypatch.delenv("FORERUN_SANITIZE", raising=False)
    kernels.CARRIED.mkdir()
    result = kernels.library()
    assert result is not None
    for name in kernels.CARRIABLE:
        shutil.copy(result._name, kernels.carried(name))
    return kernels.CARRIED


def chosen() -> str:
    result = kernels._carried()
    return "" if result is None else Path(result._name).name.rsplit("-", 1)[0]


AVX512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ({"avx2", "fma"}, ""),
        ({"avx2", "fma", "f16c"}, "avx2"),
        ({"avx2", "fma", "f16c", "avx_vnni"}, "avx_vnni"),
        (AVX512 - {"avx512dq"}, "avx2"),
        (AVX512, "avx512"),
        (AVX512 | {"avx512_vnni", "avx_vnni"}, "avx512_vnni"),
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, "avx512_vnni_bf16"),
    ],
)
def test_the_best_that_the_processor_has_is_loaded(carried, monkeypatch, units, expected):
    monkeypatch.setattr(kernels, "_units", lambda: frozenset(units))
    assert chosen() == expected


def test_nothing_is_compiled_where_they_are_carried(carried, monkeypatch):
    monkeypatch.setattr(kernels, "_compile", lambda *arguments: pytest.fail("compiled"))
    monkeypatch.setattr(kernels, "COMPILERS", ())
    monkeypatch.setattr(kernels, "ZIG", "no_such_module")
    result = kernels.library.__wrapped__()
    assert result is not None
    assert Path(result._name).parent == carried


def test_kernels_of_other_sources_or_damaged_ones_are_left(carried, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_written", lambda: ["other sources"])
    assert chosen() == ""
    whole = next(carried.iterdir()).read_bytes()
    for content in (b"no library", b"", whole[: len(whole) // 2], whole[:-1]):
        for name in kernels.CARRIABLE:
            kernels.carried(name).write_bytes(content)
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
    (package / "__main__.py").write_text(ZIG.format(kernels=whole._name, seal=kernels.SEAL), encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "ZIG", "zig_like")
    result = kernels.library.__wrapped__()
    assert result is not None
    assert Path(result._name).parent == tmp_path / "cache"
