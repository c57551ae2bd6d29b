"""``forerun chat`` and ``forerun run`` on a terminal."""

import re

import pytest

from forerun.cli.chat import read_messages
from xterm import BRACKETED_PASTE, Xterm

pytestmark = pytest.mark.slow

READY = r"/help lists the commands\n>>>$"


@pytest.fixture
def xterm(warm):
    opened = []

    def start(*arguments, **options):
        opened.append(Xterm(warm, arguments, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def terminal(chat_model, xterm):
    def start(*arguments, **options):
        return xterm("chat", "--threads", "1", "--model", chat_model, *arguments, **options)

    return start


def saved(shown, path):
    """The messages so far."""
    shown.type(f"/save {path}\r")
    shown.wait(r"messages saved to.*\n>>>$")
    return [message["content"] for message in read_messages(path)]


def test_text_is_marked_as_pasted_only_if_that_was_asked_for(xterm):
    plain = xterm(code="print(repr(input('? ')), repr(input('? ')))")
    plain.wait(r"\?$")
    plain.paste("a\nb\n")
    plain.wait(r"'a' 'b'")
    asks = xterm(code="print(repr(input('? \\x1b[?2004h')), repr(input('? ')))")
    asks.wait(r"\?$")
    asks.paste("a\nb\n")
    asks.wait(r"\[200~a' 'b")


def test_in_a_terminal(terminal):
    """Ctrl-C stops an answer and not the program, a command works, several lines are one message, two Ctrl-C end it."""
    shown = terminal("--max-tokens", "30000", "--ignore-eos")
    assert "sampling" in shown.wait(READY)
    assert b">>> " in shown.raw  # with its space, which is what scripts wait for
    shown.type("hello\r")
    shown.wait(r"hello\n.*?\w")
    shown.type("\x03")
    assert "10 of 10 prompt tokens" in shown.wait(r"stopped\n>>>$")
    shown.type("/show\r")
    assert re.search(r"messages +2", shown.wait(r"messages.*\n>>>$"))
    shown.type("/set max_tokens 5\r")
    shown.wait(r"max_tokens is 5\n>>>$")
    shown.type("one\\\r")
    shown.wait(r"\n\.\.\.$")
    shown.type("two\r")
    shown.wait(r"\n5 tokens.*max_tokens 5\n>>>$")
    shown.type("\x1b[A")
    shown.wait(r">>> one\n\.\.\. two$")
    shown.type("\x03")
    shown.wait(r"Ctrl-C again.*\n>>>$")
    shown.type("/nope\r")
    shown.wait(r"error: unknown command /nope.*\n>>>$")
    shown.type("\x03")
    shown.wait(r"Ctrl-C again, Ctrl-D or /exit ends.*\n>>>$")
    shown.type("/tr\t")
    shown.wait(r">>> /trace$")
    shown.type(" on\r")
    shown.wait(r"drafted and accepted.*\n>>>$")
    shown.type("\x03")
    shown.wait(r"Ctrl-C again.*\n>>>$")
    shown.type("\x03")
    assert shown.ended() == 0
    assert "WARNING" not in "\n".join(shown.lines())
    assert BRACKETED_PASTE not in shown.screen.mode


@pytest.mark.parametrize("text", ["first\n/exit\nthird", "/exit\nsecond\n\n/reset", "/usr/bin\n" + "x" * 6000])
def test_pasted_lines_are_one_message(terminal, tmp_path, text):
    """Whatever they begin with. Ctrl-D ends the program."""
    shown = terminal("--max-tokens", "3", "--max-model-len", "8192")
    shown.wait(READY)
    shown.paste(text)
    shown.type("\r")
    shown.wait(r"\n3 tokens.*\n>>>$")
    assert saved(shown, tmp_path / "saved.json")[0] == text
    shown.type("\x04")
    assert shown.ended() == 0


def test_text_pasted_while_an_answer_comes_is_the_next_message(terminal, tmp_path):
    shown = terminal("--max-tokens", "400", "--ignore-eos")
    shown.wait(READY)
    shown.type("hello\r")
    shown.wait(r"hello\n.*?\w")
    shown.type("typed ")
    shown.paste("first\n/exit\nthird")
    shown.wait(r"\n400 tokens.*\n>>> typed first\n\.\.\. /exit\n\.\.\. third$")
    shown.type("\r")
    shown.wait(r"\n400 tokens.*\n>>>$")
    assert saved(shown, tmp_path / "saved.json")[2] == "typed first\n/exit\nthird"


def test_quoted_lines_are_one_message(terminal, tmp_path):
    shown = terminal("--max-tokens", "3")
    shown.wait(READY)
    shown.type('"""/exit\rtwo \\\r\rthree"""\r')
    shown.wait(r"\n3 tokens.*\n>>>$")
    assert saved(shown, tmp_path / "saved.json")[0] == "/exit\ntwo \\\n\nthree"


def test_a_terminal_without_control_codes(terminal, tmp_path):
    shown = terminal("--max-tokens", "20", term="dumb")
    shown.wait(READY)
    shown.type("one\\\rtwo\r")
    shown.wait(r"\n\d+ tokens.*\n>>>$")
    assert saved(shown, tmp_path / "saved.json")[0] == "one\ntwo"
    shown.type("/bye\r")
    assert shown.ended() == 0
    assert b"\x1b" not in shown.raw


def test_words_are_whole_in_a_narrow_terminal(terminal, tmp_path):
    shown = terminal("--max-tokens", "3", columns=40)
    shown.wait(READY)
    shown.type("/help\r")
    words = shown.wait(r"ends the program\.\n>>>$").split()
    assert {"conversation", "/regenerate)", "backslash", "completes"} <= set(words)


def test_run_answers_once(xterm, chat_model):
    command = ["run", chat_model, "--threads", "1", "--max-tokens", "5"]
    shown = xterm(*command, "two", "words")
    assert shown.ended() == 0
    assert re.search(r" 5 tokens.* 14 of 14 prompt tokens read", " ".join(shown.lines()))  # u:two words;a:
    chatting = xterm(*command)
    chatting.wait(READY)
    chatting.type("/bye\r")
    assert chatting.ended() == 0
