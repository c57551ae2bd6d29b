"""Hand-made trees: drafts whose shape and quality are chosen, not drafted, to meet every case of verification."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft
from forerun.engine.config import SpeculativeConfig
from forerun.speculate.draft import Drafter, DrafterConfig, drafters

METHOD = "hand_made_tree"
SHAPES = (
    (-1, -1, 0, 0, 1, 3, 3),
    (-1, 0, 0, 2, 2, 4),
    (-1, -1, -1, 1, 3, 4),
    (-1, 0, 1, 2),
    (-1, -1, -1),
)
"""Parents of every node; -1 is the root."""
DEEPEST = 4


@dataclass(frozen=True)
class HandMadeConfig(DrafterConfig):
    num_speculative_tokens: int = DEEPEST
    texts: tuple[tuple[int, ...], ...] = ()
    """Sources, if there are, prompts, and the answers of plain decoding: what a draft must contain to be accepted."""

    @property
    def branches(self) -> bool:
        return True

    def nodes_by_depth(self) -> list[int]:
        return [0] + [max(map(len, SHAPES))] * self.num_speculative_tokens


class HandMade(Drafter[HandMadeConfig]):
    """Hides the next tokens of the known text, some or all, on one path of a tree of other tokens."""

    name = METHOD
    config_class = HandMadeConfig

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        known = len(sequence.tokens)
        source = random.Random(f"{sequence.seed} {known}")
        shape = source.choice(SHAPES)
        depths: list[int] = []
        for parent in shape:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        truth = self._continuation(sequence)[: source.randrange(budget + 1)]
        path, node = [], source.randrange(len(shape))
        while node >= 0:
            path.append(node)
            node = shape[node]
        draft = Draft()
        nodes: dict[int, int] = {-1: -1}
        for index, (parent, depth) in enumerate(zip(shape, depths)):
            if depth > budget:
                continue
            if index in path and depth <= len(truth):
                token = truth[depth - 1]
            else:
                token = self._other(draft, nodes[parent], truth[depth - 1 : depth], source)
            nodes[index] = draft.add(token, nodes[parent])
        return draft

    def _continuation(self, sequence: Sequence) -> tuple[int, ...]:
        known = (*(sequence.source or ()), *sequence.tokens)
        for text in self.config.texts:
            if text[: len(known)] == known:
                return text[len(known) :]
        return ()

    def _other(self, draft: Draft, parent: int, truth: Seq[int], source: random.Random) -> int:
        """A token that neither the text nor a sibling has."""
        taken = {*draft.children(parent), *truth}
        return next(t for t in iter(lambda: source.randrange(self.context.sampler.vocab_size), -1) if t not in taken)


@contextmanager
def hand_made(texts: Seq[Seq[int]]) -> Iterator[SpeculativeConfig]:
    """A configuration that drafts hand-made trees around ``texts``; the method exists inside the block only."""
    drafters.register(METHOD)(HandMade)
    config: Any = HandMadeConfig(texts=tuple(tuple(text) for text in texts))
    try:
        yield SpeculativeConfig(METHOD, drafter=config)
    finally:
        drafters.remove(METHOD)
