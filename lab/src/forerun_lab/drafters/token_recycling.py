"""``token_recycling`` (arXiv 2408.08696) keeps an adjacency matrix: for every token, the likeliest next tokens when the
target last read it.

Drafts are trees over the matrix, which all requests share. Here each candidate keeps its probability, so that the tree
follows the likeliest paths instead of one fixed shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log
from typing import ClassVar

import torch

from forerun.core.config import COUNT
from forerun.core.errors import ConfigError
from forerun.core.request import Requests
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.speculate.draft.base import DraftContext, Drafter
from forerun.speculate.draft.best_first import TreeConfig
from forerun.speculate.verify import Verification

UNSEEN = -1


@dataclass(frozen=True)
class TokenRecyclingConfig(TreeConfig):
    num_speculative_tokens: int = 5
    recycled_candidates: int = 8
    """Next tokens remembered per token."""
    unsupported: ClassVar = {"draft_temperature": "method 'token_recycling' draws nothing from a distribution"}
    limits: ClassVar = {"recycled_candidates": COUNT}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None and max(self.tree) > self.recycled_candidates:
            most = self.recycled_candidates
            raise ConfigError(f"a node has at most recycled_candidates ({most}) children, not {max(self.tree)}")


class TokenRecycling(Drafter[TokenRecyclingConfig]):
    """Drafts trees over the target's likeliest next tokens when it last read each token (arXiv 2408.08696)."""

    name = "token_recycling"
    config_class = TokenRecyclingConfig

    def __init__(self, config: TokenRecyclingConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        vocabulary = context.target.info.vocab_size
        shape = (vocabulary, min(config.recycled_candidates, vocabulary))
        self.ids = torch.full(shape, UNSEEN, dtype=torch.int32)
        """int32 [vocabulary, candidates]: likeliest next tokens, the best first."""
        self.logs = torch.zeros(shape)
        """The logs of their probabilities, in the same shape."""
        self._rows = self.ids.numpy(), self.logs.numpy()

    def _candidates(self, token: int) -> Iterator[tuple[int, float, int]]:
        ids, logs = self._rows
        if ids[token, 0] != UNSEEN:
            for candidate, log_p in zip(ids[token].tolist(), logs[token].tolist()):
                if log_p > -inf:
                    yield candidate, log_p, candidate

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for sequence, budget in zip(sequences, budgets):
            draft, expected = self.config.grow(self._candidates, sequence.tokens[-1], budget)
            if len(draft):
                draft.confidence = min(1.0, expected / draft.depth)
            drafts.append(draft)
        return drafts

    def follow(self, tokens: Sequence[int]) -> None:
        """Learns from emitted tokens where the target's logits are not available: each token's follower gets half of
        the probability, and the earlier candidates the other half."""
        ids, logs = self._rows
        for before, after in pairwise(tokens):
            chances = {i: exp(p) / 2 for i, p in zip(ids[before].tolist(), logs[before].tolist()) if i != UNSEEN}
            chances[after] = chances.get(after, 0.0) + 0.5
            best = sorted(chances.items(), key=lambda item: -item[1])[: ids.shape[1]]
            for index, (token, p) in enumerate(best):
                ids[before, index], logs[before, index] = token, log(p)
            logs[before, len(best) :] = -inf

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Stores the top candidates of every row of logits, including those of rejected tokens and prompts. For a token
        with several rows, the last one counts."""
        logits = result.output.logits
        tokens = [span.tokens[row] for span in result.batch.spans for row in span.logits]
        latest = {token: row for row, token in enumerate(tokens)}
        if latest:
            self.context.sampler.rank_into(logits, list(latest.values()), list(latest), self.ids, self.logs)
