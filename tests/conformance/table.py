"""What a run of these tests found, as a markdown table: drafters against rules and layouts."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
import transformers
from harness import REQUESTS, TOKENS
from matrix import PATHS, POLICIES, Combination

from forerun.speculate.accept import rules

PROPERTY = "combination"


class Outcome(NamedTuple):
    """One test's end: ``passed``, ``failed`` or ``error``, and its place in the matrix if it has one."""

    nodeid: str
    outcome: str
    combination: Combination | None

    @classmethod
    def of(cls, report, outcome):
        known = dict(report.user_properties)
        index = Combination(*known[PROPERTY]) if PROPERTY in known else None
        return cls(report.nodeid, outcome, index)


def promise(rule):
    kind = rules[rule]
    if kind.identity:
        return "the same tokens at T = 0 and 0.8"
    return "the same tokens at T = 0" if kind.lossless else "counts, caches and limits only: not lossless by design"


def cell(outcomes):
    """``passed/all``, in bold where some did not pass."""
    counts = Counter(outcomes)
    text = f"{counts['passed']}/{counts.total()}"
    return text if counts["passed"] == counts.total() else f"**{text}**"


def lines_of(heads, rows):
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def matrix_lines(outcomes):
    """A row per drafter, shape and layout; a column per rule."""
    cells = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        index = outcome.combination
        if index is not None:
            layout = "slotted" if index.page_size is None else f"paged {index.page_size}"
            cells[f"`{index.method}`", index.shape, layout][index.rule].append(outcome.outcome)
    columns = [rule for rule in rules if any(rule in row for row in cells.values())]
    rows = [
        [*names, *(cell(result[rule]) if rule in result else "–" for rule in columns)]
        for names, result in sorted(cells.items())
    ]
    return lines_of(["drafter", "draft", "layout", *(f"`{rule}`" for rule in columns)], rows)


def other_lines(outcomes):
    """A row per test that is not of the matrix."""
    tests = defaultdict(list)
    for outcome in outcomes:
        if outcome.combination is None:
            name = outcome.nodeid.split("[")[0].rsplit("::", 1)[-1]
            tests[name.removeprefix("test_").replace("_", " ")].append(outcome.outcome)
    return lines_of(["test", "cases"], [[name, cell(result)] for name, result in tests.items()])


def markdown(stats, command, collected):
    """The whole document, from pytest's reports by outcome. ``collected`` tests were to be run."""
    reports = [(report, kind) for kind in ("passed", "failed", "error") for report in stats.get(kind, ())]
    outcomes = [Outcome.of(report, kind) for report, kind in reports]
    minutes = sum(report.duration for report, _ in reports) / 60
    answers = sum(params.n for _, params in REQUESTS)
    counts = Counter(outcome.outcome for outcome in outcomes)
    tested = dict.fromkeys(o.combination.rule for o in outcomes if o.combination is not None)
    failed = [f"- `{outcome.nodeid}`" for outcome in outcomes if outcome.outcome != "passed"]
    return "\n".join(
        [
            "# Conformance",
            "",
            "Generated; do not edit. From the repository's root:",
            "",
            "```",
            command,
            "```",
            "",
            f"{counts['passed']} of {len(outcomes)} tests passed in {minutes:.0f} minutes"
            f"{f'; {collected - len(outcomes)} more were not run' if collected > len(outcomes) else ''}: torch "
            f"{torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
            f"{platform.machine()}, {os.cpu_count()} cores. A random two-layer target in float32, bit-equal logits.",
            "",
            f"A cell counts the combinations of model path ({', '.join(PATHS)}) and length policy "
            f"({', '.join(POLICIES)}) that passed, of all. Each answers {len(REQUESTS)} requests ({answers} answers "
            f"of up to {TOKENS} tokens) at T = 0 and 0.8 with other sampling options each, all at once, and compares "
            "tokens, text and stop with decoding one token and one request at a time; after every round the drafter's "
            "caches hold a prefix of the committed tokens, and at the end no page is left. – means no such case in "
            "this run: some rules take no trees, and without `--full` only every pair of parts is met. `echo` and "
            "`restless` belong to the tests. What is compared, by rule:",
            "",
            *(f"- `{rule}`: {promise(rule)}" for rule in sorted(tested)),
            "",
            *matrix_lines(outcomes),
            "",
            "The other tests of the same folder:",
            "",
            *other_lines(outcomes),
            *(["", "Not passed:", "", *failed] if failed else []),
            "",
        ]
    )
