"""``layerskip``: the target drafts for itself with some of its layers (Draft & Verify, arXiv 2309.08168; LayerSkip,
2404.16710). These layers use the target's own cache, so there is no second model and no second prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from forerun.core.batch import Batch, Span
from forerun.core.config import COUNT
from forerun.core.errors import ConfigError
from forerun.core.inference import inference
from forerun.core.request import Requests
from forerun.core.tree import Draft, Drafts
from forerun.models.files.open import BUNDLED, resolve
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, Needs
from forerun.speculate.draft.levels import Frontier, StepsConfig, grow, newest_level
from forerun_lab.drafters.medusa import MedusaHead


@dataclass(frozen=True)
class LayerskipConfig(StepsConfig):
    exit_layer: int | None = None
    """Draft with the first ``exit_layer`` layers; None: half of them."""
    layers: tuple[int, ...] | None = None
    """Or with exactly these layers, counted from 0, in ascending order."""
    exit_head: str | None = None
    """Folder of a trained exit head (``forerun train layerskip``). None: the bundled one for the bundled target, where
    neither ``exit_layer`` nor ``layers`` is given; else no head."""
    limits: ClassVar = {"exit_layer": COUNT}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            if self.exit_layer is not None:
                raise ConfigError("exit_layer conflicts with layers: remove one")
            layers = tuple(self.layers) if isinstance(self.layers, (list, tuple)) else ()
            numbers = all(isinstance(i, int) and i >= 0 for i in layers)
            if not layers or not numbers or list(layers) != sorted(set(layers)):
                raise ConfigError(f"layers must be ascending layer numbers from 0, not {self.layers!r}")
            object.__setattr__(self, "layers", layers)


class ExitHead(MedusaHead):
    """Predicts the target's own next token from an early layer's normed state: a trained residual layer before the
    target's output layer (LayerSkip, arXiv 2404.16710, trains the output layer instead)."""

    method = "layerskip"
    ahead = 0


class Layerskip(Drafter[LayerskipConfig]):
    name = "layerskip"
    config_class = LayerskipConfig
    needs = Needs(model=True)

    def __init__(self, config: LayerskipConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.needs = replace(self.needs, rows=config.rows_by_depth()[-1])
        context.require_decoder(self.name)
        info = context.target.info
        self.layers = config.layers or tuple(range(config.exit_layer or max(1, info.num_layers // 2)))
        if self.layers[-1] >= info.num_layers:
            raise ConfigError(f"the target has layers 0 to {info.num_layers - 1}, not {self.layers[-1]}")
        path = config.exit_head
        if path is None and config.layers is None and config.exit_layer is None and info.name == f"{BUNDLED}target":
            path = f"{BUNDLED}layerskip"
        self.head: ExitHead | None = None
        if path is not None:
            head = ExitHead.load(resolve(path)).to(device=info.device, dtype=info.dtype)
            assert isinstance(head, ExitHead)
            if (head.sizes.hidden_size, head.sizes.vocab_size) != (info.hidden_size, info.vocab_size):
                raise ConfigError(f"the exit head in {path} was trained for another target")
            after = head.record.get("exit_layer")
            if after is not None and self.layers != tuple(range(after)):
                raise ConfigError(f"the exit head in {path} was trained after {after} layers: set exit_layer to that")
            head.pack()
            self.head = head
        self.chooser = Chooser.of(config, context)

    @inference
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        """Writes to the target's cache; verification overwrites these entries."""
        pool, nodes = self.context.attention().pool, self.config.rows_by_depth()
        ready = [
            index
            for index, (s, depth) in enumerate(zip(sequences, budgets))
            if s.num_computed_tokens == len(s.tokens) - 1
            and pool.try_reserve(s.id, len(s.tokens) + nodes[depth] * len(s.sequences))
        ]

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            if depth:
                return self._logits(newest_level(sequences, frontier, drafts, lambda each: len(each.tokens)))
            roots = [sequences[index] for index, _ in frontier]
            return self._logits([Span(s.id, s.num_computed_tokens, s.tokens[-1:], logits=[0]) for s in roots])

        drafts, _ = grow(sequences, ready, budgets, self.config, self.chooser, score)
        for index in ready:
            pool.truncate(sequences[index].id, sequences[index].num_computed_tokens)
        return drafts

    def _logits(self, spans: list[Span]) -> torch.Tensor:
        target, attention = self.context.target, self.context.attention()
        last = target.info.num_layers
        hidden = () if self.head is None else (last,)
        batch = Batch(spans, target.info.device, layers=self.layers, hidden=hidden)
        out = target.forward(batch, attention)
        if self.head is None:
            return out.logits
        return target.lm_head(self.head.transform(out.hidden[last])[:, 0])[batch.logit_rows]

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"exit_layer": 1}
