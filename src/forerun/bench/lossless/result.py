"""One line of the table that ``forerun check`` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """What was checked on how many cases, how many were right, and what the first wrong one looked like.

    Where nothing was tested (no draft, no verification, too few samples), ``tested`` and ``passed`` are both False and
    ``detail`` says why.
    """

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
    tested: bool = True

    def __post_init__(self) -> None:
        assert self.tested or not self.passed, "what was not tested has not passed"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def layout_name(page_size: int | None) -> str:
    return "slotted" if page_size is None else f"paged {page_size}"
