"""``forerun tune``: measures candidates, chooses the fastest, and checks that it changes no token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forerun.engine.config import NONE
from forerun.engine.llm import LLM
from forerun.measure.page import bar, html, table
from forerun.measure.rounds import PLAIN, EngineContender, Interleaved, Prompts, identity, seeded_params
from forerun.measure.search import Race
from forerun.speculate.draft import drafters
from forerun.speculate.draft.levels import StepsConfig
from forerun.tune.page import header, label, minutes
from forerun_lab.tune.progress import progress
from forerun_lab.tune.state import TuneState

HISTORY: tuple[dict[str, Any], ...] = (
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 4},
    {"method": "prompt_lookup", "num_speculative_tokens": 4},
)
DEPTHS = (1, 2, 3)
"""Draft lengths of a trained draft."""
CONFIDENT = {"num_speculative_tokens": 4, "confidence_threshold": 0.5}
"""A length that ends at an unlikely token, for drafts of one step per token: a step and a row cost about a fifth of a
round, and the next token is accepted in about two of five cases."""
TREE = {"num_speculative_tokens": 4, "tree_nodes": 16}
"""A tree, which pays where rows cost little, as with a processor's matrix unit."""
REPEATS = 2
"""Times that every candidate answers every prompt, if there is time."""
FIRST_PROMPTS = 4
"""Prompts that every candidate answers even if the time is over."""
ALONE = 0.75
"""Fraction of the time for single drafters; the rest is for combinations of two."""


def with_datastore(texts: Path) -> dict[str, Any]:
    """The suffix drafter with the model's own ``texts`` as its datastore."""
    return {"method": "suffix", "datastore": str(texts), "num_speculative_tokens": 4}


def choose(
    llm: LLM,
    drafts: Sequence[Mapping[str, Any]],
    known: Mapping[str, Any] | None,
    texts: Path | None,
    prompts: Prompts,
    tokens: int,
    seconds: float,
    shown: bool,
) -> dict[str, Any]:
    """Measure candidates, one request at a time at temperature 0, for about ``seconds``.

    Candidates are plain decoding, history drafters (also with the datastore ``texts``), the trained ``drafts`` at
    several lengths, the ``known`` drafter of the model, and the best of both kinds combined. Returns ``{"chosen":
    speculative_config, "measured": [{"config", "tokens_per_second", "tokens_per_round", "speedup"}, ...]}``.
    """
    history = [*HISTORY, *([with_datastore(texts)] if texts is not None else [])]
    heads = [{**draft, **length} for draft in drafts for length in _lengths(draft)]
    heads += [] if known is None else [dict(known)]
    rows = _measured(llm, [*history, *heads], prompts, tokens, ALONE * seconds, shown)
    if heads:
        copying, head = _best(rows, history), _best(rows, heads)
        combined = [
            {"method": "merged", "drafters": [head, copying]},
            {"method": "cascade", "drafters": [copying, head]},
        ]
        rows += _measured(llm, combined, prompts, tokens, (1 - ALONE) * seconds, shown)[1:]
    fastest = _best(rows)
    chosen = fastest if fastest["method"] == NONE else {**fastest, "length": "adaptive"}
    return {"chosen": chosen, "measured": rows}


def _lengths(draft: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lengths of a trained ``draft`` that are compared."""
    steps = issubclass(drafters[draft["method"]].config_class, StepsConfig)
    return [*({"num_speculative_tokens": depth} for depth in DEPTHS), *([CONFIDENT] if steps else []), TREE]


def _best(rows: Sequence[Mapping[str, Any]], among: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """The config of the fastest row, or of the fastest with a config ``among`` some."""
    candidates = [row for row in rows if among is None or row["config"] in among]
    return dict(max(candidates, key=lambda row: row["speedup"])["config"])


def _measured(
    llm: LLM, candidates: Sequence[Mapping[str, Any]], prompts: Prompts, tokens: int, seconds: float, shown: bool
) -> list[dict[str, Any]]:
    """A row of figures for plain decoding, and for each of ``candidates``."""
    began = time.monotonic()
    race = Race(llm, candidates, prompts, tokens=tokens, repeats=REPEATS, ignore_eos=True)
    with progress("measuring", REPEATS * len(prompts), shown) as bar:
        race.run(
            lambda: time.monotonic() - began > seconds, lambda turn, _: bar.update(turn), FIRST_PROMPTS, drops=False
        )
    return race.rows()


def check(llm: LLM, config: Mapping[str, Any], prompts: Prompts, tokens: int, shown: bool) -> dict[str, Any]:
    """``{"passed", "answers", "different"}``: whether held-out prompts get the same tokens with ``config`` and without,
    at temperatures 0 and 0.8."""
    interleaved = Interleaved([EngineContender(llm, item, max_num_seqs=1) for item in (PLAIN, config)])
    with progress("checking", 2 * len(prompts), shown) as bar:
        for number, temperature in enumerate((0.0, 0.8)):
            if number:
                interleaved.renew(fresh=True)
            interleaved.run(prompts, seeded_params(len(prompts), 0, temperature=temperature, max_tokens=tokens))
            bar.update((number + 1) * len(prompts))
    return identity(interleaved.runs[1], interleaved.runs[0])


def verdict(result: Mapping[str, Any], *, trained: bool) -> str:
    """One line with the chosen drafter and its speed-ups. ``trained``: whether a draft was."""
    rows = {str(row["config"]): row for row in result["measured"]}
    chosen = {key: value for key, value in result["chosen"].items() if key != "length"}
    row = rows[str(chosen)]
    history = max(rows[str(config)]["speedup"] for config in HISTORY)
    if chosen["method"] == NONE:
        return "no way of drafting pays here: plain decoding is recommended"
    pays = "; what was trained does not pay, history does" if trained and "'model'" not in str(chosen) else ""
    name = f"{chosen['method']} with the model's own text" if "'datastore'" in str(chosen) else chosen["method"]
    return (
        f"{name}: {row['speedup']:.2f} times plain decoding, "
        f"{row['speedup'] / history:.2f} times the best history drafter, {row['tokens_per_round']:.2f} "
        f"tokens a round{pays}"
    )


def page(model: str, state: TuneState) -> str:
    """The report of a tuning, as HTML."""
    results, trained = state.results["choose"], state.results.get("train", {})
    wrote = state.results.get("write", {"tokens": 0})
    most = max(row["speedup"] for row in results["measured"])
    rows = [
        [label(row["config"]), f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.1f}",
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
        *header(model, results["chosen"], state.results["check"]),
        "<h2>Speed, one request at a time, temperature 0</h2>",
        table(["drafter", "over plain decoding", "tokens/s", "tokens a round", ""], rows),
        "<h2>Held-out drafts that are kept up to each position, temperature 0</h2>",
        table(["draft", "position", "fitted", "trained", ""], kept),
        f"<p>{wrote['tokens']:,} tokens of the model's own text; {escape(learnt)}.</p>",
        *minutes(state.seconds),
    ]
    return html(model, parts)
