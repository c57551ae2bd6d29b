"""Fill in the middle: prompts that also have the text after the cursor, by the tokens that a model has for that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import RequestError, shown
from forerun.models.text.tokenizer import encode
from forerun.sampling.params import SamplingParams

PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = "prefix", "suffix", "middle", "repository", "file"
LINE, BLOCK = "line", "block"
NO_SPACE = "\N{WHITE SMILING FACE}"
"""What no token has in common with a text after it, for tokenizers that put a space before each text."""


@dataclass(frozen=True)
class Names:
    """The names of a family's tokens, and their order: prefix first unless ``suffix_first``."""

    prefix: str
    suffix: str
    middle: str | None
    """What the answer follows; None: it follows the prefix."""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, beside these."""


FAMILIES = {
    "Qwen2.5-Coder, CodeGemma, Granite 4": Names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "StarCoder 2, Granite": Names("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "DeepSeek-Coder": Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "CodeLlama": Names("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    "GLM 4.5": Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    "Seed-Coder": Names("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    "Codestral": Names("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
}
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>")
"""Tokens of any family that end an answer."""


@dataclass(frozen=True)
class RepositoryNames:
    """The names of tokens before a repository's name and each file's path."""

    repository: str | None
    file: str
    line_end: str = "\n"
    """What follows the repository's name."""
    path_inside: bool = False
    """Whether the path of the file with the cursor follows the prefix token, instead of preceding it."""


REPOSITORIES = (
    RepositoryNames("<|repo_name|>", "<|file_sep|>"),  # Qwen2.5-Coder
    RepositoryNames("<repo_name>", "<file_sep>", line_end="", path_inside=True),  # StarCoder 2
    RepositoryNames(None, "<|file_separator|>"),  # CodeGemma
)


@dataclass(frozen=True)
class Hole:
    """What is around the cursor.

    ``begun`` follows the prefix with tokens of its own, as llama.cpp does it (``format_prompt_infill``): what was read
    before it is found in the prefix cache while it grows.
    ``files`` are other files of the repository, a path and a text each, the least important first.
    """

    prefix: str
    suffix: str
    begun: str = ""
    files: Sequence[tuple[str, str]] = ()
    repository: str | None = None
    path: str | None = None


