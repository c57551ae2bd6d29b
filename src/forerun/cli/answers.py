"""An answer as it comes: its text, Markdown, or its tokens in the colours of acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Protocol, TextIO

import torch
from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from forerun.cli.trace import KINDS, plain_terminal
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job, Update
from forerun.engine.stop import LENGTH
from forerun.engine.stream import ShownText
from forerun.engine.trace import PLAIN
from forerun.sampling.params import SamplingParams

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""What a model must not send to a terminal, as letters that show it."""


class View(Protocol):
    """Shows one answer; ``kind`` is what became of the draft behind the text."""

    def add(self, kind: str, text: str) -> None: ...

    def end(self) -> None: ...


class PlainView:
    """The text and nothing else, ended by a line break."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def add(self, kind: str, text: str) -> None:
        self.file.write(text)
        self.file.flush()

    def end(self) -> None:
        self.file.write("\n")
        self.file.flush()


class TraceView:
    """Tokens in their kind's colour; with marks around them where there are no colours."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.plain = plain_terminal(console)

    def add(self, kind: str, text: str) -> None:
        look = KINDS[kind]
        text = text.translate(CONTROLS)
        if text:
            shown = Text(f"{look.left}{text}{look.right}") if self.plain else Text(text, style=look.style)
            self.console.print(shown, end="", soft_wrap=True)

    def end(self) -> None:
        self.console.print()


class MarkdownView:
    """Markdown: blocks that are complete are printed for good, the last one is drawn again as it grows."""

    INTERVAL = 0.08
    """Seconds between two drawings."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.text = ""
        self.drawn = 0.0
        self.blocks = 0
        self.live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")
        self.live.start()

    def add(self, kind: str, text: str) -> None:
        self.text += text.translate(CONTROLS)
        if perf_counter() - self.drawn > self.INTERVAL:
            self._draw()
            self.drawn = perf_counter()

    def _draw(self) -> None:
        complete, self.text = split(self.text)
        if complete:
            self._print(complete)
        self.live.update(Tail(markdown(self.text), gap=bool(self.blocks)), refresh=True)

    def _print(self, text: str) -> None:
        if self.blocks:
            self.console.print()
        self.console.print(markdown(text))
        self.blocks += 1

    def end(self) -> None:
        self.live.update("", refresh=True)
        self.live.stop()
        if self.text.strip():
            self._print(self.text)


def markdown(text: str) -> Markdown:
    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)


def split(text: str) -> tuple[str, str]:
    """Markdown up to its last block, which may still grow, and that block."""
    parsed = MarkdownIt().enable("strikethrough").enable("table").parse(text)
    starts = [token.map[0] for token in parsed if token.level == 0 and token.map]
    lines = text.splitlines(keepends=True)
    at = starts[-1] if starts else 0
    return "".join(lines[:at]), "".join(lines[at:])


class Tail:
    """The last lines of something, as many as a terminal can draw again."""

    def __init__(self, inner: Markdown, *, gap: bool) -> None:
        self.inner = inner
        self.gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.inner, options.update(height=None), pad=False)
        lines = [[], *lines] if self.gap else lines
        for line in lines[1 - console.height :]:
            yield from line
            yield Segment.line()


def answer(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    view: Callable[[], View],
    *,
    trace: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Job:
    """Generate an answer and show it as it comes; ``stopped`` is asked between rounds. Raises RequestError if the
    request cannot be run; nothing was shown then."""
    (job,) = engine.add(prompt, params, trace=trace)
    try:
        shown = ShownText(job, engine.tokenizer)
        screen = view()
        try:
            with torch.inference_mode():  # entered once, not in every step
                while job.finish is None and not stopped():
                    for update in engine.step():
                        for kind, text in _pieces(shown, update):
                            screen.add(kind, text)
            if job.finish is None:
                engine.abort(job)
                screen.add(PLAIN, shown.after([], job.finish))
        finally:
            screen.end()
    finally:
        engine.abort(job)
    return job


def _pieces(shown: ShownText, update: Update) -> Iterator[tuple[str, str]]:
    """A round's text, token by token where its origin is known."""
    tokens, job = update.tokens, update.job
    if not job.traced or not tokens:
        yield PLAIN, shown.after(tokens, update.finish)
        return
    for index, (origin, token) in enumerate(zip(job.trace[-1].origins, tokens), start=1):
        yield origin, shown.after([token], update.finish if index == len(tokens) else None)


def figures(job: Job, method: str, max_model_len: int) -> str:
    """The line under an answer."""
    metrics, count = job.metrics, len(job.output_ids)
    rate = metrics.tokens_per_second
    read = min(job.sequence.num_prompt, job.sequence.cached) - metrics.num_cached_tokens
    result = [f"{count} tokens" + (f", {rate:.0f} tokens/s" if rate else "")]
    if metrics.num_drafts:
        result.append(
            f"mean acceptance length {metrics.mean_acceptance_length:.2f} ({method}, {metrics.rounds} rounds)"
        )
    else:
        result.append(f"nothing drafted ({method})")
    result.append(f"{read} of {job.sequence.num_prompt} prompt tokens read")
    assert job.finish is not None
    if job.finish.reason == LENGTH:
        limit: Any = job.sequence.params.max_tokens
        full = limit is None or count < limit
        result.append(f"context of {max_model_len} tokens full" if full else f"ended by max_tokens {limit}")
    return " · ".join(result)
