"""Checks that every config class shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from forerun.core.errors import ConfigError, shown

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
}

NO_TEXT = (int, float, list, tuple, dict)
"""What JSON has beside text; from Python a path, a dtype or a device may stand for its name."""


def as_python(value: Any) -> Any:
    """Numbers and arrays of NumPy's or torch's as Python's numbers and lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value


def hold_python(options: Any) -> None:
    """Let a frozen dataclass hold Python's numbers and lists where it was given NumPy's or torch's."""
    for name, value in list(vars(options).items()):
        object.__setattr__(options, name, as_python(value))


def check_seed(seed: Any) -> None:
    """Raise ConfigError unless ``seed`` is None or one of the keys of noise: 64 bits, with or without a sign."""
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(1 << 63) <= seed < 1 << 64:
        raise ConfigError(f"seed must be an integer from -2^63 to 2^64 - 1, not {shown(seed)}")


def check_types(kind: type, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that is annotated as a number, a flag or text in the dataclass ``kind`` and is
    none.

    JSON and command lines bring strings where numbers belong; a comparison deep inside would say less.
    """
    for field in fields(kind):
        names = [name.strip() for name in str(field.type).split("|")]
        if field.name not in options or set(names[1:]) - {"None"}:
            continue
        value = options[field.name]
        if names[0] == "str" and isinstance(value, NO_TEXT):
            raise ConfigError(f"{field.name} must be text, not {shown(value)}")
        if names[0] not in _KINDS or (value is None and "None" in names):
            continue
        types, requested = _KINDS[names[0]]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"{field.name} must be {requested}, not {shown(value)}")
