"""The search of ``tune``: candidates answer the same prompts in turns with plain decoding; slow ones may drop out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from forerun.engine.llm import LLM
from forerun.measure.rounds import PLAIN, EngineContender, Interleaved, Prompts, figures, identity, seeded_params

FIRST_PROMPTS = 2
"""Prompts of each workload that every candidate answers even if the time is over."""
HOPELESS = 0.4
"""A candidate is dropped when its speed is below 1 - HOPELESS / (prompts so far) of the best one's."""


class Race:
    """Times ``candidates`` at every workload, a temperature and a number of requests at a time.

    Each prompt is answered ``repeats`` times, by drafters that have not seen it. Candidate 0 is plain decoding.
    """

    def __init__(
        self,
        llm: LLM,
        candidates: Sequence[Mapping[str, Any]],
        prompts: Prompts,
        workloads: Sequence[tuple[float, int]] = ((0.0, 1),),
        *,
        tokens: int,
        seed: int = 0,
        repeats: int = 1,
        ignore_eos: bool = False,
    ) -> None:
        self.configs = [dict(PLAIN), *map(dict, candidates)]
        self.prompts, self.workloads, self.repeats = prompts, list(workloads), repeats
        self.options, self.seed = {"max_tokens": tokens, "ignore_eos": ignore_eos}, seed
        most = max(count for _, count in self.workloads)
        self.contenders = [EngineContender(llm, config, max_num_seqs=most) for config in self.configs]
        self.runs = [Interleaved(self.contenders) for _ in self.workloads]
        self.active = list(range(len(self.configs)))

    def run(
        self,
        over: Callable[[], bool],
        told: Callable[[int, Race], None] = lambda turn, race: None,
        least: int = FIRST_PROMPTS,
        *,
        drops: bool = True,
    ) -> None:
        """Goes on until all prompts are answered or the time is ``over``, at least for ``least`` prompts of each
        workload. ``told`` is called after each. ``drops``: whether slow candidates drop out."""
        for turn, (fresh, groups) in enumerate(self._turns()):
            if turn >= least and over():
                break
            if fresh:
                if turn:
                    self.runs[0].renew(fresh=True)
                self.runs[0].warm_up(self.prompts[:1], seeded_params(1, 0, temperature=0.0, ignore_eos=True))
            for run, (temperature, count), prompts in zip(self.runs, self.workloads, groups):
                params = seeded_params(count, self.seed + turn * count, temperature=temperature, **self.options)
                run.run(prompts, params, self.active)
            speeds = {index: self.speedup(index) for index in self.active}
            slowest = max(speeds.values()) * (1 - HOPELESS / (1 + turn)) if drops else 0.0
            self.active = [index for index, speed in speeds.items() if not index or speed > slowest]
            told(turn + 1, self)

    def _turns(self) -> Iterator[tuple[bool, list[list[Sequence[int]]]]]:
        """Yields whether a new repetition begins, and a group of prompts for each workload."""
        for _ in range(self.repeats):
            waiting, fresh = list(self.prompts), True
            while fresh or len(waiting) >= sum(count for _, count in self.workloads):
                groups = []
                for _, count in self.workloads:
                    while len(waiting) < count:
                        waiting += self.prompts
                    groups.append(waiting[:count])
                    waiting = waiting[count:]
                yield fresh, groups
                fresh = False

    def speedup(self, index: int) -> float:
        """A candidate's speed over plain decoding: the geometric mean over workloads."""
        return geometric_mean([figures(run.runs[index], run.runs[0])["speedup"] for run in self.runs])

    def best(self) -> int:
        """The fastest of the candidates that were not dropped."""
        return max(self.active, key=self.speedup)

    def rows(self) -> list[dict[str, Any]]:
        """What was measured of each candidate at each workload."""
        return [
            {"config": config, "temperature": temperature, "concurrency": count, "answers": len(run.runs[index]),
             **figures(run.runs[index], run.runs[0])}
            for index, config in enumerate(self.configs)
            for run, (temperature, count) in zip(self.runs, self.workloads)
        ]  # fmt: skip

    def identity(self, index: int) -> dict[str, Any]:
        """Whether a candidate's answers are those of plain decoding."""
        own, plain = ([one for run in self.runs for one in run.runs[each]] for each in (index, 0))
        return identity(own, plain)
