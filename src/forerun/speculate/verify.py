"""One target forward for all drafts, prefill chunks included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.attention.base import Attention
from forerun.core.batch import Batch, Output, Scores, Span
from forerun.core.request import Requests
from forerun.core.tree import Drafts
from forerun.models.base import Model
from forerun.sampling.warp import warp
from forerun.speculate.accept.compare import row_contexts


@dataclass(slots=True)
class Target:
    """The model that is spoken for, and attention over its cache."""

    model: Model
    attention: Attention
    hidden: tuple[int, ...] = ()
    """Layers whose hidden states the drafters asked for."""
    before: Callable[[], None] | None = None
    """Called as a forward begins: while the model computes, the interpreter is free for other threads."""


@dataclass(slots=True)
class Verification:
    """A round's forward: scores of the sequences that decode, and what prefill produced."""

    scores: Scores
    deciding: list[int]
    """Which of the round's sequences ``scores`` covers."""
    batch: Batch
    output: Output
    logit_first: list[int]
    """Per sequence of the round: the first of its rows in ``output.logits``."""


def verify(target: Target, sequences: Requests, drafts: Drafts) -> Verification:
    """Feed every sequence's scheduled tokens and draft; warp the rows that decide."""
    spans = pack(sequences, drafts)
    batch = Batch(spans, target.model.info.device, hidden=target.hidden)
    if target.before is not None:
        target.before()
    output = target.model.forward(batch, target.attention)
    deciding: list[int] = []
    first: list[int] = []
    keep: list[int] = []
    logit_first: list[int] = []
    cursor = 0
    for index, (sequence, span, draft) in enumerate(zip(sequences, spans, drafts)):
        logit_first.append(cursor)
        if sequence.decodes:
            deciding.append(index)
            first.append(len(keep))
            skipped = len(span.logits) - 1 - len(draft)
            keep.extend(range(cursor + skipped, cursor + len(span.logits)))
        cursor += len(span.logits)
    logits = output.logits if len(keep) == output.logits.shape[0] else output.logits[keep]
    chosen = [sequences[i] for i in deciding]
    scores = Scores(chosen, [drafts[i] for i in deciding], first, logits)
    if any(s.params.logprobs is not None or s.params.edits for s in chosen):
        scores.raw, scores.warped = logits, logits.clone()
    scores.warped = warp(scores.warped, row_contexts(scores))
    return Verification(scores, deciding, batch, output, logit_first)


def pack(sequences: Requests, drafts: Drafts) -> list[Span]:
    """One span per sequence: its scheduled committed tokens, then its draft's nodes.

    A prefill chunk, a plain decode and a verification differ in nothing else. Logits are asked for from the last
    committed token on if the sequence decodes, and for every row of a prompt whose log-probabilities are wanted.
    """
    spans = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        first, count = sequence.num_computed_tokens, sequence.scheduled
        tokens = sequence.tokens[first : first + count] + draft.tokens
        parents = None
        if not draft.is_chain:
            parents = list(range(-1, count - 1)) + [parent + count for parent in draft.parents]
        if sequence.params.prompt_logprobs is not None and sequence.num_output == 0:
            rows = list(range(len(tokens)))
        else:
            rows = list(range(count - 1, len(tokens))) if sequence.decodes else []
        spans.append(
            Span(sequence.id, first, tokens, parents, logits=rows, source=sequence.source, settled=first + count)
        )
    return spans
