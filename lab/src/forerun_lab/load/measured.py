"""What a replica's rounds cost and bring, measured on the engine at the lengths of a load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.engine.config import NONE, EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.measure.methods import labels
from forerun.measure.rounds import Measured, Sample, measure
from forerun.sampling.params import SamplingParams
from forerun.speculate.length.prices import Curve
from forerun_lab.load.arrivals import Arrival
from forerun_lab.load.costs import LoadCosts, Way
from forerun_lab.load.replica import Limits

LENGTHS = (1, 3, 5, 7)
"""Drafted tokens that are measured."""
ANSWER = 48
"""Most tokens of a measured answer."""
SHORTEST = 16
"""Prompt tokens beyond one from which reading is measured, then four times as many each time."""
REQUESTS = 4
"""That are measured for each number of them at a time, at least."""
REPEATS = 3
PASSES = 2
"""Times that everything is measured, in turns."""


@dataclass
class LoadBench:
    """Runs ``llm``'s engine at the lengths that ``typical`` has, and reads prompts of up to ``longest`` tokens.
    ``prompts(count, length)`` gives texts."""

    llm: LLM
    typical: Arrival
    longest: int
    prompts: Callable[[int, int], list[list[int]]]
    temperature: float = 0.0
    seed: int = 0
    step: Callable[[str], None] = lambda note: None

    def costs(self, options: Sequence[Mapping[str, Any]]) -> LoadCosts:
        """With the drafters of ``options``, each at ``LENGTHS``."""
        result: dict[tuple[str, int], dict[int, Measured]] = defaultdict(lambda: defaultdict(Measured))
        several = options or [{"method": NONE}]
        names = labels(several, ())
        drafted = {"num_speculative_tokens": LENGTHS[-1]} if options else {}
        # Prompts that are known need no rounds, in which the first ones would be done before the last are read.
        engines = [self._engine({**each, **drafted}, prefix_caching=None) for each in several]
        for count in counts(self.llm.config.max_num_seqs):
            for _ in range(PASSES):
                for engine, name in zip(engines, names):
                    for k in (0, *LENGTHS) if options else (0,):
                        self.step(f"{name}, {k} drafted tokens, {count} at a time")
                        result[name if k else NONE, k][count].extend(self._decoded(engine, count, k))
        ways = [way for (method, k), runs in result.items() if (way := _way(method, k, runs)) is not None]
        self.step("reading prompts")
        return LoadCosts(ways, self._prompt_curve(), self._deep())

    def _decoded(self, engine: Engine, count: int, k: int) -> Measured:
        """``count`` requests that decode together, around the middle of a typical answer."""
        positions = engine.max_model_len
        most = min(ANSWER, max(8, self.typical.output), positions // 2)
        length = max(1, min(self.typical.prompt + (self.typical.output - most) // 2, positions - most))
        params = [
            SamplingParams(temperature=self.temperature, max_tokens=most, ignore_eos=True, seed=self.seed + i)
            for i in range(count)
        ]
        # Several prompts, and others for each count: requests differ in how well they are guessed.
        result, groups = Measured(), max(1, REQUESTS // count)
        prompts = self.prompts((1 + groups) * count, length)
        for group in range(1, 1 + groups):
            result.extend(measure(engine, prompts[group * count : (group + 1) * count], params, max_draft=k))
        result.check()
        return result

    def _prompt_curve(self) -> Curve:
        """Seconds of rounds that read one prompt from its beginning."""
        longest = max(2, min(self.llm.config.max_num_batched_tokens, self.longest))
        lengths, length = [1], SHORTEST
        while length < longest:
            lengths.append(length)
            length *= 4
        times: dict[int, list[float]] = defaultdict(list)
        engine = self._engine({"method": NONE}, prefix_caching=False)
        for repeat in range(REPEATS + 1):
            for length in [*lengths, longest]:
                text = self.prompts(repeat + 1, length)[repeat]
                times[len(text)] += [seconds for _, seconds in self._read(engine, text)][:1] if repeat else []
        return Curve({length: median(values) for length, values in times.items() if values})

    def _deep(self) -> float:
        """Seconds that a prompt's token costs more for each token before it: least squares over a prompt's chunks."""
        chunk = max(SHORTEST, self.longest // 8)
        engine = self._engine({"method": NONE}, prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=chunk)
        text = self.prompts(1, self.longest)[0]
        rounds = [one for _ in range(REPEATS) for one in self._read(engine, text)]
        whole = [(depth, seconds / chunk) for depth, seconds in rounds if depth + chunk <= len(text)]
        mean_depth = sum(depth for depth, _ in whole) / max(1, len(whole))
        spread = sum((depth - mean_depth) ** 2 for depth, _ in whole)
        return max(0.0, sum((depth - mean_depth) * each for depth, each in whole) / spread) if spread else 0.0

    def _read(self, engine: Engine, prompt: Sequence[int]) -> list[tuple[int, float]]:
        """Tokens before it, and seconds, of each round that reads a prompt."""
        result = []
        with torch.inference_mode():
            (job,) = engine.add(prompt, SamplingParams(temperature=self.temperature, max_tokens=1, ignore_eos=True))
            while engine.busy:
                depth, began = job.sequence.num_computed_tokens, perf_counter()
                engine.step()
                result.append((depth, perf_counter() - began))
        return result

    def _engine(self, speculative: Mapping[str, Any], **changes: Any) -> Engine:
        config = replace(self.llm.config, **changes)
        return Engine(self.llm.model, None, config, SpeculativeConfig.parse(speculative))


def steps(seats: int | None, drafters: int) -> int:
    """How often ``LoadBench.costs`` says what it does."""
    lengths = 1 + len(LENGTHS) if drafters else 1
    return len(counts(seats or EngineConfig.max_num_seqs)) * PASSES * lengths * max(1, drafters) + 1


def counts(seats: int) -> list[int]:
    """Requests at a time that are measured: 1, 2, 4, ... up to ``seats``."""
    result, count = [], 1
    while count < seats:
        result.append(count)
        count *= 2
    return [*result, seats]


def _way(method: str, k: int, runs: Mapping[int, Measured]) -> Way | None:
    """None for a drafter that drafted nothing, or never for several together. Raises ConfigError where that is plain
    decoding: the price of one says nothing of that of several."""
    if k and not any(one.depth for run in runs.values() for one in run.rounds):
        return None
    points, tokens, fractions = {}, 0, 0
    for count, run in runs.items():
        rounds = [one for one in run.rounds if len(one.depths) == count]
        if rounds:
            points[count] = _usual(rounds)
            tokens += sum(one.tokens for one in rounds)
            fractions += sum(len(one.depths) for one in rounds)
    if len(points) < min(2, len(runs)):
        if k:
            return None
        together = ", ".join(str(count) for count in runs if count not in points)
        raise ConfigError(
            f"of the load's requests, {together} never decoded together: raise kv_cache_memory or max_tokens, or lower "
            "max_num_seqs"
        )
    requests = [one for run in runs.values() for one in run.metrics if one.rounds]
    spread = sorted(one.decode_tokens / one.rounds for one in requests) if k else []
    return Way(method, k, Curve(points), tokens / fractions, spread)


def _usual(rounds: Sequence[Sample]) -> float:
    """Seconds of a round at the mean over what is drafted, each kind of round at its median: some draft nothing."""
    kinds: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        kinds[one.rows].append(one.total)
    return sum(len(times) * median(times) for times in kinds.values()) / len(rounds)


def limits_of(llm: LLM) -> Limits:
    """As the engine has them."""
    config, pool = llm.config, llm.engine.target.attention.pool
    return Limits(
        seats=config.max_num_seqs,
        rows=config.max_num_batched_tokens,
        chunk=config.max_prefill_tokens,
        pages=pool.num_pages,
        page=pool.page_size,
        prefixes=config.caches_prefixes,
        positions=llm.engine.max_model_len,
    )
