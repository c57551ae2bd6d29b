"""What a user might say to a model: turns made of templates, topics and paragraphs of text on this machine."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from functools import cache
from importlib.resources import files as resources
from pathlib import Path

from forerun.measure.prompts import standard_library

FOLLOW_UPS = (
    "Make it shorter.",
    "Can you explain the last point again?",
    "Give me an example.",
    "Thank you! Write it again in simpler words.",
    "Now list the most important points.",
    "Are you sure? Check your answer.",
    "Translate your answer into Spanish.",
    "Tell me more.",
)
PARAGRAPH = (200, 1200)
"""Characters of a paragraph, at least and at most."""
ENOUGH = 1000
"""Paragraphs of the standard library."""


@cache
def _sets() -> dict[str, dict[str, list[str]]]:
    result: dict[str, dict[str, list[str]]] = json.loads(
        resources("forerun.tune").joinpath("turns.json").read_text("utf-8")
    )
    return result


@cache
def held_out() -> tuple[tuple[str, str], ...]:
    """(category, turn): four of each category, none of which ``turns`` makes."""
    result = json.loads(resources("forerun.tune").joinpath("held_out.json").read_text("utf-8"))
    return tuple((name, turn) for name, turns in result.items() for turn in turns)


def turns(seed: int, paragraphs: list[str]) -> Iterator[tuple[str, str]]:
    """(category, turn), without end, the categories in turn. ``paragraphs`` are texts to work on; none: those of the
    standard library."""
    draw = random.Random(seed)
    texts = paragraphs or machine_paragraphs()
    while True:
        for name, parts in _sets().items():
            fields = {key: draw.choice(values) for key, values in parts.items() if key != "templates"}
            text = draw.choice(parts["templates"])
            if "{p}" in text:
                fields["p"] = draw.choice(texts)
            for key, value in fields.items():
                text = text.replace("{" + key + "}", value)
            yield name, text


@cache
def machine_paragraphs() -> list[str]:
    """Paragraphs of the standard library: docstrings and short functions."""
    result: list[str] = []
    for path in sorted(Path(standard_library()).glob("*.py")):
        if len(result) >= ENOUGH:
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
