"""Exceptions: each says what is wrong and what to change."""


class ForerunError(ValueError):
    """Base of every error that Forerun raises on purpose."""


class ConfigError(ForerunError):
    """An option, a key or a combination of them that cannot be honoured."""


class ModelError(ForerunError):
    """A checkpoint that is missing, broken, unsafe or of an unsupported kind."""


class RequestError(ForerunError):
    """One request that cannot be run as asked (its neighbours are unaffected). ``param`` is its part that is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt that leaves no room for an answer."""


class NumericsError(ForerunError):
    """Logits with NaN, or a row without a single permitted token."""
