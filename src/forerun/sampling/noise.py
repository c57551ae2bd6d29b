"""Keyed noise: every random number is a pure function of its key, never of a generator's state.

A key is a 64-bit integer folded from request seed, purpose, absolute position and more. Coupling draft and target needs
the same Gumbel noise for both at one position (cf. Daliri et al., arXiv 2408.07978). Rules that compare p with q need
fresh noise for every round, parent node and trial.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from forerun.kernels import gpu
from forerun.sampling.compiled import CompiledSampling, can_sample

if TYPE_CHECKING:
    from forerun.sampling.triton import TritonSampling

_MASK = (1 << 64) - 1

TARGET = 1
DRAFT = 2
ACCEPT = 3
RESIDUAL = 4


def fold(*parts: int) -> int:
    """One well-mixed 64-bit key from integers (splitmix64's finaliser over a running sum)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + (part & _MASK) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(key: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (key >> 11) * 2.0**-53


@lru_cache(maxsize=1 << 12)  # the draft, the target and the next round ask for the same keys
def target_key(seed: int, position: int) -> int:
    """Key of the noise that samples the target at an absolute position."""
    return fold(seed, TARGET, position)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


class Gumbel:
    """Rows of standard Gumbel noise over a vocabulary, cached by key.

    Entry i of a row depends only on the key and i, bit for bit. ``capacity`` rows are cached (None: 64 MB).
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", capacity: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.capacity = capacity if capacity is not None else max(64, min(4096, 2**24 // vocab_size))
        self._rows: OrderedDict[int, torch.Tensor] = OrderedDict()
        # A multiple of 64 keeps each element in the same vector lane, whatever the number of rows.
        width = -(-vocab_size // 64) * 64
        ids = torch.arange(1, width + 1, dtype=torch.int32, device=self.device)
        for factor in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35):
            ids = _fold_high(ids.mul_(_signed(factor)))
        self._ids = ids
        self.compiled = CompiledSampling(ids) if can_sample(self.device) else None
        self.on_gpu = _on_gpu(ids) if gpu.serves(self.device) else None
        # Wide rows are computed one by one: several at once do not fit the processor's cache.
        self.together = 1 if self.compiled is not None or (width > 1 << 15 and self.device.type == "cpu") else 16

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def rows(self, keys: Sequence[int], ahead: Sequence[int] = ()) -> torch.Tensor:
        """Float32 [len(keys), vocabulary]. Rows of ``ahead`` are computed too where that is cheap, for later calls."""
        cache = self._rows
        missing = [key for key in dict.fromkeys(keys) if key not in cache]
        if missing:
            if self.together > 1:
                missing = list(dict.fromkeys([*missing, *(key for key in ahead if key not in cache)]))
            for first in range(0, len(missing), self.together):
                chunk = missing[first : first + self.together]
                cache.update(zip(chunk, self._compute(chunk)))
        for key in keys:
            cache.move_to_end(key)
        result = cache[keys[0]][None] if len(keys) == 1 else torch.stack([cache[key] for key in keys])
        while len(cache) > self.capacity:
            cache.popitem(last=False)
        return result

    def _compute(self, keys: Sequence[int]) -> torch.Tensor:
        if self.compiled is not None:
            return self.compiled.noise(keys, self.vocab_size)
        halves = [[_signed(key | 1), _signed(key >> 32)] for key in keys]
        odd, plus = torch.tensor(halves, dtype=torch.int32, device=self.device)[:, :, None].unbind(1)
        x = _fold_high(torch.mul(self._ids, odd).add_(plus)).mul_(0x7FEB352D)
        # |x| has 31 random bits; 0 < u < 1. Floats are precise near 0, and so are log1p(-u) and the noise's upper tail.
        u = _fold_high(x).float().abs_().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-(1.0 - 2.0**-24))
        return u.log1p_().neg_().log_().neg_()[:, : self.vocab_size]


def _on_gpu(words: torch.Tensor) -> TritonSampling:
    from forerun.sampling.triton import TritonSampling  # which not every system has

    return TritonSampling(words)


def _fold_high(x: torch.Tensor) -> torch.Tensor:
    """x ^ (x >>> 16), in place; int32 has no logical shift."""
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
