"""What a user gives to tune on: prompts, chats or texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun.tune.turns import PARAGRAPH


@dataclass(frozen=True)
class Data:
    """``turns`` a user takes, and ``paragraphs`` to work on or to go on with."""

    turns: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)


def read(path: Path | None) -> Data:
    """JSONL (a line has ``prompt``, ``messages`` or ``text``) or plain text, a file or a folder of them; None: nothing.

    Raises ConfigError for a path that is not there, or that has no usable line."""
    if path is None:
        return Data()
    if not path.exists():
        raise ConfigError(f"no such file or folder: {path}")
    result = Data()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            _take(result, text, lines=file.suffix in (".jsonl", ".ndjson"))
    if not result.turns and not result.paragraphs:
        raise ConfigError(
            f"{path} has no usable line: JSONL lines have 'prompt', 'messages' or 'text'; texts have paragraphs of "
            f"{PARAGRAPH[0]} characters or more"
        )
    return result


def _take(result: Data, text: str, *, lines: bool) -> None:
    if not lines:
        result.paragraphs.extend(_paragraphs(text))
        return
    for line in text.splitlines():
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if isinstance(item, dict):
            result.turns.extend(_asked(item))
            result.paragraphs.extend(_paragraphs(item.get("text")))


def _asked(item: dict[str, Any]) -> Iterator[str]:
    messages = item.get("messages")
    talk = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    said = [m.get("content") for m in talk if m.get("role") == "user"]
    for text in (item.get("prompt"), *said):
        if isinstance(text, str) and text.strip():
            yield text


def _paragraphs(text: Any) -> Iterator[str]:
    if isinstance(text, str):
        for part in text.split("\n\n"):
            if len(part.strip()) >= PARAGRAPH[0]:
                yield part.strip()[: PARAGRAPH[1]]
