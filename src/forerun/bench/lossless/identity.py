"""Same seed, same tokens: speculation against decoding one token at a time, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from forerun.bench.lossless.result import Result, layout_name
from forerun.bench.lossless.trees import hand_made
from forerun.engine.config import SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.plan.estimate import measure
from forerun.sampling.params import SamplingParams

MIXES: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"min_p": 0.05, "logit_bias": {7: 1.0, 11: -5.0}},
)
"""Sampling options; every prompt takes the next ones."""


def requests(count: int, temperature: float, max_tokens: int, seed: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=seed + i, ignore_eos=True, **MIXES[i % len(MIXES)]
        )
        for i in range(count)
    ]


def answers(
    llm: LLM,
    speculative: SpeculativeConfig | Mapping[str, Any] | None,
    prompts: Seq[Seq[int]],
    params: Seq[SamplingParams],
    *,
    concurrency: int,
    page_size: int | None = None,
) -> tuple[list[list[int]], RequestMetrics]:
    """Tokens of every answer, and what speculation did for all of them."""
    config = replace(llm.config, max_num_seqs=concurrency, page_size=page_size)
    engine = Engine(llm.model, llm.tokenizer, config, SpeculativeConfig.parse(speculative))
    found = measure(engine, prompts, params)
    return found.answers, found.total


def accepted(total: RequestMetrics) -> str:
    return f"{total.num_accepted_draft_tokens} of {total.num_draft_tokens} drafted tokens accepted"


def check_identity(
    llm: LLM,
    methods: Mapping[str, Mapping[str, Any] | None],
    prompts: Seq[list[int]],
    *,
    temperatures: Seq[float],
    max_tokens: int,
    page_sizes: Seq[int | None],
    concurrency: int,
    seed: int,
    step: Callable[[str], None],
) -> Iterator[Result]:
    """One result per method, layout and temperature. ``methods`` maps names to ``speculative_config``; None stands
    for hand-made trees."""
    for temperature in temperatures:
        params = requests(len(prompts), temperature, max_tokens, seed)
        step(f"plain decoding, temperature {temperature:g}")
        plain, _ = answers(llm, None, prompts, params, concurrency=1)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain)]
        for name, options in methods.items():
            for page_size in page_sizes:
                step(f"{name}, {layout_name(page_size)}, temperature {temperature:g}")
                with hand_made(texts) if options is None else nullcontext(options) as speculative:
                    found, total = answers(
                        llm, speculative, prompts, params, concurrency=concurrency, page_size=page_size
                    )
                wrong = [i for i in range(len(prompts)) if found[i] != plain[i]]
                detail = accepted(total)
                if wrong:
                    detail = _difference(wrong[0], plain[wrong[0]], found[wrong[0]])
                elif total.draft_error is not None:
                    detail = f"the drafter failed: {total.draft_error}"
                yield Result(
                    "same-seed identity",
                    "hand-made trees" if options is None else name,
                    layout_name(page_size),
                    temperature,
                    len(prompts) - len(wrong),
                    len(prompts),
                    "prompts",
                    not wrong and total.draft_error is None,
                    detail,
                )


def _difference(prompt: int, plain: list[int], found: list[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(plain, found)) if a != b), min(len(plain), len(found)))
    return (
        f"prompt {prompt} differs from token {place} on: {plain[place : place + 3]} became {found[place : place + 3]}"
    )
