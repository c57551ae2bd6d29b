"""Prompts that tuning measures with and never trains on."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files as resources
from pathlib import Path

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


@cache
def held_out() -> tuple[tuple[str, str], ...]:
    """(category, user turn), four of each category; what forerun-lab trains on has none of them."""
    result = json.loads(resources("forerun.tune").joinpath("held_out.json").read_text("utf-8"))
    return tuple((name, turn) for name, turns in result.items() for turn in turns)


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
                result += [part for part in (ast.get_docstring(node) or "").split("\n\n") if _fits(part)]
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
        return [llm.encode(text)[1][:OPENING] for text in every_fortieth(list(paragraphs) or library_paragraphs())]
    prompts = [rendered(llm, [{"role": "user", "content": turn}]) for _, turn in held_out()]
    return [prompt for prompt in prompts if len(prompt) <= longest]


def every_fortieth(texts: Sequence[str]) -> Sequence[str]:
    """The texts that are held out."""
    return texts[:: max(1, len(texts) // 40)][:40]


def rendered(llm: LLM, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation in the model's chat template."""
    return encode(llm.tokenizer, render_chat(llm.tokenizer, messages), add_special_tokens=False)
