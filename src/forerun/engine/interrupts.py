"""Ctrl-C between rounds and not within one, where it would leave pages that nobody owns."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, the main thread's SIGINT waits for ``deliver``, for ``allowed`` code or for the end.

    It then goes to the handler that was there before, which raises KeyboardInterrupt unless the program has set
    another. Other threads get no signals, and nothing changes for them.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._open = False
        self._pending = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self.deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if self._open:
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Let a signal that has come meanwhile take effect."""
        if self._pending and self._before is not None:
            self._pending = False
            self._before(signal.SIGINT, frame)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Signals take effect at once, as in the caller's own code."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
