"""Prompt sets that are written, not drawn: conversations by category, and HumanEval; what a benchmark says of each
category.

``prompt_sets/categories.jsonl`` has 110 conversations, ten in each of the eleven categories of SPEED-Bench, category
after category in turn, so that the first 22 lines (``categories-small``) are two of each. A line is a category and one
turn or more; ``{file:NAME}`` stands for a text beside it, ``{topic:NAME}`` for a section of Python's reference manual
(``pydoc_data``) and ``{source:MODULE}`` for a module of its standard library, each with ``:N`` cut to N characters at
the end of a line. The last two are read from the running Python, so that they differ a little between its versions.

By category, a conversation is one case. Its turns are not independent, so errors and intervals count it once.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from forerun.cli.bench import SETTINGS, cell
from forerun.core.errors import ConfigError
from forerun.engine.config import NONE
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.bench import acceptance_by_position
from forerun.measure.config import CATEGORIES_SMALL, HUMANEVAL, SMALL, BenchConfig
from forerun.measure.prompts import repetition_rate
from forerun.measure.rounds import FASTEST, Contender, EngineContender, Measured
from forerun.models.text.chat import Message, render_chat
from forerun.models.text.tokenizer import encode
from forerun.sampling.params import SamplingParams
from forerun_lab.humaneval import Judge, Task, read_tasks
from forerun_lab.intervals import median_interval, ratio_error

FOLDER = Path(__file__).parent / "prompt_sets"
PLACEHOLDER = re.compile(r"\{(file|topic|source):([\w.-]+)(?::(\d+))?\}")


@dataclass(frozen=True)
class RecordedConversation:
    """A user's turns; each is answered, and the answer becomes history."""

    category: str
    turns: Sequence[str]
    task: Task | None = None
    """The tests, if the answer is code."""


@dataclass
class Texts:
    """Prompts as token ids, and each one's conversation."""

    prompts: list[list[int]]
    owners: list[int]
    """Index into ``conversations`` for each prompt, ascending."""
    conversations: list[RecordedConversation]
    left_out: int = 0
    """Turns whose answers do not fit into the model's context."""
    chat: bool = False
    """Whether prompts use the model's chat template."""


def read_set(name: str, file: Path | None = None) -> list[RecordedConversation]:
    """The conversations of a set, or of ``file``: JSON lines with ``category`` and ``turns``; for ``humaneval`` its
    package. Raises ConfigError."""
    if name == HUMANEVAL:
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
            RecordedConversation(each.category, [PLACEHOLDER.sub(_text, turn) for turn in each.turns])
            for each in result
        ]
    return result[:SMALL] if name == CATEGORIES_SMALL else result


def _conversation(line: str, where: str) -> RecordedConversation:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
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
    """The text of a placeholder in a turn."""
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
    """The prompts of ``conversations``, as many as ``config`` asks for. Raises ConfigError."""
    texts = _ask(llm, conversations[: config.prompts], config)
    together = max(config.concurrency)
    if len(texts.prompts) < together:
        raise ConfigError(
            f"{len(texts.prompts)} prompts of {config.prompt_set} fit into {llm.engine.max_model_len} tokens with "
            f"answers of {config.max_tokens}, and {together} are to be decoded together"
        )
    return texts


def _ask(llm: LLM, conversations: Sequence[RecordedConversation], config: BenchConfig) -> Texts:
    """Every turn's prompt. Plain decoding at T = 0 answers earlier turns, so that all contenders read the same."""
    chat = getattr(llm.tokenizer, "chat_template", None) is not None
    limit = llm.engine.max_model_len - config.max_tokens
    params = SamplingParams(**{**config.sampling, "temperature": 0.0, "max_tokens": config.max_tokens})
    messages: list[list[Message]] = [[] for _ in conversations]
    prompts: dict[tuple[int, int], list[int]] = {}
    running = list(range(len(conversations)))
    turn = 0
    while running:
        for index in running:
            messages[index].append({"role": "user", "content": conversations[index].turns[turn]})
            ids = _prompt(llm, messages[index], conversations[index].task, chat)
            if len(ids) <= limit:
                prompts[index, turn] = ids
        running = [i for i in running if (i, turn) in prompts and turn + 1 < len(conversations[i].turns)]
        answers = llm.generate(
            [{"prompt_token_ids": prompts[index, turn]} for index in running], params, use_tqdm=False, speculate=False
        )
        for index, answer in zip(running, answers):
            messages[index].append({"role": "assistant", "content": answer.outputs[0].text})
        turn += 1
    return Texts(
        [prompts[key] for key in sorted(prompts)],
        [index for index, _ in sorted(prompts)],
        list(conversations),
        sum(len(each.turns) for each in conversations) - len(prompts),
        chat,
    )


