"""How far a training is: a bar on a terminal, now and then a line anywhere else. All of it on stderr."""

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
    """Shows how many of ``total`` units of work are done."""

    def __init__(self, title: str, total: int, bar: Bar | None, quiet: bool) -> None:
        self.title = title
        self.total = total
        self.quiet = quiet
        self._bar = bar
        self._task = None if bar is None else bar.add_task(title, total=total, note="")
        self._started = time.monotonic()
        self._first: int | None = None
        self._said = float("-inf")

    def update(self, done: int, note: str = "") -> None:
        done = min(done, self.total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if self._first is None:
            self._started, self._first = now, done
        if now - self._said >= LINE_SECONDS or done == self.total:
            self._said = now
            fraction = f"{self.title}: {done:,} of {self.total:,} ({done / max(1, self.total):.0%})"
            self.say(", ".join(part for part in (fraction, note, self._left(done, now)) if part))

    def _left(self, done: int, now: float) -> str:
        fresh = done - (self._first or 0)
        if fresh <= 0 or done >= self.total:
            return ""
        seconds = (now - self._started) * (self.total - done) / fresh
        return f"{seconds / 60:.0f} min left" if seconds >= 60 else f"{seconds:.0f} s left"

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int, shown: bool = True) -> Iterator[Progress]:
    """Progress of a block of ``total`` units; nothing at all unless ``shown``."""
    console = Console(file=sys.stderr)
    if not shown or not console.is_terminal:
        yield Progress(title, total, None, quiet=not shown)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    with Bar(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console) as bar:
        yield Progress(title, total, bar, quiet=False)
