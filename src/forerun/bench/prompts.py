"""Prompts to measure on, as token ids: unseen code, text that repeats itself, and random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun.train.corpus import held_out_files, list_files, read_text, standard_library

HELD_OUT, REPETITIVE, RANDOM, FILE = "held_out", "repetitive", "random", "file"
SETS = (HELD_OUT, REPETITIVE, RANDOM)
REPETITION_ORDER = 4


def make_prompts(
    kind: str, tokenizer: Any, *, count: int, length: int, seed: int = 0, file: Path | None = None
) -> list[list[int]]:
    """``count`` prompts of at most ``length`` tokens each. With ``file``, its non-empty lines. Raises ConfigError."""
    if count < 1 or length < 1:
        raise ConfigError(f"prompts need a count and a length of at least 1, not {count} and {length}")
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
        return [_encode(tokenizer, _listing(source), length)[-length:] for _ in range(count)]
    return _windows(tokenizer, count, length, source)


def _from_file(file: Path, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {file}: {error}") from error
    if not lines:
        raise ConfigError(f"{file} has no prompts: write one per line")
    return [_encode(tokenizer, lines[i % len(lines)], length)[:length] for i in range(count)]


def _encode(tokenizer: Any, text: str, length: int) -> list[int]:
    return tokenizer.encode(text[: 64 * length], add_special_tokens=False, verbose=False)


def _windows(tokenizer: Any, count: int, length: int, source: random.Random) -> list[list[int]]:
    """Pieces of held-out files, each from the start of a line."""
    files = held_out_files() or list_files(standard_library())
    found: list[list[int]] = []
    order = source.sample(files, len(files))
    for attempt in range(50 * count):
        text = read_text(order[attempt % len(order)])
        lines = text.splitlines(keepends=True)
        start = source.randrange(max(1, len(lines) // 2))
        tokens = _encode(tokenizer, "".join(lines[start:]), length)[:length]
        if len(tokens) == length:
            found.append(tokens)
        if len(found) == count:
            return found
    raise ConfigError(f"the held-out files give only {len(found)} prompts of {length} tokens: ask for shorter ones")


def _listing(source: random.Random) -> str:
    """A table of entries of one shape: the next entry is easy to guess for who looks back."""
    names = ["status", "header", "reason", "method", "length", "offset", "target", "prefix"]
    word = source.choice(names)
    lines = [f"    {word}_{number}: int = {word}_table[{number}]\n" for number in range(source.randrange(40), 120)]
    return "class Table:\n" + "".join(lines[:60])


def repetition_rate(texts: Seq[Seq[int]], starts: Seq[int] | None = None) -> float | None:
    """Share of tokens that end a run of four which occurred before in the same text, from ``starts`` on.

    A high rate flatters drafters that copy from history.
    """
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
