"""Quantized GGUF types, unpacked for the kernels. No weight changes: a scale times an integer level, less any minimum.

Rare types have no kernel of their own and become a form that holds them. That is ``q2_k`` for three levels, and
``codes`` for up to 16 levels and integer scales, where a table of the levels comes with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from forerun.kernels.structs import QUANTS
from forerun.models.kinds import TRITON_BLOCKS

OUTPUTS, INPUTS = 16, 32
Bytes = np.ndarray
"""Of dtype uint8."""
TABLE_ZERO = 64
"""Level 0 in the tables of ``codes``, which hold bytes."""


@dataclass(frozen=True)
class UnpackedBlocks:
    """The parts of the kernels' records: levels [outputs, blocks, bytes] of blocks of 32 inputs, and scales and minima,
    those of blocks [outputs, blocks] and those of records (``heads``) [outputs, records].

    32 bytes hold a level each, in order. 16 bytes hold two each, of inputs 16 apart. 8 bytes hold four each, of inputs
    4 apart, and 4 more bytes may hold the levels' third bits.
    """

    levels: Bytes
    scales: tuple[np.ndarray, ...]
    heads: tuple[np.ndarray, ...] = ()


def sizes(kind: str) -> tuple[int, int]:
    """Inputs and bytes of a block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]


def _f16_bits(raw: Bytes, at: int) -> np.ndarray:
    """Each block's float16 at byte ``at``, as an integer."""
    return raw[..., at : at + 2].view("<u2")[..., 0]


def _f16(raw: Bytes, at: int) -> np.ndarray:
    """Each block's float16 at byte ``at``, in float32."""
    return _f16_bits(raw, at).view(np.float16).astype(np.float32)


