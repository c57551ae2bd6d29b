"""From measurements to the rows of the benchmark's table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from statistics import median, stdev
from typing import Any

from forerun.bench.contenders import FASTEST, Contender
from forerun.bench.prompts import repetition_rate
from forerun.engine.config import NONE
from forerun.plan.estimate import Costs, Measured, shares


def table(
    contenders: Seq[Contender],
    runs: Seq[Seq[Measured]],
    prompts: Seq[list[int]],
    temperature: float,
    concurrency: int,
) -> list[dict[str, Any]]:
    """One row per contender, each against ``none`` of the same run and against the fastest plain mode;
    ``speedup_error`` is the standard error of the repeats' mean speed-up."""
    names = [contender.name for contender in contenders]
    plain = runs[names.index(NONE)]
    for each in plain:
        each.check()
    fastest = runs[names.index(FASTEST)] if FASTEST in names else plain
    rows = []
    for contender, found in zip(contenders, runs):
        row: dict[str, Any] = {"method": contender.name, "temperature": temperature, "concurrency": concurrency}
        row["tree"] = None
        row |= contender.facts()
        row["tokens_per_second"] = median(m.tokens_per_second for m in found)
        ratios = [m.tokens_per_second / p.tokens_per_second for m, p in zip(found, plain)]
        row["speedup"], row["speedup_range"] = median(ratios), [min(ratios), max(ratios)]
        row["speedup_error"] = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
        row["speedup_over_fastest"] = median(m.tokens_per_second / f.tokens_per_second for m, f in zip(found, fastest))
        row |= _speculation(found, plain, concurrency)
        row["identical"] = None
        if contender.promises_identity(temperature):
            row["identical"] = all(m.answers == plain[0].answers for m in found)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, found[0].answers)]
        row["repetition_rate"] = repetition_rate(texts, [len(prompt) for prompt in prompts])
        rows.append(row)
    _compare_with_chains(rows)
    return rows


def _compare_with_chains(rows: Seq[dict[str, Any]]) -> None:
    """``over_chain``: a tree's tokens per round over those of the same drafter's chain of the same depth."""

    def key(row: dict[str, Any]) -> tuple:
        return tuple(row.get(name) for name in ("method", "accept", "length", "num_speculative_tokens"))

    chains = {key(row): row["tokens_per_round"] for row in rows if row.get("tree") is None}
    for row in rows:
        chain = chains.get(key(row)) if row.get("tree") is not None else None
        row["over_chain"] = row["tokens_per_round"] / chain if chain and row["tokens_per_round"] else None


def acceptance_by_position(histogram: Seq[int]) -> list[float] | None:
    """Entry j: the share of drafts of which more than j tokens were accepted (vLLM's unconditional rates)."""
    drafts = sum(histogram)
    return [sum(histogram[j + 1 :]) / drafts for j in range(len(histogram) - 1)] if drafts else None


def _speculation(found: Seq[Measured], plain: Seq[Measured], concurrency: int) -> dict[str, Any]:
    """Acceptance and prices of all repeats together, and what the theory makes of them."""
    rounds = [r for m in found for r in m.rounds]
    total = Measured(metrics=[metric for m in found for metric in m.metrics]).total
    costs = Costs.of(rounds, [r for m in plain for r in m.rounds], concurrency) if total.num_drafts else None
    predicted = None
    if costs is not None and total.match_rate is not None:
        predicted = costs.predict(rounds, total.match_rate)
    return {
        "alpha": total.alpha,
        "match_rate": total.match_rate,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "mean_acceptance_length": total.mean_acceptance_length,
        "tokens_per_round": total.tokens_per_round,
        "nodes_per_draft": total.num_draft_tokens / total.num_drafts if total.num_drafts else None,
        "acceptance_by_position": acceptance_by_position(total.acceptance_histogram),
        "cost_coefficient": costs.c if costs is not None else None,
        "verify_cost": costs.typical if costs is not None else None,
        "predicted_speedup": predicted,
        "shares": shares(rounds),
        "draft_error": total.draft_error,
    }
