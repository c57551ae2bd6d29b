"""The benchmark's figures by category of the prompts, with their errors over the conversations.

A conversation is one case: its turns are not independent, so that errors and intervals count it once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import comb
from statistics import median
from typing import Any

from forerun.bench.contenders import Contender
from forerun.bench.conversations import Texts
from forerun.bench.prompts import repetition_rate
from forerun.bench.rows import acceptance_by_position
from forerun.engine.config import NONE
from forerun.engine.metrics import RequestMetrics
from forerun.plan.estimate import Measured

ALL = "all"
CONFIDENCE = 0.95


def by_category(
    contenders: Seq[Contender],
    runs: Seq[Seq[Measured]],
    texts: Texts,
    temperature: float,
    concurrency: int,
    tokenizer: Any,
    judge: Any = None,
) -> list[dict[str, Any]]:
    """One row per contender and category, then one over all where there are several; none for drawn prompts. ``judge``,
    a ``forerun_lab.humaneval.Judge``, says how many answers pass their tests."""
    kinds = [texts.conversations[owner].category for owner in texts.owners]
    groups = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)}
    if len(groups) > 1:
        groups[ALL] = list(range(len(kinds)))
    plain = runs[[contender.name for contender in contenders].index(NONE)]
    rows = []
    for contender, found in zip(contenders, runs):
        about: dict[str, Any] = {"method": contender.name, "temperature": temperature, "concurrency": concurrency}
        about |= {"tree": None} | contender.facts()
        promised = contender.promises_identity(temperature)
        passed = _passed(found[0], texts, tokenizer, judge) if judge is not None else None
        for kind, members in groups.items():
            row: dict[str, Any] = (
                about | {"category": kind} | _acceptance(found, texts, members) | _speed(found, plain, texts, members)
            )
            same = sum(all(m.answers[i] == plain[0].answers[i] for m in found) for i in members)
            row |= {"same_answers": same, "identical": same == len(members) if promised else None}
            answers = [[*texts.prompts[i], *found[0].answers[i]] for i in members]
            row["repetition_rate"] = repetition_rate(answers, [len(texts.prompts[i]) for i in members])
            row["passed"] = sum(passed[i] for i in members) if passed is not None else None
            row["pass_at_1"] = row["passed"] / len(members) if passed is not None else None
            rows.append(row)
    return rows


def _passed(found: Measured, texts: Texts, tokenizer: Any, judge: Any) -> list[bool]:
    tasks = [task for owner in texts.owners if (task := texts.conversations[owner].task) is not None]
    return judge.passed(tasks, [tokenizer.decode(a, skip_special_tokens=True) for a in found.answers], texts.chat)


def _cases(texts: Texts, members: Seq[int]) -> list[list[int]]:
    """The prompts of each conversation."""
    found: dict[int, list[int]] = {}
    for i in members:
        found.setdefault(texts.owners[i], []).append(i)
    return list(found.values())


def _acceptance(found: Seq[Measured], texts: Texts, members: Seq[int]) -> dict[str, Any]:
    """Counts, and tokens per round and per drafted round with their standard errors; None for a peer."""
    cases = _cases(texts, members)
    row: dict[str, Any] = {
        "conversations": len(cases),
        "prompts": len(members),
        "tokens": sum(len(found[0].answers[i]) for i in members),
    }
    measured = all(m.metrics for m in found)
    each = [RequestMetrics.merged([m.metrics[i] for m in found for i in case]) for case in cases] if measured else []
    total = RequestMetrics.merged(each) if each else RequestMetrics()
    lengths = [(m.num_accepted_draft_tokens + m.num_drafts, m.num_drafts) for m in each]
    return row | {
        "tokens_per_round": total.tokens_per_round,
        "tokens_per_round_error": ratio_error([(m.decode_tokens, m.rounds) for m in each]),
        "mean_acceptance_length": total.mean_acceptance_length,
        "mean_acceptance_length_error": ratio_error(lengths),
        "acceptance_by_position": acceptance_by_position(total.acceptance_histogram),
    }


def _speed(found: Seq[Measured], plain: Seq[Measured], texts: Texts, members: Seq[int]) -> dict[str, Any]:
    """Speed over plain decoding: each conversation's is the median over the repeats, which are interleaved pairs;
    ``speedup`` is the conversations' median. None where prompts were decoded together or nothing but first tokens
    came."""
    ratios = []
    for case in _cases(texts, members):
        pairs = [(_rate(m, case), _rate(p, case)) for m, p in zip(found, plain)]
        if all(mine and theirs for mine, theirs in pairs):
            ratios.append(median(mine / theirs for mine, theirs in pairs))
    return {
        "speedup": median(ratios) if ratios else None,
        "speedup_interval": median_interval(ratios),
        "speedup_conversations": len(ratios),
    }


def _rate(measured: Measured, case: Seq[int]) -> float:
    """Tokens per second over these prompts; 0 where they were not timed one by one."""
    if len(measured.parts) != len(measured.answers):
        return 0.0
    seconds = sum(measured.parts[i][1] for i in case)
    return sum(measured.parts[i][0] for i in case) / seconds if seconds else 0.0


def ratio_error(pairs: Seq[tuple[float, float]]) -> float | None:
    """Standard error of sum(a) / sum(b) over independent cases (a, b), to first order (Cochran, Sampling Techniques,
    1977, section 6.4). None for fewer than two cases with b > 0."""
    pairs = [(a, b) for a, b in pairs if b > 0]
    count, below = len(pairs), sum(b for _, b in pairs)
    if count < 2:
        return None
    ratio = sum(a for a, _ in pairs) / below
    return (sum((a - ratio * b) ** 2 for a, b in pairs) * count / (count - 1)) ** 0.5 / below


def median_interval(values: Seq[float], confidence: float = CONFIDENCE) -> list[float] | None:
    """An interval that holds the population's median with at least this confidence, whatever the distribution: between
    two of the sorted values, as far from both ends as the binomial law permits. None for too few values."""
    count = len(values)
    outside, below = 0, 0.0
    while (below := below + comb(count, outside) / 2**count) <= (1 - confidence) / 2:
        outside += 1
    if not outside:
        return None
    ordered = sorted(values)
    return [ordered[outside - 1], ordered[count - outside]]
