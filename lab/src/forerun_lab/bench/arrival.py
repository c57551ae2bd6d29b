"""``python -m forerun_lab.bench.arrival``: how a long prompt slows down the running requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from time import process_time
from typing import Any

import torch

from forerun.engine.engine import Engine
from forerun.engine.jobs import Job
from forerun.engine.llm import LLM
from forerun.measure.config import HELD_OUT
from forerun.measure.prompts import make_prompts
from forerun.sampling.params import SamplingParams

SETTLE = 12
ROUNDS = 25
PATIENCE = 100
"""Most rounds in which the prompt's draft model catches up."""
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True)
class TimedArrival:
    """Seconds, on the engine's clock."""

    before: float
    """Time per token of one running request, before the prompt came."""
    without: float
    """The same in the rounds after that, in a run in which no prompt comes: their contexts grow all the same."""
    during: float
    """The same while the prompt was read."""
    slowdown: float
    """during / without."""
    since_before: float
    """during / before."""
    slowest: float
    """95th percentile of a round's time while it was read, over that of the same rounds without it."""
    slowest_since: float
    """The same over the mean round before."""
    rounds: int
    """How many rounds it was read in."""
    first_token: float
    """From its arrival to its first token."""
    alone: float
    """The same on an idle engine."""
    catching_up: float | None
    """Time per token of one running request from then on, while the prompt's draft catches up, up to the round in which
    it drafts; None: nobody drafts."""
    catching_up_slowdown: float | None
    """catching_up, over the same rounds in the run in which no prompt comes."""
    catching_up_since_before: float | None
    """catching_up / before."""
    catching_up_slowest: float | None
    """As ``slowest``, of these rounds."""
    catching_up_rounds: int
    """How many they are; ``PATIENCE`` if it did not draft."""


def arrival(engine: Engine, running: Sequence[Sequence[int]], prompt: Sequence[int]) -> TimedArrival:
    """Serve the prompts ``running``; when all of them decode, add ``prompt``, until it drafts. Then the same without
    it, for as many rounds. The engine must be idle."""
    alone = _first_token(engine, prompt)
    jobs = _settled(engine, running)
    before = _rounds(engine, jobs, ROUNDS)
    arrived = engine.clock()
    long = engine.add(prompt, ENDLESS)[0]
    during = _rounds(engine, jobs, len(prompt), lambda: long.sequence.num_output > 0)
    first = engine.clock() - arrived
    drafts = long.sequence.drafter is not None
    catching = _rounds(engine, jobs, PATIENCE if drafts else 0, lambda: long.metrics.num_drafts > 0)
    _end(engine, [*jobs, long])
    jobs = _settled(engine, running)
    _rounds(engine, jobs, ROUNDS)
    without = _rounds(engine, jobs, len(during))
    later = _rounds(engine, jobs, len(catching))
    _end(engine, jobs)
    at_first, alike, beside = (time_per_token(rounds, len(running)) for rounds in (before, without, during))
    catching_up = time_per_token(catching, len(running)) if catching else None
    usual = mean(seconds for seconds, _ in before)
    return TimedArrival(
        before=at_first,
        without=alike,
        during=beside,
        slowdown=beside / alike,
        since_before=beside / at_first,
        slowest=_slowest(during) / _slowest(without),
        slowest_since=_slowest(during) / usual,
        rounds=len(during),
        first_token=first,
        alone=alone,
        catching_up=catching_up,
        catching_up_slowdown=catching_up / time_per_token(later, len(running)) if catching_up is not None else None,
        catching_up_since_before=catching_up / at_first if catching_up is not None else None,
        catching_up_slowest=_slowest(catching) / _slowest(later) if catching else None,
        catching_up_rounds=len(catching),
    )


def time_per_token(rounds: Sequence[tuple[float, int]], running: int) -> float:
    """Of one of this many requests, from the seconds of rounds and the tokens that all of them got."""
    return running * sum(seconds for seconds, _ in rounds) / sum(tokens for _, tokens in rounds)


def medians(result: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Key by key; None where a value is missing."""
    kept = {name: [one[name] for one in result] for name in result[0]}
    return {name: None if None in values else median(values) for name, values in kept.items()}


def _settled(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Job]:
    """Requests that have decoded for a while."""
    jobs = [engine.add(ids, ENDLESS)[0] for ids in prompts]
    while any(not job.sequence.num_output for job in jobs):
        engine.step()
    _rounds(engine, jobs, SETTLE)
    return jobs


def _end(engine: Engine, jobs: Sequence[Job]) -> None:
    for job in jobs:
        engine.abort(job)


def _slowest(rounds: Sequence[tuple[float, int]]) -> float:
    """95th percentile of the rounds' seconds."""
    return sorted(seconds for seconds, _ in rounds)[int(0.95 * (len(rounds) - 1))]


def _first_token(engine: Engine, prompt: Sequence[int]) -> float:
    began = engine.clock()
    job = engine.add(prompt, ENDLESS)[0]
    while not job.sequence.num_output:
        engine.step()
    seconds = engine.clock() - began
    engine.abort(job)
    if engine.scheduler.tree is not None:
        engine.scheduler.tree.clear()
    return seconds


def _rounds(
    engine: Engine, jobs: Sequence[Job], count: int, done: Callable[[], bool] = lambda: False
) -> list[tuple[float, int]]:
    """Seconds, and tokens that ``jobs`` emitted, of up to ``count`` rounds."""
    result: list[tuple[float, int]] = []
    while len(result) < count and not done():
        began = engine.clock()
        emitted = sum(len(update.tokens) for update in engine.step() if update.job in jobs)
        result.append((engine.clock() - began, emitted))
    return result


def measure(llm: LLM, running: int, prompt_tokens: int, repeats: int) -> TimedArrival:
    """Medians of ``repeats`` arrivals on held-out text, after one that is not counted."""
    prompts = make_prompts(HELD_OUT, llm.tokenizer, count=running, length=64)
    long = make_prompts(HELD_OUT, llm.tokenizer, count=1, length=prompt_tokens, seed=1)[0]
    result = [asdict(arrival(llm.engine, prompts, long)) for _ in range(repeats + 1)][1:]
    return TimedArrival(**medians(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="forerun:target")
    parser.add_argument("--spec-method", default=None)
    parser.add_argument("--running", type=int, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--max-prefill-tokens", type=int, default=None)
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-clock", action="store_true", help="count this process's CPU time, for a busy machine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(
        args.model,
        speculative_config={"method": args.spec_method} if args.spec_method else None,
        max_num_seqs=args.running + 1,
        page_size=args.page_size,
        max_prefill_tokens=args.max_prefill_tokens,
        prefix_caching=False,
    )
    if args.cpu_clock:
        llm.engine.clock = process_time
    print(json.dumps(asdict(measure(llm, args.running, args.prompt_tokens, args.repeats)), indent=1))


if __name__ == "__main__":
    main()
