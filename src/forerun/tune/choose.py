"""Which way of drafting is quickest here, and whether it changes anything."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forerun.engine.config import NONE
from forerun.engine.llm import LLM
from forerun.measure.page import bar, html, table
from forerun.measure.rounds import PLAIN, EngineContender, Prompts, Turns, figures, identity
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import drafters
from forerun.speculate.draft.levels import StepsConfig
from forerun.tune.loop import progress
from forerun.tune.state import TuneState

HISTORY: tuple[dict[str, Any], ...] = (
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 4},
    {"method": "prompt_lookup", "num_speculative_tokens": 4},
)
DEPTHS = (1, 2, 3)
"""Tokens that a trained draft drafts."""
SURE = {"num_speculative_tokens": 4, "confidence_threshold": 0.5}
"""Or as many as are likely to be kept, where each takes a step: a step and a row cost about a fifth of a round, and the
next token is right in about two of five cases."""
TREE = {"num_speculative_tokens": 4, "tree_nodes": 16}
"""Or the likeliest of many, which pays where a processor has a matrix unit, so that rows cost little."""
TURNS = 2
"""Times that every way answers every prompt, in turns, if there is time."""
FEWEST = 4
"""Prompts that every way answers in any case."""
FIRST = 0.75
"""Share of the time for each way alone; the rest is for two of them together."""


def retrieving(texts: Path) -> dict[str, Any]:
    """History that the model's own ``texts`` are a part of."""
    return {"method": "suffix", "datastore": str(texts), "num_speculative_tokens": 4}


def choose(
    llm: LLM,
    drafts: Sequence[Mapping[str, Any]],
    texts: Path | None,
    prompts: Prompts,
    tokens: int,
    seconds: float,
    shown: bool,
) -> dict[str, Any]:
    """``{"chosen": speculative_config, "measured": [{"config", "tokens_per_second", "tokens_per_round", "speedup"},
    ...]}``, one request at a time at temperature 0: plain decoding, history, also with the datastore ``texts``, each of
    the trained ``drafts`` at several depths, and the best of both together; for ``seconds``, and until every way has
    answered a few prompts."""
    known = [*HISTORY, *([retrieving(texts)] if texts is not None else [])]
    alone = [{**draft, **length} for draft in drafts for length in _lengths(draft)]
    rows = _measured(llm, [PLAIN, *known, *alone], prompts, tokens, FIRST * seconds, shown)
    if alone:
        history, best = _best(rows, known), _best(rows, alone)
        both = [
            {"method": "merged", "drafters": [best, history]},
            {"method": "cascade", "drafters": [history, best]},
        ]
        rows += _measured(llm, [PLAIN, *both], prompts, tokens, (1 - FIRST) * seconds, shown)[1:]
    quickest = max(rows, key=lambda row: row["speedup"])["config"]
    chosen = quickest if quickest["method"] == NONE else {**quickest, "length": "adaptive"}
    return {"chosen": chosen, "measured": rows}


