"""Sampling on a GPU: temperature and filters, and keyed noise with the choice of a token. One small copy brings the
tokens of a round to the host.

Filters are found by bisection over the bits of float32, so that nothing is sorted and a row's sums have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import numpy as np
import torch
import triton
import triton.language as tl

from forerun.kernels import gpu

BLOCK = 4096


@triton.jit
def _ordered(value):
    """Integers in the order of float32 numbers."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(row, least, peak, size, floor, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """How many numbers are at least ``least`` in order, or with MASS the exponentials of those that ``floor`` keeps."""
    total = tl.zeros([BLOCK], tl.float32)
    first = 0
    while first < size:
        index = first + tl.arange(0, BLOCK)
        value = tl.load(row + index, mask=index < size, other=float("-inf"))
        kept = (index < size) & (_ordered(value) >= least)
        if MASS:
            total += tl.where(kept & (_ordered(value) >= floor), tl.exp(value - peak), 0.0)
        else:
            total += tl.where(kept, 1.0, 0.0)
        first += BLOCK
    return tl.sum(total, 0)


@triton.jit
def _largest(row, goal, peak, size, floor, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The largest number, as an ordered integer, with at least ``goal`` at or above it."""
    high = _ordered(peak).to(tl.int64)
    low = high - high - 2139095041  # -inf
    while low < high:
        middle = (low + high + 1) >> 1
        enough = _above(row, middle, peak, size, floor, BLOCK, MASS) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit(do_not_specialize=gpu.VARYING)
def _restrict(logits, out, limits, size, BLOCK: tl.constexpr):
    """One row: the logits over the temperature, and -inf outside min-p, top-k and top-p. ``limits`` are four numbers
    a row: temperature (0: the row stays as it is), log of min-p, top-p (1: all) and top-k (0: all)."""
    which = tl.program_id(0).to(tl.int64)
    temperature = tl.load(limits + 4 * which)
    least_log, top_p = tl.load(limits + 4 * which + 1), tl.load(limits + 4 * which + 2)
    top_k = tl.load(limits + 4 * which + 3)
    source, row = logits + which * size, out + which * size
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    first = 0
    while first < size:
        index = first + tl.arange(0, BLOCK)
        value = tl.load(source + index, mask=index < size, other=float("-inf")) / divisor
        tl.store(row + index, value, mask=index < size)
        tops = tl.maximum(tops, value)
        first += BLOCK
    if temperature <= 0.0:
        return
    if (top_p >= 1.0) & (top_k <= 0.0) & (least_log == float("-inf")):
        return
    tl.debug_barrier()
    peak = tl.max(tops, 0)
    floor = _ordered(peak + least_log).to(tl.int64)
    if (top_k > 0.0) & (top_k < size):
        floor = tl.maximum(floor, _largest(row, top_k, peak, size, floor, BLOCK, False))
    if top_p < 1.0:
        every = _above(row, floor, peak, size, floor, BLOCK, True)
        floor = tl.maximum(floor, _largest(row, every * top_p, peak, size, floor, BLOCK, True))
    first = 0
    while first < size:
        index = first + tl.arange(0, BLOCK)
        value = tl.load(row + index, mask=index < size, other=0.0)
        tl.store(row + index, tl.where(_ordered(value) >= floor, value, float("-inf")), mask=index < size)
        first += BLOCK


