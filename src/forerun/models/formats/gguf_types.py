"""Types of GGUF files that the kernels do not read, as types that they do: without loss where one can hold them.

A weight is a step times a whole number, its level. ``Q8_0`` has a step in float16 for 32 inputs and levels in 8 bits,
``Q6_K`` one for 256 inputs, times a whole number for 16, and levels in 6 bits. The levels of codebooks follow from what
the gguf package dequantizes. A step that float16 cannot hold is rounded, and levels are chosen anew: no weight moves by
more than half a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from forerun.core.errors import ModelError
from forerun.models.formats.base import CHUNK
from forerun.models.formats.gguf_blocks import UNPACK, Blocks, Bytes, Raw, half, sizes

SMALLEST = 2.0**-24
"""What steps below 2**-14 are multiples of in float16."""


@dataclass(frozen=True)
class Recoded:
    """What a type is held as, the bytes [rows, blocks, bytes] of its blocks as those of the other's; ``loss``: of a
    weight, for people; empty: none."""

    to: str
    recode: Callable[[Bytes], Bytes]
    loss: str = ""


def _to_float16(steps: np.ndarray) -> np.ndarray:
    """Steps of float32. Where float16 is coarser they are rounded up, so that levels stay in their range. Raises
    OverflowError for those beyond its range."""
    size = np.abs(steps)
    with np.errstate(over="ignore"):
        up = np.copysign(np.ceil(size / SMALLEST) * SMALLEST, steps)
        result = np.where(size < 2.0**-14, up, steps).astype("<f2")
    if (np.isinf(result) & np.isfinite(steps)).any():
        raise OverflowError
    return result


def _levels(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Whole numbers [..., n] of ``steps`` [...]; 0 where a step is none, or no number."""
    wide = steps.astype(np.float32)[..., None]
    with np.errstate(invalid="ignore"):
        result = np.divide(values, wide, out=np.zeros_like(values), where=(wide != 0) & np.isfinite(wide))
    return np.rint(result)


def _values(raw: Bytes, kind: str, inputs: int) -> np.ndarray:
    """In float32 [rows, blocks of ``inputs``, inputs]."""
    with np.errstate(invalid="ignore", over="ignore"):
        result = quants.dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[kind.upper()])
    return result.reshape(len(raw), -1, inputs)


def _bytes(numbers: np.ndarray) -> Bytes:
    """Numbers [...] as bytes [..., those of each]."""
    return np.ascontiguousarray(numbers)[..., None].view(np.uint8)


