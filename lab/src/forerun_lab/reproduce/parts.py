"""Parts of the reproduction: a reference's table with our values beside its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Cell = str | float | int | None


@dataclass(frozen=True)
class Settings:
    """Amount of work, and the folder of trained models."""

    folder: Path
    tokens: int
    """Tokens of the target's own text over which an acceptance rate is a mean (reference 002, 4.2: 10,000)."""
    minutes: float
    """CPU minutes that each model of a pair may train."""
    progress: Callable[[str], None] = lambda note: None


@dataclass(frozen=True)
class ReportTable:
    """Rows under ``columns``; ``notes`` are sentences under the table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """One table. ``place`` is where it stands in its reference, ``why`` says why our values differ."""

    name: str
    title: str
    place: str
    why: str
    make: Callable[[Settings], ReportTable] = field(repr=False)
    seconds: bool = True
    """Whether it takes seconds, or else minutes to hours."""
