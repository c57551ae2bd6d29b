"""Reference 001 as a table: what it asked for, where that is here, what it got wrong."""

from __future__ import annotations

from forerun.theory import best_gamma, walltime_improvement
from forerun_lab.reproduce.parts import Cell, ReportTable, Section, Settings

COST = 0.385
"""A bfloat16 Llama-3.2-1B over a 3B: weight bytes, 2.5 GB over 6.5 GB."""
ASKED = (
    (
        "D1, a runner of its own for speculation",
        "`speculate/round.py`: one round for all requests; no draft is the case of depth 0",
    ),
    (
        "D2, a draft model beside the target, tokenizers compared",
        "`speculate/draft/model.py`; vocabularies that differ work too (`heterogeneous`)",
    ),
    (
        "D3, drafting in K steps for the batch, prefill of the draft when first needed",
        "`draft/chain.py`, `draft/catch_up.py`, in parts beside decoding",
    ),
    ("D4, one verification of K + 1 rows", "`speculate/verify`, chains and trees, ragged"),
    ("D5, acceptance by min(1, p/q), residual, bonus", "`accept/token.py`; seven more rules"),
    ("D6, rollback of both caches", "`speculate/rollback`, by pages"),
    ("D7 and D8, engine and options", "`LLM(speculative_config=...)`, `--spec-method`, ..."),
    ("D9, acceptance per request", "`metrics` of every output, Prometheus, `--trace`"),
    ("D10, tests", "`tests/exact` (enumeration), `tests/conformance`, `tests/parity`"),
    ("CUDA graphs refused", "on a GPU: written, never run (no GPU so far)"),
)
WRONG = (
    "D6 truncates the draft's cache to start + accepted + 1 although K steps have fed only K tokens: after a full "
    "acceptance the last drafted token's keys and values are missing and never made up for. Here a sequence knows how "
    "far each cache reaches, and catching up, the first prefill and a prefix hit are one case.",
    "The draft's prefill without the prefix cache, `always the full prompt`, and a speculation length that is fixed "
    "per step are not kept.",
    "Its exit criterion, 1.5x to 2.5x for a bfloat16 1B draft of a 3B target, stays open: there was no GPU. "
    "Predicted, not measured, from theorem 3.8 below; weights alone make c = 0.385, so that 1.5x needs alpha of 0.86 "
    "and 2x 0.975.",
)


def asked(settings: Settings) -> ReportTable:
    return ReportTable(["asked for", "here"], ASKED, WRONG)


def predicted(settings: Settings) -> ReportTable:
    alphas = (0.6, 0.7, 0.8, 0.86, 0.9, 0.95, 0.975)
    rows: list[list[Cell]] = [[a, g := best_gamma(a, COST), f"{walltime_improvement(a, g, COST):.2f}"] for a in alphas]
    return ReportTable(["alpha", "best gamma", "predicted speed-up"], rows)


PARTS = [
    Section("reference-001", "What reference 001 asked for", "Reference 001", "", asked),
    Section(
        "reference-001-exit",
        "Its exit criterion, predicted",
        "Reference 001, Exit Criteria",
        "A prediction for a chain on one stream, from weight bytes and theorem 3.8; not a measurement.",
        predicted,
    ),
]
