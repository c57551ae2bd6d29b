"""``mtp``: the layer for multi-token prediction that a checkpoint brings along (DeepSeek-V3, arXiv 2412.19437,
section 2.2).

``layers.py`` says how it drafts: [norm(embedding), norm(hidden)] go through one matrix, a decoder layer and a norm into
the target's output layer. The feature is the target's last hidden state; deeper tokens use the layer's own normed
output instead, as in vLLM and transformers.

A checkpoint may have several such modules. Entry t of module m combines the output for entry t of the module before it
with the embedding of token t + m + 1, and predicts token t + m + 2. So a chain's step m runs module m over the newest
entries again, and its last m entries hold drafted tokens, which are dropped after the round. Steps beyond the last
module begin with the first one again, as in vLLM: the outputs of the modules then stand for the target's hidden states.
Trees and beam searches use the first module alone.

The layer is in the target's own files or a file beside them (``models/weights/drafters.py``). Gemma 4's assistant,
another kind of drafter under the same method, is in ``assistant.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.core.batch import Batch, Span
from forerun.core.config import COUNT
from forerun.core.errors import ConfigError, ModelError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts
from forerun.models.architectures.drafters import mtp_example
from forerun.models.architectures.spec import with_window
from forerun.models.files.checkpoint import CONFIG
from forerun.models.files.open import Checkpoint, resolve
from forerun.models.formats import ON_CPU
from forerun.models.run.assistant import is_assistant
from forerun.models.run.drafter import DraftDecoder
from forerun.models.weights.drafters import output_rows, read_mtp
from forerun.models.weights.transform import ChangedWeights
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, Needs, drafters
from forerun.speculate.draft.chain import FEEDS_NORMED
from forerun.speculate.draft.heads.layers import LayerConfig, LayerDrafter
from forerun.speculate.draft.levels import Frontier, grow
from forerun.speculate.draft.model import most_common

LARGE_VOCABULARY, REDUCED_VOCABULARY = 65536, 32768
"""By default, a vocabulary larger than the first is reduced to the second, because the output layer is most of a step
(FastMTP, arXiv 2509.18362)."""


def has_layer(opened: Checkpoint, config: Any) -> bool:
    """Whether a target's own files have a supported layer; its weights are not read."""
    try:
        read_mtp(opened, config)
    except ModelError:
        return False
    return True


@dataclass(frozen=True)
class MtpConfig(LayerConfig):
    """As eagle's. ``model`` is a file with the layer, if that is not in the target's files, or Gemma 4's assistant."""

    draft_vocab_size: int | None = None
    """How many tokens its output layer predicts, as for a draft model. None: 32,768 of a vocabulary of more than
    65,536, otherwise all tokens."""
    limits: ClassVar = {"draft_vocab_size": COUNT}
    unsupported: ClassVar = {"adapt": "method 'mtp' does not learn"}


