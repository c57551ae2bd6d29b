"""Prompt sets of conversations, by category.

``prompt_sets/categories.jsonl`` has 110 of them, ten in each of the eleven categories of SPEED-Bench, category after
category in turn, so that the first 22 lines (``categories-small``) are two of each. A line is a category and one turn
or more; ``{file:NAME}`` stands for a text beside it, ``{topic:NAME}`` for a section of Python's reference manual
(``pydoc_data``) and ``{source:MODULE}`` for a module of its standard library, each with ``:N`` cut to N characters at
the end of a line. The last two are read from the running Python, so that they differ a little between its versions.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.engine.llm import LLM
from forerun.measure.config import CATEGORIES_SMALL, HUMANEVAL, SETS, SMALL, BenchConfig
from forerun.measure.prompts import make_prompts
from forerun.models.chat import Message, render_chat
from forerun.models.tokenizer import encode
from forerun.sampling.params import SamplingParams

FOLDER = Path(__file__).parent / "prompt_sets"
PLACE = re.compile(r"\{(file|topic|source):([\w.-]+)(?::(\d+))?\}")


@dataclass(frozen=True)
class RecordedConversation:
    """What a user says in turn; each turn is answered, and the answer becomes history."""

    category: str
    turns: Sequence[str]
    task: Any = None
    """A ``forerun_lab.humaneval.Task`` where the answer is code that can be tested."""


@dataclass
class Texts:
    """Prompts as token ids; where they come from conversations, each one's conversation."""

    prompts: list[list[int]]
    owners: list[int] = field(default_factory=list)
    """Index into ``conversations`` for each prompt, ascending."""
    conversations: list[RecordedConversation] = field(default_factory=list)
    left_out: int = 0
    """Turns that do not fit into the model's context with their answers."""
    chat: bool = False
    """Whether they are written by the model's chat template."""


def read_set(name: str, file: Path | None = None) -> list[RecordedConversation]:
    """The conversations of a set, or of ``file``: JSON lines with ``category`` and ``turns``; for ``humaneval`` its
    package. Raises ConfigError."""
    if name == HUMANEVAL:
        read_tasks = from_lab(HUMANEVAL, HUMANEVAL).read_tasks
        return [RecordedConversation(HUMANEVAL, (task.question,), task) for task in read_tasks(file)]
    path = file or FOLDER / "categories.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from error
    result = [_conversation(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not result:
        raise ConfigError(f"{path} has no prompts: write one JSON object with category and turns per line")
    if file is None:
        result = [
            RecordedConversation(each.category, [PLACE.sub(_text, turn) for turn in each.turns]) for each in result
        ]
    return result[:SMALL] if name == CATEGORIES_SMALL else result


def _conversation(line: str, where: str) -> RecordedConversation:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(item, dict) or set(item) != {"category", "turns"}:
        raise ConfigError(f"{where}: a prompt is an object with category and turns")
    category, turns = item["category"], item["turns"]
    if not isinstance(category, str) or not category.strip():
        raise ConfigError(f"{where}: category must be a name, not {category!r}")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ConfigError(f"{where}: turns must be a list of at least one text, none of them empty")
    return RecordedConversation(category, turns)


def _text(placeholder: re.Match[str]) -> str:
    """The text that a place in a turn stands for."""
    kind, name, limit = placeholder.groups()
    if kind == "file":
        text = (FOLDER / name).read_text(encoding="utf-8")
    elif kind == "source":
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            raise ConfigError(f"this Python has no source of its module {name}, which a prompt quotes")
        text = Path(spec.origin).read_text(encoding="utf-8")
    else:
        try:
            from pydoc_data.topics import topics
        except ModuleNotFoundError:
            raise ConfigError("this Python has no pydoc_data, its manual, which some prompts quote") from None
        if name not in topics:
            raise ConfigError(f"this Python's manual has no section {name!r}, which a prompt quotes")
        text = topics[name]
    if limit is not None and len(text) > int(limit):
        text = text[: int(limit)].rpartition("\n")[0]
    return text.strip()


def make_texts(config: BenchConfig, llm: LLM, conversations: Sequence[RecordedConversation]) -> Texts:
    """The prompts of ``config``; those of ``conversations`` where its set has them. Raises ConfigError."""
    together = max(config.concurrency)
    if config.prompt_set in SETS:
        prompts = make_prompts(
            config.prompt_set,
            llm.tokenizer,
            count=max(config.prompts, together),
            length=config.prompt_tokens,
            seed=config.seed,
            file=config.prompts_file,
        )
        return Texts(prompts)
    texts = _ask(llm, conversations[: config.prompts], config)
    if len(texts.prompts) < together:
        raise ConfigError(
            f"{len(texts.prompts)} prompts of {config.prompt_set} fit into {llm.engine.max_model_len} tokens with "
            f"answers of {config.max_tokens}, and {together} are to be decoded together"
        )
    return texts


def _ask(llm: LLM, conversations: Sequence[RecordedConversation], config: BenchConfig) -> Texts:
    """Every turn's prompt. Earlier turns are answered by plain decoding at T = 0, so that all contenders read the same
    history, whatever they would have answered themselves."""
    chat = getattr(llm.tokenizer, "chat_template", None) is not None
    limit = llm.engine.max_model_len - config.max_tokens
    params = SamplingParams(**{**config.sampling, "temperature": 0.0, "max_tokens": config.max_tokens})
    said: list[list[Message]] = [[] for _ in conversations]
    asked: dict[tuple[int, int], list[int]] = {}
    running = list(range(len(conversations)))
    turn = 0
    while running:
        for index in running:
            said[index].append({"role": "user", "content": conversations[index].turns[turn]})
            ids = _prompt(llm, said[index], conversations[index].task, chat)
            if len(ids) <= limit:
                asked[index, turn] = ids
        running = [i for i in running if (i, turn) in asked and turn + 1 < len(conversations[i].turns)]
        answers = llm.generate(
            [{"prompt_token_ids": asked[index, turn]} for index in running], params, use_tqdm=False, speculate=False
        )
        for index, answer in zip(running, answers):
            said[index].append({"role": "assistant", "content": answer.outputs[0].text})
        turn += 1
    return Texts(
        [asked[key] for key in sorted(asked)],
        [index for index, _ in sorted(asked)],
        list(conversations),
        sum(len(each.turns) for each in conversations) - len(asked),
        chat,
    )


def _prompt(llm: LLM, messages: Sequence[Message], task: Any, chat: bool) -> list[int]:
    if chat:
        return encode(llm.tokenizer, render_chat(llm.tokenizer, messages), add_special_tokens=False)
    if task is not None:
        return encode(llm.tokenizer, task.prompt)
    return encode(llm.tokenizer, "".join(f"{message['content']}\n\n" for message in messages))


def stops(texts: Texts) -> list[str]:
    """Texts that end an answer: where a model without a chat template completes a function, what begins the next."""
    tasks = [each.task for each in texts.conversations if each.task is not None]
    return list(tasks[0].stops) if tasks and not texts.chat else []