def _float(raw: Bytes, at: int) -> np.ndarray:
    """A float16 in every block, in float32."""
    return half(raw, at).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> np.ndarray:
    """The 4 bits of two halves in bytes, one half behind the other."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _q8_0(steps: np.ndarray, levels: np.ndarray) -> Bytes:
    """Of steps in float16 [rows, blocks of 32]."""
    return np.concatenate([_bytes(steps), levels.astype(np.int8).view(np.uint8)], axis=-1)


def _q6_k(steps: np.ndarray, scales: np.ndarray, levels: np.ndarray) -> Bytes:
    """Of steps in float16 [rows, blocks], whole scales [rows, blocks, 16] and levels from -32 to 31."""
    result = (levels.reshape(*steps.shape, 2, 4, 32) + 32).astype(np.uint8)
    low = result[..., :2, :] & 15 | (result[..., 2:, :] & 15) << 4
    high = np.zeros_like(result[..., 0, :])
    for where in range(4):
        high |= result[..., where, :] >> 4 << 2 * where
    parts = [low, high, scales.astype(np.int8).view(np.uint8)]
    return np.concatenate([*(part.reshape(*steps.shape, -1) for part in parts), _bytes(steps)], axis=-1)


def _by_halves(kind: str, raw: Bytes, step: np.ndarray, scales: np.ndarray) -> Bytes:
    """As Q6_K, of steps [rows, blocks] and scales [rows, blocks, 16], or 8 for twice as many inputs."""
    scales = scales.repeat(16 // scales.shape[-1], axis=-1)
    steps = _to_float16(step)
    each = (steps[..., None].astype(np.float32) * scales).reshape(len(raw), -1)
    return _q6_k(steps, scales, _levels(_values(raw, kind, 16), each))


def _iq4_nl(raw: Bytes) -> Bytes:
    return _q8_0(half(raw, 0), np.array(quants.IQ4_NL.kvalues, np.int8)[_nibbles(raw[..., 2:])])


def _iq4_xs(raw: Bytes) -> Bytes:
    high = half(raw, 2)[..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_fours(raw[..., 4:8]) | high << 4).astype(np.float32) - 32
    steps = _to_float16((_float(raw, 0)[..., None] * scales).reshape(len(raw), -1))
    codes = _nibbles(raw[..., 8:].reshape(*steps.shape, 16))
    return _q8_0(steps, np.array(quants.IQ4_NL.kvalues, np.int8)[codes])


def _mxfp4(raw: Bytes) -> Bytes:
    exact = quants.MXFP4.e8m0_to_fp32_half(raw[..., 0])
    steps = _to_float16(exact)
    levels = np.array(quants.MXFP4.kvalues, np.int8)[_nibbles(raw[..., 1:])]
    if (exact < SMALLEST).any():
        levels = np.rint(levels * (exact / steps.astype(np.float32))[..., None])
    return _q8_0(steps, levels)


def _fours(raw: Bytes) -> np.ndarray:
    """The two numbers of each byte, side by side."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)


