"""``forerun chat`` while it runs: reads messages, generates answers and shows them, in a terminal or without one."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol, TextIO

import torch
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from forerun.cli.chat import ASSISTANT, USER, ChatCommands, Conversation, completions
from forerun.cli.console import model_line, one_line, out, table, warn
from forerun.cli.editor import keys_kept, parse, reader
from forerun.cli.trace import KINDS, REJECTED, marked, plain_terminal
from forerun.core.errors import ForerunError, RequestError
from forerun.engine.client import StreamedText
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job, Update
from forerun.engine.llm import LLM
from forerun.engine.metrics import PLAIN
from forerun.engine.stop import ABORT, ERROR, LENGTH
from forerun.models.text.chat import render_chat
from forerun.models.text.tokenizer import encode
from forerun.sampling.params import SamplingParams

PATIENCE = 4
"""How many Ctrl-C's wait for the running round to end; one more ends it at once."""


def model_facts(llm: LLM, *, named: bool) -> dict[str, str]:
    """The model and its drafter, a line each. ``named``: the user chose the drafter."""
    config = llm.speculative
    method = config.method if config.drafter is None else f"{config.method}, {config.accept}, {config.length} lengths"
    return {
        "model": f"{model_line(llm)}, {llm.engine.max_model_len} tokens",
        "drafts": method + ("" if named else ", as no --spec-method was given"),
    }


class ChatSession:
    """Answers the messages of standard input, a line each. Only answers go to standard output."""

    def __init__(self, llm: LLM, conversation: Conversation, template: str | None, facts: Mapping[str, str]) -> None:
        self.llm = llm
        self.conversation = conversation
        self.template = template
        self.console = out()
        self.commands = ChatCommands(conversation, facts)

    def run(self) -> None:
        self.begin()
        for text, command in self.lines():
            try:
                if self.handle(text, command=command):
                    break
            except ForerunError as error:
                self.report_error(error)

    def begin(self) -> None:
        """Shows what the session starts with."""
        self.note(f"sampling: {self.commands.facts['sampling']}")

    def handle(self, line: str, *, command: bool = False) -> bool:
        """Handles one message or command; True ends the session.

        Raises ForerunError for what cannot be done; the messages are as before then.
        """
        before = list(self.conversation.turns)
        if not command:
            self.conversation.say(USER, line)
            self.answer(before)
            return False
        reply = self.commands.run(line)
        if reply.text:
            self.note(reply.text, style="")
        if reply.ask:
            self.answer(before)
        return reply.end

    def answer(self, before: list[dict[str, str]]) -> None:
        """Answers the last message. A stopped answer is kept; after a failure, the turns are ``before`` again."""
        conversation, engine, tokenizer = self.conversation, self.llm.engine, self.llm.tokenizer
        try:
            text = render_chat(tokenizer, conversation.messages(), chat_template=self.template)
            prompt = encode(tokenizer, text, add_special_tokens=False, verbose=False)
            with self.interruptible() as stopped:
                job = answer(engine, prompt, conversation.params, self.view, trace=conversation.trace, stopped=stopped)
            assert job.finish is not None
            if job.finish.reason == ERROR:
                raise RequestError(f"generation failed: {job.finish.stopped_by}")
        except BaseException:
            conversation.turns = before
            raise
        conversation.say(ASSISTANT, job.text)
        if job.metrics.draft_error is not None:
            warn(f"drafter failed, decoding continued without it: {job.metrics.draft_error}")
        summary = figures(job, self.llm.speculative.method, engine.max_model_len)
        self.note(summary + (" · stopped" if job.finish.reason == ABORT else ""))

    def lines(self) -> Iterator[tuple[str, bool]]:
        """Yields messages and commands; True for a command."""
        try:
            for line in sys.stdin:
                if line.strip():
                    yield line.rstrip("\r\n"), line.startswith("/")
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text: {error}") from None

    def view(self) -> View:
        """A view for the next answer."""
        return TraceView(self.console) if self.conversation.trace else PlainView(sys.stdout)

    def note(self, text: str, style: str = "dim") -> None:
        """Shows what is no answer: a command's reply, or the line under an answer."""
        print(text, file=sys.stderr)

    def report_error(self, error: ForerunError) -> None:
        raise error

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that says whether the answer is to stop."""
        yield lambda: False


class Terminal(ChatSession):
    """A session with line editing, Markdown and colours. Ctrl-C stops the answer, not the program."""

    def begin(self) -> None:
        self.note(table(self.commands.facts))
        self.note("/help lists the commands")
        if self.conversation.trace:
            self.show_legend()

    def lines(self) -> Iterator[tuple[str, bool]]:
        read = reader(completions())
        warned = False
        while True:
            try:
                text, command = parse(read())
                warned = False
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print()
                if warned:
                    return
                warned = True
                self.note("Ctrl-C again, Ctrl-D or /exit ends the program")
                continue
            if text.strip():
                yield text, command

    def view(self) -> View:
        redraws = not (self.conversation.trace or self.console.is_dumb_terminal)
        return MarkdownView(self.console) if redraws else TraceView(self.console)

    def handle(self, line: str, *, command: bool = False) -> bool:
        before = self.conversation.trace
        ended = super().handle(line, command=command)
        if self.conversation.trace and not before:
            self.show_legend()
        return ended

    def show_legend(self) -> None:
        plain = plain_terminal(self.console)
        key = [marked(kind, look.meaning, plain=plain) for kind, look in KINDS.items() if kind != REJECTED]
        self.console.print(Text("  ").join(key))

    def note(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(wrapped(text, self.console.width), style=style), soft_wrap=True)

    def report_error(self, error: ForerunError) -> None:
        print(f"error: {one_line(error)}", file=sys.stderr)

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """The first Ctrl-C stops the answer after the running round."""
        presses = 0

        def press(number: int, frame: object) -> None:
            nonlocal presses
            presses += 1
            if presses > PATIENCE:
                raise KeyboardInterrupt

        previous = signal.signal(signal.SIGINT, press)
        try:
            with keys_kept():
                yield lambda: presses > 0
        finally:
            signal.signal(signal.SIGINT, previous)


def wrapped(text: str, width: int) -> str:
    """Lines of whole words, below the second column where there are two. A long path stays in one piece."""
    result = []
    for line in text.split("\n"):
        first = re.match(r"\S.*?  +", line)
        indent = " " * len(first[0]) if first else ""
        result += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(result)


CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Control characters, which a model must not send to a terminal, and the symbols that show them."""


