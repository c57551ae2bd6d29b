"""``draft_model``: a smaller language model with a cache of its own (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.core.batch import Batch, Span
from forerun.core.sequence import Sequence
from forerun.core.tree import POINT_MASS, Draft, Verdict
from forerun.models.base import new_cache
from forerun.models.load import load_model
from forerun.models.tokenizer import check_compatible, load_tokenizer
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, DrafterConfig, drafters
from forerun.speculate.verify.score import Verification


@dataclass(frozen=True)
class DraftModelConfig(DrafterConfig):
    model: str | None = None
    """Checkpoint of the draft (path or hub id); None: the bundled draft, for the bundled target."""
    dtype: str | None = None
    """Its dtype; None: as the target's option."""
    quantization: str | None = None
    prefill_chunk: int = 512
    """Most tokens a sequence catches up on per round before it drafts."""
    max_model_len: int | None = None
    """The draft's context; past it, nothing is proposed. None: the checkpoint's, at most the target's."""


@drafters.register("draft_model")
class DraftModel(Drafter[DraftModelConfig]):
    """Drafts level by level: a chain is a tree of width one."""

    name = "draft_model"
    config_class = DraftModelConfig

    def __init__(self, config: DraftModelConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        path = config.model or "forerun:draft"
        options = dict(context.options or {})
        page_size = options.pop("page_size", None)
        options["quantization"] = config.quantization
        self.model = load_model(
            path, dtype=config.dtype or context.dtype, device=context.target.info.device, invariant=False, **options
        )
        if context.tokenizer is not None:
            check_compatible(context.tokenizer, load_tokenizer(path), context.target.info, self.model.info)
        self.max_len = min(self.model.info.max_len, config.max_model_len or context.max_model_len)
        self.cache = new_cache(
            self.model,
            max_seqs=context.max_num_seqs,
            max_len=self.max_len,
            page_size=page_size,
            slack=config.max_nodes(),
        )
        self.chooser = Chooser(context.sampler, context.rule, config.draft_temperature, context.stream)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = [Draft() for _ in sequences]
        active = self._catch_up(sequences, budgets)
        logits = active.logits
        frontier = [(index, -1) for index in active.ready]
        qs: list[torch.Tensor] = []
        base = 0
        depth = 0
        fed: dict[int, int] = dict.fromkeys(active.ready, 0)
        while frontier:
            rows = [self._row(sequences[i], drafts[i], node) for i, node in frontier]
            width = self.config.width(depth)
            ids, q, q_rows = self.chooser.choose(logits, rows, [node for _, node in frontier], width)
            for (index, node), tokens, row in zip(frontier, ids, q_rows):
                for token in tokens:
                    drafts[index].add(token, node, POINT_MASS if row == POINT_MASS else base + row)
            if q is not None:
                qs.append(q)
                base += q.shape[0]
            depth += 1
            growing = [i for i in fed if len(drafts[i]) > fed[i] and depth < self._depth(sequences[i], budgets[i])]
            frontier = [(i, node) for i in growing for node in range(fed[i], len(drafts[i]))]
            if frontier:
                logits = self._step(sequences, drafts, growing, fed)
        if qs:
            q = qs[0] if len(qs) == 1 else torch.cat(qs)
            for index in active.ready:
                drafts[index].q = q
        return drafts

    def _row(self, sequence: Sequence, draft: Draft, node: int):
        return self.chooser.row(sequence, draft.path_tokens(node) if node >= 0 else ())

    def _depth(self, sequence: Sequence, budget: int) -> int:
        """The budget, less where the draft's context ends."""
        return min(budget, self.max_len - len(sequence.tokens))

    @dataclass(slots=True)
    class _Active:
        ready: list[int]
        logits: torch.Tensor

    def _catch_up(self, sequences: Seq[Sequence], budgets: Seq[int]) -> _Active:
        """Feed committed tokens this model has not seen; the sequences that reach their last one may draft."""
        spans, ready = [], []
        pool = self.cache.pool
        for index, sequence in enumerate(sequences):
            length = pool.length(sequence.id)
            missing = len(sequence.tokens) - length
            if self._depth(sequence, budgets[index]) < 1:
                continue
            count = min(missing, self.config.prefill_chunk)
            reaches = count == missing
            tokens = sequence.tokens[length : length + count]
            spans.append(Span(sequence.id, length, tokens, logits=[count - 1] if reaches else []))
            if reaches:
                ready.append(index)
        if not spans:
            return self._Active([], torch.empty(0))
        return self._Active(ready, self.model.forward(Batch(spans, self.model.info.device), self.cache).logits)

    def _step(
        self, sequences: Seq[Sequence], drafts: Seq[Draft], growing: Seq[int], fed: dict[int, int]
    ) -> torch.Tensor:
        """Feed the newest level of every growing draft."""
        spans = []
        for index in growing:
            draft, start, stored = drafts[index], len(sequences[index].tokens), fed[index]
            parents = None if draft.is_chain else draft.parents
            tokens = draft.tokens[stored:]
            spans.append(Span(sequences[index].id, start, tokens, parents, stored, logits=list(range(len(tokens)))))
            fed[index] = len(draft)
        return self.model.forward(Batch(spans, self.model.info.device), self.cache).logits

    def observe(
        self, sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], result: Verification
    ) -> None:
        """Truncate to the committed prefix: of the drafted nodes this model has fed, the accepted ones stay."""
        pool = self.cache.pool
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            if not len(draft) or sequence.id not in pool.tables:
                continue
            start = len(sequence.tokens) - len(verdict.tokens)
            fed = pool.length(sequence.id) - start
            kept = [node for node in verdict.path[: verdict.accepted] if node < fed]
            pool.keep(sequence.id, start, kept)

    def release(self, sequence: Sequence) -> None:
        self.cache.pool.free(sequence.id)

    def cached_tokens(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[: self.cache.pool.length(sequence.id)]

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(target)}
