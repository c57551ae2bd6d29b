"""The law of the output: sampled answers against probabilities enumerated from the target's own logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from forerun.bench.config import SAMPLES
from forerun.bench.lossless.identity import IDLE, accepted, answers
from forerun.bench.lossless.result import Result, layout_name
from forerun.core.batch import Batch, Span
from forerun.engine.llm import LLM
from forerun.models.base import new_attention
from forerun.sampling.params import SamplingParams

SUPPORT = 2
LENGTH = 5
FEWEST = 5.0
"""Answers are counted together, from the rarest on, until they are expected so often."""
BATCH = 64
SMALLEST_P = 1e-4
"""A smaller p-value is a failure: one false alarm in ten thousand checks."""


@torch.inference_mode()
def exact_law(llm: LLM, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Probability, float64, of every answer of LENGTH tokens when the SUPPORT likeliest tokens can be sampled."""
    model, (begin, source) = llm.model, llm.model.info.begin(prompt)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        attention = new_attention(model, max_seqs=len(law), max_len=len(prompt) + LENGTH)
        spans = [
            Span(i, 0, [*begin, *path], logits=[len(begin) + len(path) - 1], source=source)
            for i, path in enumerate(law)
        ]
        logits = model.forward(Batch(spans, model.info.device), attention).logits.double().cpu()
        least = logits.topk(SUPPORT, dim=1).values[:, -1:]  # ties with the last one can be sampled too
        shares = torch.softmax((logits / temperature).where(logits >= least, -torch.inf), dim=1)
        law = {
            (*path, token): chance * float(row[token])
            for (path, chance), row in zip(law.items(), shares)
            for token in row.nonzero()[:, 0].tolist()
        }
    return law


def chi_square(counts: Mapping[tuple[int, ...], int], law: Mapping[tuple[int, ...], float]) -> tuple[float, int]:
    """p-value of the counts under the law, and the degrees of freedom. A count outside the law gives 0."""
    total = sum(counts.values())
    if any(answer not in law for answer in counts):
        return 0.0, 0
    cells: list[tuple[int, float]] = []
    count, expected = 0, 0.0
    for answer, chance in sorted(law.items(), key=lambda item: item[1]):
        count, expected = count + counts.get(answer, 0), expected + chance * total
        if expected >= FEWEST:
            cells.append((count, expected))
            count, expected = 0, 0.0
    if cells:
        cells[-1] = (cells[-1][0] + count, cells[-1][1] + expected)
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0, 0
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    tail = torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    return float(tail), freedom


def check_law(
    llm: LLM, options: Mapping[str, Any], prompt: list[int], *, samples: int = SAMPLES, seed: int = 0, name: str = ""
) -> Result:
    """Sample ``samples`` answers with seeds of their own and compare their frequencies with the exact law.
    ``name`` is what the result calls ``options``, else by their method."""
    params = [
        SamplingParams(temperature=1.0, top_k=SUPPORT, max_tokens=LENGTH, ignore_eos=True, seed=seed + i)
        for i in range(samples)
    ]
    found, total = answers(llm, options, [prompt] * samples, params, concurrency=BATCH)
    law = exact_law(llm, prompt, 1.0)
    counts = Counter(tuple(group[0].tokens) for group in found)
    p_value, freedom = chi_square(counts, law)
    inside = sum(count for answer, count in counts.items() if answer in law)
    detail = f"chi-square p = {p_value:.3f}, {freedom} degrees of freedom, {accepted(total)}"
    right = p_value >= SMALLEST_P and total.draft_error is None
    tested = not right or (freedom > 0 and total.num_draft_tokens > 0)
    if total.draft_error is not None:
        detail = f"the drafter failed: {total.draft_error}"
    elif not tested:
        detail = IDLE.format("") if freedom else f"{samples} samples cannot tell two answers apart: give more --samples"
    what = f"{name or options['method']}, {options['accept']}"
    return Result(
        "law", what, layout_name(None), 1.0, inside, samples, "samples", right and tested, detail, p_value, tested
    )
