"""What drafts are trained on: the user's own data, and generated user turns."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun.tune.data import PARAGRAPH, library_paragraphs


@dataclass(frozen=True)
class Data:
    """The user's data: ``turns`` of a user, and ``paragraphs`` to work on or to continue."""

    turns: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)


def read(path: Path | None) -> Data:
    """Read JSONL (a line has ``prompt``, ``messages`` or ``text``) or plain text from a file or a folder of files.
    Empty for None. Raises ConfigError for a missing path or one without a usable line."""
    if path is None:
        return Data()
    if not path.exists():
        raise ConfigError(f"no such file or folder: {path}")
    result = Data()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix in (".jsonl", ".ndjson"):
            for line in text.splitlines():
                _add_line(result, line)
        else:
            result.paragraphs.extend(_paragraphs(text))
    if not result.turns and not result.paragraphs:
        raise ConfigError(
            f"{path} has no usable line: JSONL lines have 'prompt', 'messages' or 'text'; texts have paragraphs of "
            f"{PARAGRAPH[0]} characters or more"
        )
    return result


def _add_line(data: Data, line: str) -> None:
    """Add the prompt, user messages and paragraphs of a JSON line; other lines are skipped."""
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return
    if not isinstance(item, dict):
        return
    messages = item.get("messages")
    messages = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    turns = [item.get("prompt"), *(m.get("content") for m in messages if m.get("role") == "user")]
    data.turns.extend(turn for turn in turns if isinstance(turn, str) and turn.strip())
    if isinstance(item.get("text"), str):
        data.paragraphs.extend(_paragraphs(item["text"]))


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.split("\n\n"):
        if len(part.strip()) >= PARAGRAPH[0]:
            yield part.strip()[: PARAGRAPH[1]]


@cache
def _templates() -> Any:
    return json.loads(resources("forerun_lab.tune").joinpath("turns.json").read_text("utf-8"))


def user_turns(seed: int, paragraphs: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (category, user turn) without end, filled into templates; categories alternate. ``paragraphs`` are the
    texts to work on; if empty, the standard library's."""
    rng = random.Random(seed)
    texts = paragraphs or library_paragraphs()
    while True:
        for name, parts in _templates().items():
            fields = {key: rng.choice(values) for key, values in parts.items() if key != "templates"}
            text = rng.choice(parts["templates"])
            if "{p}" in text:
                fields["p"] = rng.choice(texts)
            for key, value in fields.items():
                text = text.replace("{" + key + "}", value)
            yield name, text
