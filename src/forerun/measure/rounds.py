"""Contenders that answer the same prompts in turns, and what their rounds did and cost.

``bench``, ``plan`` and ``tune`` all measure here, and never in a tight loop: a draft step that follows a target pass
finds cold caches and takes up to twice as long. ``Measured.metrics`` has each request's start, first token and end.
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
"""Rounds of a turn of contenders that run at once: long enough for warm caches, shorter than a neighbour's moods."""
WARM_UP = 8
"""Tokens of an answer before anything counts."""
DISTURBED = 3.0
"""Times what is usual that a round is believed to take: what drafters do differently from round to round is less."""
Prompts = Sequence[Sequence[int]]
"""Token ids of each."""
Params = Sequence[SamplingParams]
"""One each."""


def seeded(count: int, seed: int, **options: Any) -> list[SamplingParams]:
    """``options`` for each of ``count`` prompts, with seeds from ``seed`` on."""
    return [SamplingParams(seed=seed + number, **options) for number in range(count)]


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

    @classmethod
    def joined(cls, parts: Iterable[Measured]) -> Measured:
        """Of one run after another."""
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

    def different(self, other: Measured) -> int:
        """How many answers are not the other's."""
        return sum(mine != theirs for mine, theirs in zip(self.answers, other.answers, strict=True))

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
    engine: Engine, prompts: Prompts, params: Params, *, whole: bool = False, max_draft: int | None = None
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
    prompts: Prompts,
    params: Params,
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


class Contender(Protocol):
    """What answers prompts, to be compared with others."""

    name: str

    def facts(self) -> dict[str, Any]:
        """What a table's row says of it besides measurements."""

    def promises_identity(self, temperature: float) -> bool:
        """Whether its tokens must be those of plain decoding."""

    def run(self, prompts: Prompts, params: Params) -> Measured:
        """Answer the prompts, all of them, and time decoding."""

    def close(self) -> None:
        """Give memory back."""