def _halves(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of 16 inputs each, as those of first and of second halves of 32 inputs, [outputs, blocks] each."""
    pairs = scales.reshape(len(scales), -1, 2)
    return pairs[..., 0], pairs[..., 1]


def _nibbles(raw: Bytes) -> np.ndarray:
    """The two 4-bit numbers of each byte, side by side."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)


def _fifth_bits(raw: Bytes, at: int) -> Bytes:
    """5-bit levels as bytes: 32 high bits from byte ``at`` on, then the low nibbles."""
    bits = np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little")
    low = raw[..., at + 4 :]
    result: Bytes = np.concatenate([low & 15, low >> 4], axis=-1) | bits << 4
    return result


def _six_bit_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima of 6 bits, which 12 bytes hold, [outputs, blocks] each."""
    scales, minima = quants.Q4_K.get_scale_min(raw.reshape(-1, 12))
    return scales.reshape(len(raw), -1), minima.reshape(len(raw), -1)


def _low_and_high(raw: Bytes) -> Bytes:
    """The nibbles of 128 bytes as [outputs, blocks, 32]: low ones of 32 bytes are a block, then their high ones."""
    pairs = raw.reshape(*raw.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(len(raw), -1, 32)


def _q4_k(raw: Bytes) -> UnpackedBlocks:
    halves = raw[..., 16:].reshape(len(raw), -1, 2, 16)
    low, high = halves[..., 0, :], halves[..., 1, :]
    levels = np.stack([low & 15 | high << 4, low >> 4 | high & 240], axis=-2).reshape(len(raw), -1, 16)
    return UnpackedBlocks(levels, _six_bit_scales(raw[..., 4:16]), (_f16_bits(raw, 0), _f16_bits(raw, 2)))


def _q5_k(raw: Bytes) -> UnpackedBlocks:
    bits = np.unpackbits(raw[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2)
    levels = _low_and_high(raw[..., 48:]) | bits.reshape(len(raw), -1, 32) << 4
    return UnpackedBlocks(levels, _six_bit_scales(raw[..., 4:16]), (_f16_bits(raw, 0), _f16_bits(raw, 2)))


def _q6_k(raw: Bytes) -> UnpackedBlocks:
    low, high = raw[..., :128].reshape(*raw.shape[:-1], 2, 2, 32), raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    fours = np.concatenate([low & 15, low >> 4], axis=-2)
    twos = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    levels = (fours | twos << 4).reshape(len(raw), -1, 32)
    return UnpackedBlocks(levels, _halves(raw[..., 192:208].view(np.int8)), (_f16_bits(raw, 208),))


def _iq4_xs(raw: Bytes) -> UnpackedBlocks:
    high = _f16_bits(raw, 2)[..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_nibbles(raw[..., 4:8]) | high << 4).astype(np.int8) - np.int8(32)
    return UnpackedBlocks(raw[..., 8:].reshape(len(raw), -1, 16), (scales.reshape(len(raw), -1),), (_f16_bits(raw, 0),))


def _share_bytes(levels: Bytes, count: int) -> Bytes:
    """Levels [outputs, blocks, 32] with ``count`` of them, 4 inputs apart, in a byte."""
    words = np.ascontiguousarray(levels).view("<u4").reshape(*levels.shape[:2], -1, count)
    result = words[..., 0].copy()
    for place in range(1, count):
        result |= words[..., place] << 8 // count * place
    return result.view(np.uint8)


def _two_bits(raw: Bytes) -> Bytes:
    """The 2-bit levels of 64 bytes as [outputs, blocks, 32]: each 32 bytes hold four blocks."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (raw.reshape(*raw.shape[:-1], 2, 1, 32) >> shifts & 3).reshape(len(raw), -1, 32)


def _q3_k(raw: Bytes) -> UnpackedBlocks:
    thirds = (raw[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(raw), -1, 32)
    levels = np.concatenate([_share_bytes(_two_bits(raw[..., 32:96]), 4), _share_bytes(thirds, 8)], axis=-1)
    fours, twos = raw[..., 96:104], raw[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    low = np.concatenate([fours & 15, fours >> 4], axis=-1)
    scales = (low | twos.reshape(*raw.shape[:-1], 16) << 4).view(np.int8) - np.int8(32)
    return UnpackedBlocks(levels, _halves(scales), (_f16_bits(raw, 108),))


def _values(raw: Bytes, kind: str, inputs: int) -> np.ndarray:
    """Dequantized: float32 [outputs, blocks of ``inputs``, inputs]."""
    result = quants.dequantize(raw.reshape(len(raw), -1), GGMLQuantizationType[kind.upper()])
    return result.reshape(len(raw), -1, inputs)


def _levels(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """``values`` [..., n] over ``steps`` [...] as integers; 0 where a step is 0 or not finite."""
    wide = steps[..., None]
    result = np.divide(values, wide, out=np.zeros_like(values), where=(wide != 0) & np.isfinite(wide))
    levels: np.ndarray = np.rint(result).astype(np.int8)
    return levels


def _ternary(kind: str, at: int, raw: Bytes) -> UnpackedBlocks:
    """Three levels, which are Q2_K's levels minus one."""
    steps = _f16_bits(raw, at)
    levels = _levels(_values(raw, kind, INPUTS), _f16(raw, at).repeat(8, axis=-1)) + np.int8(1)
    ones = np.full(levels.shape[:2], 1 | 1 << 4, np.uint8)
    return UnpackedBlocks(_share_bytes(levels.view(np.uint8), 4), (ones, ones), (steps, steps))


def _signed(sizes: Sequence[float]) -> list[int]:
    return [int(sign * size) for sign in (1, -1) for size in sizes]


def _codes(kind: str, raw: Bytes, step: np.ndarray, scale_bits: np.ndarray, table: Sequence[int]) -> UnpackedBlocks:
    """The form ``codes``: float32 steps [outputs, blocks], and scales 1 + 2 * bits [outputs, blocks, 16 or 8]."""
    scales = (1 + 2 * scale_bits).astype(np.int8).repeat(16 // scale_bits.shape[-1], axis=-1)
    levels = _levels(_values(raw, kind, INPUTS // 2), (step[..., None] * scales).reshape(len(raw), -1))
    codes = np.zeros(2 * TABLE_ZERO, np.uint8)
    codes[np.array(table) + TABLE_ZERO] = np.arange(len(table))
    pairs = codes[levels + TABLE_ZERO].reshape(len(raw), -1, 2, 16)
    lanes = np.resize(np.pad(np.array(table) + TABLE_ZERO, (0, 16 - len(table))), len(raw)).astype(np.uint8)
    heads = np.repeat(lanes[:, None], step.shape[1], axis=1), step
    return UnpackedBlocks(pairs[:, :, 0] | pairs[:, :, 1] << 4, _halves(scales), heads)


IQ2 = _signed(quants.IQ2_XXS.grid_map)
IQ1 = _signed([1, 7, 9])
"""Eight times -1, 0 or 1, plus or minus one."""
CODES: Mapping[str, tuple[Sequence[int], int, Callable[[Bytes], np.ndarray]]] = {
    "iq3_s": (_signed(quants.IQ3_S.grid_map), 1, lambda raw: _nibbles(raw[..., 106:110])),
    "iq3_xxs": (_signed([s / 2 for s in quants.IQ3_XXS.grid_map]), 2, lambda raw: raw[..., 66:98].view("<u4") >> 28),
    "iq2_xxs": (IQ2, 8, lambda raw: raw[..., 2:66].view("<u4")[..., 1::2] >> 28),
    "iq2_xs": (IQ2, 8, lambda raw: _nibbles(raw[..., 66:74])),
    "iq2_s": (IQ2, 8, lambda raw: _nibbles(raw[..., 74:82])),
    "iq1_s": (IQ1, 8, lambda raw: raw[..., 34:50].view("<u2") >> 12 & 7),
}
"""Types with a float16 step first: their levels, what the step is divided by, and the bits of their scales."""


def _with_step(kind: str, raw: Bytes) -> UnpackedBlocks:
    table, divisor, scale_bits = CODES[kind]
    return _codes(kind, raw, _f16(raw, 0) / divisor, scale_bits(raw), table)


def _iq1_m(raw: Bytes) -> UnpackedBlocks:
    words = raw[..., 48:56].view("<u2")
    tops = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    step = np.bitwise_or.reduce(tops, axis=-1).view(np.float16).astype(np.float32)
    scale_bits = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    return _codes("iq1_m", raw, step / 8, scale_bits.reshape(*step.shape, 16), IQ1)


@dataclass(frozen=True)
class Packed:
    """A type in the kernels: the form that holds it, and what unpacks its bytes [outputs, blocks, bytes]."""

    form: str
    unpack: Callable[[Bytes], UnpackedBlocks]


_OWN: Mapping[str, Callable[[Bytes], UnpackedBlocks]] = {
    "q4_0": lambda raw: UnpackedBlocks(raw[..., 2:], (_f16_bits(raw, 0),)),
    "q4_1": lambda raw: UnpackedBlocks(raw[..., 4:], (_f16_bits(raw, 0), _f16_bits(raw, 2))),
    "q4_k": _q4_k,
    "q5_0": lambda raw: UnpackedBlocks(_fifth_bits(raw, 2), (_f16_bits(raw, 0),)),
    "q5_1": lambda raw: UnpackedBlocks(_fifth_bits(raw, 4), (_f16_bits(raw, 0), _f16_bits(raw, 2))),
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q8_0": lambda raw: UnpackedBlocks(raw[..., 2:] ^ 128, (_f16_bits(raw, 0),)),
    "iq4_nl": lambda raw: UnpackedBlocks(raw[..., 2:], (_f16_bits(raw, 0),)),
    "iq4_xs": _iq4_xs,
    "mxfp4": lambda raw: UnpackedBlocks(raw[..., 1:], (raw[..., 0],)),
    "q2_k": lambda raw: UnpackedBlocks(
        _share_bytes(_two_bits(raw[..., 16:80]), 4), _halves(raw[..., :16]), (_f16_bits(raw, 80), _f16_bits(raw, 82))
    ),
    "q3_k": _q3_k,
}
PACKED: Mapping[str, Packed] = {
    **{kind: Packed(kind, unpack) for kind, unpack in _OWN.items()},
    **{kind: Packed("codes", partial(_with_step, kind)) for kind in CODES},
    "iq1_m": Packed("codes", _iq1_m),
    "tq1_0": Packed("q2_k", partial(_ternary, "tq1_0", 52)),
    "tq2_0": Packed("q2_k", partial(_ternary, "tq2_0", 64)),
}
EXPANDED = ("nvfp4",)
"""Types that become bfloat16, without loss: no form holds NVFP4's scales, 8-bit floats for 16 inputs each."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = (*FLOATS, *(kind.upper() for kind in (*PACKED, *EXPANDED)))
"""All types that are read, by their names in files."""


def bits_per_weight(kind: str) -> tuple[float, float]:
    """In a file, and in memory."""
    of, size = sizes(kind)
    if kind in EXPANDED:
        return 8 * size / of, 16
    inputs, record_size = QUANTS[PACKED[kind].form]
    return 8 * size / of, 8 * record_size / inputs / OUTPUTS


def forms(types: Iterable[str]) -> list[str]:
    """The forms that hold ``types`` in the kernels; others than block-quantized types have none."""
    return sorted({PACKED[kind.lower()].form for kind in types if kind.lower() in PACKED})


def larger_in_memory(types: Iterable[str], *, on_gpu: bool = False) -> str:
    """For a message: those of ``types`` that take more memory than in the file, since no kernel has their form."""
    if on_gpu:
        others = sorted({each.lower() for each in types} & {*PACKED, *EXPANDED} - {*TRITON_BLOCKS})
        return ", ".join(f"{kind.upper()}, as numbers" for kind in others)
    result = []
    for kind in sorted({each.lower() for each in types} & {*PACKED, *EXPANDED}):
        if kind not in PACKED or PACKED[kind].form != kind:
            file, memory = bits_per_weight(kind)
            result.append(f"{kind.upper()} in {memory:.3g} bits a weight instead of {file:.3g}")
    return ", ".join(result)
