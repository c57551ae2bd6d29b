"""From drafts to the rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.batch import Span
from forerun.core.request import RequestState
from forerun.core.tree import Draft


def pack(
    sequences: Sequence[RequestState], drafts: Sequence[Draft], *, prompt_logits: Sequence[bool] | None = None
) -> list[Span]:
    """One span per sequence: its scheduled committed tokens, then its draft's nodes.

    A prefill chunk, a plain decode and a verification differ in nothing else. Logits are asked for from the last
    committed token on if the sequence decodes, and for every row where ``prompt_logits`` says so.
    """
    spans = []
    for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
        first, count = sequence.cached, sequence.scheduled
        tokens = sequence.tokens[first : first + count] + draft.tokens
        parents = None
        if not draft.is_chain:
            parents = list(range(-1, count - 1)) + [parent + count for parent in draft.parents]
        if prompt_logits is not None and prompt_logits[index]:
            rows = list(range(len(tokens)))
        else:
            rows = list(range(count - 1, len(tokens))) if sequence.decodes else []
        spans.append(
            Span(sequence.id, first, tokens, parents, logits=rows, source=sequence.source, settled=first + count)
        )
    return spans
