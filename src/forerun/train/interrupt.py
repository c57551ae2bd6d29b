"""Ctrl-C while something is trained: the step ends, the work is saved, and how to go on is said."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from forerun.core.errors import ForerunError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(ForerunError):
    """A run was asked to stop, and has saved what it had done."""


class Interrupt:
    """Inside the block, the first Ctrl-C (or SIGTERM) is noted in ``asked``; a second one ends everything at once.

    Signals reach the main thread only; in another one nothing changes. What is ignored already stays so.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(
            "stopping when this step is done; again: at once, without what was done since the last save",
            file=sys.stderr,
            flush=True,
        )
