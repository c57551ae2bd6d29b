"""Acceptance and cost, measured inside real rounds: what the theory needs to know of a pair of models.

Never in a tight loop: a draft step that follows a target pass finds cold caches and takes up to twice as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.core.tree import Draft, Verdict
from forerun.engine.config import SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.sampling.params import SamplingParams
from forerun.speculate.round import Round
from forerun.theory import expected_tokens

TURN = 32
"""Rounds of a turn: long enough for warm caches, shorter than a neighbour's moods."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured round in which every sequence decoded. Times in seconds; ``total`` includes the host's."""

    depths: tuple[int, ...]
    """Depth of each sequence's draft; 0: it decoded plainly."""
    rows: int
    """Rows of the target's forward."""
    tokens: int
    """Tokens emitted."""
    draft: float
    verify: float
    accept: float
    total: float
    ranks: tuple[int | None, ...] = ()
    """Of each draft: which draw under the root was accepted, from 0; None: none was."""
    experts: int = 0
    """That the target's forward read, those of all layers."""

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def rest(self) -> float:
        """Seconds for neither drafting nor the target's forward."""
        return self.total - self.draft - self.verify


@dataclass
class Measured:
    """What a run gave: every prompt's tokens, and the rounds after the prompts were read."""

    answers: list[list[int]] = field(default_factory=list)
    metrics: list[RequestMetrics] = field(default_factory=list)
    rounds: list[Sample] = field(default_factory=list)
    tokens: int = 0
    """Tokens emitted in ``seconds``."""
    seconds: float = 0.0
    """Time of decoding: rounds that read no prompt; of all rounds where they were asked for."""
    parts: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of each measurement that it was extended with."""

    def extend(self, other: Measured) -> None:
        self.answers += other.answers
        self.metrics += other.metrics
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.parts.append((other.tokens, other.seconds))

    def check(self) -> None:
        """Raise ConfigError where nothing was decoded."""
        if not self.tokens:
            raise ConfigError(
                "nothing to measure: an answer's first token comes with its prompt, so let answers have two tokens or "
                "more (max_tokens, max_model_len)"
            )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def total(self) -> RequestMetrics:
        return RequestMetrics.merged(self.metrics) if self.metrics else RequestMetrics()


def engine_of(llm: LLM, options: Mapping[str, Any] | SpeculativeConfig | None, **changes: Any) -> Engine:
    """An engine on a loaded target that drafts as ``options`` say (``speculative_config``), with ``changes`` of its
    engine options. Raises ForerunError subclasses."""
    return Engine(llm.model, llm.tokenizer, replace(llm.config, **changes), SpeculativeConfig.parse(options))


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    whole: bool = False,
    max_draft: int | None = None,
) -> Measured:
    """Run the prompts through ``engine``, as many at a time as it takes, and time every round; with ``whole`` those
    that read prompts count, too. ``max_draft`` bounds a draft's tokens."""
    result = Measured()
    with torch.inference_mode():  # as whoever runs an engine does
        for _ in rounds(engine, prompts, params, result, whole=whole, max_draft=max_draft):
            pass
    return result


def rounds(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    result: Measured,
    *,
    whole: bool = False,
    max_draft: int | None = None,
) -> Iterator[None]:
    """The same, round by round, for whoever lets several engines take turns; ``result`` is whole at the end."""
    latest: list[Round] = []
    engine.on_round = latest.append
    jobs = [
        job
        for prompt, options in zip(prompts, params, strict=True)
        for job in engine.add(prompt, options, max_draft=max_draft)
    ]
    while engine.busy:
        latest.clear()
        began = perf_counter()
        engine.step()
        seconds = perf_counter() - began
        sample = _sample(latest[0], seconds) if latest else None
        if sample is not None:
            result.rounds.append(sample)
        if sample is not None or whole:
            result.tokens += sum(len(verdict.tokens) for round_ in latest for verdict in round_.verdicts)
            result.seconds += seconds
        yield
    engine.on_round = None
    result.answers = [job.output_ids for job in jobs]
    result.metrics = [job.metrics for job in jobs]


