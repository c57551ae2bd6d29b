"""The protocol between the engine and a model, and what all models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from forerun.attention.base import Attention
from forerun.attention.kernel import KernelAttention, can_attend
from forerun.attention.sdpa import SdpaAttention
from forerun.attention.tiled import BLOCK, TiledAttention
from forerun.cache.pool import KVShape, Pool
from forerun.cache.sources import Sources
from forerun.cache.states import INTERVAL, States, StateShape
from forerun.core.batch import Batch, Output
from forerun.core.errors import ConfigError

if TYPE_CHECKING:
    from forerun.models.fused import Fused


BACK = 16
"""Tokens that may be taken back where nobody says how many are drafted."""


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What the engine needs to know of an encoder-decoder's other half."""

    start: tuple[int, ...]
    """The tokens that an answer begins behind where a request gives none."""
    max_len: int
    """Tokens of the longest source."""
    kv_shapes: tuple[KVShape, ...]
    """Of attention across, per decoder layer."""


@dataclass(frozen=True, slots=True)
class MixtureInfo:
    """A mixture of experts: each row chooses some of a layer's."""

    count: int
    chosen: int
    layers: int
    """That have experts."""
    share: float
    """Of the bytes that a row reads, those of its experts."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine needs to know of a model."""

    name: str
    architecture: str
    path: str
    """Which code runs it: ``hf`` or ``native``, and how its weights are laid out."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_len: int
    kv_shapes: tuple[KVShape, ...]
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int]
    weight_bytes: int
    """Of the matrices as they are held; norms and biases, a thousandth of them, are left out."""
    token_bytes: int
    """How many of them one row's forward reads: the embedding is not, unless the head is the same."""
    quantization: str | None = None
    outputs: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """int64 [n], ascending: the tokens that its logits are of; None: all."""
    lora: tuple[str, ...] = ()
    """Adapters that are merged into it: ``FOLDER`` or ``FOLDER=WEIGHT``."""
    encoder: EncoderInfo | None = None
    """None: a decoder alone."""
    state_shapes: tuple[StateShape | None, ...] = ()
    """Per layer, what it keeps of a sequence beside keys and values; () where none does."""
    mixture: MixtureInfo | None = None
    """None: there are no experts, or ``Output.experts`` does not count them."""

    def begin(self, prompt: Sequence[int]) -> tuple[list[int], tuple[int, ...] | None]:
        """What a decoder is fed for a prompt, and what its encoder reads, if it has one."""
        return (list(prompt), None) if self.encoder is None else (list(self.encoder.start), tuple(prompt))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The row counts, ascending, of calls whose results agree to the last bit at so many ``threads``: of the layers,
    and of the output layer."""

    rows: tuple[int, ...]
    logits: tuple[int, ...]
    threads: int

    @property
    def together(self) -> int:
        """Rows that one call takes, their logits included."""
        return min(self.rows[-1], self.logits[-1])

    def forward(self, feed: Callable[[Batch, Attention], Output], batch: Batch, attention: Attention) -> Output:
        """``feed`` in pieces that fit."""
        pieces = batch.split(self.rows[-1], self.logits[-1])
        if len(pieces) == 1:
            return feed(batch, attention)
        for span in batch.spans:  # nothing may be written if there is no room for all
            attention.pool.reserve(span.key, span.end)
        outputs = [feed(piece, attention) for piece in pieces]
        hidden = {layer: torch.cat([output.hidden[layer] for output in outputs]) for layer in batch.hidden}
        read = sum(output.experts for output in outputs)
        return Output(torch.cat([output.logits for output in outputs]), hidden, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What to load, and how, as ``load.load_model`` has the options: every rank knows it."""

    folder: Path
    name: str
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int] = frozenset()
    invariant: bool | None = False
    """None: if it can be had."""
    weights: str = "auto"
    quantization: str | None = None
    numbers: bool = False
    """Weights are to be numbers, whatever the files hold."""
    lora: Sequence[str] | str | None = None
    outputs: torch.Tensor | None = None
    max_model_len: int | None = None


