"""Sampling through ``kernels/sampling.cpp``: a row's noise, best id and softmax in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import torch

from forerun import kernels
from forerun.sampling.params import SamplingParams


def can_sample(device: torch.device) -> bool:
    return device.type == "cpu" and kernels.has("choose")


def restrict(logits: torch.Tensor, heats: Seq[float], shares: Seq[float], top_ks: Seq[int]) -> torch.Tensor:
    """Each row of float32 ``logits`` [rows, vocabulary] divided by its temperature, -inf where its min-p, top-k or
    top-p leaves a token out. ``shares`` holds min-p and top-p of each row in turn; rows of temperature 0 stay."""
    rows = logits.contiguous().clone()
    lists = array("f", heats), array("f", shares), array("q", top_ks)
    kernels.library().restrict_rows(  # type: ignore[union-attr]
        rows.data_ptr(), *rows.shape, *(numbers.buffer_info()[0] for numbers in lists), torch.get_num_threads()
    )
    return rows


def penalise(row: torch.Tensor, text: Seq[int], output: int, params: SamplingParams) -> None:
    """Penalties on one row of float32 logits [vocabulary], in place, for a text whose output begins at ``output``."""
    tokens = array("q", text)
    kernels.library().penalise(  # type: ignore[union-attr]
        row.data_ptr(), len(row), tokens.buffer_info()[0], len(tokens), output,
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
    )  # fmt: skip


def excess(
    p: torch.Tensor, q: torch.Tensor, rows: Seq[int], factors: Seq[float]
) -> tuple[torch.Tensor, list[float], list[float]]:
    """Float32 ``p`` [n, vocabulary] with max(0, factor * p - q) in the named rows, one for each of ``q`` [rows,
    vocabulary], or p itself where nothing is left; the sums of what is left; and those of min(p, q)."""
    residual, q = p.contiguous().clone(), q.contiguous()
    lists = array("q", rows), array("f", factors), array("f", bytes(4 * len(rows))), array("f", bytes(4 * len(rows)))
    at = [numbers.buffer_info()[0] for numbers in lists]
    kernels.library().excess(residual.data_ptr(), q.data_ptr(), q.shape[1], len(rows), *at)  # type: ignore[union-attr]
    return residual, lists[2].tolist(), lists[3].tolist()


class Compiled:
    """``ids`` int32 [at least the vocabulary]: a well-mixed word for each token id, see ``Gumbel``."""

    def __init__(self, ids: torch.Tensor) -> None:
        found = kernels.library()
        assert found is not None
        self.ids = ids
        self._at = ids.data_ptr()
        self._gumbel, self._choose = found.gumbel, found.choose
        self._draw, self._overlaps = found.draw, found.overlaps

    def noise(self, keys: Seq[int], size: int) -> torch.Tensor:
        """Gumbel noise, float32 [len(keys), size]."""
        rows = torch.empty(len(keys), size)
        for key, row in zip(keys, rows):
            self._gumbel(key, self._at, row.data_ptr(), size)
        return rows

    def choose(
        self, scores: torch.Tensor, keys: Seq[int | None], law: bool
    ) -> tuple[list[float], list[int], torch.Tensor | None]:
        """Per row of ``scores`` [rows, vocabulary], float32: the largest sum of a score and the noise of the row's key
        (None: no noise), NaN if there is one; the first id that has it; and with ``law``, softmax of the scores."""
        scores = scores.contiguous()
        count, size = scores.shape
        noisy = array("q", [key is not None for key in keys])
        words = array("Q", [key or 0 for key in keys])
        tops, places = array("f", bytes(4 * count)), array("q", bytes(8 * count))
        softmax = torch.empty_like(scores) if law else None
        self._choose(
            scores.data_ptr(), count, size, self._at, words.buffer_info()[0], noisy.buffer_info()[0],
            tops.buffer_info()[0], places.buffer_info()[0], None if softmax is None else softmax.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return tops.tolist(), places.tolist(), softmax

    def draw(self, weights: torch.Tensor, spots: Seq[float]) -> list[int]:
        """Per row of ``weights`` [rows, vocabulary], the first id at which the cumulative share exceeds its spot, in
        [0, 1); never an id of weight 0, unless the whole row is 0."""
        weights = weights.float().contiguous()
        count, size = weights.shape
        numbers, places = array("d", spots), array("q", bytes(8 * count))
        self._draw(weights.data_ptr(), count, size, numbers.buffer_info()[0], places.buffer_info()[0])
        return places.tolist()

    def overlaps(
        self, scores: torch.Tensor, rows: Seq[int], tokens: Seq[int], qs: Seq[torch.Tensor | None]
    ) -> list[float]:
        """Per trial, sum_x min(p, q) for p the softmax of its row of ``scores`` and q [vocabulary]; where q is None,
        p of its token."""
        scores = scores.contiguous()
        kept = [q if q is None else q.float().contiguous() for q in qs]
        out = array("f", bytes(4 * len(rows)))
        lists = array("q", rows), array("q", [0 if q is None else q.data_ptr() for q in kept]), array("q", tokens)
        self._overlaps(
            scores.data_ptr(), scores.shape[1], len(rows), *(numbers.buffer_info()[0] for numbers in lists),
            out.buffer_info()[0], torch.get_num_threads(),
        )  # fmt: skip
        return out.tolist()