def interleave(running: Sequence[Iterator[None]]) -> None:
    """Runs of ``rounds`` side by side, ``TURN`` rounds each, so that a slow moment of the machine meets them all."""
    with torch.inference_mode():
        waiting = list(running)
        while waiting:
            waiting = [run for run in waiting if sum(1 for _ in islice(run, TURN)) == TURN]


def _sample(round_: Round, seconds: float) -> Sample | None:
    """None for a round that read prompt tokens."""
    if any(verdict.fed != 1 for verdict in round_.verdicts):
        return None
    return Sample(
        depths=tuple(max(draft.depths(), default=0) for draft in round_.drafts),
        rows=round_.verification.batch.num_rows,
        tokens=sum(len(verdict.tokens) for verdict in round_.verdicts),
        draft=round_.seconds.draft,
        verify=round_.seconds.verify,
        accept=round_.seconds.accept,
        total=seconds,
        ranks=tuple(map(_rank, round_.drafts, round_.verdicts)),
        experts=round_.seconds.experts,
    )


def _rank(draft: Draft, verdict: Verdict) -> int | None:
    if not verdict.path:
        return None
    return next(rank for rank, trial in enumerate(draft.trials[0]) if trial.node == verdict.path[0])


def full(rounds: Sequence[Sample], sequences: int) -> list[Sample]:
    """The rounds in which ``sequences`` took part; all of them if there is none."""
    return [r for r in rounds if len(r.depths) == sequences] or list(rounds)


def in_plain_forwards(result: Measured, plain: Measured, sequences: int) -> None:
    """Make the times of ``result``'s rounds multiples of the forward of plain rounds that took turns with them."""
    unit = median(r.verify for r in full(plain.rounds, sequences))
    result.rounds = [
        replace(r, draft=r.draft / unit, verify=r.verify / unit, accept=r.accept / unit, total=r.total / unit)
        for r in result.rounds
    ]


@dataclass(frozen=True)
class RoundCosts:
    """Prices in units of a plain target forward of the same sequences.

    ``c`` is one draft step (Leviathan et al. 2023, definition 3.7), ``verify[rows]`` a forward of so many rows;
    ``typical`` that of a drafted round.
    """

    sequences: int
    c: float | None
    verify: dict[int, float]
    typical: float | None

    @classmethod
    def of(cls, rounds: Sequence[Sample], plain: Sequence[Sample], sequences: int) -> RoundCosts | None:
        """From a method's rounds and plain decoding's of the same run; None if either is empty. Medians."""
        rounds, plain = full(rounds, sequences), full(plain, sequences)
        if not rounds or not plain:
            return None
        unit = median(r.verify for r in plain)
        drafted = [r for r in rounds if r.depth]
        by_rows: dict[int, list[float]] = defaultdict(list)
        for r in rounds:
            by_rows[r.rows].append(r.verify)
        return cls(
            sequences,
            median(r.draft / r.depth for r in drafted) / unit if drafted else None,
            {rows: median(values) / unit for rows, values in sorted(by_rows.items())},
            median(r.verify for r in drafted) / unit if drafted else None,
        )

    def predict(self, rounds: Sequence[Sample], match_rate: float) -> float | None:
        """Speed over plain decoding that the theory promises for these rounds' draft lengths.

        ``expected_tokens / (gamma c + verify_cost)``, both summed over the rounds, because a drafter may draft less
        than it was asked for.
        """
        rounds = full(rounds, self.sequences)
        tokens = sum(expected_tokens(match_rate, depth) for r in rounds for depth in r.depths)
        time = sum(r.depth * (self.c or 0.0) + self.verify[r.rows] for r in rounds)
        sequences = sum(len(r.depths) for r in rounds) / len(rounds)
        return tokens / time / sequences if time else None


def shares(rounds: Sequence[Sample]) -> dict[str, float] | None:
    """Where the rounds' time went: drafting, the target's forward, acceptance and sampling, and the host."""
    total = sum(r.total for r in rounds)
    if not total:
        return None
    parts = {name: sum(getattr(r, name) for r in rounds) / total for name in ("draft", "verify", "accept")}
    return {**parts, "host": 1.0 - sum(parts.values())}
