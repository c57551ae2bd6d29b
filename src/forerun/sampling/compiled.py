"""Sampling through ``kernels/sampling.cpp``, in the host's memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence, Sized
from dataclasses import dataclass

import torch

from forerun import kernels
from forerun.kernels import gpu
from forerun.sampling.params import SamplingParams


def can_sample(device: torch.device) -> bool:
    return device.type == "cpu" and kernels.has("gumbel_max") and not gpu.interpreted()


def restrict(
    logits: torch.Tensor, temperatures: Sequence[float], thresholds: Sequence[float], top_ks: Sequence[int]
) -> torch.Tensor:
    """Divides each row of float32 ``logits`` [rows, vocabulary] by its temperature, and sets tokens outside its min-p,
    top-k and top-p to -inf. ``thresholds`` alternates min-p and top-p by row. Rows of temperature 0 are unchanged."""
    source = _rows(logits)
    rows = torch.empty_like(source)
    ctypes.memmove(rows.data_ptr(), source.data_ptr(), 4 * rows.numel())  # torch's copy waits for all of its threads
    _equally_many(temperatures=temperatures, min_ps=thresholds[::2], top_ps=thresholds[1::2], top_ks=top_ks, rows=rows)
    lists = array("f", temperatures), array("f", thresholds), array("q", top_ks)
    kernels.library().filter_rows(  # type: ignore[union-attr]
        rows.data_ptr(), *rows.shape, *(numbers.buffer_info()[0] for numbers in lists), kernels.threads()
    )
    return rows


def penalise(row: torch.Tensor, text: Sequence[int], output: int, params: SamplingParams) -> None:
    """Applies penalties to one row of float32 logits [vocabulary] in place; the output begins at ``text[output]``."""
    tokens = array("q", text)
    if row.dim() != 1 or row.dtype is not torch.float32 or row.stride(0) != 1:
        raise ValueError(f"penalties are for one row of float32, not {row.dtype} {[*row.shape]}")
    kernels.library().apply_penalties(  # type: ignore[union-attr]
        row.data_ptr(), len(row), tokens.buffer_info()[0], len(tokens), output,
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
    )  # fmt: skip


def _rows(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` [rows, vocabulary], contiguous. Raises ValueError for what the kernels would misread."""
    if scores.dim() != 2 or scores.dtype is not torch.float32 or not scores.is_cpu:
        raise ValueError(f"rows of float32 on cpu are needed, not {scores.dtype} {[*scores.shape]} on {scores.device}")
    return scores.contiguous()


def _equally_many(**lists: Sized) -> None:
    if len({len(numbers) for numbers in lists.values()}) > 1:
        raise ValueError(", ".join(f"{len(numbers)} {name}" for name, numbers in lists.items()) + ": not as many each")


@dataclass(slots=True)
class Weighed:
    """p against q for chains of trials."""

    residual: torch.Tensor
    """[rows, vocabulary]: p; in rows with a trial, max(0, factor * p - q), not normalised."""
    tops: list[float]
    """Each row's best score."""
    weights: list[float]
    """Per trial, min(1, factor * p / q) of its token."""
    left: list[float]
    """Per trial, the mass of max(0, factor * p - q)."""
    shared: list[float]
    """Per trial, the sum of min(p, q)."""


