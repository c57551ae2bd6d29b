"""Prompts for tuning: the user's own data, generated user turns, and a fixed held-out set."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM
from forerun.measure.prompts import standard_library
from forerun.models.text.chat import Message, render_chat
from forerun.models.text.tokenizer import encode

OPENING = 32
"""Tokens of a text that a model without a chat template continues."""
PARAGRAPH = (200, 1200)
"""Characters of a paragraph, at least and at most."""
PARAGRAPHS = 1000
"""Paragraphs taken from the standard library."""


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
def _resource(name: str) -> Any:
    return json.loads(resources("forerun.tune").joinpath(name).read_text("utf-8"))


def held_out() -> tuple[tuple[str, str], ...]:
    """(category, user turn), four of each category; ``user_turns`` yields none of them."""
    return tuple((name, turn) for name, turns in _resource("held_out.json").items() for turn in turns)


def user_turns(seed: int, paragraphs: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (category, user turn) without end, filled into templates; categories alternate. ``paragraphs`` are the
    texts to work on; if empty, the standard library's."""
    rng = random.Random(seed)
    texts = paragraphs or library_paragraphs()
    while True:
        for name, parts in _resource("turns.json").items():
            fields = {key: rng.choice(values) for key, values in parts.items() if key != "templates"}
            text = rng.choice(parts["templates"])
            if "{p}" in text:
                fields["p"] = rng.choice(texts)
            for key, value in fields.items():
                text = text.replace("{" + key + "}", value)
            yield name, text


@cache
def library_paragraphs() -> list[str]:
    """Paragraphs of the standard library: docstrings and short functions."""
    result: list[str] = []
    for path in sorted(Path(standard_library()).glob("*.py")):
        if len(result) >= PARAGRAPHS:
            break
        try:
            source = path.read_text(encoding="utf-8")
            tree, lines = ast.parse(source), source.splitlines()
        except (OSError, ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                doc = ast.get_docstring(node) or ""
                result += [part for part in doc.split("\n\n") if _fits(part)]
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                    if _fits(code) and len(result) % 3 == 0:
                        result.append(code)
    return result


def _fits(text: str) -> bool:
    return PARAGRAPH[0] <= len(text.strip()) <= PARAGRAPH[1]


def held_out_prompts(llm: LLM, longest: int, paragraphs: Sequence[str] = ()) -> list[list[int]]:
    """Token ids of prompts that are never trained on, at most ``longest`` tokens each. A model with a chat template
    gets ``held_out``; another one beginnings of ``paragraphs`` or of the standard library's."""
    if not getattr(llm.tokenizer, "chat_template", None):
        texts = list(paragraphs) or library_paragraphs()
        return [llm.encode(text)[1][:OPENING] for text in every_fortieth(texts)]
    prompts = [rendered(llm, [{"role": "user", "content": turn}]) for _, turn in held_out()]
    return [prompt for prompt in prompts if len(prompt) <= longest]


def every_fortieth(texts: Sequence[str]) -> Sequence[str]:
    """The texts that are held out."""
    return texts[:: max(1, len(texts) // 40)][:40]


def rendered(llm: LLM, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation in the model's chat template."""
    return encode(llm.tokenizer, render_chat(llm.tokenizer, messages), add_special_tokens=False)
