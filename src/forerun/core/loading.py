"""Who watches models being loaded. Commands put a bar here; everybody else need not know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Advance = Callable[[int], None]
"""Takes how many bytes have been read since the last call."""
Watch = Callable[[str, int], AbstractContextManager[Advance]]
"""Takes what is loaded and its bytes in all."""


@contextmanager
def _unwatched(title: str, total: int) -> Iterator[Advance]:
    yield lambda done: None


watch: ContextVar[Watch] = ContextVar("watch", default=_unwatched)
