"""Heads that predict all depths at once from the target's last hidden state, or from trained input embeddings.

``medusa`` (Cai et al., arXiv 2401.10774): residual heads on the target's last hidden state, one per position ahead.
Head i turns the state that predicted the last committed token into a prediction of the token i positions after it. The
output layer is the target's own, or some of its rows, so a head costs one square matrix. ``blockwise`` predicts all
positions with one wide layer.

``lookahead``: PaSS, parallel speculative sampling (Monea et al., arXiv 2311.13581). The target itself reads T trained
input embeddings after the last committed token. One pass gives its own distribution of the next token, and predictions
of the T tokens after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.batch import Batch, HiddenStates, Span
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.speculate.draft.base import DraftContext
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.block import BlockConfig, BlockDrafter
from forerun_lab.heads.training import Guess, TrainedHead, TrainingBatch


class ResidualHead(TrainedHead):
    """Heads that predict depth d by the target's output layer on a transformed last hidden state."""

    ahead: ClassVar[int] = 1
    """The first prediction is this many tokens after the one that the state itself predicts."""

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden size] -> [n, depth, hidden size]."""
        raise TypeError(f"{type(self).__name__} must define transform")

    def guesses(self, batch: TrainingBatch) -> Iterator[Guess]:
        hidden = batch.hidden[self.sizes.num_layers]
        margin = self.sizes.depth + self.ahead - (batch.segments is None)  # packed rows end inside a text
        length = hidden.shape[1] - margin
        at = torch.arange(length, device=hidden.device)
        indices = batch.trainable(at, self.ahead + 1, self.sizes.depth)
        known = hidden[:, :length]
        flat = known.flatten(0, 1) if indices is None else known[indices]
        guessed = self.transform(flat)
        if indices is None:
            guessed = guessed.unflatten(0, known.shape[:2])
        for depth in range(self.sizes.depth):
            yield self.guess(guessed[..., depth, :], batch, batch.target_logits(at + depth + self.ahead, indices))


class MedusaHead(ResidualHead):
    method = "medusa"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        blocks = [nn.Linear(sizes.hidden_size, sizes.hidden_size) for _ in range(sizes.depth)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)
        self.make_lm_head()

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        """x + silu(W_i x + b_i). Zero weights, as at the start of training, repeat the target's own prediction."""
        return torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks], dim=1)


class ResidualDrafter(BlockDrafter):
    """Drafts from the newest hidden state only."""

    head: ResidualHead
    per_sequence = ("seen", "skipped", "latest")
    latest: dict[int, torch.Tensor]

    def add_hidden(self, sequence: RequestState, hidden: HiddenStates) -> None:
        super().add_hidden(sequence, hidden)
        self.latest[sequence.id] = hidden.joined(self.layers)[-1].clone()

    def all_logits(self, sequences: Requests) -> torch.Tensor:
        states = self.head.transform(torch.stack([self.latest[sequence.id] for sequence in sequences]))
        states = states[:, : self.config.num_speculative_tokens]
        return self.predict(states.flatten(0, 1)).unflatten(0, states.shape[:2])


class Medusa(ResidualDrafter):
    """Residual heads on the target's last hidden state, one for each position ahead (arXiv 2401.10774)."""

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


class Blockwise(ResidualDrafter):
    """One wide layer on the target's last hidden state, which predicts all positions ahead."""

    name = "blockwise"
    head_class = BlockwiseHead


ANCHORS = 16


class LookaheadHead(TrainedHead):
    method = "lookahead"
    first_token = 2  # the target's own distribution is there for the first

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.embeddings = nn.Embedding(sizes.depth - 1, sizes.hidden_size)
        nn.init.normal_(self.embeddings.weight, std=0.02)

    def default_layers(self, last: int) -> tuple[int, ...]:
        return ()

    def guesses(self, batch: TrainingBatch) -> Iterator[Guess]:
        """Appends the look-ahead rows of several anchors to each sequence. Each group attends to the text up to its
        anchor and to itself, and learns the target's distributions at its positions."""
        rows, length = batch.tokens.shape
        ahead = self.embeddings.num_embeddings
        anchors = torch.randint(0, length - ahead - 1, (ANCHORS,), device=batch.tokens.device).sort().values
        total = length + ANCHORS * ahead
        mask = torch.zeros(total, total, dtype=torch.bool, device=anchors.device)
        mask[:length, :length] = torch.ones(length, length, dtype=torch.bool, device=anchors.device).tril()
        positions = torch.cat([torch.arange(length), (anchors[:, None] + 1 + torch.arange(ahead)).flatten()])
        for group, anchor in enumerate(anchors.tolist()):
            first = length + group * ahead
            mask[first : first + ahead, : anchor + 1] = True
            mask[first : first + ahead, first : first + ahead] = torch.ones(ahead, ahead, dtype=torch.bool).tril()
        dtype = next(batch.target.parameters()).dtype
        embedded = batch.embedding[batch.tokens].to(dtype)
        extra = self.embeddings.weight.to(dtype).repeat(ANCHORS, 1).expand(rows, -1, -1)
        additive = torch.zeros(1, 1, total, total, dtype=embedded.dtype).masked_fill_(~mask, float("-inf"))
        out = batch.target(
            inputs_embeds=torch.cat([embedded, extra], dim=1),
            attention_mask=additive,
            position_ids=positions[None].expand(rows, -1),
            use_cache=False,
            logits_to_keep=torch.arange(length, total),
        ).logits.unflatten(1, (ANCHORS, ahead))
        requested = batch.all_target_logits()[:, anchors[:, None] + 1 + torch.arange(ahead)]
        for position in range(ahead):
            yield Guess(out[:, :, position], requested[:, :, position])


class Lookahead(BlockDrafter):
    """Costs one pass of the target per round. Its first token is drawn from the target's own distribution."""

    name = "lookahead"
    head_class = LookaheadHead
    head: LookaheadHead

    def __init__(self, config: BlockConfig, context: DraftContext) -> None:
        if config.adapt is not None:
            raise ConfigError("method 'lookahead' learns through its whole target and cannot adapt: remove 'adapt'")
        super().__init__(config, context)

    def ready(self, sequence: RequestState) -> bool:
        return sequence.num_computed_tokens == len(sequence.tokens) - 1

    def all_logits(self, sequences: Requests) -> torch.Tensor:
        ahead = self.config.num_speculative_tokens - 1
        attention = self.context.attention()
        spans: list[Span] = []
        rows: list[int] = []
        for index, sequence in enumerate(sequences):
            tokens = [sequence.tokens[-1]] + [0] * ahead
            spans.append(Span(sequence.id, sequence.num_computed_tokens, tokens, logits=list(range(ahead + 1))))
            first = index * (ahead + 1)
            rows.extend(range(first + 1, first + ahead + 1))
        embeds = self.head.embeddings.weight[:ahead].repeat(len(sequences), 1)
        batch = Batch(spans, self.context.target.info.device, embeds=embeds, embed_rows=rows)
        logits = self.context.target.forward(batch, attention).logits
        for sequence in sequences:
            attention.pool.truncate(sequence.id, sequence.num_computed_tokens)
        return logits.unflatten(0, (len(sequences), ahead + 1))
