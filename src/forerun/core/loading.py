"""Who watches what a start waits for: kernels being compiled, and models being loaded. Commands put bars here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

log = logging.getLogger(__name__)
Advance = Callable[[int], None]
"""Takes how many bytes, or parts, were done since the last call."""
Watch = Callable[[str, int], AbstractContextManager[Advance]]
"""Takes what is done, and its bytes or parts in all."""


@contextmanager
def _unwatched(title: str, total: int) -> Iterator[Advance]:
    yield lambda done: None


@contextmanager
def _logged(title: str, total: int) -> Iterator[Advance]:
    log.warning("%s", title)
    yield lambda done: None


watch: ContextVar[Watch] = ContextVar("watch", default=_unwatched)
"""Of a model that is loaded, in bytes."""
watch_parts: ContextVar[Watch] = ContextVar("watch_parts", default=_logged)
"""Of what takes long enough to be told in any case, in parts."""
