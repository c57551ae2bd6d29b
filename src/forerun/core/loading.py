"""Progress of a start: compiling kernels and loading models. Commands show it as bars."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

log = logging.getLogger(__name__)
Advance = Callable[[int], None]
"""Reports how many bytes, or parts, were done since the last call."""
Watch = Callable[[str, int], AbstractContextManager[Advance]]
"""Begins a task, given its title and its total bytes or parts."""


@contextmanager
def _unwatched(title: str, total: int) -> Iterator[Advance]:
    yield lambda done: None


@contextmanager
def _logged(title: str, total: int) -> Iterator[Advance]:
    log.warning("%s", title)
    yield lambda done: None


watch: ContextVar[Watch] = ContextVar("watch", default=_unwatched)
"""Watches a model being loaded, in bytes."""
watch_parts: ContextVar[Watch] = ContextVar("watch_parts", default=_logged)
"""Watches tasks, in parts, that take long enough to be reported in any case."""
