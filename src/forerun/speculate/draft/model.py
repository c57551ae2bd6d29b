"""``draft_model``: a smaller language model with a cache of its own (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from forerun.cache.pool import Pool
from forerun.cache.prefix import PrefixTree
from forerun.core.batch import Batch, Span
from forerun.core.config import COUNT, Within
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdict, Verdicts
from forerun.models.architectures.spec import refusal
from forerun.models.base import Model, new_attention
from forerun.models.formats import blocks, int8
from forerun.models.formats.tiled import can_tile
from forerun.models.kinds import FLOATS, UNQUANTIZED
from forerun.models.load import load_shared, parse_dtype
from forerun.models.open import quick_config, resolve, weight_sizes
from forerun.models.tokenizer import check_compatible, read_vocabulary
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, common_tokens, drafters, spread
from forerun.speculate.draft.chain import CatchUpConfig, ChainLookup, ChainRunner, plain
from forerun.speculate.draft.levels import Frontier, StepsConfig, grow, newest_level
from forerun.speculate.verify import Verification

log = logging.getLogger("forerun")
LARGE = 64 << 20
"""Bytes of a file whose weights come from memory at every step, so that a smaller form is faster."""
MOST_BITS = 5
"""A weight of a file that is taken as it is, whatever its size."""
NARROW = 256
AHEAD = 8
"""Most tokens that are read ahead in a call, unless an option says otherwise."""
TOGETHER = 2
"""Most chains at once for which tokens are read ahead; with four there is no gain."""
BUNDLED = "forerun:draft"


@dataclass(frozen=True)
class DraftModelConfig(StepsConfig, CatchUpConfig):
    model: str | None = None
    """Checkpoint of the draft (path or hub id); None: the bundled draft, for the bundled target."""
    dtype: str | None = None
    """Its dtype; None: as the target's option, but float32 for a narrow draft on CPU."""
    quantization: str | None = None
    """Its weights' form, as the target's option, or ``none``. None: where CPU kernels of ours run it on the native path
    and no dtype is asked for, q4_0 if it is too large for the processor's caches and int8_rows for the bundled draft;
    otherwise none."""
    max_model_len: int | None = None
    """The draft's context; past it, nothing is proposed. None: the checkpoint's, at most the target's."""
    draft_vocab_size: int | None = None
    """How many tokens its output layer predicts: the special ones, the commonest, and the first others of the
    vocabulary. What is left out is never drafted. None: those of the table of common tokens that comes with Forerun for
    this tokenizer (Qwen 2.5's: 49,152, 99.5 % of code and English); all of them where there is no table."""
    prompt_lookup_num_tokens: int | None = None
    """Most tokens that it reads ahead in a call; 0: none, None: 8. They are looked up in the text; those that it would
    not have drafted itself are dropped, so that drafts stay the same. It reads as many as pay off by measured times,
    for up to two requests at a time, in chains that our kernels draft."""
    use_heterogeneous_vocab: bool = False
    """The draft has another tokenizer than the target."""
    heterogeneous_vocab_method: str = "tli"
    """How two vocabularies meet: tli (draft among the tokens that both have) or slem (draft text, encode it anew)."""
    limits: ClassVar = {"draft_vocab_size": COUNT, "prompt_lookup_num_tokens": Within(0, 64, whole=True)}

    @classmethod
    def with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Chains of up to twelve tokens that end where the draft is unsure, as far as they pay."""
        open_ended = not {"num_speculative_tokens", "tree", "tree_nodes", "confidence_threshold"} & set(options)
        if options.get("model") in (None, BUNDLED) or not open_ended or options.get("heterogeneous_vocab_method"):
            return dict(options)
        return {"num_speculative_tokens": 12, "confidence_threshold": 0.6, "length": "adaptive", **options}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None and self.use_heterogeneous_vocab:
            raise ConfigError("draft_vocab_size is for drafts with the target's tokenizer: leave it out")
        if self.prompt_lookup_num_tokens is not None and (self.branches or self.use_heterogeneous_vocab):
            raise ConfigError("prompt_lookup_num_tokens is for chains in the target's own tokens: leave it out")
        method = self.heterogeneous_vocab_method
        if method not in ("tli", "slem"):
            raise ConfigError(f"heterogeneous_vocab_method must be tli or slem, not {method!r}")
        if method != "tli" and not self.use_heterogeneous_vocab:
            raise ConfigError(f"heterogeneous_vocab_method {method!r} needs use_heterogeneous_vocab")
        if method == "slem" and self.branches:
            raise ConfigError("heterogeneous_vocab_method 'slem' drafts chains; remove 'tree' or 'tree_nodes'")
        if method == "slem" and self.confidence_threshold is not None:
            raise ConfigError("heterogeneous_vocab_method 'slem' knows no confidence_threshold: remove one of them")


@drafters.register("draft_model")
class DraftModel(Drafter[DraftModelConfig]):
    name = "draft_model"
    config_class = DraftModelConfig
    watches = False
    per_sequence: ClassVar[tuple[str, ...]] = ("skipped", "places")
    skipped: dict[int, int]
    """Of which it reads the last tokens only: how many it leaves out. Their positions count from 0."""
    places: dict[int, list[int]]
    """Where each node of its draft is among those that this model has read, or -1."""

    def __init__(self, config: DraftModelConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        path = config.model or BUNDLED
        options = dict(context.options or {})
        page_size = options.pop("page_size", None)
        dtype = self._dtype(path)
        source = context.target.info.encoder is not None
        if source:
            options["max_model_len"] = config.max_model_len or 2 * context.max_model_len  # source and answer
        self.output_ids = self._predicted(path)
        """The tokens that its logits are of, ascending; None: all."""
        self.model = load_shared(
            path,
            dtype=dtype,
            device=context.target.info.device,
            invariant=False,
            quantization=self._quantization(path, dtype),
            outputs=self.output_ids,
            **options,
        )
        self._check_kind(path, source)
        self._check_vocabulary(path)
        self.joins = source and self.model.info.encoder is None
        """It reads the source before the text, as one text."""
        self.windows = not self.joins and not config.use_heterogeneous_vocab
        """It can leave out the beginning of a text."""
        longest = context.max_model_len * (2 if self.joins else 1)
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
        self.chooser = Chooser(context.sampler, context.rule, config.draft_temperature, context.stream)
        translates = config.use_heterogeneous_vocab
        fused = None if translates else self.model.fused
        most = AHEAD if config.prompt_lookup_num_tokens is None else config.prompt_lookup_num_tokens
        lookup = ChainLookup(most) if most else None
        self.chains = ChainRunner.find(
            fused, self.attention, self.chooser, config, names=self.output_ids, lookup=lookup
        )

    @classmethod
    def build(cls, config: DraftModelConfig, context: DraftContext) -> DraftModel:
        if not config.use_heterogeneous_vocab:
            return cls(config, context)
        from forerun.speculate.draft.heterogeneous import CrossVocabularyDraftModel, StringDraftModel

        tli = config.heterogeneous_vocab_method == "tli"
        return (CrossVocabularyDraftModel if tli else StringDraftModel)(config, context)

    def _check_kind(self, path: str, source: bool) -> None:
        """Raise ConfigError for an encoder-decoder whose source nobody gives, and for other ids where there is one."""
        if self.model.info.encoder is not None and not source:
            raise ConfigError(
                f"the draft {path} is an encoder-decoder, and {self.context.target.info.name} a decoder, which has no "
                "source for it: choose a decoder"
            )
        if self.config.use_heterogeneous_vocab and source:
            raise ConfigError("use_heterogeneous_vocab is for decoders: an encoder-decoder's draft has its vocabulary")

    def _check_vocabulary(self, path: str) -> None:
        """Raise ConfigError unless the draft's ids mean what the target's mean."""
        context = self.context
        if context.tokenizer is not None:
            ours, theirs = context.tokenizer.get_vocab(), read_vocabulary(path)
            check_compatible(ours, theirs, context.target.info, self.model.info)

    def _read(self, sequence: RequestState) -> list[int]:
        """What this model reads of a sequence: its committed tokens in the draft's ids. A decoder that drafts for an
        encoder-decoder reads the source in the place of the token that begins an answer."""
        if self.joins:
            return [*(sequence.source or ()), *sequence.tokens[1:]]
        begin = self.skipped.get(sequence.id, 0)
        return sequence.tokens[begin:] if begin else sequence.tokens

    def _shift(self, sequence: RequestState) -> int:
        """How many tokens more than the sequence's that is."""
        return len(sequence.source or ()) - 1 if self.joins else -self.skipped.get(sequence.id, 0)

    def _root(self, sequence: RequestState) -> tuple[int, ...] | None:
        """What cached prefixes depend on beside what is read."""
        return None if self.joins else sequence.source

    def _own(self, tokens: list[int]) -> list[int]:
        """Drafted tokens in the draft's ids."""
        return tokens

    def translate(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's ids."""
        return logits if self.output_ids is None else spread(logits, self.output_ids, self.context.sampler.vocab_size)

    def _predicted(self, path: str) -> torch.Tensor | None:
        """The tokens that are worth an output, ascending; None: all of them. Raises ConfigError."""
        size = self.config.draft_vocab_size
        if size is None and not self.config.use_heterogeneous_vocab:
            size = len(common_tokens(self.context.tokenizer))
        if not size:
            return None
        vocabulary = int(quick_config(resolve(path)).get_text_config().vocab_size)
        known = min(vocabulary, self.context.sampler.vocab_size)
        if size > known:
            raise ConfigError(f"draft_vocab_size is {size}, and {path} has {known} tokens")
        return None if size == vocabulary else self.context.commonest(size, known)

    def _dtype(self, path: str) -> torch.dtype:
        """On CPU, narrow layers run nearly twice as fast in float32 as in half precision, unless they are streamed."""
        config = quick_config(resolve(path))
        numbers = self.config.quantization if self.config.quantization in FLOATS else None
        dtype = parse_dtype(self.config.dtype or numbers or self.context.dtype, config)
        if self.config.dtype is not None or self.config.quantization not in (None, UNQUANTIZED):
            return dtype
        slow = self.context.target.info.device.type == "cpu" and not can_tile(dtype)
        return torch.float32 if slow and config.get_text_config().hidden_size < NARROW else dtype

    def _quantization(self, path: str, dtype: torch.dtype) -> str | None:
        """What was asked for; otherwise the bundled draft's default, where it is quicker."""
        if self.config.quantization is not None:
            return self.config.quantization
        native = (self.context.options or {}).get("model_path") != "hf" and refusal(quick_config(resolve(path))) is None
        device = self.context.target.info.device
        if self.config.dtype is not None or not native:
            return None
        if path == BUNDLED:
            return "int8_rows" if int8.ours(device, dtype) else None
        held, numbers = weight_sizes(resolve(path))
        if blocks.can(dtype, device) and held > LARGE and 8 * held > MOST_BITS * numbers:
            log.info("the draft %s is held in 4 bits (quantization: none holds it as its file does)", path)
            return "q4_0"
        return None

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        depths = [self._depth(sequence, budget) for sequence, budget in zip(sequences, budgets)]
        spans, ready = self._missing(sequences, depths)
        if self.chains is not None and ready and all(plain(sequences[i]) for i in ready):
            batch = self._batch(spans)
            texts = [self._read(sequences[i]) for i in ready] if len(ready) <= TOGETHER else []
            return self.chains.draft(sequences, ready, depths, batch, self.attention, texts=texts)

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            if depth:
                fed = newest_level(sequences, frontier, drafts, lambda each: len(self._read(each)), self._own)
            return self.translate(self._forward(fed if depth else spans))

        if spans and not ready:
            self._forward(spans)
        drafts, indices = grow(sequences, ready, depths, self.config, self.chooser, score)
        self.places = {sequence.id: slot for sequence, slot in zip(sequences, indices or ())}
        return drafts

    def _forward(self, spans: list[Span]) -> torch.Tensor:
        return self.model.forward(self._batch(spans), self.attention).logits

    def _batch(self, spans: list[Span]) -> Batch:
        return Batch(spans, self.model.info.device).clamp_tokens(self.model.info.vocab_size)

    def _depth(self, sequence: RequestState, budget: int) -> int:
        """The budget, less where the draft's context ends; nothing for a source that it has too few positions for."""
        sources = self.attention.pool.sources
        if sources is not None and len(sequence.source or ()) > sources.longest:
            return 0
        return min(budget, self.max_len - len(self._read(sequence)))

    def _missing(self, sequences: Requests, depths: Sequence[int]) -> tuple[list[Span], list[int]]:
        """The committed tokens to feed that this model has not seen, and the sequences that reach their last one and
        may draft."""
        spans, ready = [], []
        pool = self.attention.pool
        indices = [i for i, depth in enumerate(depths) if depth > 0 and self._fits(sequences[i], depth)]
        missing = [len(self._read(sequences[i])) - pool.length(sequences[i].id) for i in indices]
        for index, lacks, count in zip(indices, missing, self.config.shares(missing)):
            if not count:
                continue
            sequence = sequences[index]
            length = pool.length(sequence.id)
            tokens = self._read(sequence)[length : length + count]
            requested = [count - 1] if count == lacks else []
            settled = max(length, min(length + count, length + lacks - sequence.tentative))
            spans.append(Span(sequence.id, length, tokens, logits=requested, source=sequence.source, settled=settled))
            if self.tree is not None and lacks > pool.page_size:  # it reads; a few tokens are what it was not asked for
                self.tree.keep_states(sequence.id, settled, length + lacks)
            if count == lacks:
                ready.append(index)
        return spans, ready

    def _fits(self, sequence: RequestState, depth: int) -> bool:
        """Whether there are pages for its tokens and a draft; a sequence that is new here starts on a known prefix."""
        if self._starts_over(sequence):
            self.release(sequence)
        pool, new = self.attention.pool, sequence.id not in self.attention.pool.block_tables
        if new and sequence.reads is not None and self.windows:
            self.skipped[sequence.id] = max(0, len(sequence.tokens) - sequence.reads)
        known = self._read(sequence)
        if new and self.tree is not None:
            self.tree.match_prefix(sequence.id, known, len(known) - 1, source=self._root(sequence))
        if pool.try_reserve(sequence.id, len(known) + self.nodes[depth] * len(sequence.sequences)):
            return True
        if new:
            self.release(sequence)
        return False

    def _starts_over(self, sequence: RequestState) -> bool:
        """Whether it is to read all of a text that it has begun with the last tokens of."""
        return sequence.reads is None and self.skipped.get(sequence.id, 0) > 0

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Truncate to the committed prefix: of the drafted nodes this model has fed, the accepted ones stay."""
        pool = self.attention.pool
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            if sequence.id not in pool.block_tables:
                continue
            if len(draft):
                start = len(sequence.tokens) - len(verdict.tokens) + self._shift(sequence)
                pool.keep(sequence.id, start, self._kept(sequence, verdict, start))
            if self.tree is not None:
                known = self._read(sequence)
                self.tree.insert(sequence.id, known, len(known) - sequence.tentative, source=self._root(sequence))

    def _kept(self, sequence: RequestState, verdict: Verdict, start: int) -> list[int]:
        """Which of the nodes in the cache, counted from ``start``, were accepted."""
        fed = self.attention.pool.length(sequence.id) - start
        indices = self.places.pop(sequence.id, None)
        path = verdict.path[: verdict.accepted]
        return [node for node in (path if indices is None else [indices[n] for n in path]) if 0 <= node < fed]

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        pool = self.attention.pool
        if source.id in pool.block_tables:
            pool.fork(source.id, sequence.id, pool.length(source.id))
        super().fork(source, sequence)

    def release(self, sequence: RequestState) -> None:
        if self.tree is not None and sequence.id in self.attention.pool.block_tables:
            known = self._read(sequence)
            self.tree.insert_finished(sequence.id, known, len(known) - sequence.tentative, source=self._root(sequence))
        self.attention.pool.free(sequence.id)
        super().release(sequence)

    def rewind(self, sequence: RequestState) -> None:
        pool, length = self.attention.pool, len(sequence.tokens) + self._shift(sequence)
        if pool.length(sequence.id) > length:
            pool.truncate(sequence.id, length)

    def backlog(self, sequence: RequestState) -> int:
        known, pool = self._read(sequence), self.attention.pool
        if self._starts_over(sequence):
            return len(sequence.tokens)
        if sequence.id in pool.block_tables:
            return len(known) - pool.length(sequence.id)
        result = self.tree.match_length(known, len(known) - 1, self._root(sequence)) if self.tree is not None else 0
        return len(known) - result

    def pools(self) -> list[Pool]:
        return [self.attention.pool]

    def models(self) -> list[Model]:
        return [self.model]

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        return sequence.tokens[: max(0, self.attention.pool.length(sequence.id) - self._shift(sequence))]

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(target)}