def _prompt(llm: LLM, messages: Sequence[Message], task: Task | None, chat: bool) -> list[int]:
    if chat:
        return encode(llm.tokenizer, render_chat(llm.tokenizer, messages), add_special_tokens=False)
    if task is not None:
        return encode(llm.tokenizer, task.prompt)
    return encode(llm.tokenizer, "".join(f"{message['content']}\n\n" for message in messages))


def stops(texts: Texts) -> list[str]:
    """Texts that end an answer: for a model without a chat template, the beginning of the next definition."""
    tasks = [each.task for each in texts.conversations if each.task is not None]
    return list(tasks[0].stops) if tasks and not texts.chat else []


class WrittenPrompts:
    """A written prompt set in a benchmark. Raises ConfigError if it cannot be read."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.conversations = read_set(config.prompt_set, config.prompts_file)
        self.judge = Judge() if config.execute else None

    def ask(self, llm: LLM) -> tuple[list[list[int]], BenchConfig]:
        """The prompts, and the configuration with the stop texts of their answers. Raises ConfigError with peers, which
        have no stop texts."""
        self.tokenizer = llm.tokenizer
        self.texts = make_texts(self.config, llm, self.conversations)
        ends = stops(self.texts)
        if not ends:
            return self.texts.prompts, self.config
        if self.config.peers:
            raise ConfigError("peers know no stop texts, with which a model without a chat template answers humaneval")
        return self.texts.prompts, replace(self.config, sampling={"stop": ends, **self.config.sampling})

    def by_category(
        self, contenders: Sequence[Contender], runs: Sequence[Sequence[Measured]], temperature: float, concurrency: int
    ) -> list[dict[str, Any]]:
        return by_category(contenders, runs, self.texts, temperature, concurrency, self.tokenizer, self.judge)

    def facts(self) -> dict[str, Any]:
        """Facts about the prompts for the benchmark's environment."""
        offline = self.judge.offline if self.judge is not None else None
        return {"prompts_left_out": self.texts.left_out, "offline": offline}


EVERYTHING = "all"


def by_category(
    contenders: Sequence[Contender],
    runs: Sequence[Sequence[Measured]],
    texts: Texts,
    temperature: float,
    concurrency: int,
    tokenizer: Any,
    judge: Judge | None = None,
) -> list[dict[str, Any]]:
    """One row per contender and category, then one over all categories if there are several. ``judge`` runs the tests
    of answers."""
    kinds = [texts.conversations[owner].category for owner in texts.owners]
    groups = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)}
    if len(groups) > 1:
        groups[EVERYTHING] = list(range(len(kinds)))
    names = [contender.name for contender in contenders]
    plain = runs[names.index(NONE)]
    rows = []
    for contender, result in zip(contenders, runs):
        about: dict[str, Any] = {"method": contender.name, "temperature": temperature, "concurrency": concurrency}
        about |= {"tree": None} | contender.facts()
        promised = contender.promises_identity(temperature)
        own = runs[names.index(plain_name(contender, names))]
        passed = _passed(result[0], texts, tokenizer, judge) if judge is not None else None
        for kind, members in groups.items():
            row: dict[str, Any] = (
                about | {"category": kind} | _acceptance(result, texts, members) | _speed(result, plain, texts, members)
            )
            same = sum(all(m.answers[i] == plain[0].answers[i] for m in result) for i in members)
            row |= {"same_answers": same, "identical": same == len(members) if promised else None}
            row["same_as_own_plain"] = sum(all(m.answers[i] == own[0].answers[i] for m in result) for i in members)
            answers = [[*texts.prompts[i], *result[0].answers[i]] for i in members]
            row["repetition_rate"] = repetition_rate(answers, [len(texts.prompts[i]) for i in members])
            row["passed"] = sum(passed[i] for i in members) if passed is not None else None
            row["pass_at_1"] = row["passed"] / len(members) if passed is not None else None
            rows.append(row)
    return rows


def plain_name(contender: Contender, names: Sequence[str]) -> str:
    """The row of the same program without drafts: ``openvino`` for ``openvino prompt_lookup``, ``none`` for ours."""
    if isinstance(contender, EngineContender):
        return NONE
    return min((name for name in names if f"{contender.name} ".startswith(f"{name} ")), key=len)