class Infill:
    """Makes prompts for holes with the tokens that a model's tokenizer has.

    Raises RequestError, from every method but ``ends``, if there are none.
    """

    def __init__(self, tokenizer: Any) -> None:
        vocabulary = tokenizer.get_vocab()
        self.tokenizer = tokenizer
        self.ids: dict[str, int] = dict(getattr(tokenizer, "infill_ids", {}))
        """By role; a GGUF file may say them."""
        by_id = {index: name for name, index in vocabulary.items()} if self.ids else {}
        given = by_id.get(self.ids.get(PREFIX, -1))
        families = [names for names in FAMILIES.values() if given in (None, names.prefix)]
        self.names = next(
            (n for n in families if {n.prefix, n.suffix, n.middle or n.prefix} <= vocabulary.keys()), None
        )
        if self.names is not None:
            for role in (PREFIX, SUFFIX, MIDDLE):
                if (name := getattr(self.names, role)) is not None:
                    self.ids.setdefault(role, vocabulary[name])
        self.suffix_first = self.names is not None and self.names.suffix_first
        self.usable = {PREFIX, SUFFIX} <= self.ids.keys() and (MIDDLE in self.ids or self.suffix_first)
        self.repository = next((n for n in REPOSITORIES if n.file in vocabulary), RepositoryNames(None, ""))
        for role, name in ((FILE, self.repository.file), (REPOSITORY, self.repository.repository)):
            if name in vocabulary:
                self.ids.setdefault(role, vocabulary[name])
        names = [*ENDS, *(self.names.ends if self.names is not None else ())]
        self.ends = sorted({*self.ids.values(), *(vocabulary[name] for name in names if name in vocabulary)})
        """Tokens that end an answer: after them, another text would begin."""
        added = [text for text in tokenizer.get_added_vocab() if text]
        self._marked = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))) if added else None
        alone = tokenizer.convert_ids_to_tokens(encode(tokenizer, "x", add_special_tokens=False))
        self._spaced = alone[:1] not in ([], ["x"])

    def prompt(self, hole: Hole, room: int | None = None) -> list[int]:
        """Returns the tokens of a prompt whose answer fills the hole.

        Args:
            hole: what is around the cursor.
            room: most tokens; files are left out, the first ones first, until it is kept or there are none.
        """
        if not self.usable:
            families = ", ".join(FAMILIES)
            message = f"this model has no tokens to fill in the middle: remove suffix, or use a model of {families}"
            raise RequestError(message, param="suffix")
        begin, end = self._begin(), self._around(hole)
        files = [self._file(path, text) for path, text in hole.files]
        named = bool(files) or hole.repository is not None
        head: list[int] = []
        if named and REPOSITORY in self.ids:
            name = (hole.repository or "repository") + self.repository.line_end
            head = [self.ids[REPOSITORY], *self._plain(name)]
        while files and room is not None and sum(map(len, (begin, head, *files, end))) > room:
            del files[0]
        return [*begin, *head, *(token for file in files for token in file), *end]

    def _begin(self) -> list[int]:
        ids, start = encode(self.tokenizer, ""), getattr(self.tokenizer, "bos_token_id", None)
        return [start] if start is not None and ids[:1] == [start] else []

    def _file(self, path: str, text: str) -> list[int]:
        if FILE not in self.ids:
            return self._plain(f"# {path}\n{text}\n")
        return [self.ids[FILE], *self._plain(f"{path}\n{text}{'' if text.endswith(chr(10)) else chr(10)}")]

    def _around(self, hole: Hole) -> list[int]:
        """The tokens from those of the file with the cursor on."""
        path: list[int] = []
        within = ""
        if FILE in self.ids and (hole.files or hole.repository is not None or hole.path is not None):
            path, line = [self.ids[FILE]], f"{hole.path or 'file'}\n"
            if self.repository.path_inside:
                within = line
            else:
                path += self._plain(line)
        prefix = [self.ids[PREFIX], *self._plain(within + hole.prefix, spaced=True), *self._plain(hole.begun)]
        suffix = [self.ids[SUFFIX], *self._plain(hole.suffix)]
        middle = [self.ids[MIDDLE]] if MIDDLE in self.ids else []
        both = [*suffix, *prefix] if self.suffix_first else [*prefix, *suffix]
        return [*path, *both, *middle]

    def _plain(self, text: str, *, spaced: bool = False) -> list[int]:
        """The tokens of a text in which the names of special tokens are text, too. ``spaced``: with the space that the
        tokenizer puts before texts, if it does."""
        parts, start = [], 0
        for match in self._marked.finditer(text) if self._marked is not None else ():
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
        parts.append(text[start:])
        result: list[int] = []
        for number, part in enumerate(parts):
            mark = NO_SPACE if self._spaced and (number or not spaced) else ""
            skipped = len(encode(self.tokenizer, mark, add_special_tokens=False)) if mark else 0
            result += encode(self.tokenizer, mark + part, add_special_tokens=False)[skipped:] if part else []
        return result


def files_of(given: Any) -> list[tuple[str, str]]:
    """Checks ``input_extra``: mappings with ``text`` and perhaps ``filename``. Raises RequestError."""
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
        raise RequestError(f"input_extra must be a list of mappings, not {shown(given)}", param="input_extra")
    result = []
    for each in given:
        name, text = (each.get("filename", "tmp"), each.get("text")) if isinstance(each, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str) or set(each) - {"filename", "text"}:
            raise RequestError(
                f"each of input_extra has a 'text' and perhaps a 'filename', not {shown(each)}", param="input_extra"
            )
        result.append((name, text))
    return result


def ending(params: SamplingParams, at: str | None, before: str, ends: Sequence[int] = ()) -> SamplingParams:
    """Returns the options of an answer that ends at its line or its block (None: anywhere). Raises RequestError.

    Args:
        params: the request's own options.
        at: ``line``: before the first line end. ``block``: before a line that is indented less than the cursor's, or
            not more where that line has begun.
        before: the text before the cursor.
        ends: tokens that end the answer, too, unless the options ignore the end of a text.
    """
    if ends and not params.ignore_eos:
        params = params.clone(stop_token_ids=[*(params.stop_token_ids or ()), *ends])
    if at is None:
        return params
    if at == LINE:
        return params.clone(stop=[*(params.stop or ()), "\n"])
    if at != BLOCK:
        raise RequestError(f"stop_at must be {LINE!r} or {BLOCK!r}, not {shown(at)}", param="stop_at")
    line = before[before.rfind("\n") + 1 :]
    width = len(line) - len(line.lstrip())
    return params.clone(min_indent=max(1, width if width == len(line) else width + 1))
