"""Prompts for measurements, as token ids.

- ``held_out``: pieces of files that the bundled target was not trained on.
- ``repetitive``: prompts that their answers should repeat, made of the same files. An edit (a listing, then its
  beginning again), a table (rows of one shape) and JSON (records of one shape) alternate, all cut to one length.
- ``random``: tokens drawn uniformly, which nothing can predict.
"""

from __future__ import annotations

import json
import keyword
import random
import re
import sysconfig
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from forerun import pretrained
from forerun.core.errors import ConfigError
from forerun.measure.config import RANDOM, REPETITIVE, SETS, BenchConfig, PlanConfig

REPETITION_ORDER = 4
RECORD = '    {{"name": "{}", "type": "string", "default": null}},\n'


def make_prompts(
    kind: str, tokenizer: Any, *, count: int, length: int, seed: int = 0, file: Path | None = None
) -> list[list[int]]:
    """``count`` prompts of at most ``length`` tokens each. With ``file``, its non-empty lines. Raises ConfigError."""
    if file is not None:
        return _from_file(file, tokenizer, count, length)
    if kind not in SETS:
        raise ConfigError(f"unknown prompt set {kind!r}: choose one of {', '.join(SETS)}")
    source = random.Random(seed)
    if kind == RANDOM:
        special = set(tokenizer.all_special_ids)
        permitted = [token for token in range(len(tokenizer)) if token not in special]
        return [source.choices(permitted, k=length) for _ in range(count)]
    if kind == REPETITIVE:
        return _repetitive(tokenizer, count, length, source)
    return _windows(tokenizer, count, length, source)


def prompts_of(config: BenchConfig | PlanConfig, tokenizer: Any) -> list[list[int]]:
    """The prompts of ``config``, at least as many as are decoded together. Raises ConfigError."""
    kind, length, file = config.prompt_set, config.prompt_tokens, config.prompts_file
    count = max(config.prompts, *config.concurrency)
    return make_prompts(kind, tokenizer, count=count, length=length, seed=config.seed, file=file)


def _from_file(file: Path, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {file}: {error}") from error
    if not lines:
        raise ConfigError(f"{file} has no prompts: write one per line")
    return [_encode(tokenizer, lines[i % len(lines)], length)[:length] for i in range(count)]


def _encode(tokenizer: Any, text: str, length: int) -> list[int]:
    return list(tokenizer.encode(text[: 64 * length], add_special_tokens=False, verbose=False))


def _windows(tokenizer: Any, count: int, length: int, source: random.Random) -> list[list[int]]:
    """Pieces of held-out files, each from the start of a line."""
    files = _code_files()
    result: list[list[int]] = []
    order = source.sample(files, len(files))
    for attempt in range(50 * count):
        lines = read_text(order[attempt % len(order)]).splitlines(keepends=True)
        start = source.randrange(max(1, len(lines) // 2))
        tokens = _encode(tokenizer, "".join(lines[start:]), length)[:length]
        if len(tokens) == length:
            result.append(tokens)
        if len(result) == count:
            return result
    raise ConfigError(
        f"the held-out files have only {len(result)} prompts of {length} tokens: lower --prompts or --prompt-tokens"
    )


def _repetitive(tokenizer: Any, count: int, length: int, source: random.Random) -> list[list[int]]:
    """Edits, tables and JSON, alternating."""
    listings = _windows(tokenizer, -(-count // 3), max(1, length - length // 4 - 1), source)
    words = _words(source)
    newline = _encode(tokenizer, "\n", 1)
    result: list[list[int]] = []
    for number in range(count):
        if number % 3 == 0:
            listing = listings[number // 3]
            tokens = [*listing, *newline, *listing]
        else:
            chosen = source.sample(words, min(len(words), length))
            if number % 3 == 1:
                text = "MAPPING = {\n" + "".join(f"    '{name}': '{value}',\n" for name, value in pairwise(chosen))
            else:
                text = "[\n" + "".join(RECORD.format(name) for name in chosen[:-1])
            tokens = _encode(tokenizer, text, length)
        result.append(tokens[:length])
    return result


def _words(source: random.Random) -> list[str]:
    """Names that occur in the held-out files."""
    files = _code_files()
    text = "\n".join(read_text(file) for file in source.sample(files, min(6, len(files))))
    return sorted({word for word in re.findall(r"\b[a-z][a-z_]{2,11}\b", text) if not keyword.iskeyword(word)})


def repetition_rate(texts: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> float | None:
    """Fraction of the tokens from ``starts`` on that end a 4-gram which occurred before in the same text. A high rate
    flatters history drafters."""
    repeated, count = 0, 0
    for text, start in zip(texts, starts or [0] * len(texts)):
        seen: set[tuple[int, ...]] = set()
        for end in range(REPETITION_ORDER, len(text) + 1):
            run = tuple(text[end - REPETITION_ORDER : end])
            if end > start:
                count += 1
                repeated += run in seen
            seen.add(run)
    return repeated / count if count else None


def standard_library() -> Path:
    """Folder of the running interpreter's standard library: the corpus of the bundled models."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(path: Path) -> str:
    """Content of a text file; bytes that are not UTF-8 become replacement characters."""
    return path.read_text(encoding="utf-8", errors="replace")


def held_out_files() -> list[Path]:
    """The bundled models' held-out files (the target's ``training.json``) that this interpreter's library has."""
    record = json.loads((pretrained.path("target") / "training.json").read_text(encoding="utf-8"))
    return [path for name in record["held_out_files"] if (path := standard_library() / name).is_file()]


def _code_files() -> list[Path]:
    """The held-out files or, if this interpreter has none, its library's modules."""
    return held_out_files() or sorted(standard_library().glob("*.py"))