class EngineContender:
    """Forerun's engine on a loaded target with one speculative configuration.

    ``whole``: the rounds that read prompts count, too. ``changes`` are of the engine's options. Raises ForerunError
    subclasses.
    """

    def __init__(
        self, llm: LLM, options: Mapping[str, Any], name: str = "", *, whole: bool = False, **changes: Any
    ) -> None:
        self.llm, self.options, self.whole, self.changes = llm, options, whole, changes
        self.name = name or options["method"]
        self.engine = engine_of(llm, options, **changes)

    def renew(self, fresh: bool = False) -> None:
        """A drafter that has not seen these prompts' answers, which some would recite; what the length policy has
        measured stays, unless ``fresh``."""
        policy = self.engine.policy
        del self.engine
        self.engine = engine_of(self.llm, self.options, **self.changes)
        if fresh:
            return
        policy.setting = self.engine.policy.setting
        self.engine.policy = policy
        self.engine.scheduler.draft_rows = policy.longest_nodes

    def facts(self) -> dict[str, Any]:
        speculative = self.engine.speculative
        drafter = speculative.drafter
        return {
            "accept": speculative.accept if drafter is not None else None,
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
        """The same, round by round."""
        return rounds(self.engine, prompts, params, result, whole=self.whole)

    def close(self) -> None:
        del self.engine


def _tree(drafter: DrafterConfig | None) -> str | None:
    """How drafts branch: a shape, a number of nodes, ``yes`` where parts of the drafter say how; None: not at all."""
    if drafter is None or not drafter.branches:
        return None
    if drafter.tree is not None:
        return "x".join(map(str, drafter.tree))
    nodes = getattr(drafter, "tree_nodes", None)
    return f"best {nodes}" if nodes is not None else "yes"


class Turns:
    """Contenders that answer the same prompts. ``runs[i]`` is what the i-th did: an entry for each of its turns."""

    def __init__(self, contenders: Sequence[Contender], first: int = 0) -> None:
        """``first`` begins; the next time it is the next contender that begins."""
        self.contenders, self.first = contenders, first
        self.runs: list[list[Measured]] = [[] for _ in contenders]

    def _order(self) -> list[int]:
        count = len(self.contenders)
        first = self.first + len(self.runs[0])
        return [(first + index) % count for index in range(count)]

    def renew(self, fresh: bool) -> None:
        """Engines' drafters forget what they have seen, and if ``fresh`` length policies what they have measured."""
        for contender in self.contenders:
            if isinstance(contender, EngineContender):
                contender.renew(fresh)

    def warm_up(self, prompts: Prompts, params: Params) -> None:
        """What is made once is not measured. The prompts are read backwards: a drafter learns nothing of what comes."""
        backwards = [prompt[::-1] for prompt in prompts]
        few = [replace(each, max_tokens=min(WARM_UP, each.max_tokens or WARM_UP)) for each in params]
        for contender in self.contenders:
            contender.run(backwards, few)

    def take(self, prompts: Prompts, params: Params, among: Sequence[int] | None = None) -> None:
        """Every contender, or those ``among`` them, answers all the prompts when its turn comes."""
        for index in self._order():
            if among is None or index in among:
                self.runs[index].append(self.contenders[index].run(prompts, params))

    def side_by_side(self, prompts: Prompts, params: Params) -> list[Measured]:
        """All contenders, engines alone, answer at once: the turn passes after ``ROUNDS`` rounds, so that a slow moment
        of the machine meets them all."""
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
    """``{"passed", "answers", "different"}``: whether all turns' answers are those of plain decoding."""
    different = sum(mine.different(theirs) for mine, theirs in zip(answers, plain, strict=True))
    return {"passed": not different, "answers": sum(len(mine.answers) for mine in answers), "different": different}


def figures(answers: Sequence[Measured], plain: Sequence[Measured]) -> dict[str, float]:
    """``{"tokens_per_second", "tokens_per_round", "speedup"}`` of one contender's turns, by ``undisturbed`` times.
    ``plain`` has plain decoding's turns on the same prompts, or more.

    ``speedup`` is the median over turns of plain decoding's time a token over its own, at most its tokens a round: no
    draft makes a round cheaper.
    """
    plain = plain[: len(answers)]
    took = undisturbed(answers)
    made, number = sum(answer.tokens for answer in answers), sum(len(answer.rounds) for answer in answers)
    ratios = [
        min(answer.tokens * plain_seconds / (seconds * beside.tokens), answer.tokens / len(answer.rounds))
        for answer, seconds, beside, plain_seconds in zip(answers, took, plain, undisturbed(plain), strict=True)
        if seconds and beside.tokens
    ]
    return {
        "tokens_per_second": made / sum(took) if made else 0.0,
        "tokens_per_round": made / max(1, number),
        "speedup": median(ratios) if ratios else 1.0,
    }


def undisturbed(answers: Sequence[Measured]) -> list[float]:
    """Seconds of each of one contender's turns if no round took more than ``DISTURBED`` times the median of its rounds
    with as many rows: where other work has the cores, single rounds take a hundred times as long, in whichever way's
    turn it is. First rounds, in which a drafter may read the prompt, are compared with each other."""
    times: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for answer in answers:
        for number, sample in enumerate(answer.rounds):
            times[number == 0, sample.rows].append(sample.total)
    most = {kind: DISTURBED * median(each) for kind, each in times.items()}
    return [sum(min(s.total, most[i == 0, s.rows]) for i, s in enumerate(answer.rounds)) for answer in answers]


def full(rounds: Sequence[Sample], sequences: int) -> list[Sample]:
    """The rounds in which ``sequences`` took part; all of them if there is none."""
    return [r for r in rounds if len(r.depths) == sequences] or list(rounds)


def in_plain_forwards(results: Sequence[Measured], sequences: int) -> float:
    """Make the times of rounds multiples of the plain rounds' forward; those are the first result's, which took turns
    with the others. Gives that forward's seconds. Raises ConfigError where nothing was decoded."""
    results[0].check()
    unit = median(r.verify for r in full(results[0].rounds, sequences))
    for result in results:
        result.rounds = [
            replace(r, draft=r.draft / unit, verify=r.verify / unit, accept=r.accept / unit, total=r.total / unit)
            for r in result.rounds
        ]
    return unit


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
