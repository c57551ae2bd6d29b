"""``staged``: a draft model that is itself sped up by another drafter, through the same round as the target.

The draft model's tokens are drafted by ``drafter``, verified and accepted by one or more inner rounds, and then
drafted for the target (staged speculative decoding, Spector and Re, arXiv 2308.04623). The inner rounds sample the
draft model under ``coupled``: if the outer rule is ``coupled`` too, with the same noise, so that the draft is exactly
what the draft model alone would propose; otherwise with noise of this round, so that each token is a draw from the q
that it carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from forerun.core.batch import Batch, Output
from forerun.core.errors import ConfigError
from forerun.core.request import Constraint, Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft, Drafts, Verdict, Verdicts
from forerun.sampling.draw import probabilities
from forerun.sampling.noise import fold
from forerun.speculate.accept import rules
from forerun.speculate.draft.base import DraftContext, Drafter, drafters
from forerun.speculate.draft.model import DraftModel, DraftModelConfig
from forerun.speculate.draft.nested import NestedPart
from forerun.speculate.draft.router import Router
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting
from forerun.speculate.round import Round, speculate
from forerun.speculate.verify import Target, Verification

INNER = "inner"


@dataclass(frozen=True)
class StagedConfig(DraftModelConfig):
    drafter: Any = None
    """Options of the drafter that drafts for the draft model (it may be staged itself); None: ``ngram``."""
    without: ClassVar = dict.fromkeys(
        ("tree", "tree_nodes", "confidence_threshold", "prompt_lookup_num_tokens"),
        "method 'staged' drafts chains as long as asked for, and 'drafter' may have options of its own",
    )

    @classmethod
    def with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Chains are drafted as far as asked: the draft model has no say in their end."""
        return dict(options)

    def __post_init__(self) -> None:
        super().__post_init__()
        options: Mapping[str, Any] | NestedPart = self.drafter if self.drafter is not None else {"method": "ngram"}
        object.__setattr__(self, "drafter", NestedPart.parse(options, self.num_speculative_tokens))


class Aligned:
    """A draft model whose logits have the target's vocabulary."""

    fused: None = None

    def __init__(self, draft: DraftModel) -> None:
        self.draft, self.model = draft, draft.model
        self.info = replace(self.model.info, vocab_size=draft.chooser.sampler.vocab_size)
        self.invariant = self.model.invariant
        self.tiles = self.model.tiles
        self.row_multiple = self.model.row_multiple

    def forward(self, batch: Batch, attention: Any) -> Output:
        output = self.model.forward(batch.clamp_tokens(self.model.info.vocab_size), attention)
        return Output(self._align(output.logits), output.hidden)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(ids.clamp(max=self.model.info.vocab_size - 1))

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._align(self.model.lm_head(hidden))

    def _align(self, logits: torch.Tensor) -> torch.Tensor:
        return self.draft.chooser.align(self.draft.translate(logits))


class Ahead:
    """A sequence's grammar as its inner copy meets it, some drafted tokens further."""

    def __init__(self, sequence: RequestState, grammar: Constraint) -> None:
        self.sequence = sequence
        self.grammar = grammar

    def allowed(self, sequence: RequestState, path: Sequence[int]) -> torch.Tensor | None:
        return self.grammar.allowed(self.sequence, self._whole(sequence, path))

    def fault(self, sequence: RequestState, path: Sequence[int]) -> str | None:
        return self.grammar.fault(self.sequence, self._whole(sequence, path))

    def _whole(self, copy: RequestState, path: Sequence[int]) -> list[int]:
        return [*copy.tokens[len(self.sequence.tokens) :], *path]

    def forced(self, sequence: RequestState, count: int) -> list[int]:
        """None: the grammar answers only about what is committed."""
        return []


