"""``forerun chat`` on a pseudo-terminal."""

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from forerun.cli.chat import read_messages

pytestmark = pytest.mark.slow


class Screen:
    """``forerun chat`` on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "forerun", "chat", "--threads", "1", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, preexec_fn=_adopt
        )
        os.close(slave)
        self.text = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt_prompt(self):
        """Ctrl-C at a prompt that waits: readline heeds no signal between showing its prompt and waiting for keys."""
        sleep(0.5)
        self.type("\x03")

    def wait(self, pattern, seconds=120):
        """Everything up to what matches, which is then forgotten."""
        end = monotonic() + seconds
        while (result := re.search(pattern, self.text, re.DOTALL)) is None:
            assert select.select([self.master], [], [], max(0.0, end - monotonic()))[0], self.text
            try:
                self.text += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # the other side is closed
                raise AssertionError(self.text) from None
        before, self.text = self.text[: result.end()], self.text[result.end() :]
        return before


def _adopt():
    """Make the terminal the controlling one, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(chat_model):
    opened = []

    def start(*arguments):
        opened.append(Screen("--model", chat_model, *arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.master)


def test_in_a_terminal(terminal):
    """Ctrl-C stops an answer and not the program, a command works, several lines are one message, two Ctrl-C end it."""
    shown = terminal("--max-tokens", "30000", "--ignore-eos")
    shown.wait(r"/help lists the commands.*>>> ")
    shown.type("hello\r")
    shown.wait(r"hello\r\n.*?\w")
    shown.type("\x03")
    assert "prompt tokens read" in shown.wait(r"stopped.*?>>> ")
    shown.type("/show\r")
    assert re.search(r"messages +2", shown.wait(r"messages.*?>>> "))
    shown.type("/set max_tokens 5\r")
    shown.wait(r"max_tokens is 5.*?>>> ")
    shown.type("one\\\r")
    shown.wait(r"\.\.\. ")
    shown.type("two\r")
    shown.wait(r"m5 tokens.*?ended by max_tokens 5.*?>>> ")
    shown.type("/nope\r")
    shown.wait(r"error: there is no command /nope.*?>>> ")
    shown.interrupt_prompt()
    shown.wait(r"Ctrl-C again, Ctrl-D or /exit ends.*?>>> ")
    shown.type("/trace on\r")
    shown.wait(r"drafted and accepted.*?>>> ")
    shown.interrupt_prompt()
    shown.wait(r"Ctrl-C again.*?>>> ")
    shown.interrupt_prompt()
    assert shown.process.wait(30) == 0


def test_pasted_lines_are_one_message(terminal, tmp_path):
    """Saved as one, and Ctrl-D ends it."""
    shown = terminal("--max-tokens", "3")
    shown.wait(r"/help lists the commands.*>>> ")
    shown.type("\x1b[200~first\rsecond\x1b[201~\r")
    shown.wait(r"m3 tokens.*?>>> ")
    shown.type(f"/save {tmp_path}/saved.json\r")
    shown.wait(r"2 messages.*?>>> ")
    saved = read_messages(Path(tmp_path) / "saved.json")
    assert saved[0]["content"].split() == ["first", "second"]
    shown.type("\x04")
    assert shown.process.wait(30) == 0
