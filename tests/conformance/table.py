"""What a run of these tests found, as a markdown table: drafters against rules and layouts."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict

import torch
import transformers
from harness import REQUESTS, TOKENS
from matrix import PATHS, POLICIES, Combination

from forerun.speculate.accept import rules

PROPERTY = "combination"


def promise(rule):
    kind = rules[rule]
    if kind.identity:
        return "the same tokens at T = 0 and 0.8"
    return "the same tokens at T = 0" if kind.lossless else "counts, caches and limits only: not lossless by design"


def cell(counts):
    """``passed/all``, in bold where some did not pass."""
    text = f"{counts['passed']}/{counts.total()}"
    return text if counts["passed"] == counts.total() else f"**{text}**"


def lines_of(heads, rows):
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def markdown(stats, command, collected):
    """The whole document, from pytest's reports by outcome: of the matrix a row per drafter, shape and layout and a
    column per rule, then a row per other test. ``collected`` tests were to be run."""
    reports = [(report, kind) for kind in ("passed", "failed", "error") for report in stats.get(kind, ())]
    matrix, others = defaultdict(lambda: defaultdict(Counter)), defaultdict(Counter)
    for report, kind in reports:
        known = dict(report.user_properties)
        if PROPERTY in known:
            case = Combination(*known[PROPERTY])
            layout = "slotted" if case.page_size is None else f"paged {case.page_size}"
            matrix[f"`{case.method}`", case.shape, layout][case.rule][kind] += 1
        else:
            name = report.nodeid.split("[")[0].rsplit("::", 1)[-1]
            others[name.removeprefix("test_").replace("_", " ")][kind] += 1
    tested = [rule for rule in rules if any(rule in row for row in matrix.values())]
    rows = [
        [*names, *(cell(row[rule]) if rule in row else "–" for rule in tested)] for names, row in sorted(matrix.items())
    ]
    answers = sum(params.n for _, params in REQUESTS)
    minutes = sum(report.duration for report, _ in reports) / 60
    failed = [f"- `{report.nodeid}`" for report, kind in reports if kind != "passed"]
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
            f"{len(reports) - len(failed)} of {len(reports)} tests passed in {minutes:.0f} minutes"
            f"{f'; {collected - len(reports)} more were not run' if collected > len(reports) else ''}: torch "
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
            *lines_of(["drafter", "draft", "layout", *(f"`{rule}`" for rule in tested)], rows),
            "",
            "The other tests of the same folder:",
            "",
            *lines_of(["test", "cases"], [[name, cell(row)] for name, row in others.items()]),
            *(["", "Not passed:", "", *failed] if failed else []),
            "",
        ]
    )