class DraftRequest(LengthPolicy):
    """An inner draft leaves room for the token behind it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.missing: dict[int, int] = {}

    def budgets(self, sequences: Requests) -> list[int]:
        longest = len(self.setting.nodes[INNER]) - 1
        return [min(longest, self.missing[s.id] - 1) if s.decodes and s.drafter else 0 for s in sequences]

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        pass


@drafters.register("staged")
class Staged(Drafter[StagedConfig]):
    name = "staged"
    config_class = StagedConfig

    def __init__(self, config: StagedConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        part = config.drafter
        # The draft model's cache also holds the nodes that are drafted for it.
        rows = config.num_speculative_tokens + part.config.max_nodes()
        names = [field.name for field in fields(DraftModelConfig)]
        own = {name: getattr(config, name) for name in names if name != "num_speculative_tokens"}
        base_context = replace(context, prefix_caching=False)
        self.base = DraftModel(DraftModelConfig(num_speculative_tokens=rows, **own), base_context)
        if self.base.joins:
            raise ConfigError("method 'staged' drafts for an encoder-decoder with an encoder-decoder: give 'model' one")
        self.rows = rows
        self.rule = rules["coupled"]()
        aligned = Aligned(self.base)
        inner = part.build(
            replace(
                base_context,
                target=aligned,
                target_attention=lambda: self.base.attention,
                rule=self.rule,
                max_model_len=self.base.max_len,
            )
        )
        if inner.needs.hidden:
            raise ConfigError(
                f"method {part.method!r} feeds on the target's hidden states and cannot be inside 'staged'"
            )
        self.inner = inner
        self.parts = [self.base, inner]
        self.router = Router({INNER: inner})
        self.policy = DraftRequest(Setting({INNER: part.config.nodes_by_depth()}, aligned.row_multiple))
        self.stage = Target(aligned, self.base.attention)
        self.copies: dict[int, RequestState] = {}

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        requested: dict[int, int] = {}
        for sequence, budget in zip(sequences, budgets):
            depth = min(budget, self.base.max_len - len(sequence.tokens))
            if depth > 0 and self.base.attention.pool.try_reserve(sequence.id, len(sequence.tokens) + self.rows):
                requested[sequence.id] = depth
                self._follow(sequence)
        start = {sequence.id: len(sequence.tokens) for sequence in sequences}
        rows: dict[int, list[torch.Tensor]] = {key: [] for key in requested}
        active = [self.copies[key] for key in requested]
        while active := self._reading(active):
            result = self._round(active, start, requested)
            self._collect(active, result, rows)
            read = [copy for copy, verdict in zip(active, result.verdicts) if verdict.tokens]
            active = [copy for copy in read if len(copy.tokens) - start[copy.id] < requested[copy.id]]
        return self._drafts(sequences, start, rows)

    def _follow(self, sequence: RequestState) -> None:
        """Bring the inner copy of a sequence up to its committed tokens."""
        copy = self.copies.get(sequence.id)
        if copy is None:
            params, temperature = sequence.params, self.config.draft_temperature
            if temperature is not None and not params.greedy:
                params = replace(params, temperature=temperature)
            copy = RequestState(
                sequence.id, [], sequence.num_prompt, params, sequence.seed, sequence.eos_ids, drafter=INNER,
                source=sequence.source,
            )  # fmt: skip
            self.copies[sequence.id] = copy
        copy.tokens.extend(sequence.tokens[len(copy.tokens) :])
        copy.tentative = sequence.tentative
        copy.constraint = Ahead(sequence, sequence.constraint) if sequence.constraint is not None else None
        copy.drafter = INNER if sequence.id not in self.router.failures else None
        if self.context.rule.needs_q:
            copy.seed = fold(sequence.seed, self.base.chooser.purpose, len(sequence.tokens))

    def _reading(self, copies: Requests) -> list[RequestState]:
        """Those who take part in the next inner round, with the tokens that each of them is to read."""
        missing = []
        for copy in copies:
            copy.num_computed_tokens = self.base.attention.pool.length(copy.id)
            missing.append(len(copy.tokens) - copy.num_computed_tokens)
        for copy, count in zip(copies, self.config.shares(missing)):
            copy.scheduled = count
        return [copy for copy in copies if copy.scheduled]

    def _round(self, active: Requests, start: Mapping[int, int], requested: Mapping[int, int]) -> Round:
        for copy in active:
            self.policy.missing[copy.id] = requested[copy.id] - (len(copy.tokens) - start[copy.id])
        result = speculate(active, self.stage, self.router, self.rule, self.policy, self.context.sampler, self._clip)
        for copy, verdict in zip(active, result.verdicts):
            copy.tentative += len(verdict.tokens)
        return result

    def _clip(self, copy: RequestState, draft: Draft, verdict: Verdict) -> list[int]:
        """Keep no more tokens than are wanted. A row without a permitted token ends the draft there."""
        return verdict.decided_tokens(draft)[: self.policy.missing[copy.id]]

    def _collect(self, active: Requests, result: Round, rows: dict[int, list[torch.Tensor]]) -> None:
        """The exact q of every token that the inner round emitted."""
        scores = result.verification.scores
        for slot, index in enumerate(result.verification.deciding):
            verdict = result.verdicts[index]
            nodes = [-1, *verdict.path][: len(verdict.tokens)]
            if nodes and not active[index].params.greedy:
                rows[active[index].id].append(probabilities(scores.warped[[scores.row(slot, n) for n in nodes]]))

    def _drafts(
        self, sequences: Requests, start: Mapping[int, int], rows: Mapping[int, list[torch.Tensor]]
    ) -> list[Draft]:
        kept = [row for sequence in sequences for row in rows.get(sequence.id, ())]
        q = torch.cat(kept) if kept else None
        drafts, first = [], 0
        for sequence in sequences:
            tokens = self.copies[sequence.id].tokens[start[sequence.id] :] if sequence.id in rows else []
            if sequence.params.greedy:
                numbers = [POINT_MASS] * len(tokens)
            else:
                numbers = list(range(first, first + len(tokens)))
                first += len(tokens)
            drafts.append(Draft.chain(tokens, q, numbers))
        return drafts

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence in sequences:
            copy = self.copies.get(sequence.id)
            if copy is not None and len(copy.tokens):
                self._take_back(copy, sequence)

    def _take_back(self, copy: RequestState, sequence: RequestState) -> None:
        """Cut the inner copy and its cache to what was committed."""
        same = min(len(copy.tokens) - copy.tentative, len(sequence.tokens))
        while same < min(len(copy.tokens), len(sequence.tokens)) and copy.tokens[same] == sequence.tokens[same]:
            same += 1
        del copy.tokens[same:]
        copy.tentative = 0
        pool = self.base.attention.pool
        if pool.length(copy.id) > same:
            pool.truncate(copy.id, same)
        self.inner.rewind(copy)

    def rewind(self, sequence: RequestState) -> None:
        if sequence.id in self.copies:
            self._take_back(self.copies[sequence.id], sequence)

    def release(self, sequence: RequestState) -> None:
        self.base.release(sequence)
        copy = self.copies.pop(sequence.id, None)
        self.policy.missing.pop(sequence.id, None)
        self.router.failures.pop(sequence.id, None)
        if copy is not None:
            self.inner.release(copy)

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        return sequence.tokens[: self.base.attention.pool.length(sequence.id)]

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(target), "drafter": {"method": "ngram"}}
