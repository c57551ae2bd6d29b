"""The runner of ``bench``, ``plan`` and ``tune``: contenders answer the same prompts in rotation, and rounds are timed.

Nothing is timed in a tight loop of one step: a draft step that follows a target pass finds cold caches and takes up to
twice as long. ``Measured.metrics`` has each request's start, first token and end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from forerun.core.errors import ConfigError
from forerun.core.tree import Draft, Verdict
from forerun.engine.config import NONE, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import DrafterConfig
from forerun.speculate.round import Round
from forerun.theory import expected_tokens

PLAIN: dict[str, Any] = {"method": NONE}
FASTEST = "none_fastest"
ROUNDS = 32
"""Rounds before the next contender continues: enough for warm caches, few enough to share what disturbs the machine."""
WARM_UP = 8
"""Tokens of the answers that are not measured."""
OUTLIER = 3.0
"""Times the median beyond which a round's time is capped. Drafters vary less than this from round to round."""
Prompts = Sequence[Sequence[int]]
"""Token ids of each prompt."""
Params = Sequence[SamplingParams]
"""Sampling parameters of each prompt."""


def seeded_params(count: int, seed: int, **options: Any) -> list[SamplingParams]:
    """Sampling parameters with ``options`` for ``count`` prompts, with the seeds ``seed``, ``seed + 1``, ..."""
    return [SamplingParams(seed=seed + number, **options) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured round in which every sequence decoded. Times in seconds; ``total`` includes the host's work."""

    depths: tuple[int, ...]
    """Depth of each sequence's draft; 0 for a sequence without one."""
    rows: int
    """Rows of the target's forward."""
    tokens: int
    """Emitted tokens."""
    draft: float
    verify: float
    accept: float
    total: float
    ranks: tuple[int | None, ...] = ()
    """For each draft the rank of the accepted trial under the root, from 0; None if none was accepted."""
    experts: int = 0
    """Experts that the target's forward read, summed over layers."""

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def rest(self) -> float:
        """Time outside drafting and the target's forward."""
        return self.total - self.draft - self.verify


@dataclass
class Measured:
    """The result of a run: every prompt's answer, and its decoding rounds."""

    answers: list[list[int]] = field(default_factory=list)
    metrics: list[RequestMetrics] = field(default_factory=list)
    rounds: list[Sample] = field(default_factory=list)
    tokens: int = 0
    """Tokens emitted in ``seconds``."""
    seconds: float = 0.0
    """Time of the rounds without prefill; of all rounds if ``measure`` counts them as a ``whole``."""
    parts: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of each run that was joined to this one."""

    @classmethod
    def joined(cls, parts: Iterable[Measured]) -> Measured:
        """One result for consecutive runs."""
        result = cls()
        for part in parts:
            result.extend(part)
        return result

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

    def num_different(self, other: Measured) -> int:
        """Number of answers that differ from ``other``'s."""
        return sum(a != b for a, b in zip(self.answers, other.answers, strict=True))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def total(self) -> RequestMetrics:
        return RequestMetrics.merged(self.metrics) if self.metrics else RequestMetrics()


def engine_of(llm: LLM, options: Mapping[str, Any] | SpeculativeConfig | None, **changes: Any) -> Engine:
    """An engine on the loaded target with the ``speculative_config`` ``options`` and ``changes`` to the engine config.
    Raises ForerunError subclasses."""
    return Engine(llm.model, llm.tokenizer, replace(llm.config, **changes), SpeculativeConfig.parse(options))


def measure(
    engine: Engine, prompts: Prompts, params: Params, *, whole: bool = False, max_draft: int | None = None
) -> Measured:
    """Run the prompts through ``engine``, ``max_num_seqs`` at a time, and time every round.

    Args:
        whole: count rounds with prefill, too.
        max_draft: limit of a draft's tokens.
    """
    result = Measured()
    with torch.inference_mode():
        for _ in rounds(engine, prompts, params, result, whole=whole, max_draft=max_draft):
            pass
    return result


def rounds(
    engine: Engine,
    prompts: Prompts,
    params: Params,
    result: Measured,
    *,
    whole: bool = False,
    max_draft: int | None = None,
) -> Iterator[None]:
    """``measure`` as a generator that yields after every round, so that engines can alternate. Fills ``result``."""
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


def _sample(round_: Round, seconds: float) -> Sample | None:
    """None for a round with prefill."""
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
        ranks=tuple(map(_accepted_rank, round_.drafts, round_.verdicts)),
        experts=round_.seconds.experts,
    )


def _accepted_rank(draft: Draft, verdict: Verdict) -> int | None:
    if not verdict.path:
        return None
    return next(rank for rank, trial in enumerate(draft.trials[0]) if trial.node == verdict.path[0])


class Contender(Protocol):
    """An engine that a benchmark compares with others."""

    name: str

    def facts(self) -> dict[str, Any]:
        """Settings that a table's row shows beside the measurements."""

    def promises_identity(self, temperature: float) -> bool:
        """Whether its tokens must be those of plain decoding."""

    def run(self, prompts: Prompts, params: Params) -> Measured:
        """Answer all prompts and time decoding."""

    def close(self) -> None:
        """Free its memory."""


