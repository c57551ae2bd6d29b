"""The text that tuning learns from: given data, what a user might say, and what the target writes itself."""

from __future__ import annotations

import ast
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files as resources
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from forerun.core.errors import ConfigError, RequestError
from forerun.core.folders import replace_with
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.engine.llm import LLM
from forerun.measure.prompts import standard_library
from forerun.models.chat import Message, render_chat
from forerun.models.tokenizer import encode
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs
from forerun.speculate.verify import Verification

FOLLOWED = 4
"""One conversation of so many gets a second turn."""
IMAGINED = 2
"""One conversation of so many begins with a turn that the model wrote itself."""
TURN = 96
"""Most tokens of such a turn; one that goes on is left out."""
SPOKEN = "What does a user say?"
"""Stands where a turn would."""
ROWS = 48
"""Texts that are written together."""
TIMED = 24
"""Answers, and tokens of each, by which the speed of writing is told."""
OPENING = 32
"""Tokens of a text that a model without a chat template goes on with."""


@dataclass
class Writer:
    """Lets the model of ``llm``, which ``record`` watches, write. Texts are at most ``answer`` tokens behind prompts of
    at most ``prompt`` tokens; ``rows`` are written together."""

    llm: LLM
    record: TuneRecord
    data: Data
    rows: int = ROWS
    answer: int = 256
    prompt: int = 700
    chats: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chats = bool(getattr(self.llm.tokenizer, "chat_template", None))

    def part(self, seed: int, temperature: float) -> dict[str, Any]:
        """One batch, as ``Features`` reads it: ``tokens``, ``lengths``, ``prompts``, ``hidden``, ``layers``."""
        draw = random.Random(seed)
        if not self.chats:
            return self._packed(self._continued(self._openings(seed), temperature, draw))
        first = max(1, self.rows * FOLLOWED // (FOLLOWED + 1))
        begun = self._imagined(first // IMAGINED, draw)
        begun += islice(self._turns(seed), first - len(begun))
        asked = [[{"role": "user", "content": turn}] for turn in begun]
        result, talks = [], []
        for ids, count, talk in self._answered(asked, temperature, draw):
            result.append((ids, count))
            talks.append([*talk, {"role": "user", "content": draw.choice(FOLLOW_UPS)}])
        again = draw.sample(talks, min(len(talks), self.rows - first))
        result += [(ids, count) for ids, count, _ in self._answered(again, temperature, draw)]
        return self._packed(result)

    def read(self, answers: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What the model sees in answers of its own, behind a turn that says nothing; ``part``'s form."""
        prompts = [[*self.lead, *answer][: self.reach] for answer in answers]
        said = self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        each = zip(prompts, said, strict=True)
        return self._packed([([*prompt, *one.outputs[0].token_ids], len(self.lead)) for prompt, one in each])

    @cached_property
    def lead(self) -> list[int]:
        """What is before an answer that is read: a turn that says nothing, or the token that begins a text, if one
        does."""
        if self.chats:
            return rendered(self.llm, [{"role": "user", "content": ""}])
        begun = self.llm.encode("")[1]
        return begun[:1] if begun[:1] == [self.llm.tokenizer.bos_token_id] else []

    @property
    def reach(self) -> int:
        """Tokens of a text that are read at most; one follows them."""
        return self.prompt + self.answer - 1

    def reads(self, answers: Sequence[Sequence[int]]) -> int:
        """Tokens of the texts that ``read`` makes of these."""
        return sum(min(len(self.lead) + len(answer), self.reach) + 1 for answer in answers)

    def held_out(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """The same behind held-out prompts, at temperatures 0 and 1."""
        result = []
        for temperature in (0.0, 1.0):
            result += self._continued(prompts, temperature, random.Random(0))
        return self._packed(result)

    def speed(self, prompts: Sequence[list[int]]) -> float:
        """Tokens a second, prompts among them, of short answers to a few of ``prompts``."""
        few = list(prompts[:: max(1, len(prompts) // TIMED)][:TIMED])
        began = time.monotonic()
        texts = self._continued(few, 0.0, random.Random(0), TIMED)
        self.record.done.clear()
        return sum(len(ids) for ids, _ in texts) / (time.monotonic() - began)

    def held_out_prompts(self) -> list[list[int]]:
        """Token ids of prompts that are never trained on."""
        return held_out_prompts(self.llm, self.prompt, self.data.paragraphs)

    def _turns(self, seed: int) -> Iterator[str]:
        """The data's own turns and, as often, made ones."""
        draw = random.Random(seed)
        for _, turn in turns(seed, self.data.paragraphs):
            if self.data.turns:
                yield draw.choice(self.data.turns)
            yield turn

    def _imagined(self, count: int, draw: random.Random) -> list[str]:
        """At most ``count`` turns that the model writes where its template lets a user speak (Magpie: Xu et al. 2024,
        arXiv 2406.08464)."""
        text = render_chat(self.llm.tokenizer, [{"role": "user", "content": SPOKEN}])
        before, spoken, _ = text.partition(SPOKEN)
        if not spoken:
            return []
        prompts = [encode(self.llm.tokenizer, before, add_special_tokens=False)] * count
        said = [text.outputs[0] for text in self._written(prompts, 1.0, draw, TURN)]
        self.record.done.clear()
        return [one.text.strip() for one in said if one.finish_reason == "stop" and one.text.strip()]

    def _openings(self, seed: int) -> list[list[int]]:
        """Beginnings of texts; every fortieth text is held out."""
        draw = random.Random(seed)
        texts = [*(self.data.paragraphs or machine_paragraphs()), *self.data.turns]
        kept = set(_every_fortieth(texts)) if len(texts) > 40 else set()
        usable = [text for text in texts if text not in kept] or texts
        return [self.llm.encode(draw.choice(usable))[1][:OPENING] for _ in range(self.rows)]

    def _answered(
        self, talks: Sequence[Sequence[Message]], temperature: float, draw: random.Random
    ) -> Iterator[tuple[list[int], int, list[Message]]]:
        usable = []
        for talk in talks:
            try:
                ids = rendered(self.llm, talk)
            except RequestError:  # the template leaves a turn out, or refuses it
                continue
            if len(ids) <= self.prompt:
                usable.append((talk, ids))
        for (talk, prompt), text in zip(usable, self._written([ids for _, ids in usable], temperature, draw)):
            said = {"role": "assistant", "content": text.outputs[0].text}
            yield [*prompt, *text.outputs[0].token_ids], len(prompt), [*talk, said]

    def _continued(
        self, prompts: Sequence[list[int]], temperature: float, draw: random.Random, answer: int | None = None
    ) -> list[tuple[list[int], int]]:
        texts = self._written(prompts, temperature, draw, answer)
        return [([*prompt, *text.outputs[0].token_ids], len(prompt)) for prompt, text in zip(prompts, texts)]

    def _written(
        self, prompts: Sequence[list[int]], temperature: float, draw: random.Random, answer: int | None = None
    ) -> list[Any]:
        longest = min(self.answer, answer or self.answer)
        params = [
            SamplingParams(temperature=temperature, max_tokens=longest, seed=draw.randrange(2**31)) for _ in prompts
        ]
        return self.llm.generate(list(prompts), params, use_tqdm=False) if prompts else []

    def _packed(self, texts: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
        """Texts with the hidden states that were recorded, if any are; the last token's, which the model never read,
        is zero."""
        layers = list(self.record.config.layers)
        width = len(layers) * self.llm.model.info.hidden_size
        pad = torch.zeros(1, width, dtype=torch.bfloat16)
        kept = [(ids, count, self.record.take(ids) if layers else pad.expand(len(ids) - 1, 0)) for ids, count in texts]
        whole = [(ids, count, rows) for ids, count, rows in kept if rows is not None and len(rows) == len(ids) - 1]
        self.record.done.clear()
        return {
            "layers": layers,
            "tokens": torch.tensor([token for ids, _, _ in whole for token in ids], dtype=torch.int32),
            "lengths": torch.tensor([len(ids) for ids, _, _ in whole], dtype=torch.int32),
            "prompts": torch.tensor([count for _, count, _ in whole], dtype=torch.int32),
            "hidden": torch.cat([part for _, _, rows in whole for part in (rows, pad)] or [pad[:0]]),
        }


def held_out_prompts(llm: LLM, longest: int, paragraphs: Sequence[str] = ()) -> list[list[int]]:
    """Prompts of at most ``longest`` tokens, four of each category in turn; for a model without a chat template,
    beginnings of ``paragraphs``, or of the standard library's."""
    if not getattr(llm.tokenizer, "chat_template", None):
        texts = list(paragraphs) or machine_paragraphs()
        return [llm.encode(text)[1][:OPENING] for text in _every_fortieth(texts)]
    prompts = [rendered(llm, [{"role": "user", "content": turn}]) for _, turn in held_out()]
    return [prompt for prompt in prompts if len(prompt) <= longest]


def _every_fortieth(texts: Sequence[str]) -> Sequence[str]:
    return texts[:: max(1, len(texts) // 40)][:40]


def rendered(llm: LLM, talk: Sequence[Message]) -> list[int]:
    """Token ids of a conversation."""
    return encode(llm.tokenizer, render_chat(llm.tokenizer, talk), add_special_tokens=False)


def save_part(part: dict[str, Any], path: Path) -> None:
    """Writes a part; the file is there whole or not at all."""
    replace_with(path, lambda temporary: torch.save(part, temporary))


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
        except (ValueError, RecursionError):
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


@dataclass(frozen=True)
class RecordConfig(DrafterConfig):
    layers: tuple[int, ...] = ()
    """Hidden states to keep, as ``Needs.hidden`` counts them."""


class TuneRecord(Drafter[RecordConfig]):
    name = "record"
    config_class = RecordConfig

    def __init__(self, config: RecordConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.needs = Needs(hidden=tuple(config.layers))
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.done: dict[tuple[int, ...], torch.Tensor] = {}
        """[tokens fed, layers * hidden size] of each sequence that ended, by its tokens."""

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in sequences]

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            if verdict.hidden is not None and verdict.error is None:
                parts = [verdict.hidden[layer] for layer in self.config.layers]
                self.rows.setdefault(sequence.id, []).append(torch.cat(parts, dim=-1).to(torch.bfloat16))

    def release(self, sequence: RequestState) -> None:
        rows = self.rows.pop(sequence.id, None)
        if rows:
            self.done[tuple(sequence.tokens)] = torch.cat(rows)

    def take(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """What was kept of a finished sequence; forgotten then."""
        return self.done.pop(tuple(tokens), None)
