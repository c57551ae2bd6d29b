"""A drafter that drafts nothing and writes down what the target sees while it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs, drafters
from forerun.speculate.verify.score import Verification


@dataclass(frozen=True)
class RecordConfig(DrafterConfig):
    layers: tuple[int, ...] = ()
    """Hidden states to keep, as ``Needs.hidden`` counts them."""


class Record(Drafter[RecordConfig]):
    name = "record"
    config_class = RecordConfig

    def __init__(self, config: RecordConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.needs = Needs(hidden=tuple(config.layers))
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.done: dict[tuple[int, ...], torch.Tensor] = {}
        """[tokens fed, layers * hidden size] of each sequence that ended, by its tokens."""

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in sequences]

    def observe(
        self,
        sequences: Sequence[RequestState],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        result: Verification,
    ) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            if verdict.hidden is not None and verdict.error is None:
                parts = [verdict.hidden[layer] for layer in self.config.layers]
                self.rows.setdefault(sequence.id, []).append(torch.cat(parts, dim=-1).to(torch.bfloat16))

    def release(self, sequence: RequestState) -> None:
        rows = self.rows.pop(sequence.id, None)
        if rows:
            self.done[tuple(sequence.tokens)] = torch.cat(rows)

    def take(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """What was kept of a finished sequence; forgotten then."""
        return self.done.pop(tuple(tokens), None)


@contextmanager
def known() -> Iterator[None]:
    """Engines that are built meanwhile know the method; nobody else has a use for it."""
    drafters.register(Record.name)(Record)
    try:
        yield
    finally:
        drafters.remove(Record.name)
