"""A bar that shows how many of a call's answers are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from forerun.engine.jobs import Update


class ProgressBar:
    """On standard error, an answer at a time, with the tokens per second so far. Entered, it is what ``on_update``
    calls; it hands every update on to ``then``."""

    def __init__(self, answers: int, then: Callable[[Update], None] | None = None) -> None:
        self._answers, self._then = answers, then
        self._tokens = 0

    def __enter__(self) -> ProgressBar:
        self._bar = tqdm(total=self._answers, desc="Answers", unit="answer", dynamic_ncols=True, file=sys.stderr)
        return self

    def __call__(self, update: Update) -> None:
        self._tokens += len(update.tokens)
        seconds = self._bar.format_dict["elapsed"]
        if seconds:
            self._bar.set_postfix_str(f"{self._tokens / seconds:.0f} tokens/s", refresh=False)
        self._bar.update(int(update.finish is not None))
        if self._then is not None:
            self._then(update)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
