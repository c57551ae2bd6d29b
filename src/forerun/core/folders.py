"""The cache folder, and files that other users of the machine must not be able to change."""

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
"""Whether files have owners and modes."""


def cache_folder() -> Path:
    """``FORERUN_CACHE``, or ``forerun`` in the user's cache folder; another folder if other users can write there.
    Raises OSError if there is none."""
    named, *others = _candidates()
    reason = distrust(named)
    if reason is None:
        return Path(os.path.realpath(named))
    for target in others:
        try:
            result = make_folder(target)
        except OSError:
            continue
        _warn(f"{reason}, so {named} is not used as the cache folder: {result} is. FORERUN_CACHE names another")
        return result
    raise PermissionError(errno.EACCES, f"{reason}, and there is no other cache folder", str(named))


def _candidates() -> Iterator[Path]:
    """Possible cache folders, the preferred one first."""
    named, base = os.environ.get("FORERUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if named:
        yield expanded(named)
    if base:
        yield Path(base) / "forerun"
    user = _name(os.geteuid()) if POSIX else ""
    for home in ("~", f"~{user}"):  # under sudo the first is often another user's
        try:
            yield Path(home).expanduser() / ".cache" / "forerun"
        except RuntimeError:  # there is no such home
            continue
    yield Path(tempfile.gettempdir()) / f"forerun-{user}"


def expanded(path: str | Path) -> Path:
    """The path with ``~`` and ``~USER`` replaced, if there is such a user."""
    return Path(os.path.expanduser(path))


@cache
def _warn(message: str) -> None:
    """Warns once."""
    log.warning("%s", message)


def distrust(path: Path) -> str | None:
    """Why other users may have written, or may replace, the file or folder ``path``; None: only this user and root can.

    Looks at owners and modes of ``path`` and of all folders above, in which a sticky bit protects it.
    """
    if not POSIX:
        return None
    target = Path(os.path.realpath(path))  # unlike Path.resolve, it raises nothing for links in a circle
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
    """Locks an open file until it is closed; nothing on Windows. Raises BlockingIOError if another process has it."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_private(path: Path) -> int:
    """Opens a file that only this user can read and write, and makes it if it is not there. Raises OSError for a link,
    for anything but a file, and if it is another user's or its mode lets others in."""
    flags = os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    file = os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        reason = "it is not a file"
    elif POSIX and found.st_uid != os.geteuid():
        reason = f"it belongs to {_name(found.st_uid)}"
    elif POSIX and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        reason = f"others can use it: chmod 600 {path}"
    else:
        return file
    os.close(file)
    raise PermissionError(reason)


def make_folder(path: Path) -> Path:
    """Makes a folder that only this user and root can write to, and its parents. Raises OSError."""
    path = path.resolve()
    for part in (*reversed(path.parents), path):
        if not part.is_dir():
            part.mkdir(mode=0o755, exist_ok=True)
    if (reason := distrust(path)) is not None:
        raise PermissionError(errno.EACCES, reason)
    return path


def replace_with(path: Path, write: Callable[[Path], object], *, sync: bool = True) -> None:
    """Replaces the file ``path`` by one that ``write`` makes: wholly or not at all, even if the process or, with
    ``sync``, the machine ends meanwhile. Other users may not write to it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as work:
        made = Path(work) / path.name
        write(made)
        made.chmod(made.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        if sync:
            with made.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(made, path)


def let_read(path: Path) -> None:
    """Gives a file the mode that the umask asks for: safetensors hides its files from a server of another user."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def read_kept(name: Path) -> bytes | None:
    """A file of the cache folder; None if there is none, or if other users may have written it."""
    try:
        path = cache_folder() / name
        return None if distrust(path) else path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: no cache folder
        return None


def keep(name: Path, content: bytes) -> None:
    """Makes a file of the cache folder, if that can be written."""
    try:
        path = cache_folder() / name
        make_folder(path.parent)
        replace_with(path, lambda made: made.write_bytes(content))
    except (OSError, RuntimeError) as error:
        log.info("%s cannot be kept for the next start: %s", name, error)


class Record:
    """A measurement as JSON in the cache folder ``kind``, valid in the given ``environment``."""

    def __init__(self, kind: str, *environment: str) -> None:
        # Earlier versions share the folder, and take a record with a hash for a measurement.
        key = hashlib.sha256("\0".join(("with a hash", *environment)).encode()).hexdigest()[:24]
        self._path = Path(kind) / f"{key}.json"

    def read(self) -> Any:
        """The measurement; None if there is none, if it is damaged, or if other users may have written it."""
        try:
            kept = json.loads(read_kept(self._path) or "null")
            return kept["value"] if kept["sha256"] == _digest(kept["value"]) else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, value: Any) -> None:
        """Keeps ``value``, if there is a writable cache folder."""
        keep(self._path, json.dumps({"sha256": _digest(value), "value": value}).encode())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
