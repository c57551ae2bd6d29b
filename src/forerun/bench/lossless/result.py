"""One line of the table that ``forerun check`` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """What was checked on how many cases, how many were right, and what the first wrong one looked like."""

    check: str
    what: str
    layout: str
    temperature: float | None
    good: int
    total: int
    unit: str
    passed: bool
    detail: str = ""
    p_value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def layout_name(page_size: int | None) -> str:
    return "slotted" if page_size is None else f"paged {page_size}"