class CompiledSampling:
    """The kernels, with the hashed token ids ``ids``, int32 [at least the vocabulary], of ``Gumbel``."""

    def __init__(self, ids: torch.Tensor) -> None:
        result = kernels.library()
        assert result is not None
        if ids.dtype is not torch.int32 or not ids.is_contiguous() or not ids.is_cpu:
            raise ValueError(f"hashed ids are int32 on cpu, not {ids.dtype} on {ids.device}")
        self.ids = ids
        self._at = ids.data_ptr()
        self._gumbel, self._gumbel_max = result.gumbel, result.gumbel_max
        self._inverse_cdf, self._overlaps, self._acceptance = result.inverse_cdf, result.overlaps, result.acceptance
        self._top_logprobs = result.top_logprobs

    def noise(self, keys: Sequence[int], size: int) -> torch.Tensor:
        """Gumbel noise, float32 [len(keys), size]."""
        self._check_size(size)
        rows = torch.empty(len(keys), size)
        for key, row in zip(keys, rows):
            self._gumbel(key, self._at, row.data_ptr(), size)
        return rows

    def _check_size(self, size: int) -> None:
        if size > len(self.ids):
            raise ValueError(f"noise for {size} ids from hashes of {len(self.ids)}")

    def choose(
        self, scores: torch.Tensor, keys: Sequence[int | None], distribution: bool
    ) -> tuple[list[float], list[int], torch.Tensor | None]:
        """Adds the noise of each row's key (None: none) to float32 ``scores`` [rows, vocabulary].

        Returns each row's largest sum (NaN if any), its first id and, with ``distribution``, the scores' softmax.
        """
        scores = _rows(scores)
        count, size = scores.shape
        self._check_size(size)
        if len(keys) != count:
            _equally_many(keys=keys, rows=scores)
        noisy = array("q", [key is not None for key in keys])
        seeds = array("Q", [key or 0 for key in keys])
        tops, indices = array("f", bytes(4 * count)), array("q", bytes(8 * count))
        softmax = torch.empty_like(scores) if distribution else None
        self._gumbel_max(
            scores.data_ptr(), count, size, self._at, seeds.buffer_info()[0], noisy.buffer_info()[0],
            tops.buffer_info()[0], indices.buffer_info()[0], None if softmax is None else softmax.data_ptr(),
            kernels.threads(),
        )  # fmt: skip
        return tops.tolist(), indices.tolist(), softmax

    def weigh(
        self,
        scores: torch.Tensor,
        greedy: Sequence[bool],
        rows: Sequence[int],
        tokens: Sequence[int],
        qs: Sequence[int],
        follows: Sequence[bool],
        lenience: float = 1.0,
    ) -> Weighed:
        """Compares p with q.

        Args:
            scores: float32 [rows, vocabulary], whose softmax is p.
            greedy: per row, whether p is a point mass at its best id instead.
            rows, tokens: per trial, its row of p, which no other trial has, and its token.
            qs: per trial, the address of its q, float32 [vocabulary]; 0: a point mass at the token.
            follows: per trial, whether its factor is the weight of the trial before, instead of 1.
            lenience: multiplies q in weights.
        """
        scores = _rows(scores)
        count, size = scores.shape
        _equally_many(greedy=greedy, rows=scores)
        _equally_many(rows=rows, tokens=tokens, qs=qs, follows=follows)
        residual, trials = torch.empty_like(scores), len(rows)
        inputs = [array("q", numbers) for numbers in (greedy, rows, tokens, qs, follows)]
        outputs = [array("f", bytes(4 * length)) for length in (count, trials, trials, trials)]
        greedy_rows, *lists = (numbers.buffer_info()[0] for numbers in inputs)
        self._acceptance(
            scores.data_ptr(), count, size, greedy_rows, trials, *lists, lenience, residual.data_ptr(),
            *(numbers.buffer_info()[0] for numbers in outputs),
        )  # fmt: skip
        return Weighed(residual, *(numbers.tolist() for numbers in outputs))

    def rank(
        self, scores: torch.Tensor, rows: Sequence[int], into: Sequence[int], ids: torch.Tensor, logs: torch.Tensor
    ) -> None:
        """``Sampler.rank_into`` for float32 ``scores``. Where fewer ids are permitted, rows end with -1 and -inf."""
        scores = _rows(scores)
        sources, targets = array("q", rows), array("q", into)
        _equally_many(rows=rows, into=into)
        if ids.shape != logs.shape or ids.dtype is not torch.int32 or logs.dtype is not torch.float32:
            raise ValueError(f"room for ids {ids.dtype} {[*ids.shape]} and logs {logs.dtype} {[*logs.shape]}")
        if not (ids.is_contiguous() and logs.is_contiguous()):
            raise ValueError("room for ids and logs must be contiguous")
        self._top_logprobs(
            scores.data_ptr(), *scores.shape, len(rows), sources.buffer_info()[0], ids.shape[1],
            targets.buffer_info()[0], len(ids), ids.data_ptr(), logs.data_ptr(),
        )  # fmt: skip

    def draw(self, weights: torch.Tensor, quantiles: Sequence[float]) -> list[int]:
        """Per row of ``weights`` [rows, vocabulary], the first id at which the cumulative share exceeds its quantile in
        [0, 1). An id of weight 0 is drawn only if its whole row is 0."""
        weights = _rows(weights.float())
        count, size = weights.shape
        _equally_many(quantiles=quantiles, rows=weights)
        numbers, indices = array("d", quantiles), array("q", bytes(8 * count))
        self._inverse_cdf(weights.data_ptr(), count, size, numbers.buffer_info()[0], indices.buffer_info()[0])
        return indices.tolist()

    def overlaps(
        self, scores: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], qs: Sequence[torch.Tensor | None]
    ) -> list[float]:
        """Per trial, sum_x min(p, q) of the softmax p of its row of ``scores`` and q [vocabulary]; q None: p(token)."""
        scores = _rows(scores)
        _equally_many(rows=rows, tokens=tokens, qs=qs)
        if any(q is not None and q.shape != scores.shape[1:] for q in qs):
            raise ValueError(f"each q must have {scores.shape[1]} numbers")
        kept = [q if q is None else q.float().contiguous() for q in qs]
        out = array("f", bytes(4 * len(rows)))
        lists = array("q", rows), array("q", [0 if q is None else q.data_ptr() for q in kept]), array("q", tokens)
        self._overlaps(
            scores.data_ptr(), *scores.shape, len(rows), *(numbers.buffer_info()[0] for numbers in lists),
            out.buffer_info()[0], kernels.threads(),
        )  # fmt: skip
        return out.tolist()