WORD_END = re.compile(r"(?<=[\s\u2e80-\ua4cf\uf900-\ufaff\uff00-\uffef])")
"""Behind white space, and behind each character of scripts that have none between words."""


class View(Protocol):
    """Shows one answer as it is generated."""

    def add(self, kind: str, text: str) -> None:
        """``kind``: what became of the draft that had this text, a key of ``trace.KINDS``."""

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
    """Tokens in their kind's colour or, without colours, between marks. A word is shown once complete, on one line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.plain = plain_terminal(console)
        self.word = Text()
        self.column = 0

    def add(self, kind: str, text: str) -> None:
        look = KINDS[kind]
        parts = WORD_END.split(text.translate(CONTROLS)) if text else []
        for index, part in enumerate(parts):
            first, last = index == 0, index == len(parts) - 1
            if self.plain:
                self.word.append(f"{look.left if first else ''}{part}{look.right if last else ''}")
            else:
                self.word.append(part, look.style)
            if not last:
                self._print_word()

    def _print_word(self) -> None:
        word, self.word, width = self.word, Text(), self.console.width
        if self.column and self.column + cell_len(word.plain.rstrip()) > width:
            self.console.print()
            self.column = 0
        self.column += word.cell_len
        if self.column > width and word.plain.endswith(" "):
            word.right_crop()  # the terminal would move it to the next line
        self.console.print(word, end="", soft_wrap=True)
        if word.plain.endswith("\n"):
            self.column = 0

    def end(self) -> None:
        self._print_word()
        self.console.print()


class MarkdownView:
    """Rendered Markdown. Complete blocks are printed for good; the last one is drawn again as it grows."""

    INTERVAL = 0.08
    """Seconds between two redraws."""

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
    """Splits Markdown into its complete blocks and the last one, which may still grow."""
    parsed = MarkdownIt().enable("strikethrough").enable("table").parse(text)
    starts = [token.map[0] for token in parsed if token.level == 0 and token.map]
    lines = text.splitlines(keepends=True)
    at = starts[-1] if starts else 0
    return "".join(lines[:at]), "".join(lines[at:])


class Tail:
    """The last lines of a renderable, as many as a terminal can redraw."""

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
    """Generates an answer and shows it as it comes. ``stopped`` is polled between rounds.

    Raises RequestError if the request cannot be run; nothing has been shown then.
    """
    (job,) = engine.add(prompt, params, trace=trace)
    try:
        streamed = StreamedText(job, engine.tokenizer)
        screen = view()
        try:
            with torch.inference_mode():  # entered once, not in every step
                while job.finish is None and not stopped():
                    for update in engine.step():
                        for kind, text in _pieces(streamed, update):
                            screen.add(kind, text)
            if job.finish is None:
                engine.abort(job)
                screen.add(PLAIN, streamed.push([], job.finish))
        finally:
            screen.end()
    finally:
        engine.abort(job)
    return job


def _pieces(streamed: StreamedText, update: Update) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) for a round's text, token by token where the request is traced."""
    tokens, job = update.tokens, update.job
    if not job.traced or not tokens:
        yield PLAIN, streamed.push(tokens, update.finish)
        return
    for index, (origin, token) in enumerate(zip(job.trace[-1].origins, tokens), start=1):
        yield origin, streamed.push([token], update.finish if index == len(tokens) else None)


def figures(job: Job, method: str, max_model_len: int) -> str:
    """The line under an answer: its length, speed, acceptance, and what ended it early."""
    metrics, sequence, count = job.metrics, job.sequence, len(job.output_ids)
    rate = metrics.tokens_per_second
    result = [f"{count} token{'s'[: count != 1]}" + (f", {rate:.0f} tokens/s" if rate else "")]
    if metrics.num_drafts:
        rounds = f"({method}, {metrics.rounds} round{'s'[: metrics.rounds != 1]})"
        result.append(f"mean acceptance length {metrics.mean_acceptance_length:.2f} {rounds}")
    else:
        result.append(f"nothing drafted ({method})")
    read = min(sequence.num_prompt, sequence.num_computed_tokens) - metrics.num_cached_tokens
    result.append(f"{read} of {sequence.num_prompt} prompt tokens read")
    assert job.finish is not None
    if job.finish.reason == LENGTH:
        limit = sequence.params.max_tokens
        full = limit is None or count < limit
        result.append(f"context of {max_model_len} tokens full" if full else f"ended by max_tokens {limit}")
    return " · ".join(result)
