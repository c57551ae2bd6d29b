"""The base class of drafters that predict a whole block in one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts
from forerun.speculate.draft.best_first import TreeConfig, best_first, depth_first
from forerun.speculate.draft.heads.base import HeadConfig, HeadDrafter
from forerun.speculate.draft.levels import Frontier, grow
from forerun_lab.heads.training import TrainedHead


@dataclass(frozen=True)
class BlockConfig(TreeConfig, HeadConfig):
    """Options of heads that predict all depths at once, so that the best tree can be chosen afterwards."""


class BlockDrafter(HeadDrafter[BlockConfig]):
    """Drafters that predict all depths in one pass: the distribution at depth d does not depend on the path to it."""

    config_class = BlockConfig
    head: TrainedHead

    @abstractmethod
    def all_logits(self, sequences: Requests) -> torch.Tensor:
        """Float32 logits [sequences, depth, vocabulary] of the tokens after the last committed one."""

    def predict(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocabulary] of the head's output states [n, hidden size]."""
        lm_head = self.head.lm_head
        logits = self.context.target.lm_head(states) if lm_head is None else lm_head(states).float()
        return self.to_target_ids(logits)

    @inference
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        self.learn()
        ready = [index for index, sequence in enumerate(sequences) if self.ready(sequence)]
        if not ready:
            return [Draft() for _ in sequences]
        logits = self.all_logits([sequences[index] for index in ready])
        slot = {index: i for i, index in enumerate(ready)}
        if self.config.tree_nodes is not None:
            drafts = [Draft() for _ in sequences]
            for index in ready:
                drafts[index] = self._best(sequences[index], budgets[index], logits[slot[index]])
            return drafts

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            return logits[[slot[index] for index, _ in frontier], depth]

        return grow(sequences, ready, budgets, self.config, self.chooser, score)[0]

    def _best(self, sequence: RequestState, depth: int, logits: torch.Tensor) -> Draft:
        """A best-first tree of point masses."""
        assert self.config.tree_nodes is not None
        rows = [self.chooser.row(sequence, [0] * level) for level in range(depth)]
        ids, logs = self.chooser.rank(logits[:depth], rows, min(self.config.tree_nodes, 16))

        def source(level: int) -> Iterator[tuple[int, float, int]]:
            return ((token, log_q, level + 1) for token, log_q in zip(ids[level], logs[level]))

        return depth_first(best_first(source, 0, self.config.tree_nodes, depth))
