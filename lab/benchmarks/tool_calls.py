"""Tool calls of the Berkeley Function-Calling Leaderboard, plain and by ``auto``: same tokens, seconds, correct calls.

    pip download --no-deps bfcl-eval && unzip -d FOLDER bfcl_eval-*.whl     # its data and its grader are in the wheel
    python lab/benchmarks/tool_calls.py MODEL --bfcl FOLDER --count 40 --out FILE.json

Both engines are in one process and answer each question in turns, at T = 0 and at T = 0.7 with the question's number as
seed. Questions come from the leaderboard's Python categories in turns. Names and types of functions are rewritten as
the leaderboard does it for models that call functions: ``_`` for ``.``, and JSON schema's types. Its own checker grades
the calls. FILE keeps each pair; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

from forerun import LLM, SamplingParams
from forerun.measure.environment import processor
from forerun.serve.tools import format_of
from forerun_lab.intervals import shown

CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
LONGEST = 256
"""Tokens of an answer, at most."""


def schema(given: Any) -> Any:
    """The leaderboard's parameters as JSON schema."""
    if isinstance(given, list):
        return [schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    return {key: TYPES.get(value, value) if key == "type" and isinstance(value, str) else schema(value)
            for key, value in given.items()}  # fmt: skip


def questions(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """``count`` questions, of the categories in turns."""
    data = folder / "bfcl_eval" / "data"
    turns = {}
    for category in CATEGORIES:
        name = f"BFCL_v4_{category}.json"
        asked, answers = (list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
                          for path in (data / name, data / "possible_answer" / name))  # fmt: skip
        truth = {answer["id"]: answer["ground_truth"] for answer in answers}
        turns[category] = iter([{**each, "category": category, "truth": truth[each["id"]]} for each in asked])
    for number in range(count):
        yield next(turns[CATEGORIES[number % len(CATEGORIES)]])


def checker(folder: Path) -> Any:
    """The leaderboard's ``ast_checker``, without what it imports of models, Java and JavaScript."""
    models: Any = ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = defaultdict(lambda: SimpleNamespace(underscore_to_dot=True))
    sys.modules[models.__name__] = models
    for language in ("java", "js"):
        converter: Any = ModuleType(f"bfcl_eval.eval_checker.ast_eval.type_convertor.{language}_type_converter")
        setattr(converter, f"{language}_type_converter", None)
        sys.modules[converter.__name__] = converter
    sys.path.insert(0, str(folder))
    module = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    language = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON

    def right(question: dict[str, Any], calls: list[dict[str, Any]]) -> bool:
        found = module.ast_checker(question["function"], calls, question["truth"], language, question["category"], "")
        return bool(found["valid"])

    return right


def ask(llm: LLM, question: dict[str, Any], temperature: float, seed: int) -> dict[str, Any]:
    """One answer alone: its tokens, the seconds until the first one and of all, and the calls in it."""
    tools: list[dict[str, Any]] = []
    for function in question["function"]:
        name, parameters = function["name"].replace(".", "_"), schema(function["parameters"])
        tools.append({"type": "function", "function": {**function, "name": name, "parameters": parameters}})
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=LONGEST)
    seen: list[float] = []
    began = perf_counter()
    messages = question["question"][0]
    output = llm.chat(messages, params, tools=tools, on_update=lambda update: seen.append(perf_counter()))[0]
    seconds = perf_counter() - began
    form = format_of(llm.get_tokenizer())
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    parser = form.parser(functions, fenced=True)
    parser.push(output.outputs[0].text, last=True)
    calls = [{call.name: read(call.arguments)} for call in parser.calls if call.complete]
    return {"ids": list(output.outputs[0].token_ids), "seconds": seconds, "first": seen[0] - began, "calls": calls,
            "prompt": len(output.prompt_token_ids)}  # fmt: skip


def read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def show(rows: list[dict[str, Any]]) -> None:
    for temperature in sorted({row["temperature"] for row in rows}):
        pairs = [row for row in rows if row["temperature"] == temperature]
        gains = [row["plain"]["seconds"] / row["auto"]["seconds"] for row in pairs]
        behind = [(row["plain"]["seconds"] - row["plain"]["first"]) / (row["auto"]["seconds"] - row["auto"]["first"])
                  for row in pairs if len(row["plain"]["ids"]) > 1]  # fmt: skip
        same = sum(row["plain"]["ids"] == row["auto"]["ids"] for row in pairs)
        right = sum(row["right"] for row in pairs)
        print(f"T = {temperature:g}: {len(pairs)} questions, {same} with the same tokens; plain over auto: whole "
              f"{shown(gains)}, behind the first token {shown(behind)}; least {min(gains):.2f}; right {right}; median "
              f"prompt {median(row['plain']['prompt'] for row in pairs):g} tokens, answer "
              f"{median(len(row['plain']['ids']) for row in pairs):g}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--bfcl", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    right = checker(given.bfcl)
    rows: list[dict[str, Any]] = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    done = {(row["id"], row["temperature"]) for row in rows}
    began = perf_counter()
    engines = {"plain": LLM(given.model, speculative_config=None), "auto": LLM(given.model)}
    for llm in engines.values():
        llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=40))
    for number, question in enumerate(questions(given.bfcl, given.count)):
        for temperature in (0.0, 0.7):
            if (question["id"], temperature) in done or perf_counter() - began > given.seconds:
                continue
            order = list(engines)[:: 1 if number % 2 else -1]
            answers = {name: ask(engines[name], question, temperature, number) for name in order}
            calls = answers["auto"].pop("calls")
            del answers["plain"]["calls"]
            rows.append({"id": question["id"], "temperature": temperature, **answers, "right": right(question, calls)})
            given.out.write_text(json.dumps({"processor": processor(), "rows": rows}))
    show(rows)


if __name__ == "__main__":
    main()
