"""Weights rounded to blocks as GGUF files have them: by the gguf package where it can, ``q4_k`` here."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from forerun.core.errors import ConfigError

TURNS = 3
"""How often levels and then the best scale and minimum for them are chosen; more gain nothing."""


def to_blocks(rows: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, whole blocks of inputs] -> uint8 [rows, bytes]. Raises ConfigError for kinds that only files
    bring."""
    if kind == "q4_k":
        return _q4_k(rows)
    try:
        return quantize(rows, GGMLQuantizationType[kind.upper()])
    except NotImplementedError as error:
        raise ConfigError(f"weights are read in {kind}, but not rounded to it") from error


def _q4_k(rows: np.ndarray) -> np.ndarray:
    """16 levels in blocks of 32 inputs, with scales and minima of 6 bits in eight blocks' common steps."""
    blocks = rows.reshape(len(rows), -1, 8, 32)
    scale, least = _fit(blocks)
    steps, scales = _in_64_levels(scale)
    moves, minima = _in_64_levels(least)
    scale = steps[..., None].astype(np.float32) * scales
    least = moves[..., None].astype(np.float32) * minima
    levels = _levels(blocks, scale, least)
    pairs = levels.reshape(*levels.shape[:2], 4, 2, 32)
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*levels.shape[:2], 128)
    halves = np.stack([steps, moves], -1).view(np.uint8)
    sixes = [
        scales[..., :4] | scales[..., 4:] >> 4 << 6,
        minima[..., :4] | minima[..., 4:] >> 4 << 6,
        scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4,
    ]
    return np.concatenate([halves, *sixes, nibbles], -1).reshape(len(rows), -1)


def _fit(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A scale and what is to be subtracted, neither negative, for each block: least squares over the levels chosen."""
    least = np.maximum(-blocks.min(-1), 0)
    scale = (np.maximum(blocks.max(-1), 0) + least) / 15
    mean = blocks.mean(-1)
    for _ in range(TURNS):
        levels = _levels(blocks, scale, least).astype(np.float32)
        middle = levels.mean(-1)
        spread = (levels * levels).mean(-1) - middle * middle
        shared = (levels * blocks).mean(-1) - middle * mean
        slope = np.divide(shared, spread, out=scale.copy(), where=spread > 1e-6)
        below = slope * middle - mean
        fits = (slope > 0) & (below >= 0)
        scale, least = np.where(fits, slope, scale), np.where(fits, below, least)
    return scale, least


def _levels(blocks: np.ndarray, scale: np.ndarray, least: np.ndarray) -> np.ndarray:
    moved = blocks + least[..., None]
    result = np.divide(moved, scale[..., None], out=np.zeros_like(moved), where=scale[..., None] > 0)
    return np.clip(np.rint(result), 0, 15).astype(np.uint8)


def _in_64_levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps float16 [..., 1 per 8] and levels uint8 of values that are not negative."""
    steps = (values.max(-1) / 63).astype(np.float16)
    wide = steps.astype(np.float32)[..., None]
    result = np.divide(values, wide, out=np.zeros_like(values), where=wide > 0)
    return steps, np.clip(np.rint(result), 0, 63).astype(np.uint8)