@triton.jit
def _gumbel(words, odd, plus):
    """``noise.Gumbel``'s arithmetic for token words and a key's halves."""
    x = words * odd + plus
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ (x >> 16)
    u = (tl.abs(x.to(tl.int32, bitcast=True).to(tl.float32)) + 0.5) * -4.656612873077393e-10
    u = tl.maximum(u, -0.99999994039535522)
    wide = 1.0 + u
    small = tl.where(wide == 1.0, u, tl.log(wide) * (u / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    return -tl.log(-small)


@triton.jit(do_not_specialize=gpu.VARYING)
def _choose(scores, words, keys, parts, out, done, size, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """One block of one row: its best score with noise, and the first id that has it; the last program of a row writes
    the best of all. ``keys`` are three numbers a row: whether it has noise, and the halves of its key."""
    which, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    score = tl.load(scores + which.to(tl.int64) * size + index, mask=inside, other=float("-inf"))
    if tl.load(keys + 3 * which) != 0:
        word = tl.load(words + index, mask=inside, other=0).to(tl.uint32, bitcast=True)
        odd = tl.load(keys + 3 * which + 1).to(tl.uint32, bitcast=True)
        plus = tl.load(keys + 3 * which + 2).to(tl.uint32, bitcast=True)
        score += tl.where(inside, _gumbel(word, odd, plus), 0.0)
    broken = tl.max((score != score).to(tl.int32), 0)
    best = tl.max(tl.where(score != score, float("-inf"), score), 0)
    where = tl.min(tl.where((score == best) & inside, index, size - 1), 0)
    at = (which * tl.num_programs(1) + block) * 2
    tl.store(parts + at, tl.where(broken != 0, float("nan"), best).to(tl.int32, bitcast=True))
    tl.store(parts + at + 1, where)
    tl.debug_barrier()
    if tl.atomic_add(done + which, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.debug_barrier()
        each = tl.arange(0, MOST)
        some = each < tl.num_programs(1)
        pairs = parts + (which * tl.num_programs(1) + each) * 2
        bits = tl.load(pairs, mask=some, other=0, cache_modifier=".cg")
        top = tl.where(some, bits.to(tl.float32, bitcast=True), float("-inf"))
        ids = tl.load(pairs + 1, mask=some, other=0, cache_modifier=".cg")
        broken = tl.max((top != top).to(tl.int32), 0)
        top = tl.where(top != top, float("-inf"), top)
        best = tl.max(top, 0)
        tl.store(out + 2 * which, tl.where(broken != 0, float("nan"), best).to(tl.int32, bitcast=True))
        tl.store(out + 2 * which + 1, tl.min(tl.where((top == best) & some, ids, size - 1), 0))
        tl.store(done + which, 0)


def options(temperatures: Sequence[float], thresholds: Sequence[float], top_ks: Sequence[int]) -> np.ndarray:
    """The four numbers of each row for ``restrict_rows``; ``thresholds`` alternates min-p and top-p by row."""
    lists = zip(temperatures, thresholds[::2], thresholds[1::2], top_ks, strict=True)
    columns = [(each, log(least) if least > 0.0 else -inf, top_p, max(0, top_k)) for each, least, top_p, top_k in lists]
    return np.array(columns, np.float32)


def restrict_rows(logits: torch.Tensor, options: torch.Tensor) -> torch.Tensor:
    """As ``restrict``; float32 ``options`` [rows, 4] are on the device."""
    out = torch.empty_like(logits)
    _restrict[(len(logits),)](logits, out, options, logits.shape[1], BLOCK=_block(logits.shape[1]))
    return out


def restrict(
    logits: torch.Tensor, temperatures: Sequence[float], thresholds: Sequence[float], top_ks: Sequence[int]
) -> torch.Tensor:
    """As ``compiled.restrict``: float32 ``logits`` [rows, vocabulary] over the temperatures, and -inf outside each
    row's min-p, top-k and top-p; ``thresholds`` alternates min-p and top-p by row."""
    numbers = gpu.send(options(temperatures, thresholds, top_ks), logits.device)
    return restrict_rows(logits.contiguous(), numbers)


def _block(size: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(size)))


def halves(keys: Sequence[int | None]) -> np.ndarray:
    """int32 [keys, 3] for ``choose_rows``: whether there is a key, and its halves."""
    known = np.array([key or 0 for key in keys], np.uint64)
    numbers = np.stack([[key is not None for key in keys], (known | 1) & 0xFFFFFFFF, known >> 32], 1)
    return numbers.astype(np.uint32).view(np.int32)


def choose_rows(scores: torch.Tensor, words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """As ``TritonSampling.choose``; ``keys`` are ``halves`` on the device. Returns int32 [rows, 2]: the bits of the
    largest sum, and the id."""
    rows, size = scores.shape
    device, block = scores.device, _block(size)
    blocks = -(-size // block)
    parts = torch.empty(2 * rows * blocks, dtype=torch.int32, device=device)
    out = torch.empty(rows, 2, dtype=torch.int32, device=device)
    _choose[(rows, blocks)](
        scores, words, keys, parts, out, gpu.counters(device, rows), size, BLOCK=block,
        MOST=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return out


class TritonSampling:
    """Chooses tokens with the noise of the token words ``words``, int32 [at least the vocabulary], of ``Gumbel``."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    def find(self, scores: torch.Tensor, keys: Sequence[int | None]) -> torch.Tensor:
        """As ``choose_rows``, of each row's key (None: no noise)."""
        return choose_rows(scores.contiguous(), self.words, gpu.send(halves(keys), scores.device))

    def choose(self, scores: torch.Tensor, keys: Sequence[int | None]) -> tuple[list[float], list[int]]:
        """Adds the noise of each row's key to float32 ``scores`` [rows, vocabulary]. Returns each row's largest sum
        (NaN if it has one) and the first id that has it."""
        found = gpu.HostCopy(self.find(scores, keys)).read()
        return found[:, 0].contiguous().view(torch.float32).tolist(), found[:, 1].tolist()
