"""Exceptions: each says what is wrong and what to change, in one line."""

from __future__ import annotations

from typing import Any

LONGEST_REASON = 240
LONGEST_VALUE = 80


class ForerunError(ValueError):
    """Base of every error that Forerun raises on purpose."""


class ConfigError(ForerunError):
    """An option, a key or a combination of them that cannot be honoured."""


class ModelError(ForerunError):
    """A checkpoint that is missing, broken, unsafe or of an unsupported kind."""


class RequestError(ForerunError):
    """One request that cannot be run; others are unaffected. ``param`` names its wrong parameter."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt that leaves no tokens for an answer."""


class RankError(ForerunError):
    """A process of a tensor-parallel model has ended or does not answer, so that the engine cannot go on."""


def one_line(error: BaseException) -> str:
    """The message of a library's exception, shortened to one line, after its class where the message needs it."""
    text = " ".join("".join(each if each.isprintable() else " " for each in str(error)).split())
    if not text or isinstance(error, (LookupError, AttributeError)):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return _short(text, LONGEST_REASON)


def shown(value: Any) -> str:
    """A rejected value for an error message: its repr, shortened to one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not write integers of thousands of digits
        text = f"a very large {type(value).__name__}"
    return _short(" ".join(text.split()), LONGEST_VALUE)


def check_text(text: str, param: str = "prompt") -> None:
    """Raises RequestError, about ``param``, for half a surrogate pair, which cannot be encoded."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"half a surrogate pair (character {error.start}), which is no text"
            raise RequestError(f"the text has {found}; was it in another encoding than UTF-8?", param=param) from None


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