class EngineContender:
    """Forerun's engine on a loaded target with one ``speculative_config``. ``whole`` counts rounds with prefill, too;
    ``changes`` apply to the engine config. Raises ForerunError subclasses."""

    def __init__(
        self, llm: LLM, options: Mapping[str, Any], name: str = "", *, whole: bool = False, **changes: Any
    ) -> None:
        self.llm, self.options, self.whole, self.changes = llm, options, whole, changes
        self.name = name or options["method"]
        self.engine = engine_of(llm, options, **changes)

    def renew(self, fresh: bool = False) -> None:
        """Replace the drafter by one that has not seen these prompts' answers, which some would repeat. What the length
        policy has measured stays, unless ``fresh``."""
        policy = self.engine.policy
        del self.engine
        self.engine = engine_of(self.llm, self.options, **self.changes)
        if fresh:
            return
        policy.move(self.engine.policy.setting)
        self.engine.policy = policy
        self.engine.scheduler.draft_rows = policy.longest_nodes

    def facts(self) -> dict[str, Any]:
        speculative = self.engine.speculative
        drafter = speculative.drafter
        return {
            "accept": speculative.accept if drafter is not None else None,
            "lossless": self.engine.rule.lossless,
            "length": speculative.length if drafter is not None else None,
            "num_speculative_tokens": drafter.num_speculative_tokens if drafter is not None else None,
            "tree": _tree(drafter),
            "synthetic": speculative.synthetic is not None,
            "invariant": self.llm.model.invariant,
            "model_path": self.llm.model.info.path,
        }

    def promises_identity(self, temperature: float) -> bool:
        rule = self.engine.rule
        return self.llm.model.invariant and (rule.identity or (rule.lossless and temperature == 0.0))

    def run(self, prompts: Prompts, params: Params) -> Measured:
        return measure(self.engine, prompts, params, whole=self.whole)

    def rounds(self, prompts: Prompts, params: Params, result: Measured) -> Iterator[None]:
        """``run`` as a generator that yields after every round and fills ``result``."""
        return rounds(self.engine, prompts, params, result, whole=self.whole)

    def close(self) -> None:
        del self.engine


def _tree(drafter: DrafterConfig | None) -> str | None:
    """A tree's shape or number of nodes, for tables; ``yes`` if parts of the drafter branch, None if none does."""
    if drafter is None or not drafter.branches:
        return None
    if drafter.tree is not None:
        return "x".join(map(str, drafter.tree))
    nodes = getattr(drafter, "tree_nodes", None)
    return f"best {nodes}" if nodes is not None else "yes"


class Interleaved:
    """Contenders that alternate on the same prompts. ``runs[i]`` has contender i's result of each repetition. Contender
    ``first`` begins; after each repetition the next one does."""

    def __init__(self, contenders: Sequence[Contender], first: int = 0) -> None:
        self.contenders, self.first = contenders, first
        self.runs: list[list[Measured]] = [[] for _ in contenders]

    def _order(self) -> list[int]:
        count = len(self.contenders)
        first = self.first + len(self.runs[0])
        return [(first + index) % count for index in range(count)]

    def renew(self, fresh: bool) -> None:
        """Reset engines' drafters and, if ``fresh``, their length policies."""
        for contender in self.contenders:
            if isinstance(contender, EngineContender):
                contender.renew(fresh)

    def warm_up(self, prompts: Prompts, params: Params) -> None:
        """Run every contender once, unmeasured. Prompts are reversed, so that drafters learn nothing about them."""
        backwards = [prompt[::-1] for prompt in prompts]
        few = [replace(each, max_tokens=min(WARM_UP, each.max_tokens or WARM_UP)) for each in params]
        for contender in self.contenders:
            contender.run(backwards, few)

    def run(self, prompts: Prompts, params: Params, among: Sequence[int] | None = None) -> None:
        """Every contender, or those with an index in ``among``, answers all prompts, one contender after another."""
        for index in self._order():
            if among is None or index in among:
                self.runs[index].append(self.contenders[index].run(prompts, params))

    def side_by_side(self, prompts: Prompts, params: Params) -> list[Measured]:
        """The contenders, all engines, alternate every ``ROUNDS`` rounds, so that a slow moment slows all of them."""
        result = [Measured() for _ in self.contenders]
        contenders: Sequence[Any] = self.contenders
        waiting = [contenders[index].rounds(prompts, params, result[index]) for index in self._order()]
        with torch.inference_mode():
            while waiting:
                waiting = [run for run in waiting if sum(1 for _ in islice(run, ROUNDS)) == ROUNDS]
        for runs, measured in zip(self.runs, result):
            runs.append(measured)
        return result


def identity(answers: Sequence[Measured], plain: Sequence[Measured]) -> dict[str, Any]:
    """``{"passed", "answers", "different"}``: whether all runs' answers are those of plain decoding."""
    different = sum(run.num_different(beside) for run, beside in zip(answers, plain, strict=True))
    return {"passed": not different, "answers": sum(len(run.answers) for run in answers), "different": different}