def _lengths(draft: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lengths of a trained ``draft`` that are compared."""
    steps = issubclass(drafters[draft["method"]].config_class, StepsConfig)
    return [*({"num_speculative_tokens": depth} for depth in DEPTHS), *([SURE] if steps else []), TREE]


def _best(rows: Sequence[Mapping[str, Any]], among: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    result = [row for row in rows if row["config"] in among]
    return dict(max(result, key=lambda row: row["speedup"])["config"])


def _measured(
    llm: LLM, configs: Sequence[Mapping[str, Any]], prompts: Prompts, tokens: int, seconds: float, shown: bool
) -> list[dict[str, Any]]:
    """A row for each of ``configs``, of which the first is plain decoding: its figures over prompts and turns."""
    params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)]
    began = time.monotonic()
    turns = Turns([EngineContender(llm, config, max_num_seqs=1) for config in configs])
    with progress("measuring", TURNS * len(prompts), shown) as bar:
        for turn in range(TURNS):
            if turn:
                turns.renew(fresh=True)
            turns.warm_up(prompts[:1], params)
            for number, prompt in enumerate(prompts):
                if (turn or number >= FEWEST) and time.monotonic() - began > seconds:
                    break
                turns.take([prompt], params)
                bar.update(turn * len(prompts) + number + 1)
    return [
        {"config": dict(config), **figures(answers, turns.runs[0])}
        for config, answers in zip(configs, turns.runs, strict=True)
    ]


def check(llm: LLM, config: Mapping[str, Any], prompts: Prompts, tokens: int, shown: bool) -> dict[str, Any]:
    """``{"passed", "answers", "different"}``: whether held-out prompts get the same tokens with ``config`` and without,
    at temperatures 0 and 0.8."""
    turns = Turns([EngineContender(llm, item, max_num_seqs=1) for item in (PLAIN, config)])
    with progress("checking", 2 * len(prompts), shown) as bar:
        for number, temperature in enumerate((0.0, 0.8)):
            if number:
                turns.renew(fresh=True)
            params = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=i) for i in range(len(prompts))]
            turns.take(prompts, params)
            bar.update((number + 1) * len(prompts))
    return identity(turns.runs[1], turns.runs[0])


def verdict(result: Mapping[str, Any]) -> str:
    """One line: what was chosen, and what it brings."""
    rows = {str(row["config"]): row for row in result["measured"]}
    chosen = {key: value for key, value in result["chosen"].items() if key != "length"}
    row = rows[str(chosen)]
    history = max(rows[str(config)]["speedup"] for config in HISTORY)
    if chosen["method"] == NONE:
        return "no way of drafting pays here: plain decoding is recommended"
    beaten = any("model" in row["config"] for row in result["measured"]) and "'model'" not in str(chosen)
    pays = "; what was trained does not pay, history does" if beaten else ""
    name = f"{chosen['method']} with the model's own text" if "'datastore'" in str(chosen) else chosen["method"]
    return (
        f"{name}: {row['speedup']:.2f} times plain decoding, "
        f"{row['speedup'] / history:.2f} times the best history drafter, {row['tokens_per_round']:.2f} "
        f"tokens a round{pays}"
    )


def page(model: str, state: TuneState) -> str:
    """HTML, UTF-8."""
    results, trained = state.results["choose"], state.results.get("train", {})
    wrote = state.results.get("write", {"tokens": 0})
    most = max(row["speedup"] for row in results["measured"])
    rows = [
        [_name(row["config"]), f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.1f}",
         f"{row['tokens_per_round']:.2f}", bar(row["speedup"] / most)]
        for row in results["measured"]
    ]  # fmt: skip
    kept = [
        [name, str(index + 1), f"{before:.1%}", f"{after:.1%}", bar(max(before, after))]
        for name, result in trained.items()
        for index, (before, after) in enumerate(
            zip(result["fitted"]["accepted_at_0"], result["learnt"]["accepted_at_0"], strict=True)
        )
    ]
    learnt = "; ".join(f"{name} on {result['tokens']:,}, kept: {result['kept']}" for name, result in trained.items())
    parts = [
        *_found(model, results["chosen"], state.results["check"]),
        "<h2>Speed, one request at a time, temperature 0</h2>",
        table(["drafter", "over plain decoding", "tokens/s", "tokens a round", ""], rows),
        "<h2>Held-out drafts that are kept up to each position, temperature 0</h2>",
        table(["draft", "position", "fitted", "trained", ""], kept),
        f"<p>{wrote['tokens']:,} tokens of the model's own text; {escape(learnt)}.</p>",
        *_minutes(state.seconds),
    ]
    return html(model, parts)


def _found(tuned: str, chosen: Mapping[str, Any], checked: Mapping[str, Any]) -> list[str]:
    """What was tuned, what was chosen, and whether it changed an answer."""
    return [
        f"<h1>{escape(tuned)}, tuned</h1>",
        f"<p>Chosen: <code>{escape(json.dumps(chosen))}</code></p>",
        f"<p>{checked['answers']} held-out answers with and without speculation, {checked['different']} differ.</p>",
    ]


def _minutes(seconds: Mapping[str, float]) -> list[str]:
    rows = [[stage, f"{spent / 60:.1f}"] for stage, spent in seconds.items()]
    return ["<h2>Minutes</h2>", table(["stage", "minutes"], rows)]


def _name(config: dict[str, Any]) -> str:
    inside = [_name(part) for part in config.get("drafters", ())]
    depth = config.get("num_speculative_tokens")
    texts = " with the model's own text" if "datastore" in config else ""
    return config["method"] + (f" {depth}" if depth else "") + texts + (f" ({', '.join(inside)})" if inside else "")


def pair_page(model: str, result: dict[str, Any]) -> str:
    """HTML, UTF-8, of what ``pair.search`` found."""
    most = max(row["speedup"] for row in result["measured"])
    rows = [
        [_name(row["config"]), json.dumps(row["config"]), f"{row['temperature']:g}", str(row["concurrency"]),
         str(row["answers"]), f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.1f}",
         f"{row['tokens_per_round']:.2f}", bar(row["speedup"] / most)]
        for row in result["measured"]
    ]  # fmt: skip
    forms = [
        [json.dumps(form["config"]), f"{form['bytes'] / 1e6:.0f}", f"{form['guessed']:.1%}", f"{form['start']:.3f}",
         f"{form['step']:.3f}", f"{form['on_paper']:.2f}"]
        for form in result["forms"]
    ]  # fmt: skip
    dearest = max(cost for points in result["verify_cost"].values() for cost in points.values())
    costs = [
        [str(count), str(rows), f"{cost:.2f}", bar(cost / dearest)]
        for count, points in result["verify_cost"].items()
        for rows, cost in points.items()
    ]
    parts = [
        *_found(f"{model} and its draft", result["chosen"], result["check"]),
        "<h2>Measured, in turns with plain decoding</h2>",
        table(["drafter", "options", "temperature", "at a time", "answers", "over plain decoding", "tokens/s",
               "tokens a round", ""], rows),
        "<h2>Forms of the draft, each at its best on paper</h2><p>Prices in plain forwards.</p>",
        table(["form", "MB", "tokens guessed", "a draft's start", "a step", "over plain decoding, on paper"], forms),
        "<h2>A verification by its rows, in plain forwards</h2>",
        table(["at a time", "rows", "cost", ""], costs),
        *_minutes(result["seconds"]),
    ]  # fmt: skip
    return html(model, parts)
