"""Rounds of made-up requests, which measure what drafts and verifications cost on this machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.base import Drafter
from forerun.speculate.draft.router import Router
from forerun.speculate.length.base import Fixed, Setting
from forerun.speculate.length.prices import SHORT, Timed, TimeRound
from forerun.speculate.round import speculate

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

LONG, LEAST = (2048, 512), 256
"""Further tokens of context of a long request alone, and of each one in a batch; fewer than ``LEAST`` say nothing."""
READS = 32
"""Most rounds in which drafters read the prompts."""


class _Budgets(Fixed):
    """The same budget for every request."""

    depth = 0

    def budgets(self, sequences: Requests) -> list[int]:
        return [self.depth * sequence.decodes for sequence in sequences]


class _Filled(Router):
    """Drafts of the engine's drafters, filled up with random tokens."""

    rows, reached = 1, 0

    def __init__(self, router: Router, draw: random.Random, most: int) -> None:
        super().__init__(router.drafters)
        self.draw, self.most = draw, most

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        # One that fails here is asked once, and again by a request, which says so.
        drafts = [Draft() for _ in sequences] if self.failures else super().propose(sequences, budgets)
        self.reached = max(draft.depth if len(draft) else 0 for draft in drafts)
        for sequence, draft in zip(sequences, drafts):
            nodes = self.rows - 1 if draft.is_chain else min(self.rows - 1, self.most)  # states keep no larger trees
            while sequence.decodes and len(draft) < nodes:
                draft.add(self.draw.choice(sequence.tokens), len(draft) - 1)
        return drafts


@contextmanager
def trials(engine: Engine, sequences: int) -> Iterator[tuple[TimeRound, Mapping[str, float]] | None]:
    """See ``length.prices.Trials``. No room: fewer than two pages for each request, or a model that needs a source."""
    made, long_ones = MadeUp(engine, sequences), MadeUp(engine, sequences, LONG[sequences > 1])

    def time_round(method: str | None, depth: int, rows: int, long: bool = False) -> Timed:
        if not long:
            return made.time_round(method, depth, rows)
        if not long_ones.sequences and not long_ones.fits_long():
            return Timed(rows, 0, 0.0, 0.0)
        return long_ones.time_round(method, depth, rows)._replace(context=long_ones.context)

    try:
        yield (time_round, made.read()) if made.fits() else None
    finally:
        made.free()
        long_ones.free()


class MadeUp:
    """Requests that exist only while prices are measured. They are neither scheduled nor counted.

    ``context``: further tokens before the prompt, whose entries in the cache are zeros. To compute them may take a
    minute; reading them takes as long.
    """

    def __init__(self, engine: Engine, count: int, context: int = 0) -> None:
        self.engine, self.count = engine, count
        self.draw = random.Random(0)
        self.router = _Filled(engine.router, self.draw, engine.max_nodes)
        self.budgets = _Budgets(Setting())
        self.params = SamplingParams(temperature=0.8, max_tokens=None)
        self.length = min(SHORT, engine.max_model_len // 2)
        self.context = min(context, (engine.max_model_len - self.length) // 2)
        self.sequences: list[RequestState] = []

    def fits(self) -> bool:
        """Begins, if there are pages."""
        if self.engine.model.info.encoder is not None or self.count > self.engine.config.max_num_seqs:
            return False
        return self._begin(next(iter(self.router.drafters), None))

    def fits_long(self) -> bool:
        """The same for long ones: in pages that are free, so that no cached prefix has to go for them. A recurrent
        state costs the same behind any context."""
        pool = self.engine.target.attention.pool
        pages = self.count * pool.pages_for(self.context + self.length + self.engine.max_nodes + 1)
        return self.context >= LEAST and pool.states is None and pages <= pool.num_free and self._begin(None)

    def _begin(self, method: str | None) -> bool:
        """Makes new requests of a drafter and reads their prompts; False if there are no pages, or logits are NaN."""
        self.free()
        pool = self.engine.target.attention.pool
        ids = range(self.engine.model.info.vocab_size)
        for number in range(self.count):
            tokens = self.draw.choices(ids, k=self.context + self.length)
            name = -1 - number - bool(self.context) * self.count
            sequence = RequestState(name, tokens, len(tokens), self.params, number)
            self.sequences.append(sequence)
            if not pool.try_reserve(sequence.id, len(tokens) + self.engine.max_nodes + 1):
                return False
            if self.context:
                # Pages of memory that were never written are all one page, which the processor's cache keeps.
                pool.zero(pool.block_tables[sequence.id], self.context)
                pool.advance(sequence.id, self.context)
            sequence.num_computed_tokens = self.context
            sequence.drafter, sequence.scheduled = method, self.length
            sequence.worth, sequence.whole_drafts = (lambda draft: 0), True
        self._round(0, 1)
        return all(sequence.num_output for sequence in self.sequences)

    def _round(self, depth: int, rows: int) -> Timed:
        """``depth`` 0 only looks up, if ``rows`` are more than 1."""
        self.budgets.depth, self.router.rows = max(depth, int(rows > 1)), rows
        drafter = self.router.drafters.get(self.sequences[0].drafter or "")
        steps = None if drafter is None else drafter.parts().steps
        for sequence in self.sequences:
            sequence.depths = {} if steps is None else {steps: depth}
        engine = self.engine
        result = speculate(
            self.sequences, engine.target, self.router, engine.rule, self.budgets, engine.sampler,
            lambda sequence, draft, verdict: verdict.decided_tokens(draft),
        )  # fmt: skip
        seconds = result.seconds
        rows = result.verification.batch.num_rows
        return Timed(rows, self.router.reached, seconds.draft, seconds.verify + seconds.accept, seconds.experts)

    def time_round(self, method: str | None, depth: int, rows: int) -> Timed:
        """See ``length.prices.TimeRound``."""
        pool, most = self.engine.target.attention.pool, self.engine.max_nodes + 1
        longest = max(len(sequence.tokens) for sequence in self.sequences) + most
        fits = longest < self.engine.max_model_len and all(
            pool.try_reserve(sequence.id, len(sequence.tokens) + most) for sequence in self.sequences
        )
        if not fits or method not in (None, self.sequences[0].drafter):
            self._begin(method or self.sequences[0].drafter)
        for sequence in self.sequences:
            sequence.scheduled = 1
        return self._round(depth, rows)

    def read(self) -> dict[str, float]:
        """By method, the seconds in which its drafter read a token of the prompts."""
        seconds = {}
        for name, drafter in [*self.router.drafters.items()] * 2:  # the first time, weights are put in place
            self._begin(name)
            few = self.count * (drafter.config.num_speculative_tokens + 1)
            times: list[float] = []
            backlog = self._backlog(drafter)
            while self._backlog(drafter) > few and len(times) < READS:  # it reads a part of them in each round
                times.append(self.time_round(name, 1, 2).draft)
            if times:
                again = min(self.time_round(name, 1, 2).draft for _ in range(2))
                seconds[name] = max(0.0, sum(times) - len(times) * again) / backlog
        return seconds

    def _backlog(self, drafter: Drafter[Any]) -> int:
        return sum(drafter.backlog(sequence) for sequence in self.sequences)

    def free(self) -> None:
        for sequence in self.sequences:
            sequence.num_computed_tokens = 0  # so that no drafter learns from its text
            self.engine.target.attention.pool.free(sequence.id)
            self.engine.router.release(sequence)
        self.sequences.clear()
