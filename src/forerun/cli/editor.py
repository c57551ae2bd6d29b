"""The line editor of ``forerun chat``: history, messages of several lines, pasted text, completion of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

PROMPT, MORE, QUOTES = ">>> ", "... ", '"""'
ASK, FORGET = "\x1b[?2004h", "\x1b[?2004l"
"""Asks the terminal to mark pasted text, and to do so no longer."""


class Words(Completer):
    """Completes the last word of a line by the words that may follow the ones before it."""

    def __init__(self, following: Mapping[str, Sequence[str]]) -> None:
        self.following = following

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        before, _, word = document.text_before_cursor.rpartition(" ")
        for choice in self.following.get(before, ()):
            if choice.startswith(word):
                yield Completion(choice, -len(word))


def reader(following: Mapping[str, Sequence[str]]) -> Callable[[], str]:
    """Reads one message or command; ``following`` is for completion. Raises EOFError and KeyboardInterrupt."""
    if is_dumb_terminal():
        return read_lines
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        more = continued(buffer.text)
        if more is None:
            buffer.validate_and_handle()
        else:
            buffer.document = Document(more)

    session: PromptSession[str] = PromptSession(
        [("fg:ansidefault", PROMPT)],  # the space behind a prompt without a colour would not be printed
        multiline=True,
        prompt_continuation=MORE,
        key_bindings=keys,
        completer=Words(following),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_suspend=True,
    )
    return session.prompt


def read_lines(read: Callable[[str], str] = input) -> str:
    """Reads a message from a terminal that cannot redraw a line."""
    text = read(PROMPT)
    while (more := continued(text)) is not None:
        text = more + read(MORE)
    return text


def continued(text: str) -> str | None:
    """An unfinished message (in triple quotes, or behind a backslash) with a new line; None if it is finished."""
    bare = text.strip()
    if bare.startswith(QUOTES):
        return None if len(bare) >= 2 * len(QUOTES) and bare.endswith(QUOTES) else text + "\n"
    return text[:-1] + "\n" if text.endswith("\\") else None


def parse(text: str) -> tuple[str, bool]:
    """A message without the quotes around it, and whether it is a command.

    Quoted text is a message, and so are several lines, but for ``/system``: pasted text may begin with any path.
    """
    bare = text.strip()
    if bare.startswith(QUOTES):
        return bare.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"), False
    return text, text.startswith("/") and ("\n" not in bare or bare.split()[0] == "/system")


@contextmanager
def keys_kept() -> Iterator[None]:
    """Keys typed and text pasted meanwhile wait for the prompt, and do not show in the middle of an answer."""
    try:
        import termios
    except ImportError:  # not on Windows
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    kept = list(before)
    kept[0] &= ~termios.ICRNL
    kept[3] &= ~(termios.ECHO | termios.ICANON)  # lines would lose what is beyond 4,095 bytes
    ask, forget = ("", "") if is_dumb_terminal() else (ASK, FORGET)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, kept)
    print(ask, end="", flush=True)
    try:
        yield
    finally:
        print(forget, end="", flush=True)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
