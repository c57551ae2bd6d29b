"""Folders and files: where Forerun keeps what it can make or fetch again, who can have written it, and who may read
what it writes."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
POSIX = hasattr(os, "geteuid")
"""Elsewhere users are kept apart by other means than owners and modes."""


def cache_folder() -> Path:
    """``FORERUN_CACHE``, or ``forerun`` in the user's cache folder. Where others can write there, a folder of this
    user's own. Raises OSError where there is none."""
    named, *others = _places()
    reason = distrust(named)
    if reason is None:
        return named.resolve()
    for target in others:
        try:
            result = make_folder(target)
        except OSError:
            continue
        _warn(f"{reason}, so {named} is not used as the cache folder: {result} is. FORERUN_CACHE names another")
        return result
    raise PermissionError(errno.EACCES, f"{reason}, and there is no other cache folder", str(named))


def _places() -> Iterator[Path]:
    """Cache folders, the one that is asked for first."""
    named, base = os.environ.get("FORERUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if named:
        yield Path(named).expanduser()
    if base:
        yield Path(base) / "forerun"
    user = _name(os.geteuid()) if POSIX else ""
    for home in ("~", f"~{user}"):  # under sudo the first is often another user's
        try:
            yield Path(home).expanduser() / ".cache" / "forerun"
        except RuntimeError:  # nobody's home
            continue
    yield Path(tempfile.gettempdir()) / f"forerun-{user}"


def expanded(path: str | Path) -> Path:
    """``~`` and ``~USER`` replaced where there is such a user; else the path as it is."""
    return Path(os.path.expanduser(path))


@cache
def _warn(message: str) -> None:
    """Once."""
    log.warning("%s", message)


def distrust(path: Path) -> str | None:
    """Why somebody else can have written what is at ``path``, or can replace it; None for nobody but this user and
    root. Counts who owns it and the folders above, and who may write there; in a folder above, a sticky bit helps."""
    if not POSIX:
        return None
    target = path.resolve()
    for part in (target, *target.parents):
        try:
            result = part.lstat()
        except OSError:  # not there yet
            continue
        if result.st_uid not in (0, os.geteuid()):
            return f"{part} belongs to {_name(result.st_uid)}"
        if _others_write(result) and (part == target or not result.st_mode & stat.S_ISVTX):
            return f"others may write to {part}"
    return None


def _others_write(result: os.stat_result) -> bool:
    import grp

    if not result.st_mode & stat.S_IWGRP or result.st_mode & stat.S_IWOTH:
        return bool(result.st_mode & stat.S_IWOTH)
    try:
        group, owner = grp.getgrgid(result.st_gid), _name(result.st_uid)
    except KeyError:
        return True
    return group.gr_name != owner or not set(group.gr_mem) <= {owner}  # a user's own group has the user's name


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user-{user}"


def lock(file: int) -> None:
    """Keep an open file for this process alone, until it is closed; on Windows for all. Raises BlockingIOError where
    another process keeps it."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def make_folder(path: Path) -> Path:
    """Makes a folder, and those above it, that nobody but this user and root can write to. Raises OSError where that
    cannot be."""
    path = path.resolve()
    for part in (*reversed(path.parents), path):
        if not part.is_dir():
            part.mkdir(mode=0o755, exist_ok=True)
    if (reason := distrust(path)) is not None:
        raise PermissionError(errno.EACCES, reason)
    return path


def replace_with(path: Path, write: Callable[[Path], object], *, sync: bool = True) -> None:
    """Lets ``write`` make a file, which then takes the place of ``path``: whole, or not at all, whatever ends the
    process or, with ``sync``, the machine. Nobody else may write to it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as work:
        made = Path(work) / path.name
        write(made)
        made.chmod(made.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        if sync:
            with made.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(made, path)


def let_read(path: Path) -> None:
    """Gives a file the mode of others that this process writes: safetensors shows its own to nobody else, and a server
    may run under another name."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


class Record:
    """What was measured once and is kept as JSON in the cache folder: under ``kind``, by the circumstances that it
    holds in."""

    def __init__(self, kind: str, *circumstances: str) -> None:
        key = hashlib.sha256("\0".join(circumstances).encode()).hexdigest()[:24]
        self._place = Path(kind) / f"{key}.json"

    def read(self) -> Any:
        """None if there is none, or it is damaged, or others can have written it."""
        try:
            path = cache_folder() / self._place
            return None if distrust(path) else json.loads(path.read_text(encoding="utf-8"))
        except (OSError, RuntimeError, ValueError):  # RuntimeError: no cache folder, or too many brackets
            return None

    def write(self, value: Any) -> None:
        """Keep ``value``, where there is a cache folder that can be written."""
        try:
            path = cache_folder() / self._place
            make_folder(path.parent)
            replace_with(path, lambda made: made.write_text(json.dumps(value), encoding="utf-8"))
        except (OSError, RuntimeError) as error:
            log.info("what was measured cannot be kept: %s", error)
