"""Gemma 4's assistant, a kind of ``mtp``: a small decoder without keys and values that reads the target's KV cache.

Its first input is the embedding of the last token and the target's hidden state before it. Deeper inputs are the
embedding of the drafted token and its own output. It has no cache of its own, so it can draft right after a
prefix-cache hit. ``models/run/assistant.py`` has the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.attention.kernel import KernelAttention
from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.models.architectures.families import GEMMA4
from forerun.models.files.open import resolve
from forerun.models.kinds import UNQUANTIZED
from forerun.models.run.assistant import AssistantModel, KernelTargetReader, TargetReader
from forerun.models.run.base import Model
from forerun.models.run.native import NativeModel
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, Needs, scatter_logits
from forerun.speculate.draft.heads.mtp import MtpConfig, output_ids
from forerun.speculate.draft.levels import Frontier, grow
from forerun.speculate.verify import Verification


class Assistant(Drafter[MtpConfig]):
    name = "mtp"
    config_class = MtpConfig
    per_sequence = ("states",)
    states: dict[int, tuple[int, torch.Tensor]]
    """Per sequence: how many tokens the target has read, and its last hidden state [hidden size]."""

    def __init__(self, config: MtpConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        context.require_decoder(self.name)
        path, target = resolve(config.model or ""), context.target
        if not isinstance(target, NativeModel) or target.spec.architecture is not GEMMA4:
            raise ConfigError(
                f"{path} is Gemma 4's assistant, which reads the cache of a Gemma 4 on the native path, and "
                f"{target.info.name} is {target.info.architecture} ({target.info.path})"
            )
        quantization = None if config.quantization == UNQUANTIZED else config.quantization
        self.model = AssistantModel(path, target, output_ids(config, context), quantization)
        if self.model.clusters is not None and config.draft_vocab_size is not None:
            raise ConfigError(f"{path} predicts the tokens of its likeliest clusters: remove draft_vocab_size")
        if config.draft_window is not None:
            raise ConfigError(f"{path} reads its target's cache, in that one's windows: remove draft_window")
        self.needs = Needs(hidden=(target.info.num_layers,), model=True)
        self.chooser = Chooser.of(config, context)
        self.attention: TargetReader | KernelTargetReader | None = None

    @inference
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        ready = [
            index
            for index, sequence in enumerate(sequences)
            if sequence.id in self.states and self.states[sequence.id][0] == len(sequence.tokens) - 1
        ]
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        """Per node: the feature that its children read."""

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            tokens, features = [], []
            for index, node in frontier:
                sequence, draft = sequences[index], drafts[index]
                tokens.append(draft.tokens[node] if depth else sequence.tokens[-1])
                features.append(outputs[index, draft.parents[node]] if depth else self.states[sequence.id][1])
            logits, states = self._run([sequences[index] for index, _ in frontier], tokens, torch.stack(features))
            outputs.update(zip(frontier, states))
            return logits

        return grow(sequences, ready, budgets, self.config, self.chooser, score)[0]

    def _run(
        self, chosen: Requests, tokens: Sequence[int], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the next step's features, of one row for each of ``tokens``."""
        model, target = self.model, self.context.target
        if self.attention is None:
            cache = self.context.attention()
            reader = KernelTargetReader if isinstance(cache, KernelAttention) else TargetReader
            self.attention = reader(cache.pool, model.layers)
        device, last = target.info.device, model.decoder.info.num_layers
        embedded = target.embed(torch.tensor(tokens, device=device))
        inputs = model.pre_projection(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        requested = [0] if model.clusters is None else []
        spans = [Span(s.id, len(s.tokens) - 1, [token], logits=requested) for s, token in zip(chosen, tokens)]
        batch = Batch(spans, device, hidden=(last,), embeds=inputs, embed_rows=list(range(len(tokens))))
        out = model.decoder.forward(batch, self.attention)
        logits = model.logits(out, out.hidden[last])
        if model.ids is not None:
            logits = scatter_logits(logits, model.ids, target.info.vocab_size)
        return logits, model.post_projection(out.hidden[last])

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            if verdict.hidden is None or verdict.error is not None:
                continue
            rows = verdict.hidden[self.context.target.info.num_layers]
            if len(rows):
                self.states[sequence.id] = sequence.num_computed_tokens, rows[-1].clone()

    def models(self) -> list[Model]:
        return [self.model.decoder]

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        return sequence.tokens[: self.states[sequence.id][0]] if sequence.id in self.states else []
