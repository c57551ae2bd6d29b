"""How many threads commands start with: what the affinity mask and the quotas of control groups leave."""

import os

import pytest

from forerun.core.threads import usable_cores


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def grouped(folder, inner, outer=None):
    (folder / "a" / "b").mkdir(parents=True)
    for group, text in (("a/b", inner), ("a", outer)):
        if text is not None:
            (folder / group / "cpu.max").write_text(text)
    own = folder / "own"
    own.write_text("0::/a/b\n")
    return usable_cores(folder, own)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("50000 100000", None, 1),  # half a core
        ("150000 100000", None, 2),
        ("max 100000", None, 8),
        ("max 100000", "300000 100000", 3),
        ("400000 100000", "300000 100000", 3),
        ("900000 100000", None, 8),
        ("nonsense", None, 8),
        (None, None, 8),
    ],
)
def test_quotas(eight, tmp_path, inner, outer, expected):
    assert grouped(tmp_path, inner, outer) == expected


def test_no_control_groups(eight, tmp_path):
    assert usable_cores(tmp_path, tmp_path / "missing") == 8


def test_an_affinity_mask_of_one_core():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
