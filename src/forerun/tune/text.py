"""A model's own text: its answers to turns, at temperatures 0 and 1, batch by batch."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from forerun.engine.llm import LLM
from forerun.sampling.params import SamplingParams
from forerun.tune.turns import FOLLOW_UPS, held_out, turns

ROWS = 48
"""Answers written together."""
ANSWER = 256
"""Tokens of an answer, at most."""
FOLLOWED = 4
"""One conversation of so many gets a second turn."""
PROMPT = 700
"""Tokens of a prompt, at most."""


def write(llm: LLM, folder: Path, seed: int, batches: int, paragraphs: list[str]) -> Iterator[Path]:
    """Batches of answers as files of ``folder``, one after another; those that are there are not written again.

    Each line: ``prompt`` and ``answer`` (token ids), ``temperature``, ``category``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(batches):
        path = folder / f"{number:05d}.jsonl"
        if not path.exists():
            lines = _batch(llm, seed * 100_003 + number, float(number % 2), paragraphs)
            _save(lines, path)
        yield path


def write_held_out(llm: LLM, path: Path) -> Path:
    """The answers to held-out turns, at temperatures 0 and 1, as one file; written once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            prompt | {"temperature": temperature, "category": name}
            for temperature in (0.0, 1.0)
            for (name, _), prompt, _ in _answered(llm, list(held_out()), temperature, random.Random(0))
        ]
        _save(lines, path)
    return path


def _save(lines: list[dict[str, Any]], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)


def _batch(llm: LLM, seed: int, temperature: float, paragraphs: list[str]) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    asked = list(islice(turns(seed, paragraphs), ROWS))
    first = ROWS * FOLLOWED // (FOLLOWED + 1)
    lines, talks = [], []
    for (name, _), prompt, talk in _answered(llm, asked[:first], temperature, draw):
        lines.append(prompt | {"temperature": temperature, "category": name})
        talks.append((name, talk))
    again = [
        (name, [*talk, {"role": "user", "content": draw.choice(FOLLOW_UPS)}])
        for name, talk in draw.sample(talks, min(len(talks), ROWS - first))
    ]
    for (name, _), prompt, _ in _answered(llm, again, temperature, draw):
        lines.append(prompt | {"temperature": temperature, "category": name})
    return lines


def _answered(llm: LLM, asked: list[Any], temperature: float, draw: random.Random) -> Iterator[Any]:
    talks = [talk if isinstance(talk, list) else [{"role": "user", "content": talk}] for _, talk in asked]
    params = [
        SamplingParams(temperature=temperature, max_tokens=ANSWER, seed=draw.randrange(2**31), ignore_eos=False)
        for _ in talks
    ]
    outputs = llm.chat(talks, params, use_tqdm=False)
    for item, talk, output in zip(asked, talks, outputs):
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        if len(output.prompt_token_ids) <= PROMPT and len(ids) > 4:
            line = {"prompt": list(output.prompt_token_ids), "answer": ids}
            yield item, line, [*talk, {"role": "assistant", "content": answer.text}]
