"""``staged``: a draft model that is itself sped up by another drafter, through the same round as the target.

``drafter`` drafts for the draft model, which verifies in one or more inner rounds. What it accepts is the draft for the
target (staged speculative decoding, Spector and Re, arXiv 2308.04623). Inner rounds use the rule ``coupled``. If the
outer rule is ``coupled`` too, they use the same noise, so the draft is what the draft model alone would propose.
Otherwise their noise is independent, so each token is a draw from the q that it carries.
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
from forerun.speculate.draft.base import DraftContext, Drafter
from forerun.speculate.draft.model import DraftModel, DraftModelConfig
from forerun.speculate.draft.nested import InnerConfig
from forerun.speculate.draft.router import Router
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting
from forerun.speculate.round import Round, speculate
from forerun.speculate.verify import Target, Verification

INNER = "inner"


@dataclass(frozen=True)
class StagedConfig(DraftModelConfig):
    drafter: Any = None
    """Options of the drafter that drafts for the draft model (it may be staged itself); None: ``ngram``."""
    unsupported: ClassVar = dict.fromkeys(
        ("tree", "tree_nodes", "confidence_threshold", "prompt_lookup_num_tokens"),
        "method 'staged' drafts chains as long as asked for, and 'drafter' may have options of its own",
    )

    @classmethod
    def with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """As given: no threshold ends these chains."""
        return dict(options)

    def __post_init__(self) -> None:
        super().__post_init__()
        options: Mapping[str, Any] | InnerConfig = self.drafter if self.drafter is not None else {"method": "ngram"}
        object.__setattr__(self, "drafter", InnerConfig.parse(options, self.num_speculative_tokens))


class AlignedModel:
    """A draft model with logits over the target's vocabulary."""

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
    """A sequence's grammar, applied to its inner copy, which is some drafted tokens ahead."""

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
        """No tokens: the grammar knows only the committed ones."""
        return []