def figures(answers: Sequence[Measured], plain: Sequence[Measured]) -> dict[str, float]:
    """``{"tokens_per_second", "tokens_per_round", "speedup"}`` of one contender's runs, by ``capped_seconds``.
    ``plain`` has plain decoding's runs on the same prompts, or more. ``speedup`` is the median over runs of plain
    decoding's time per token over the contender's, at most its tokens per round: no draft makes a round cheaper."""
    plain = plain[: len(answers)]
    times = capped_seconds(answers)
    tokens, number = sum(run.tokens for run in answers), sum(len(run.rounds) for run in answers)
    ratios = [
        min(run.tokens * plain_seconds / (seconds * beside.tokens), run.tokens / len(run.rounds))
        for run, seconds, beside, plain_seconds in zip(answers, times, plain, capped_seconds(plain), strict=True)
        if seconds and beside.tokens
    ]
    return {
        "tokens_per_second": tokens / sum(times) if tokens else 0.0,
        "tokens_per_round": tokens / max(1, number),
        "speedup": median(ratios) if ratios else 1.0,
    }


def capped_seconds(runs: Sequence[Measured]) -> list[float]:
    """Seconds of each of one contender's runs, every round's time capped at ``OUTLIER`` times the median of its rounds
    with as many rows: other work on the machine makes single rounds a hundred times as long. First rounds, in which a
    drafter may read the prompt, are compared among themselves."""
    times: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for run in runs:
        for number, sample in enumerate(run.rounds):
            times[number == 0, sample.rows].append(sample.total)
    most = {kind: OUTLIER * median(each) for kind, each in times.items()}
    return [sum(min(s.total, most[i == 0, s.rows]) for i, s in enumerate(run.rounds)) for run in runs]


def full_rounds(rounds: Sequence[Sample], sequences: int) -> list[Sample]:
    """The rounds of ``sequences`` sequences; all rounds if there is none such."""
    return [r for r in rounds if len(r.depths) == sequences] or list(rounds)


def in_plain_forwards(results: Sequence[Measured], sequences: int) -> float:
    """Convert the times of rounds, in place, to multiples of a plain forward: the first result is plain decoding's.
    Returns that forward's seconds. Raises ConfigError if nothing was decoded."""
    results[0].check()
    unit = median(r.verify for r in full_rounds(results[0].rounds, sequences))
    for result in results:
        result.rounds = [
            replace(r, draft=r.draft / unit, verify=r.verify / unit, accept=r.accept / unit, total=r.total / unit)
            for r in result.rounds
        ]
    return unit


def costs_by_rows(rounds: Iterable[Sample]) -> dict[int, float]:
    """The median seconds of a verification, by its rows."""
    times: dict[int, list[float]] = defaultdict(list)
    for r in rounds:
        times[r.rows].append(r.verify)
    return {rows: median(values) for rows, values in sorted(times.items())}


@dataclass(frozen=True)
class RoundCosts:
    """Costs in plain target forwards of the same sequences. ``c`` is the cost of one draft step (Leviathan et al. 2023,
    definition 3.7), ``verify[rows]`` that of a forward by its rows, ``typical`` that of a drafted round's forward."""

    sequences: int
    c: float
    verify: dict[int, float]
    typical: float

    @classmethod
    def of(cls, rounds: Sequence[Sample], plain: Sequence[Sample], sequences: int) -> RoundCosts | None:
        """Medians over a method's rounds and plain decoding's of the same run; None if nothing was drafted."""
        rounds, plain = full_rounds(rounds, sequences), full_rounds(plain, sequences)
        drafted = [r for r in rounds if r.depth]
        if not drafted or not plain:
            return None
        unit = median(r.verify for r in plain)
        costs = {rows: seconds / unit for rows, seconds in costs_by_rows(rounds).items()}
        c, typical = median(r.draft / r.depth for r in drafted), median(r.verify for r in drafted)
        return cls(sequences, c / unit, costs, typical / unit)

    def predict(self, rounds: Sequence[Sample], match_rate: float) -> float | None:
        """Predicted speed over plain decoding for these rounds' draft lengths: ``expected_tokens / (gamma c +
        verify_cost)``, both summed over the rounds, because a drafter may draft less than requested."""
        rounds = full_rounds(rounds, self.sequences)
        tokens = sum(expected_tokens(match_rate, depth) for r in rounds for depth in r.depths)
        time = sum(r.depth * self.c + self.verify[r.rows] for r in rounds)
        sequences = sum(len(r.depths) for r in rounds) / len(rounds)
        return tokens / time / sequences if time else None


def shares(rounds: Sequence[Sample]) -> dict[str, float] | None:
    """Fractions of the rounds' time: ``draft``, the target's forward, ``accept`` with sampling, and ``host``."""
    total = sum(r.total for r in rounds)
    if not total:
        return None
    parts = {name: sum(getattr(r, name) for r in rounds) / total for name in ("draft", "verify", "accept")}
    return {**parts, "host": 1.0 - sum(parts.values())}
