"""Keyed noise: every random number is a pure function of its key, never of a generator's state.

A key is a 64-bit integer folded from (request seed, purpose, absolute position, ...). The shared-noise coupling
of draft and target (cf. Daliri et al., arXiv 2408.07978) needs the same Gumbel noise for both at one position; rules
that compare p with q need fresh noise for every (round, parent node, trial).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

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


def target_key(seed: int, position: int) -> int:
    """Key of the noise that samples the target at an absolute position."""
    return fold(seed, TARGET, position)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: torch.Tensor, shift: int, factor: int) -> torch.Tensor:
    """xorshift-multiply on int32, in place; the shift is logical."""
    x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
    return x.mul_(_signed(factor))


class Gumbel:
    """Rows of standard Gumbel noise over a vocabulary, remembered while a round needs them.

    Row and width independent: entry i of a row depends on the key and i alone. ``capacity`` rows are kept.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", capacity: int = 64) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.capacity = capacity
        self._rows: OrderedDict[int, torch.Tensor] = OrderedDict()
        # A multiple of 64 keeps every row's elements at the same lanes, whatever the number of rows.
        width = -(-vocab_size // 64) * 64
        ids = torch.arange(1, width + 1, dtype=torch.int32, device=self.device)
        ids = _mix(ids.mul_(_signed(0x9E3779B1)), 16, 0x85EBCA6B)
        self._ids = _mix(ids, 13, 0xC2B2AE35)

    def rows(self, keys: Sequence[int]) -> torch.Tensor:
        """Float32 [len(keys), vocabulary]."""
        missing = []
        for key in dict.fromkeys(keys):
            if key in self._rows:
                self._rows.move_to_end(key)
            else:
                missing.append(key)
        if missing:
            fresh = self._compute(missing)
            if len(missing) == len(keys):
                self._remember(missing, fresh)
                return fresh
            self._remember(missing, fresh, room=len(keys))
        if len(keys) == 1:
            return self._rows[keys[0]][None]
        return torch.stack([self._rows[key] for key in keys])

    def _remember(self, keys: list[int], rows: torch.Tensor, room: int = 0) -> None:
        for key, row in zip(keys, rows):
            self._rows[key] = row
        while len(self._rows) > max(self.capacity, room + len(keys)):
            self._rows.popitem(last=False)

    def _compute(self, keys: list[int]) -> torch.Tensor:
        odd = torch.tensor([_signed(key | 1) for key in keys], dtype=torch.int32, device=self.device)
        plus = torch.tensor([_signed(key >> 32) for key in keys], dtype=torch.int32, device=self.device)
        x = torch.addcmul(plus[:, None], self._ids[None, :], odd[:, None])
        x = _mix(x, 16, 0x7FEB352D)
        x = _mix(x, 15, 0x846CA68B)
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)
        # u in (0, 1): small values keep their precision, so -log1p(-u) and with it the upper tail of g do too.
        u = x.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
        return u.neg_().log1p_().neg_().log_().neg_()[:, : self.vocab_size]
