"""The protocol between the engine and a model, and what all models share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from forerun.attention.base import Attention
from forerun.attention.sdpa import SdpaAttention
from forerun.attention.streamed import StreamedAttention, can_attend
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Output
from forerun.core.errors import ConfigError


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


class Model(Protocol):
    """A decoder. ``forward`` feeds the rows of a batch and returns logits of the rows that asked for them."""

    info: ModelInfo
    invariant: bool
    """Whether a row's bits do not depend on the rows beside it."""
    row_multiple: int
    """Rows are padded to this many (1: not at all), as the backend needs it to be invariant."""
    key_multiple: int

    def forward(self, batch: Batch, cache: Attention) -> Output:
        """Float32 logits [batch.num_logits, vocabulary] and the hidden states that the batch asked for."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [n, hidden] of token ids."""

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocabulary] of final (normalised) hidden states."""


INVARIANT_ROWS = 4
PACKED_ROWS = 2
"""oneDNN has a kernel of its own for one row; all other row counts give a row the same bits."""
INVARIANT_KEYS = 128


def new_cache(
    model: Model,
    *,
    max_seqs: int,
    max_len: int,
    page_size: int | None = None,
    num_pages: int | None = None,
    slack: int = 0,
) -> Attention:
    """An attention with a pool of its own for ``model``.

    ``page_size`` None is the slotted layout: one page per sequence, ``max_seqs`` of them, each long enough for
    ``max_len`` tokens and ``slack`` tree nodes. Otherwise pages of ``page_size`` tokens, ``num_pages`` of them
    (default: enough for every sequence at full length).
    """
    longest = -(-(max_len + slack) // model.key_multiple) * model.key_multiple
    if page_size is None:
        page_size, num_pages = longest, num_pages or max_seqs
    else:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {page_size}")
        num_pages = num_pages or max_seqs * -(-longest // page_size)
    pool = Pool(model.info.kv_shapes, num_pages, page_size, model.info.dtype, model.info.device)
    if model.info.device.type == "cuda":
        from forerun.attention.triton import TritonAttention

        return TritonAttention(pool)
    if can_attend(model.info.dtype, model.info.device, model.info.kv_shapes):
        return StreamedAttention(pool)
    return SdpaAttention(pool, exact=model.invariant, key_multiple=model.key_multiple)


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pad_rows(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Repeat the last row until the count is a multiple."""
    missing = padded(rows.shape[0], multiple) - rows.shape[0]
    if not missing:
        return rows
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
