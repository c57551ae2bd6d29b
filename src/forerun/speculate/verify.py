"""One target forward for all drafts, prefill chunks included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from forerun.attention.base import Attention
from forerun.core.batch import Batch, Output, Scores, Span
from forerun.core.request import Requests
from forerun.core.tree import Drafts
from forerun.kernels.gpu import HostCopy
from forerun.models.run.base import Model
from forerun.sampling.warp import warp
from forerun.speculate.accept.compare import row_contexts


@dataclass(slots=True)
class Target:
    """The target model, and attention over its KV cache."""

    model: Model
    attention: Attention
    hidden: tuple[int, ...] = ()
    """Layers whose hidden states the drafters asked for."""
    before: Callable[[], None] | None = None
    """Called before each forward, during which the interpreter is free for other threads."""


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
    """Feeds every sequence's scheduled tokens and draft in one forward, and warps the logits of those that decode."""
    late = find_late(target, drafts)
    spans = pack(sequences, drafts)
    batch = Batch(spans, target.model.info.device, hidden=target.hidden, late=late)
    if target.before is not None:
        target.before()
    output = target.model.forward(batch, target.attention)
    logit_first = [0, *accumulate(len(span.logits) for span in spans)]
    deciding = [index for index, sequence in enumerate(sequences) if sequence.decodes]
    first: list[int] = []
    rows: list[int] = []
    for index in deciding:
        first.append(len(rows))
        end = logit_first[index + 1]
        rows.extend(range(end - 1 - len(drafts[index]), end))
    logits = output.logits if len(rows) == output.logits.shape[0] else output.logits[rows]
    chosen = [sequences[index] for index in deciding]
    scores = Scores(chosen, [drafts[index] for index in deciding], first, logits)
    if any(sequence.params.logprobs is not None or sequence.params.edits for sequence in chosen):
        scores.raw, scores.warped = logits, logits.clone()
    scores.warped = warp(scores.warped, row_contexts(scores))
    return Verification(scores, deciding, batch, output, logit_first[:-1])


def find_late(target: Target, drafts: Drafts) -> HostCopy | None:
    """The drafted tokens that the target reads on the GPU, where the host does not know them yet. It waits for those of
    further drafters, and for all if the target asks the host."""
    copies = [draft.late for draft in drafts if draft.late is not None]
    kept = copies[0] if copies and getattr(target.model, "graphs", None) is not None else None
    for draft in drafts:
        if draft.late is not kept:
            draft.settle()
    return kept


def pack(sequences: Requests, drafts: Drafts) -> list[Span]:
    """One span per sequence: its scheduled committed tokens, then its draft's nodes.

    A prefill chunk, a plain decode and a verification differ in nothing else. A sequence that decodes gets logits from
    its last committed token on; a prompt whose log-probabilities are requested gets them at every row.
    """
    spans = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        start, count = sequence.num_computed_tokens, sequence.scheduled
        tokens = sequence.tokens[start : start + count] + draft.ids
        parents = None
        if not draft.is_chain:
            parents = list(range(-1, count - 1)) + [parent + count for parent in draft.parents]
        if sequence.params.prompt_logprobs is not None and sequence.num_output == 0:
            rows = list(range(len(tokens)))
        else:
            rows = list(range(count - 1, len(tokens))) if sequence.decodes else []
        source, settled = sequence.source, start + count
        spans.append(Span(sequence.id, start, tokens, parents, logits=rows, source=source, settled=settled))
    return spans