class InnerPolicy(LengthPolicy):
    """Limits an inner draft so that the token after it still fits the outer draft."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.remaining: dict[int, int] = {}
        """Per sequence: how many tokens its outer draft lacks."""

    def budgets(self, sequences: Requests) -> list[int]:
        longest = len(self.setting.nodes[INNER]) - 1
        return [min(longest, self.remaining[s.id] - 1) if s.decodes and s.drafter else 0 for s in sequences]

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        pass


class Staged(Drafter[StagedConfig]):
    name = "staged"
    config_class = StagedConfig

    def __init__(self, config: StagedConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        # The draft model's cache also holds the nodes that are drafted for it.
        self.rows = config.num_speculative_tokens + config.drafter.config.max_nodes()
        options = {field.name: getattr(config, field.name) for field in fields(DraftModelConfig)}
        base_context = replace(context, prefix_caching=False)
        base = DraftModel(DraftModelConfig(**options | {"num_speculative_tokens": self.rows}), base_context)
        self.base = base
        if self.base.prepends_source:
            raise ConfigError("method 'staged' drafts for an encoder-decoder with an encoder-decoder: give 'model' one")
        self.rule = rules["coupled"]()
        model = AlignedModel(self.base)
        drafter = config.drafter.build(
            replace(
                base_context,
                target=model,
                target_attention=lambda: base.attention,
                rule=self.rule,
                max_model_len=self.base.max_len,
            )
        )
        if drafter.needs.hidden:
            raise ConfigError(
                f"method {drafter.name!r} feeds on the target's hidden states and cannot be inside 'staged'"
            )
        self.inner = [self.base, drafter]
        self.router = Router({INNER: drafter})
        self.policy = InnerPolicy(Setting({INNER: drafter.config.nodes_by_depth()}, model.row_multiple))
        self.stage = Target(model, self.base.attention)
        self.copies: dict[int, RequestState] = {}
        """Per sequence: the request as the inner rounds see it, extended by drafted tokens."""

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
        while active := self._schedule(active):
            result = self._round(active, start, requested)
            self._collect(active, result, rows)
            decoding = [copy for copy, verdict in zip(active, result.verdicts) if verdict.tokens]
            active = [copy for copy in decoding if len(copy.tokens) - start[copy.id] < requested[copy.id]]
        return self._drafts(sequences, start, rows)

    def _follow(self, sequence: RequestState) -> None:
        """Extends the inner copy of a sequence to its committed tokens."""
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

    def _schedule(self, copies: Requests) -> list[RequestState]:
        """Sets how many tokens each copy reads in the next inner round; returns those that take part."""
        missing = []
        for copy in copies:
            copy.num_computed_tokens = self.base.attention.pool.length(copy.id)
            missing.append(len(copy.tokens) - copy.num_computed_tokens)
        for copy, count in zip(copies, self.config.shares(missing)):
            copy.scheduled = count
        return [copy for copy in copies if copy.scheduled]

    def _round(self, active: Requests, start: Mapping[int, int], requested: Mapping[int, int]) -> Round:
        for copy in active:
            self.policy.remaining[copy.id] = requested[copy.id] - (len(copy.tokens) - start[copy.id])
        result = speculate(active, self.stage, self.router, self.rule, self.policy, self.context.sampler, self._clip)
        for copy, verdict in zip(active, result.verdicts):
            copy.tentative += len(verdict.tokens)
        return result

    def _clip(self, copy: RequestState, draft: Draft, verdict: Verdict) -> list[int]:
        """Keeps at most the tokens that the outer draft lacks. The draft ends where no token is permitted."""
        return verdict.decided_tokens(draft)[: self.policy.remaining[copy.id]]

    def _collect(self, active: Requests, result: Round, rows: dict[int, list[torch.Tensor]]) -> None:
        """Collects the exact q of every token that the inner round emitted."""
        scores = result.verification.scores
        for slot, index in enumerate(result.verification.deciding):
            verdict = result.verdicts[index]
            nodes = [-1, *verdict.path][: len(verdict.tokens)]
            if nodes and not active[index].params.greedy:
                rows[active[index].id].append(probabilities(scores.warped[[scores.row(slot, n) for n in nodes]]))

    def _drafts(
        self, sequences: Requests, start: Mapping[int, int], rows: Mapping[int, list[torch.Tensor]]
    ) -> list[Draft]:
        """Chains of the tokens that the inner rounds emitted; they share one q."""
        q_rows = [row for sequence in sequences for row in rows.get(sequence.id, ())]
        q = torch.cat(q_rows) if q_rows else None
        drafts, first = [], 0
        for sequence in sequences:
            tokens = self.copies[sequence.id].tokens[start[sequence.id] :] if sequence.id in rows else []
            if sequence.params.greedy:
                indices = [POINT_MASS] * len(tokens)
            else:
                indices = list(range(first, first + len(tokens)))
                first += len(tokens)
            drafts.append(Draft.chain(tokens, q, indices))
        return drafts

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence in sequences:
            copy = self.copies.get(sequence.id)
            if copy is not None and len(copy.tokens):
                self._take_back(copy, sequence)

    def _take_back(self, copy: RequestState, sequence: RequestState) -> None:
        """Truncates the inner copy and its cache to the committed tokens."""
        end = min(len(copy.tokens) - copy.tentative, len(sequence.tokens))
        while end < min(len(copy.tokens), len(sequence.tokens)) and copy.tokens[end] == sequence.tokens[end]:
            end += 1
        del copy.tokens[end:]
        copy.tentative = 0
        pool = self.base.attention.pool
        if pool.length(copy.id) > end:
            pool.truncate(copy.id, end)
        self.router.drafters[INNER].rewind(copy)

    def rewind(self, sequence: RequestState) -> None:
        if sequence.id in self.copies:
            self._take_back(self.copies[sequence.id], sequence)

    def release(self, sequence: RequestState) -> None:
        self.base.release(sequence)
        copy = self.copies.pop(sequence.id, None)
        self.policy.remaining.pop(sequence.id, None)
        self.router.failures.pop(sequence.id, None)
        if copy is not None:
            self.router.release(copy)

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        return sequence.tokens[: self.base.attention.pool.length(sequence.id)]

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(target), "drafter": {"method": "ngram"}}
