"""The cache folder: what others can have written there is neither read nor run, and what is damaged is made again."""

import io
import json
import os
import sys
from contextlib import contextmanager

import pytest

from compiler import install_compiler
from forerun import kernels
from forerun.cli import console
from forerun.core import folders
from forerun.core.folders import cache_folder, distrust, make_folder, replace_with
from forerun.core.loading import watch, watch_parts
from here import where
from refusals import refused
from terminal import Terminal

pytestmark = pytest.mark.slow

NOBODY = 65534
ROOT = "only root makes files of another user"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user with an empty home."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FORERUN_SANITIZE", raising=False)
    folders._warn.cache_clear()
    return folder


def foreign(path):
    os.chown(path, NOBODY, NOBODY)


def foreign_parent(path):
    os.chown(path.parent, NOBODY, NOBODY)


def foreign_link(path):
    path.rmdir()
    path.with_name("theirs").mkdir()
    os.chown(path.with_name("theirs"), NOBODY, NOBODY)
    path.symlink_to(path.with_name("theirs"))


def mode(bits):
    return lambda path: path.chmod(bits)


def open_parent(path):
    path.parent.chmod(0o777)


def open_parent_of_nothing(path):
    path.rmdir()
    path.parent.chmod(0o777)


def another_group(path):
    os.chown(path, -1, NOBODY)
    path.chmod(0o775)


OPEN = {
    "others may write": mode(0o757), "with a sticky bit": mode(0o1777), "the folder above": open_parent,
    "a folder to come": open_parent_of_nothing,
}  # fmt: skip
FOREIGN = {
    "another user's": foreign, "in another user's": foreign_parent, "a link to another's": foreign_link,
    "another group's": another_group,
}  # fmt: skip
CASES = [*OPEN.items(), *where(os.geteuid() == 0, FOREIGN.items(), ROOT)]


@pytest.mark.parametrize(("name", "spoil"), CASES)
def test_a_cache_folder_of_others_is_not_used(tmp_path, home, monkeypatch, caplog, name, spoil):
    named = tmp_path / "above" / "cache"
    named.mkdir(parents=True)
    monkeypatch.setenv("FORERUN_CACHE", str(named))
    assert cache_folder() == named
    spoil(named)
    assert cache_folder() == cache_folder() == home / ".cache" / "forerun"
    assert distrust(home / ".cache" / "forerun") is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{named} is not used as the cache folder: {home}/.cache/forerun is" in line
    refused(PermissionError, None, make_folder, named)


def test_where_the_home_is_anothers_too_a_third_folder_is_used(tmp_path, home, monkeypatch):
    """As under sudo, which keeps HOME."""
    (home / ".cache").mkdir(mode=0o777)
    (home / ".cache").chmod(0o777)
    monkeypatch.setattr(folders, "_name", lambda user: "nobody-of-that-name")
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache_folder() == tmp_path / "forerun-nobody-of-that-name"
    (tmp_path / "forerun-nobody-of-that-name").chmod(0o777)
    refused(PermissionError, "there is no other cache folder", cache_folder)


def test_a_private_folder_in_a_shared_one_is_used(tmp_path, home, monkeypatch):
    """As in /tmp, whose sticky bit keeps others from replacing it; and what is made is private, whatever the mask."""
    tmp_path.chmod(0o1777)
    named = tmp_path / "one" / "two"
    monkeypatch.setenv("FORERUN_CACHE", str(named))
    before = os.umask(0)
    try:
        assert make_folder(cache_folder()) == named
        replace_with(named / "file", lambda path: path.write_text("x"))
    finally:
        os.umask(before)
    assert distrust(named / "file") is None


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (steps.append("fsync"), fsync(number))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (steps.append("replace"), replace(*names))[1])

    def half(made):
        made.write_text("ne")
        raise OSError("no space left")

    refused(OSError, "no space", replace_with, path, half)
    assert (path.read_text(), steps) == ("old", [])
    replace_with(path, lambda made: made.write_text("new"))
    assert (path.read_text(), steps) == ("new", ["fsync", "replace"])
    assert [*tmp_path.iterdir()] == [path]


@pytest.fixture
def unwatched():
    before, parts = watch.get(), watch_parts.get()
    yield
    watch.set(before)
    watch_parts.set(parts)


def test_compiling_is_reported_part_by_part(tmp_path, home, monkeypatch, unwatched):
    steps = []
    told = []

    @contextmanager
    def watcher(title, total):
        told.append((title, total))
        yield steps.append

    watch_parts.set(watcher)
    log = install_compiler(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        assert kernels.library.__wrapped__() is not None
        assert told == [(kernels.COMPILING, sum(steps))]
        assert sum(steps) == len(log.read_text().splitlines()) == len(kernels.units_of(None)) + 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_has_a_bar_and_a_file_a_line(monkeypatch, unwatched, terminal):
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    console.watch_loading()
    with watch_parts.get()("Doing it", 3) as advance:
        advance(1)
        advance(1)
    said = sys.stderr.getvalue()
    assert ("2/3" in said and "Doing it" in said) if terminal else said == "Doing it\n"


def test_a_first_start_says_that_it_compiles_and_prints_json_alone(warm, tmp_path, home, monkeypatch, tiny_target):
    install_compiler(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    done = warm.run("generate", "x", "--model", tiny_target, "--max-tokens", "2", "--json")
    assert (done.returncode, done.stderr, type(json.loads(done.stdout))) == (0, f"{kernels.COMPILING}\n", dict)
