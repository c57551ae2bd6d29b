"""What rank 0 tells the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.cache.pool import Change
from forerun.core.batch import Span
from forerun.models.base import Tiles

UP, READY, FAILED = "up", "ready", "failed"
"""What a rank answers while it starts; FAILED with a reason."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What to load, a ``load.Wanted``, and where to meet."""

    rank: int
    size: int
    folder: Path
    wanted: Any


@dataclass(frozen=True, slots=True)
class Feed:
    """One forward: the rows, where their entries go in the cache ``pool``, and what happened to that since its last
    forward; ``gone`` are caches that are no more."""

    pool: int
    pages: int
    page_size: int
    changes: list[Change]
    tables: dict[int, list[int]]
    gone: list[int]
    spans: list[Span]
    hidden: tuple[int, ...]
    layers: tuple[int, ...] | None
    embeds: torch.Tensor | None
    embed_rows: list[int] | None
    tiles: Tiles | None
    invariant: bool
    threads: int


@dataclass(frozen=True, slots=True)
class RankCall:
    """Another method of the model, ``embed`` or ``lm_head``."""

    name: str
    rows: torch.Tensor
