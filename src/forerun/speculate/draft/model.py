"""``draft_model``: a smaller language model with a cache of its own (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open

from forerun import pretrained
from forerun.cache.pool import Pool
from forerun.cache.prefix import PrefixTree
from forerun.core.batch import Batch, Span
from forerun.core.config import COUNT, Within
from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdict, Verdicts
from forerun.models.architectures.spec import refusal
from forerun.models.files.open import Checkpoint
from forerun.models.formats import blocks, int8
from forerun.models.formats.tiled import can_tile
from forerun.models.kinds import FLOATS, UNQUANTIZED
from forerun.models.load import load_shared, parse_dtype
from forerun.models.run.base import Model, new_attention
from forerun.models.run.native import NativeModel
from forerun.models.text.tokenizer import check_compatible, read_vocabulary
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, drafters, scatter_logits
from forerun.speculate.draft.chain import CatchUpConfig, ChainLookup, ChainRunner, can_chain
from forerun.speculate.draft.levels import Frontier, StepsConfig, grow, newest_level
from forerun.speculate.verify import Verification

log = logging.getLogger("forerun")
LARGE = 64 << 20
"""Bytes of weights above which a draft is memory-bound, so that 4 bits are faster."""
MAX_BITS = 5
"""A file with fewer bits per weight is used as it is, whatever its size."""
NARROW = 256
LOOKUP_TOKENS = 8
"""Default of ``prompt_lookup_num_tokens``."""
LOOKUP_CHAINS = 2
"""Most chains at once for which tokens are looked up; with four there is no gain."""
BUNDLED = "forerun:draft"


def common_tokens(tokenizer: Any) -> list[int]:
    """The most common tokens of code and English, most common first, from the table of ``tokenizer``; empty if there is
    none. ``lab/tools/common_tokens.py`` writes the tables. Each names a few tokens that identify its tokenizer."""
    for path in pretrained.common_tokens() if tokenizer is not None else ():
        with safe_open(path, "pt") as file:
            samples = {int(token): text for token, text in file.metadata().items() if token.isdigit()}
            if tokenizer.convert_ids_to_tokens(list(samples)) == list(samples.values()):
                return list(file.get_tensor("tokens").tolist())
    return []


def most_common(context: DraftContext, size: int, vocab_size: int) -> torch.Tensor:
    """int64 [size], ascending: the tokens of a reduced output layer. Special tokens come first, then ``common_tokens``,
    then the lowest ids below ``vocab_size``, which in BPE are the most common."""
    tokenizer = context.tokenizer
    special = {*context.target.info.eos_ids, *(tokenizer.added_tokens_decoder if tokenizer else ())}
    ranked = dict.fromkeys([*sorted(special), *common_tokens(tokenizer), *range(vocab_size)])
    return torch.tensor(sorted([token for token in ranked if token < vocab_size][:size]))


@dataclass(frozen=True)
class DraftModelConfig(StepsConfig, CatchUpConfig):
    model: str | None = None
    """Checkpoint of the draft (path or hub id); None: the bundled draft, for the bundled target."""
    dtype: str | None = None
    """Its dtype; None: as the target's option, but float32 for a narrow draft on CPU."""
    quantization: str | None = None
    """Quantization of its weights, as the target's option, or ``none``. None: where our CPU kernels run it on the
    native path and no dtype is given, q4_0 if it is too large for the processor's caches, and int8_rows for the bundled
    draft; otherwise none."""
    max_model_len: int | None = None
    """The draft's context; past it, nothing is proposed. None: the checkpoint's, at most the target's."""
    draft_vocab_size: int | None = None
    """How many tokens its output layer predicts: special ones, the most common, then the lowest ids. Other tokens are
    never drafted. None: those of Forerun's table of common tokens for this tokenizer (Qwen 2.5's: 49,152, 99.5 % of
    code and English); all tokens where there is no table."""
    prompt_lookup_num_tokens: int | None = None
    """Most tokens that are looked up in the text and read ahead in one call; 0: none, None: 8. Those that it would not
    have drafted itself are dropped, so drafts stay the same. Measured times decide how many are read. It applies to
    chains that our kernels draft, for up to two requests at a time."""
    use_heterogeneous_vocab: bool = False
    """The draft has another tokenizer than the target."""
    heterogeneous_vocab_method: str = "tli"
    """How two vocabularies meet: tli (draft among the tokens that both have) or, with forerun-lab, slem (draft text,
    encode it anew)."""
    limits: ClassVar = {"draft_vocab_size": COUNT, "prompt_lookup_num_tokens": Within(0, 64, whole=True)}

    @classmethod
    def with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Chains of up to twelve tokens that end at low confidence, shortened by the adaptive length policy."""
        open_ended = not {"num_speculative_tokens", "tree", "tree_nodes", "confidence_threshold"} & set(options)
        if options.get("model") in (None, BUNDLED) or not open_ended or options.get("heterogeneous_vocab_method"):
            return dict(options)
        return {"num_speculative_tokens": 12, "confidence_threshold": 0.6, "length": "adaptive", **options}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None and self.use_heterogeneous_vocab:
            raise ConfigError("draft_vocab_size needs a draft model with the target's tokenizer: remove it")
        if self.prompt_lookup_num_tokens is not None and (self.branches or self.use_heterogeneous_vocab):
            raise ConfigError("prompt_lookup_num_tokens needs a draft model with the target's tokenizer: remove it")
        method = self.heterogeneous_vocab_method
        if method not in ("tli", "slem"):
            raise ConfigError(f"heterogeneous_vocab_method must be tli or slem, not {method!r}")
        if method != "tli" and not self.use_heterogeneous_vocab:
            raise ConfigError(f"heterogeneous_vocab_method {method!r} needs use_heterogeneous_vocab")
        if method == "slem" and self.branches:
            raise ConfigError("heterogeneous_vocab_method 'slem' supports chains only: remove 'tree' and 'tree_nodes'")
        if method == "slem" and self.confidence_threshold is not None:
            raise ConfigError("heterogeneous_vocab_method 'slem' does not support confidence_threshold: remove it")


@drafters.register("draft_model")
class DraftModel(Drafter[DraftModelConfig]):
    name = "draft_model"
    config_class = DraftModelConfig
    watches = False
    per_sequence: ClassVar[tuple[str, ...]] = ("skipped", "read_order")
    skipped: dict[int, int]
    """Number of tokens at the start of the text that it does not read. Positions count from the first one read."""
    read_order: dict[int, list[int]]
    """For each node of the last draft: its index among the nodes that this model has read, or -1."""

    def __init__(self, config: DraftModelConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        path = config.model or BUNDLED
        options = dict(context.options or {})
        page_size = options.pop("page_size", None)
        dtype = self._dtype(path)
        has_source = context.target.info.encoder is not None
        if has_source:
            options["max_model_len"] = config.max_model_len or 2 * context.max_model_len  # source and answer
        self.output_ids = self._choose_outputs(path)
        """The tokens that its logits are of, ascending; None: all."""
        self.model = load_shared(
            path,
            dtype=dtype,
            device=context.target.info.device,
            invariant=False,
            quantization=self._quantization(path, dtype),
            outputs=self.output_ids,
            window=config.draft_window,
            **options,
        )
        self._check_kind(path, has_source)
        self._check_vocabulary(path)
        self.prepends_source = has_source and self.model.info.encoder is None
        """A decoder that drafts for an encoder-decoder: it reads source and answer as one text."""
        self.can_skip = not self.prepends_source and not config.use_heterogeneous_vocab
        longest = context.max_model_len * (2 if self.prepends_source else 1)
        self.max_len = min(self.model.info.max_len, config.max_model_len or longest)
        self.attention = new_attention(
            self.model,
            max_seqs=context.max_num_seqs,
            max_len=self.max_len,
            page_size=page_size,
            slack=config.rows_by_depth()[-1],
            keeps=context.prefix_caching,
        )
        self.tree = PrefixTree(self.attention.pool) if context.prefix_caching else None
        self.nodes = config.rows_by_depth()
        self.chooser = Chooser.of(config, context)
        fused = None if config.use_heterogeneous_vocab else self.model.fused
        steps = None
        if isinstance(self.model, NativeModel) and not config.use_heterogeneous_vocab:
            steps = self.model.steps(self.attention)
        most = LOOKUP_TOKENS if config.prompt_lookup_num_tokens is None else config.prompt_lookup_num_tokens
        lookup = ChainLookup(most) if most else None
        self.chains = ChainRunner.find(
            fused, self.attention, self.chooser, config, output_ids=self.output_ids, lookup=lookup, steps=steps
        )

    @classmethod
    def build(cls, config: DraftModelConfig, context: DraftContext) -> DraftModel:
        if not config.use_heterogeneous_vocab:
            return cls(config, context)
        if config.heterogeneous_vocab_method == "slem":
            result: DraftModel = from_lab("slem", "heterogeneous_vocab_method 'slem'").StringDraftModel(config, context)
            return result
        from forerun.speculate.draft.heterogeneous import CrossVocabularyDraftModel

        return CrossVocabularyDraftModel(config, context)

    def _check_kind(self, path: str, has_source: bool) -> None:
        """Raises ConfigError for an encoder-decoder that drafts for a decoder, or with another vocabulary."""
        if self.model.info.encoder is not None and not has_source:
            raise ConfigError(
                f"the draft {path} is an encoder-decoder, and {self.context.target.info.name} a decoder, which has no "
                "source for it: choose a decoder"
            )
        if self.config.use_heterogeneous_vocab and has_source:
            raise ConfigError("use_heterogeneous_vocab is for decoders: an encoder-decoder's draft has its vocabulary")

    def _check_vocabulary(self, path: str) -> None:
        """Raises ConfigError unless the draft's token ids mean the same as the target's."""
        context = self.context
        if context.tokenizer is not None:
            ours, theirs = context.tokenizer.get_vocab(), read_vocabulary(path)
            check_compatible(ours, theirs, context.target.info, self.model.info)

    def _read(self, sequence: RequestState) -> list[int]:
        """The text that this model reads for a sequence, in the draft's ids. With ``prepends_source``, the source takes
        the place of the answer's first token."""
        if self.prepends_source:
            return [*(sequence.source or ()), *sequence.tokens[1:]]
        skipped = self.skipped.get(sequence.id, 0)
        return sequence.tokens[skipped:] if skipped else sequence.tokens

    def _shift(self, sequence: RequestState) -> int:
        """Length of the text that it reads, minus the length of ``sequence.tokens``."""
        return len(sequence.source or ()) - 1 if self.prepends_source else -self.skipped.get(sequence.id, 0)

    def _prefix_source(self, sequence: RequestState) -> tuple[int, ...] | None:
        """The encoder's input, which cached prefixes depend on."""
        return None if self.prepends_source else sequence.source

    def _to_draft_ids(self, tokens: list[int]) -> list[int]:
        return tokens

    def translate(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's ids."""
        if self.output_ids is None:
            return logits
        return scatter_logits(logits, self.output_ids, self.context.sampler.vocab_size)

    def _choose_outputs(self, path: str) -> torch.Tensor | None:
        """The tokens that the output layer is reduced to, ascending; None: all. Raises ConfigError."""
        size = self.config.draft_vocab_size
        if size is None and not self.config.use_heterogeneous_vocab:
            size = len(common_tokens(self.context.tokenizer))
        if not size:
            return None
        vocabulary = int(Checkpoint.open(path).config.get_text_config().vocab_size)
        known = min(vocabulary, self.context.sampler.vocab_size)
        if size > known:
            raise ConfigError(f"draft_vocab_size is {size}, and {path} has {known} tokens")
        return None if size == vocabulary else most_common(self.context, size, known)

    def _dtype(self, path: str) -> torch.dtype:
        """On CPU, narrow layers run nearly twice as fast in float32 as in half precision, unless weights are tiled."""
        config = Checkpoint.open(path).config
        floats = self.config.quantization if self.config.quantization in FLOATS else None
        dtype = parse_dtype(self.config.dtype or floats or self.context.dtype, config)
        if self.config.dtype is not None or self.config.quantization not in (None, UNQUANTIZED):
            return dtype
        slow = self.context.target.info.device.type == "cpu" and not can_tile(dtype)
        return torch.float32 if slow and config.get_text_config().hidden_size < NARROW else dtype

    def _quantization(self, path: str, dtype: torch.dtype) -> str | None:
        """The option's format; without one, a smaller format where that is faster."""
        if self.config.quantization is not None:
            return self.config.quantization
        opened = Checkpoint.open(path)
        native = (self.context.options or {}).get("model_path") != "hf" and refusal(opened.config) is None
        device = self.context.target.info.device
        if self.config.dtype is not None or not native:
            return None
        if path == BUNDLED:
            return "int8_rows" if int8.has_kernels(device, dtype) else None
        size, weights = opened.weight_sizes()
        if blocks.can(dtype, device) and size > LARGE and 8 * size > MAX_BITS * weights:
            log.info("the draft %s is held in 4 bits (quantization: none holds it as its file does)", path)
            return "q4_0"
        return None

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        depths = [self._depth(sequence, budget) for sequence, budget in zip(sequences, budgets)]
        spans, ready = self._missing(sequences, depths)
        if self.chains is not None and ready and all(can_chain(sequences[i]) for i in ready):
            batch = self._batch(spans)
            texts = [self._read(sequences[i]) for i in ready] if len(ready) <= LOOKUP_CHAINS else []
            return self.chains.draft(sequences, ready, depths, batch, self.attention, texts=texts)

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            read = spans
            if depth:
                read = newest_level(sequences, frontier, drafts, lambda each: len(self._read(each)), self._to_draft_ids)
            return self.translate(self._forward(read))

        if spans and not ready:
            self._forward(spans)
        drafts, orders = grow(sequences, ready, depths, self.config, self.chooser, score)
        self.read_order = {sequence.id: order for sequence, order in zip(sequences, orders or ())}
        return drafts

    def _forward(self, spans: list[Span]) -> torch.Tensor:
        return self.model.forward(self._batch(spans), self.attention).logits

    def _batch(self, spans: list[Span]) -> Batch:
        return Batch(spans, self.model.info.device).clamp_tokens(self.model.info.vocab_size)

    def _depth(self, sequence: RequestState, budget: int) -> int:
        """The budget, cut where the draft's context ends; 0 for a source that is too long for it."""
        sources = self.attention.pool.sources
        if sources is not None and len(sequence.source or ()) > sources.longest:
            return 0
        return min(budget, self.max_len - len(self._read(sequence)))

    def _missing(self, sequences: Requests, depths: Sequence[int]) -> tuple[list[Span], list[int]]:
        """Spans of committed tokens to prefill now, and the indices of sequences without backlog, which can draft."""
        spans, ready = [], []
        pool = self.attention.pool
        indices = [i for i, depth in enumerate(depths) if depth > 0 and self._fits(sequences[i], depth)]
        missing = [len(self._read(sequences[i])) - pool.length(sequences[i].id) for i in indices]
        for index, backlog, count in zip(indices, missing, self.config.shares(missing)):
            if not count:
                continue
            sequence = sequences[index]
            length = pool.length(sequence.id)
            tokens = self._read(sequence)[length : length + count]
            requested = [count - 1] if count == backlog else []
            settled = max(length, min(length + count, length + backlog - sequence.tentative))
            spans.append(Span(sequence.id, length, tokens, logits=requested, source=sequence.source, settled=settled))
            if self.tree is not None and backlog > pool.page_size:  # a prompt, not a few tokens of skipped rounds
                self.tree.keep_states(sequence.id, settled, length + backlog)
            if count == backlog:
                ready.append(index)
        return spans, ready

    def _fits(self, sequence: RequestState, depth: int) -> bool:
        """Reserves pages for its tokens and a draft; False: none left. A new sequence starts from the prefix cache."""
        if self._must_restart(sequence):
            self.release(sequence)
        pool, new = self.attention.pool, sequence.id not in self.attention.pool.block_tables
        if new and sequence.reads is not None and self.can_skip:
            self.skipped[sequence.id] = max(0, len(sequence.tokens) - sequence.reads)
        text = self._read(sequence)
        if new and self.tree is not None:
            self.tree.match_prefix(sequence.id, text, len(text) - 1, source=self._prefix_source(sequence))
        if pool.try_reserve(sequence.id, len(text) + self.nodes[depth] * len(sequence.sequences)):
            return True
        if new:
            self.release(sequence)
        return False

    def _must_restart(self, sequence: RequestState) -> bool:
        """Whether it skipped the beginning of a text of which it must now read everything."""
        return sequence.reads is None and self.skipped.get(sequence.id, 0) > 0

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Truncates the cache to the committed prefix: of the draft nodes that it read, the accepted ones stay."""
        pool = self.attention.pool
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            if sequence.id not in pool.block_tables:
                continue
            if len(draft):
                start = self._draft_start(sequence, verdict)
                pool.keep(sequence.id, start, self._kept(sequence, verdict, start))
            if self.tree is not None:
                text = self._read(sequence)
                end = len(text) - sequence.tentative
                self.tree.insert(sequence.id, text, end, source=self._prefix_source(sequence))

    def _draft_start(self, sequence: RequestState, verdict: Verdict) -> int:
        """Cache position of the first draft node."""
        return len(sequence.tokens) - len(verdict.tokens) + self._shift(sequence)

    def _kept(self, sequence: RequestState, verdict: Verdict, start: int) -> list[int]:
        """The cache entries of accepted nodes, counted from ``start``."""
        num_read = self.attention.pool.length(sequence.id) - start
        order, path = self.read_order.pop(sequence.id, None), verdict.path[: verdict.accepted]
        entries = path if order is None else [order[node] for node in path]
        return [entry for entry in entries if 0 <= entry < num_read]

    def release(self, sequence: RequestState) -> None:
        if self.tree is not None and sequence.id in self.attention.pool.block_tables:
            text = self._read(sequence)
            end = len(text) - sequence.tentative
            self.tree.insert_finished(sequence.id, text, end, source=self._prefix_source(sequence))
        super().release(sequence)

    def rewind(self, sequence: RequestState) -> None:
        pool, length = self.attention.pool, len(sequence.tokens) + self._shift(sequence)
        if pool.length(sequence.id) > length:
            pool.truncate(sequence.id, length)

    def backlog(self, sequence: RequestState) -> int:
        text, pool = self._read(sequence), self.attention.pool
        if self._must_restart(sequence):
            return len(sequence.tokens)
        if sequence.id in pool.block_tables:
            return len(text) - pool.length(sequence.id)
        if self.tree is None:
            return len(text)
        return len(text) - self.tree.match_length(text, len(text) - 1, self._prefix_source(sequence))

    def pools(self) -> list[Pool]:
        return [self.attention.pool]

    def models(self) -> list[Model]:
        return [self.model]

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        return sequence.tokens[: max(0, self.attention.pool.length(sequence.id) - self._shift(sequence))]

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(target)}