def _passed(result: Measured, texts: Texts, tokenizer: Any, judge: Judge) -> list[bool]:
    tasks = [task for owner in texts.owners if (task := texts.conversations[owner].task) is not None]
    return judge.passed(tasks, [tokenizer.decode(a, skip_special_tokens=True) for a in result.answers], texts.chat)


def _cases(texts: Texts, members: Sequence[int]) -> list[list[int]]:
    """The prompts of each conversation."""
    result: dict[int, list[int]] = {}
    for i in members:
        result.setdefault(texts.owners[i], []).append(i)
    return list(result.values())


def _acceptance(result: Sequence[Measured], texts: Texts, members: Sequence[int]) -> dict[str, Any]:
    """Counts, and tokens per round and per drafted round with their standard errors; None for a peer."""
    cases = _cases(texts, members)
    row: dict[str, Any] = {
        "conversations": len(cases),
        "prompts": len(members),
        "tokens": sum(len(result[0].answers[i]) for i in members),
    }
    measured = all(m.metrics for m in result)
    each = [RequestMetrics.merged([m.metrics[i] for m in result for i in case]) for case in cases] if measured else []
    total = RequestMetrics.merged(each) if each else RequestMetrics()
    lengths = [(m.num_accepted_draft_tokens + m.num_drafts, m.num_drafts) for m in each]
    return row | {
        "tokens_per_round": total.tokens_per_round,
        "tokens_per_round_error": ratio_error([(m.decode_tokens, m.rounds) for m in each]),
        "mean_acceptance_length": total.mean_acceptance_length,
        "mean_acceptance_length_error": ratio_error(lengths),
        "acceptance_by_position": acceptance_by_position(total.acceptance_histogram),
    }


def _speed(
    result: Sequence[Measured], plain: Sequence[Measured], texts: Texts, members: Sequence[int]
) -> dict[str, Any]:
    """Speed over plain decoding: each conversation's is the median over the repeats, which are interleaved pairs;
    ``speedup`` is their median. None where prompts were decoded together or nothing but first tokens came."""
    ratios = []
    for case in _cases(texts, members):
        pairs = [(_rate(m, case), _rate(p, case)) for m, p in zip(result, plain)]
        if all(own and base for own, base in pairs):
            ratios.append(median(own / base for own, base in pairs))
    return {
        "speedup": median(ratios) if ratios else None,
        "speedup_interval": median_interval(ratios),
        "speedup_conversations": len(ratios),
    }


def _rate(measured: Measured, case: Sequence[int]) -> float:
    """Tokens per second over these prompts; 0 if they were not timed one by one."""
    if len(measured.parts) != len(measured.answers):
        return 0.0
    seconds = sum(measured.parts[i][1] for i in case)
    return sum(measured.parts[i][0] for i in case) / seconds if seconds else 0.0


BY_CATEGORY = {
    "category": "category",
    **SETTINGS,
    "prompts": "prompts",
    "tokens": "tokens",
    "tokens_per_round": "tok/round",
    "tokens_per_round_error": "±",
    "mean_acceptance_length": "length kept",
    "mean_acceptance_length_error": "±",
    "acceptance_by_position": "kept by position",
    "speedup": "speed-up",
    "speedup_interval": "95 %",
    "repetition_rate": "repeats",
    "same_answers": "same",
    "same_as_own_plain": "as own plain",
    "pass_at_1": "pass@1",
}


def show(rows: Sequence[Mapping[str, Any]], write: Callable[[Sequence[str], Sequence[Sequence[str]]], None]) -> None:
    """Print a table by category of the contenders that draft or, if answers were tested, of all; errors are over
    conversations."""
    if all(row["passed"] is None for row in rows):
        rows = [row for row in rows if row["method"] not in (NONE, FASTEST)] or rows
    order = list(dict.fromkeys(row["category"] for row in rows))
    rows = sorted(rows, key=lambda row: order.index(row["category"]))
    shown = [key for key in BY_CATEGORY if any(row[key] is not None for row in rows)]
    if len({row["concurrency"] for row in rows}) == 1:
        shown.remove("concurrency")
    print()
    lines = []
    for row in rows:
        row = {**row, **{key: f"{row[key]} of {row['prompts']}" for key in ("same_answers", "same_as_own_plain")}}
        if row["speedup_interval"] is not None:
            row["speedup_interval"] = " to ".join(f"{bound:.2f}" for bound in row["speedup_interval"])
        mark = " (synthetic)" if row["synthetic"] else ""
        lines.append([cell(key, row[key]) + (mark if key == "method" else "") for key in shown])
    write([BY_CATEGORY[key] for key in shown], lines)
