"""The protocol between the engine and a model, and what all models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
from forerun.kernels import gpu

if TYPE_CHECKING:
    from forerun.models.run.fused import Fused


BACK = 16
"""Tokens that can be rolled back if nobody says how many are drafted."""


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What the engine needs to know of an encoder-decoder's encoder."""

    start: tuple[int, ...]
    """The decoder's first tokens, unless a request has its own."""
    max_len: int
    """The most tokens of a source."""
    kv_shapes: tuple[KVShape, ...]
    """Of each layer's cross-attention."""


@dataclass(frozen=True, slots=True)
class MixtureInfo:
    """A mixture of experts."""

    count: int
    chosen: int
    layers: int
    """How many layers have experts."""
    share: float
    """The experts' fraction of the bytes that a row reads."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine needs to know of a model."""

    name: str
    architecture: str
    path: str
    """Which code runs it, ``hf`` or ``native``, and the form of its weights."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_len: int
    kv_shapes: tuple[KVShape, ...]
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int]
    weight_bytes: int
    """Bytes in memory of the matrices; norms and biases, a thousandth of them, are left out."""
    token_bytes: int
    """Bytes that one row's forward reads of them: not the embedding, unless it is the output layer too."""
    quantization: str | None = None
    outputs: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """The tokens that it has logits of, int64 [n], ascending; None: all."""
    lora: tuple[str, ...] = ()
    """Merged adapters: ``FOLDER`` or ``FOLDER=WEIGHT``."""
    encoder: EncoderInfo | None = None
    """None: it is a decoder."""
    state_shapes: tuple[StateShape | None, ...] = ()
    """Each layer's state beside keys and values; () if no layer keeps one."""
    mixture: MixtureInfo | None = None
    """None: there are no experts, or ``Output.experts`` does not count them."""
    sampling: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The model's own sampling settings: fields of ``SamplingParams`` that requests get by default."""

    @property
    def sampling_line(self) -> str:
        """``sampling`` for a message."""
        return ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())

    def begin(self, prompt: Sequence[int]) -> tuple[list[int], tuple[int, ...] | None]:
        """The decoder's first tokens for a prompt, and the encoder's tokens; None if there is no encoder."""
        return (list(prompt), None) if self.encoder is None else (list(self.encoder.start), tuple(prompt))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Row counts of calls that give a row the same bits at this many ``threads``, ascending: of the layers, and of the
    output layer."""

    rows: tuple[int, ...]
    logits: tuple[int, ...]
    threads: int

    @property
    def together(self) -> int:
        """The most rows of a call that has logits of all of them."""
        return min(self.rows[-1], self.logits[-1])

    def forward(self, feed: Callable[[Batch, Attention], Output], batch: Batch, attention: Attention) -> Output:
        """``feed`` the batch in pieces of these sizes."""
        pieces = batch.split(self.rows[-1], self.logits[-1])
        if len(pieces) == 1:
            return feed(batch, attention)
        for span in batch.spans:  # nothing may be written unless all fits
            attention.pool.reserve(span.key, span.end)
        outputs = [feed(piece, attention) for piece in pieces]
        hidden = {layer: torch.cat([output.hidden[layer] for output in outputs]) for layer in batch.hidden}
        read = sum(output.experts for output in outputs)
        return Output(torch.cat([output.logits for output in outputs]), hidden, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What to load, and how: the options of ``load.load_model``, which every rank gets."""

    folder: Path
    name: str
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int] = frozenset()
    invariant: bool | None = False
    """None: if possible."""
    weights: str = "auto"
    quantization: str | None = None
    numbers: bool = False
    """Blocks in files become numbers."""
    lora: Sequence[str] | str | None = None
    outputs: torch.Tensor | None = None
    max_model_len: int | None = None
    window: int | None = None
    """``spec.with_window``."""


class Model(Protocol):
    """A decoder, or an encoder-decoder."""

    info: ModelInfo
    invariant: bool
    """Whether a row's bits do not depend on the rows beside it."""
    tiles: Tiles | None
    """Row counts of calls that make it invariant; None: any."""

    @property
    def fused(self) -> Fused | None:
        """The whole decoder, or a chain of draft steps, in one compiled call; None: there is no such call."""

    @property
    def row_multiple(self) -> int:
        """The number of rows that a single row is padded to."""

    def forward(self, batch: Batch, attention: Attention) -> Output:
        """Feed the rows of a batch, and store their keys and values.

        Args:
            batch: spans of tokens, one for each sequence; ``logits`` are the rows to compute logits of.
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
    """An attention for ``model`` over a new KV cache for ``max_seqs`` sequences of ``max_len`` tokens.

    An encoder-decoder's cache also holds ``max_seqs`` encoded sources of ``max_len`` tokens. States are allocated for
    ``max_seqs`` sequences and as many beams that fork while others end.

    Args:
        page_size: tokens of a page; None: one page per sequence (slotted).
        slack: tree nodes beyond ``max_len``.
        back: tokens by which states can be rolled back; None: a draft that is read before the last one is committed, at
            least ``BACK``.
        keeps: whether prefix caching keeps states: two of every sequence, and one every ``INTERVAL`` tokens, or every
            so many that they take a state's bytes in the pool.
    """
    info = model.info
    ours = can_attend(info.dtype, info.device, info.kv_shapes) and not gpu.interpreted()
    tiled = model.invariant and info.device.type == "cpu" and not ours
    longest = -(-(max_len + slack) // BLOCK) * BLOCK if tiled else max_len + slack
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
        if gpu.serves(info.device):
            gpu.warn("attention runs in torch, slower, since our kernel for GPUs does not serve encoder-decoders")
        return KernelAttention(pool) if ours else SdpaAttention(pool)
    return attention_over(model, pool)


def attention_over(model: Model, pool: Pool) -> Attention:
    """The attention for ``model`` on this machine."""
    info = model.info
    if gpu.serves(info.device):
        if not any(shape.shared for shape in info.kv_shapes):
            from forerun.attention.triton import TritonAttention

            return TritonAttention(pool)
        gpu.warn("attention runs in torch, slower, since our kernel for GPUs does not serve latent attention (MLA)")
    if can_attend(info.dtype, info.device, info.kv_shapes):
        return KernelAttention(pool)
    tiled = model.invariant and info.device.type == "cpu"
    return TiledAttention(pool) if tiled else SdpaAttention(pool)


def pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat the last row until there are ``count``."""
    missing = count - rows.shape[0]
    return rows if missing <= 0 else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
