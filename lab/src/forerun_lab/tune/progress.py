"""Progress of what takes minutes: a bar, or lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_SECONDS = 20.0
"""Time between two lines where there is no terminal."""


class Progress:
    """Progress out of ``total`` units: a bar or, without a terminal, a line every ``LINE_SECONDS``; nothing unless
    ``shown``."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        self.title, self.total, self.shown = title, total, shown
        console = Console(file=sys.stderr)
        self.bar = Bar(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=console, disable=not shown or not console.is_terminal,
        )  # fmt: skip
        self._task = self.bar.add_task(title, total=total, note="")
        self._started = time.monotonic()
        self._first: int | None = None
        self._last_line = float("-inf")

    def update(self, done: int, note: str = "") -> None:
        done = min(done, self.total)
        if not self.bar.disable:
            self.bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if self._first is None:  # a resumed run does not begin at 0
            self._started, self._first = now, done
        if now - self._last_line >= LINE_SECONDS or done == self.total:
            self._last_line = now
            fraction = f"{self.title}: {done:,} of {self.total:,} ({done / max(1, self.total):.0%})"
            self.say(", ".join(part for part in (fraction, note, self._left(done, now)) if part))

    def _left(self, done: int, now: float) -> str:
        fresh = done - (self._first or 0)
        if fresh <= 0 or done >= self.total:
            return ""
        seconds = (now - self._started) * (self.total - done) / fresh
        return f"{seconds / 60:.0f} min left" if seconds >= 60 else f"{seconds:.0f} s left"

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.shown:
            self.bar.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(title: str, total: int, shown: bool = True) -> Iterator[Progress]:
    """Progress of a block of ``total`` units; nothing unless ``shown``."""
    result = Progress(title, total, shown)
    with result.bar:
        yield result