class Model(Protocol):
    """A decoder. ``forward`` feeds the rows of a batch and returns logits of the rows that asked for them."""

    info: ModelInfo
    invariant: bool
    """Whether a row's bits do not depend on the rows beside it."""
    tiles: Tiles | None
    """How rows are put into calls to be invariant; None: as they come."""

    @property
    def fused(self) -> Fused | None:
        """The whole decoder, or a chain of draft steps, in one compiled call; None: it is not offered."""

    @property
    def row_multiple(self) -> int:
        """Rows that a round of one is padded to."""

    def forward(self, batch: Batch, attention: Attention) -> Output:
        """Feed the rows of a batch, and store their keys and values.

        Args:
            batch: spans of tokens, one for each sequence; ``logits`` says which rows are to be scored.
            attention: over this model's KV cache.

        Returns:
            Float32 logits [batch.num_logits, vocabulary], and for each layer in ``batch.hidden`` its outputs
            [batch.num_rows, hidden] in the model's dtype.

        Raises:
            OutOfPages: the cache has no room for the batch; nothing was written.
        """

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [n, hidden], in the model's dtype, of token ids, int64 [n]."""

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocabulary] of final (normalised) hidden states [n, hidden]."""


def new_attention(
    model: Model,
    *,
    max_seqs: int,
    max_len: int,
    page_size: int | None = None,
    slack: int = 0,
    back: int | None = None,
    keeps: bool = False,
) -> Attention:
    """An attention with a pool of its own for ``model``.

    ``page_size`` None is the slotted layout: one page per sequence, ``max_seqs`` of them, each long enough for
    ``max_len`` tokens and ``slack`` tree nodes. Otherwise pages of ``page_size`` tokens, enough for every sequence at
    full length. Beside an encoder-decoder's pool, there is room for
    ``max_seqs`` encoded sources of ``max_len`` tokens. Layers' states go ``back`` by so many tokens (default: for a
    draft that is read while the last one is still to be settled, at least ``BACK``), for ``max_seqs`` sequences and as
    many beams that begin while others end. Where prefix caching ``keeps`` states, there is room for two of every
    sequence, and for one every ``INTERVAL`` tokens, or as many as take a state's bytes in the pool.
    """
    info = model.info
    ours = can_attend(info.dtype, info.device, info.kv_shapes)
    tiled = model.invariant and info.device.type == "cpu" and not ours
    longest = padded(max_len + slack, BLOCK) if tiled else max_len + slack
    if page_size is None:
        page_size, num_pages = longest, max_seqs
    else:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {page_size}")
        num_pages = max_seqs * -(-longest // page_size)
    pool = Pool(info.kv_shapes, num_pages, page_size, info.dtype, info.device)
    if info.state_shapes:
        depth = max(BACK, 2 * slack + 1) if back is None else max(1, back)
        pool.states = states = States(info.state_shapes, 2 * max_seqs, depth, info.dtype, info.device)
        states.interval = min(INTERVAL, max(1, states.bytes_per_sequence * page_size // max(1, pool.page_bytes)))
        states.resize(states.count, 2 * max_seqs + pool.num_tokens // states.interval if keeps else 0)
    if info.encoder is not None:
        longest = min(info.encoder.max_len, max_len)
        pool.sources = Sources(info.encoder.kv_shapes, max_seqs, longest, info.dtype, info.device)
        return KernelAttention(pool) if ours else SdpaAttention(pool)
    return attention_over(model, pool)


def attention_over(model: Model, pool: Pool) -> Attention:
    """The attention that serves ``model`` here."""
    info = model.info
    if info.device.type == "cuda" and not any(shape.shared for shape in info.kv_shapes):
        from forerun.attention.triton import TritonAttention

        return TritonAttention(pool)
    if can_attend(info.dtype, info.device, info.kv_shapes):
        return KernelAttention(pool)
    tiled = model.invariant and info.device.type == "cpu"
    return TiledAttention(pool) if tiled else SdpaAttention(pool)


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat the last row until there are ``count``."""
    missing = count - rows.shape[0]
    return rows if missing <= 0 else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
