"""A conversation as it runs, in a terminal or without one."""

from __future__ import annotations

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.text import Text

from forerun.cli.answers import MarkdownView, PlainView, TraceView, View, answer, figures
from forerun.cli.console import one_line, out, warn
from forerun.cli.conversation import ASSISTANT, USER, Commands, Conversation, table
from forerun.cli.trace import KINDS, REJECTED, marked, plain_terminal
from forerun.core.errors import ForerunError, RequestError
from forerun.engine.llm import LLM
from forerun.engine.memory import megabytes
from forerun.engine.stop import ABORT, ERROR
from forerun.models.chat import render_chat
from forerun.models.tokenizer import encode

PATIENCE = 4
"""Ctrl-C's that wait for the round that runs; one more does not."""
PROMPT, MORE, BLOCK = ">>> ", "... ", '"""'


def facts(llm: LLM, *, named: bool) -> dict[str, str]:
    info, engine = llm.model.info, llm.engine
    mode = "invariant" if llm.model.invariant else "not invariant"
    config = llm.speculative
    method = config.method if config.drafter is None else f"{config.method}, {config.accept}, {config.length} lengths"
    return {
        "model": f"{info.name} ({info.path}, {mode}), {megabytes(info.weight_bytes)}, {engine.max_model_len} tokens",
        "drafts": method + ("" if named else ", as no --spec-method was given"),
    }


class Chat(ABC):
    """Messages in, answers out, until the input ends. What a subclass does is how they are read and shown."""

    def __init__(self, llm: LLM, talk: Conversation, template: str | None, facts: Mapping[str, str]) -> None:
        self.llm = llm
        self.talk = talk
        self.template = template
        self.commands = Commands(talk, facts)

    def run(self) -> None:
        for line in self.lines():
            try:
                if self.take(line):
                    break
            except ForerunError as error:
                self.failed(error)

    def take(self, line: str) -> bool:
        """One line of input; True ends the conversation. Raises ForerunError for what cannot be done; the messages
        are as before then."""
        before = list(self.talk.turns)
        if not line.startswith("/"):
            self.talk.say(USER, line)
            self.answer(before)
            return False
        reply = self.commands.run(line)
        if reply.text:
            self.tell(reply.text)
        if reply.ask:
            self.answer(before)
        return reply.end

    def answer(self, before: list[dict[str, str]]) -> None:
        """Answer the last message; what was said stays, even of an answer that was stopped. ``before`` is what stays
        where that fails."""
        talk, engine = self.talk, self.llm.engine
        try:
            tokenizer = self.llm.tokenizer
            text = render_chat(tokenizer, talk.messages(), chat_template=self.template)
            prompt = encode(tokenizer, text, add_special_tokens=False, verbose=False)
            with self.interruptible() as stopped:
                job = answer(engine, prompt, talk.params, self.view, trace=talk.trace, stopped=stopped)
            if job.finish is not None and job.finish.reason == ERROR:
                raise RequestError(f"the generation failed: {job.finish.stopped_by}")
        except BaseException:
            talk.turns = before
            raise
        talk.say(ASSISTANT, job.text)
        if job.metrics.draft_error is not None:
            warn(f"the drafter failed, decoding went on without it: {job.metrics.draft_error}")
        stopped_by_user = job.finish is not None and job.finish.reason == ABORT
        reported = figures(job, self.llm.speculative.method, engine.max_model_len)
        self.note(reported + (" · stopped" if stopped_by_user else ""))

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Messages and commands."""

    @abstractmethod
    def view(self) -> View:
        """Where the next answer is shown."""

    def tell(self, text: str) -> None:
        """What a command says."""
        print(text, file=sys.stderr)

    def note(self, text: str) -> None:
        """The line under an answer."""
        print(text, file=sys.stderr)

    def failed(self, error: ForerunError) -> None:
        raise error

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that says whether the answer is to stop."""
        yield lambda: False


class Piped(Chat):
    """Every line is a message or a command; nothing but answers goes to standard output."""

    def lines(self) -> Iterator[str]:
        try:
            for line in sys.stdin:
                if line.strip():
                    yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text: {error}") from None

    def view(self) -> View:
        return TraceView(out()) if self.talk.trace else PlainView(sys.stdout)


class Terminal(Chat):
    """Line editing, Markdown and colours; Ctrl-C stops an answer and not the program."""

    def __init__(self, llm: LLM, talk: Conversation, template: str | None, facts: Mapping[str, str]) -> None:
        super().__init__(llm, talk, template, facts)
        self.console: Console = out()
        self.note(table(facts))
        self.note("/help lists the commands")
        if talk.trace:
            self.show_legend()

    def lines(self) -> Iterator[str]:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines once it is there
        warned = False
        while True:
            try:
                text = read_message(input)
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
                yield text

    def view(self) -> View:
        return TraceView(self.console) if self.talk.trace else MarkdownView(self.console)

    def take(self, line: str) -> bool:
        before = self.talk.trace
        ended = super().take(line)
        if self.talk.trace and not before:
            self.show_legend()
        return ended

    def show_legend(self) -> None:
        plain = plain_terminal(self.console)
        key = [marked(kind, look.meaning, plain=plain) for kind, look in KINDS.items() if kind != REJECTED]
        self.console.print(Text("  ").join(key), soft_wrap=True)

    def tell(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)

    def failed(self, error: ForerunError) -> None:
        print(f"error: {one_line(error)}", file=sys.stderr)

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """The first Ctrl-C asks the answer to stop after the round that runs."""
        pressed: list[int] = []

        def press(number: int, frame: object) -> None:
            pressed.append(number)
            if len(pressed) > PATIENCE:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, press)
        try:
            with keys_hidden():
                yield lambda: bool(pressed)
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def keys_hidden() -> Iterator[None]:
    """What is typed meanwhile waits for the prompt, and does not show in the middle of an answer."""
    try:
        import termios
    except ImportError:  # not on Windows
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    hidden = list(before)
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def read_message(read: Callable[[str], str]) -> str:
    """One message or command: a line, more where it ends with a backslash, or what stands between triple quotes."""
    text = read(PROMPT)
    if text.lstrip().startswith(BLOCK):
        text = text.lstrip().removeprefix(BLOCK)
        while not text.rstrip().endswith(BLOCK):
            text += "\n" + read(MORE)
        return text.rstrip().removesuffix(BLOCK).strip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + read(MORE)
    return text