def _q3_k(raw: Bytes) -> Bytes:
    low = raw[..., 32:96].reshape(*raw.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    high = raw[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    levels = low.reshape(high.shape).view(np.int8) + (high << 2).view(np.int8) - np.int8(4)
    fours, twos = raw[..., 96:104], raw[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = (_nibbles(fours) | twos.reshape(*raw.shape[:-1], 16) << 4).view(np.int8) - np.int8(32)
    return _q6_k(half(raw, 108), scales, levels)


def _iq3_s(raw: Bytes) -> Bytes:
    return _by_halves("iq3_s", raw, _float(raw, 0), 1 + 2 * _fours(raw[..., 106:110]))


def _iq3_xxs(raw: Bytes) -> Bytes:
    scales = raw[..., 66:98].view("<u4") >> 28
    return _by_halves("iq3_xxs", raw, _float(raw, 0) / 2, 1 + 2 * scales)


def _iq2_xxs(raw: Bytes) -> Bytes:
    scales = (raw[..., 2:66].view("<u4")[..., 1::2] >> 28).astype(np.float32)
    steps = _to_float16((_float(raw, 0)[..., None] * (1 + 2 * scales) / 8).reshape(len(raw), -1))
    return _q8_0(steps, _levels(_values(raw, "iq2_xxs", 32), steps))


def _iq1_s(raw: Bytes) -> Bytes:
    scales = raw[..., 34:50].view("<u2") >> 12 & 7
    return _by_halves("iq1_s", raw, _float(raw, 0) / 8, 1 + 2 * scales)


def _iq1_m(raw: Bytes) -> Bytes:
    words = raw[..., 48:56].view("<u2")
    tops = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    step = np.bitwise_or.reduce(tops, axis=-1).view(np.float16).astype(np.float32)
    scales = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    return _by_halves("iq1_m", raw, step / 8, 1 + 2 * scales.reshape(*step.shape, 16))


def _ternary(kind: str, at: int) -> Callable[[Bytes], Bytes]:
    def recode(raw: Bytes) -> Bytes:
        steps = half(raw, at).repeat(8, axis=-1)
        levels = (_levels(_values(raw, kind, 32), steps.view(np.float16)) + 8).astype(np.uint8)
        return np.concatenate([_bytes(steps), levels[..., :16] | levels[..., 16:] << 4], axis=-1)

    return recode


def _nearest(kind: str) -> Callable[[Bytes], Bytes]:
    def recode(raw: Bytes) -> Bytes:
        values = _values(raw, kind, 32)
        steps = _to_float16(np.abs(values).max(-1) / 127)
        return _q8_0(steps, _levels(values, steps))

    return recode


SMALL_STEPS = "exact but for steps under {}"
HALF_STEP = "within 0.4 % of the largest of 32"
RECODED: Mapping[str, Recoded] = {
    "iq4_nl": Recoded("q8_0", _iq4_nl),
    "iq4_xs": Recoded("q8_0", _iq4_xs, "within 0.05 %"),
    "mxfp4": Recoded("q8_0", _mxfp4, SMALL_STEPS.format("6e-8")),
    "q3_k": Recoded("q6_k", _q3_k),
    "q2_k": Recoded("q8_0", _nearest("q2_k"), HALF_STEP),
    "iq3_s": Recoded("q6_k", _iq3_s),
    "iq3_xxs": Recoded("q6_k", _iq3_xxs, SMALL_STEPS.format("6.2e-5")),
    "iq2_xxs": Recoded("q8_0", _iq2_xxs, "within 0.05 % but for steps under 6.2e-5"),
    "iq2_xs": Recoded("q8_0", _nearest("iq2_xs"), HALF_STEP),
    "iq2_s": Recoded("q8_0", _nearest("iq2_s"), HALF_STEP),
    "iq1_s": Recoded("q6_k", _iq1_s, SMALL_STEPS.format("6.2e-5")),
    "iq1_m": Recoded("q6_k", _iq1_m, SMALL_STEPS.format("6.2e-5")),
    "tq1_0": Recoded("q4_0", _ternary("tq1_0", 52)),
    "tq2_0": Recoded("q4_0", _ternary("tq2_0", 64)),
}
EXPANDED = ("nvfp4",)
"""Scales in 8 bits for 16 inputs each: only numbers hold them, which bfloat16 does without loss."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = (*FLOATS, *(kind.upper() for kind in (*UNPACK, *RECODED, *EXPANDED)))
"""By their names in files."""


class _RecodedRows:
    def __init__(self, raw: Raw, kind: str, where: str) -> None:
        self.raw, self.kind, self.place = raw, kind, where
        self.block, self.size = sizes(kind)
        self.recode = RECODED[kind].recode

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any) -> Bytes:
        result = self.raw[rows]
        result = result.reshape(len(result), -1, self.size)
        step = max(1, CHUNK // (result.shape[1] * self.block))
        try:  # what is recoded at a time stays small
            made = [self.recode(result[first : first + step]) for first in range(0, max(1, len(result)), step)]
        except OverflowError as error:
            raise ModelError(f"{self.place} is of type {self.kind.upper()} with weights beyond what "
                             "packed types hold: use quantization bfloat16") from error  # fmt: skip
        return np.concatenate(made).reshape(len(result), -1)


def packed(kind: str, raw: Raw, inputs: int, where: str) -> Blocks | None:
    """Weights of a quantized type that is read, as the kernels want them; None: they are to be numbers. Raises
    ModelError, which ``where`` begins, when rows are asked for that the kernels' types cannot hold."""
    if kind in EXPANDED:
        return None
    if kind in UNPACK:
        return Blocks(kind, raw, inputs)
    return Blocks(RECODED[kind].to, _RecodedRows(raw, kind, where), inputs)


def described(types: Iterable[str]) -> str:
    """How those of ``TYPES`` are held that the kernels do not read; empty: there are none such."""
    result = []
    for kind in sorted({each.lower() for each in types}):
        if kind in EXPANDED:
            result.append(f"{kind.upper()} as numbers (exact in bfloat16)")
        elif kind in RECODED:
            result.append(f"{kind.upper()} as {RECODED[kind].to.upper()} ({RECODED[kind].loss or 'exact'})")
    return ", ".join(result)
