"""``medusa``: residual heads on the target's last hidden state, one per position ahead (Cai et al., arXiv 2401.10774).

Head i turns the state that predicted the last committed token into a guess for the token i places behind it. The
output layer is the target's own, or some of its rows, so a head costs one square matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.request import Requests, RequestState
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.heads.base import BlockConfig, BlockDrafter
from forerun.speculate.draft.heads.head import Guess, Head, Lesson, Sizes


class ResidualHead(Head):
    """Heads whose guess for depth d is the target's output layer on a transformed last hidden state."""

    ahead: ClassVar[int] = 1
    """The first guess is for so many tokens behind the one that the state itself predicts."""

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden size] -> [n, depth, hidden size]."""
        raise TypeError(f"{type(self).__name__} must define transform")

    def guesses(self, lesson: Lesson) -> Iterator[Guess]:
        hidden = lesson.hidden[self.sizes.num_layers]
        margin = self.sizes.depth + self.ahead - (lesson.segments is None)  # packed rows end inside a text
        length = hidden.shape[1] - margin
        at = torch.arange(length, device=hidden.device)
        indices = lesson.places(at, self.ahead + 1, self.sizes.depth)
        known = hidden[:, :length]
        flat = known.flatten(0, 1) if indices is None else known[indices]
        guessed = self.transform(flat)
        if indices is None:
            guessed = guessed.unflatten(0, known.shape[:2])
        for depth in range(self.sizes.depth):
            yield self.guess(guessed[..., depth, :], lesson, lesson.wanted(at + depth + self.ahead, indices))


class MedusaHead(ResidualHead):
    method = "medusa"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        blocks = [nn.Linear(sizes.hidden_size, sizes.hidden_size) for _ in range(sizes.depth)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self.make_output()

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        """x + silu(W_i x + b_i); zero weights, as at the start of training, repeat the target's own guess."""
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks], dim=1)


class ResidualDrafter(BlockDrafter):
    """Drafts from the newest hidden state alone."""

    head: ResidualHead

    def __init__(self, config: BlockConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.latest: dict[int, torch.Tensor] = {}

    def keep(self, sequence: RequestState, rows: torch.Tensor) -> None:
        self.latest[sequence.id] = rows[-1].clone()

    def guess(self, sequences: Requests) -> torch.Tensor:
        states = self.head.transform(torch.stack([self.latest[sequence.id] for sequence in sequences]))
        states = states[:, : self.config.num_speculative_tokens]
        return self.predict(states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def states(self) -> list[dict[int, Any]]:
        return [*super().states(), self.latest]


@drafters.register("medusa")
class Medusa(ResidualDrafter):
    name = "medusa"
    head_class = MedusaHead


class BlockwiseHead(ResidualHead):
    method = "blockwise"
    options_known = frozenset({"inner_size"})

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.inner = int(sizes.options.get("inner_size", sizes.hidden_size // 2))
        self.spread = nn.Linear(sizes.hidden_size, sizes.depth * self.inner)
        self.gather = nn.Parameter(torch.zeros(sizes.depth, self.inner, sizes.hidden_size))

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.spread(hidden)).unflatten(-1, (self.sizes.depth, self.inner))
        return hidden[:, None] + torch.einsum("nti,tih->nth", inner, self.gather)


@drafters.register("blockwise")
class Blockwise(ResidualDrafter):
    name = "blockwise"
    head_class = BlockwiseHead
