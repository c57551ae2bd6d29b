"""Checks that every config class shares."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from sys import float_info
from typing import Any

from forerun.core.errors import ConfigError, shown

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
}

_NOT_TEXT = (int, float, list, tuple, dict)
"""JSON's other types. From Python, a path, a dtype or a device may stand for its name."""


def option(default: Any, help: str, *, commas: str | None = None) -> Any:
    """A config field with the help of its command-line flag; MISSING: it has no default.

    ``commas``: on the command line it is a comma-separated list, in the option of this name.
    """
    return field(default=default, metadata={"help": help} | ({"commas": commas} if commas else {}))


@dataclass(frozen=True)
class Within:
    """A range of numbers: from ``least`` to ``most``, or between ``above`` and ``below``."""

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf
    whole: bool = False

    def permits(self, value: Any) -> bool:
        """Whether ``value`` is a number in the range; booleans and numbers beyond a float's are not."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        finite = self.whole or abs(value) <= float_info.max
        return finite and self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if self.least > -inf:
            bounds = f"from {self.least:g} to {self.most:g}" if self.most < inf else f"of at least {self.least:g}"
        else:
            upper = f" and at most {self.most:g}" if self.most < inf else ""
            bounds = f"above {self.above:g}{upper}" + (f" and below {self.below:g}" if self.below < inf else "")
        return f"{'an integer' if self.whole else 'a number'} {bounds}"


COUNT = Within(least=1, whole=True)
POSITIVE = Within(above=0)
NOT_NEGATIVE = Within(least=0)
FRACTION = Within(least=0, most=1)
POSITIVE_FRACTION = Within(above=0, most=1)


def check_within(options: Any, limits: Mapping[str, Within], label: str = "") -> None:
    """Raises ConfigError, its message after ``label``, if a field of the dataclass ``options`` exceeds its limits.

    Keys of ``limits`` are field names separated by spaces. None is permitted if the type has it; lists item by item.
    """
    types = {field.name: str(field.type) for field in fields(options)}
    for name, limit in ((name, limit) for names, limit in limits.items() for name in names.split()):
        value = getattr(options, name)
        if isinstance(value, (list, tuple)):
            if not value or not all(map(limit.permits, value)):
                raise ConfigError(f"{label}each of {name} must be {limit}, not {shown(value)}")
        elif not limit.permits(value) and (value is not None or "None" not in types[name]):
            raise ConfigError(f"{label}{name} must be {limit}, not {shown(value)}")


def to_python(value: Any) -> Any:
    """Converts NumPy's and torch's numbers and arrays to Python's numbers and lists; other values stay."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value


def convert_fields(options: Any) -> None:
    """Applies ``to_python`` to every field of a frozen dataclass."""
    for name, value in list(vars(options).items()):
        object.__setattr__(options, name, to_python(value))


def check_seed(seed: Any) -> None:
    """Raises ConfigError unless ``seed`` is None or a signed or unsigned 64-bit integer."""
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(1 << 63) <= seed < 1 << 64:
        raise ConfigError(f"seed must be an integer from -2^63 to 2^64 - 1, not {shown(seed)}")


def drawn(seed: int | None, bits: int = 63) -> int:
    """The seed itself, or a fresh one of ``bits`` bits for None and, as in vLLM and llama.cpp, for -1."""
    return secrets.randbits(bits) if seed in (None, -1) else seed


def check_types(kind: type, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that does not have its type in the dataclass ``kind``, a number, a flag or text.

    JSON and command lines may bring strings for numbers.
    """
    for item in fields(kind):
        # Without ``from __future__ import annotations``, a plug-in's types are classes and not their names.
        named = item.type.__name__ if isinstance(item.type, type) else str(item.type)
        names = [name.strip() for name in named.split("|")]
        if item.name not in options or set(names[1:]) - {"None"}:
            continue
        value = options[item.name]
        if names[0] == "str" and isinstance(value, _NOT_TEXT):
            raise ConfigError(f"{item.name} must be text, not {shown(value)}")
        if names[0] not in _KINDS or (value is None and "None" in names):
            continue
        types, expected = _KINDS[names[0]]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"{item.name} must be {expected}, not {shown(value)}")