@drafters.register("mtp")
class Mtp(LayerDrafter[MtpConfig]):
    name = "mtp"
    config_class = MtpConfig
    per_sequence: ClassVar[tuple[str, ...]] = (*LayerDrafter.per_sequence, "waiting")
    waiting: dict[int, list[torch.Tensor]]
    """Per sequence: for every module but the first, the outputs of the one before it that it has not read for good."""
    reading: dict[int, RequestState]
    """The sequences of this round, by id."""

    @classmethod
    def build(cls, config: Any, context: DraftContext) -> Drafter[Any]:
        if config.model is not None and is_assistant(resolve(config.model)):
            from forerun.speculate.draft.heads.assistant import Assistant

            return Assistant(config, context)
        return cls(config, context)

    def __init__(self, config: MtpConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        context.require_decoder(self.name)
        info, self.reading = context.target.info, {}
        self.layers = (info.num_layers,)
        self.needs = Needs(hidden=self.layers, model=True)
        self.chooser = Chooser.of(config, context)
        own, form, ids = Checkpoint.open(info.name), config.form(info), output_ids(config, context)
        opened = own if config.model is None else Checkpoint.open(config.model)
        modules = read_mtp(opened, own.transformers_config().get_text_config(), config.num_speculative_tokens)
        (one, spec, weights), *others = (
            (each, with_window(layers, config.draft_window), tensors) for each, layers, tensors in modules
        )
        if ids is not None or form is not None:
            weights = ChangedWeights(weights, {}, {f"{spec.architecture.head.checkpoint}.weight": output_rows(own)})
        quantized = None if form is None else ON_CPU[form]
        decoder = DraftDecoder(context.target, one, spec, weights, quantized, ids)
        later = [DraftDecoder(context.target, *each, quantized, other=decoder) for each in others]
        self.later = [(each, self.make_attention(each)) for each in later]
        self.use(decoder, FEEDS_NORMED, ids)
        if self.later:
            self.tree = None  # its pages have the first module's entries alone

    def find_chains(self) -> None:
        super().find_chains()
        self.chains = None if self.later else self.chains

    def pools(self) -> list[Pool]:
        return [self.attention.pool, *(attention.pool for _, attention in self.later)]

    def _read(self, spans: list[Span], feature: torch.Tensor) -> Any:
        if not self.later:
            return super()._read(spans, feature)
        out, logits = self._pass(self.decoder, self.attention, spans, feature)
        for span, rows in zip(spans, out.split([span.count for span in spans])):
            before = self.waiting.get(span.key, [rows[:0]] * len(self.later))
            self.waiting[span.key] = [torch.cat([before[0], rows]), *before[1:]]
        self._catch_up(spans, out[:0])
        ends = list(accumulate(span.count for span in spans))
        return out[[end - 1 for span, end in zip(spans, ends) if span.logits]], logits

    def _missing(self, sequences: Requests, fitting: Sequence[int]) -> tuple[list[Span], torch.Tensor, list[int]]:
        self.reading = {sequences[index].id: sequences[index] for index in fitting}
        return super()._missing(sequences, fitting)

    def release(self, sequence: RequestState) -> None:
        super().release(sequence)
        self.reading.pop(sequence.id, None)

    def _catch_up(self, spans: list[Span], nothing: torch.Tensor) -> None:
        """The later modules read what the first one read of texts that it has not read whole."""
        behind = [
            sequence
            for span in spans
            if len((sequence := self.reading[span.key]).tokens) - self.skipped[span.key] - span.end
            > len(self.later) + 1
        ]
        for module, (decoder, attention) in enumerate(self.later if behind else (), 1):
            texts = [sequence.tokens for sequence in behind]
            self._next(module, decoder, attention, behind, texts, [nothing] * len(behind))

    def _pass(
        self, decoder: DraftDecoder, attention: Attention, spans: list[Span], feature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed outputs of all rows, and the logits that the spans ask for."""
        last = decoder.info.num_layers
        out = decoder.forward(Batch(spans, feature.device, hidden=(last,), embeds=feature), attention)
        return out.hidden[last], self.to_all_tokens(out.logits)

    def _grow(
        self, sequences: Requests, budgets: Sequence[int], ready: list[int], spans: list[Span], feature: torch.Tensor
    ) -> list[Draft]:
        if not self.later or self.config.branches or any(sequences[index].group is not None for index in ready):
            return super()._grow(sequences, budgets, ready, spans, feature)
        modules = [(self.decoder, self.attention), *self.later]
        rows: dict[int, torch.Tensor] = {}
        """Per sequence: outputs of the step before that no module's ``waiting`` holds."""
        last: dict[int, list[torch.Tensor]] = {index: [] for index in ready}
        """The last output of every module, since the first one ran."""

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            if not depth:
                out, logits = self._read(spans, feature)
                rows.update((index, out[:0]) for index in ready)
                newest = list(out)
            else:
                module = depth % len(modules)
                if not module:
                    rows.update((index, torch.stack(last[index])) for index, _ in frontier)
                    last.update((index, []) for index, _ in frontier)
                texts = [sequences[index].tokens + drafts[index].tokens for index, _ in frontier]
                given = [rows[index] for index, _ in frontier]
                chosen = [sequences[index] for index, _ in frontier]
                parts, logits = self._next(module, *modules[module], chosen, texts, given)
                rows.update(zip((index for index, _ in frontier), (part for part, _ in parts)))
                newest = [each for _, each in parts]
            for (index, _), each in zip(frontier, newest):
                last[index].append(each)
            return logits

        drafts = grow(sequences, ready, budgets, self.config, self.chooser, score)[0]
        for index, (number, (_, attention)) in product(ready, enumerate(self.later, 1)):
            if (key := sequences[index].id) in attention.pool.block_tables:
                attention.pool.truncate(key, max(0, self._end(sequences[index]) - number))
        return drafts

    def _next(
        self, module: int, decoder: DraftDecoder, attention: Attention, chosen: Requests, texts: Sequence[list[int]],
        given: Sequence[torch.Tensor],
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:  # fmt: skip
        """A step of a module over the entries that it lacks of each sequence with its draft, ``texts``. It reads the
        outputs that wait for it, and then those ``given``. Returns for each sequence the outputs to give to the module
        after it, the last output of all, and the logits."""
        spans, features, exact = [], [], []
        for sequence, text, rows in zip(chosen, texts, given):
            start, key = attention.pool.length(sequence.id), sequence.id
            first = self.skipped[key] + start + module + 1
            exact.append(max(0, len(sequence.tokens) - first))
            if start < self._end(sequence):
                waiting = self.waiting[key][module - 1]
                rows = torch.cat([waiting, rows])
                self.waiting[key] = [*self.waiting[key]]
                self.waiting[key][module - 1] = waiting[exact[-1] :]
            features.append(rows)
            spans.append(Span(key, start, text[first : first + len(rows)], logits=[len(rows) - 1]))
        out, logits = self._pass(decoder, attention, spans, torch.cat(features))
        result = []
        for span, count, rows in zip(spans, exact, out.split([span.count for span in spans])):
            if module < len(self.later):
                own = self.waiting[span.key]
                own[module] = torch.cat([own[module], rows[:count]])
            result.append((rows[count:], rows[-1]))
        return result, logits

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        config = Checkpoint.at(target).config.get_text_config()
        torch.manual_seed(0)
        save_file(mtp_example(config), folder / "model.safetensors", {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps({"speculators_model_type": "mtp"}), encoding="utf8")
        return {"model": str(folder)}


def output_ids(config: MtpConfig, context: DraftContext) -> torch.Tensor | None:
    """The tokens of a reduced output layer, int64 ascending; None: all. Raises ConfigError."""
    info = context.target.info
    size = config.draft_vocab_size or (REDUCED_VOCABULARY if info.vocab_size > LARGE_VOCABULARY else None)
    if size is None:
        return None
    if size > info.vocab_size:
        raise ConfigError(f"draft_vocab_size is {size}, and {info.name} has {info.vocab_size} tokens")
    return most_common(context, size, info.vocab_size)
