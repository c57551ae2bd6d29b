"""JSON schemas with whole numbers that a float64 does not hold, such as ids of 64 bits.

llguidance reads numbers as float64, and would permit others. What lies between a schema's root and such numbers is
written as rules in Lark instead; everything else of it stays a schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written as ``json.dumps`` writes it, unless the schema's ``x-guidance`` says otherwise: a model that may put
any white space between tokens may also never stop."""
WIDE = 1 << 63
LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
HOMES = ("$defs", "definitions")
NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "format", *HOMES}
"""Keys that say nothing about an integer, nor about what holds one."""
TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "object": dict,
    "array": list,
}


def grammars(name: str, schema: Any) -> list[dict[str, Any]]:
    """A schema as grammars of llguidance, the first of which has this name. Raises ValueError for large integers
    where they cannot be kept."""
    if not isinstance(schema, dict):
        raise ValueError(f"the schema {name} must be an object")
    try:
        return _Rules(name, schema).written()
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class _Rules:
    def __init__(self, name: str, schema: Any) -> None:
        self.name = name
        self.schema = schema
        self.parts: list[dict[str, Any]] = []
        self.rules: dict[str, str] = {}
        self.defined = {f"#/{home}/{key}": each for home in HOMES for key, each in _get(schema, home, {}).items()}
        self.large: set[str] = set()
        """The definitions that hold large integers, or refer to one that does."""
        while more := {ref for ref, each in self.defined.items() if ref not in self.large and self._holds(each)}:
            self.large |= more

    def written(self) -> list[dict[str, Any]]:
        if not self._holds(self.schema):
            return [{"name": self.name, "json_schema": {"x-guidance": COMPACT, **self.schema}}]
        rules = {"start": self._node(self.schema)} | self.rules
        lark = "\n".join(f"{rule}: {text}" for rule, text in rules.items())
        return [{"name": self.name, "lark_grammar": lark}, *self.parts]

    def _holds(self, schema: Any) -> bool:
        return any(_large(key, value) or (key == "$ref" and value in self.large) for key, value in _leaves(schema))

    def _part(self, schema: Any) -> str:
        """One without large integers."""
        if any(key == "$ref" and value not in self.defined for key, value in _leaves(schema)):
            raise ValueError("$ref beside integers beyond 2^53 must name one of the root's $defs")
        if not isinstance(schema, dict) and schema is not True:
            raise ValueError(f"{_json(schema)[:40]} beside integers beyond 2^53 is no schema that an answer can meet")
        small: dict[str, dict[str, Any]] = {home: {} for home in HOMES}
        for ref, each in self.defined.items():
            if ref not in self.large:
                _, home, key = ref.split("/", 2)
                small[home][key] = each
        name = f"{self.name}_{len(self.parts)}"
        given = {} if schema is True else {key: value for key, value in schema.items() if key not in HOMES}
        self.parts.append({"name": name, "json_schema": {"x-guidance": COMPACT, **given, **small}})
        return f"@{name}"

    def _node(self, schema: Any) -> str:
        own = isinstance(schema, dict) and {key: value for key, value in schema.items() if key not in HOMES}
        if not self._holds(own):
            return self._part(schema)
        kind = schema.get("type")
        if "$ref" in schema:
            self._check(schema, "$ref")
            return self._definition(schema["$ref"])
        if "const" in schema or "enum" in schema:
            self._check(schema, "type", "const" if "const" in schema else "enum")
            return _either(_literals([schema["const"]] if "const" in schema else _get(schema, "enum", []), kind))
        if "anyOf" in schema:
            self._check(schema, "anyOf")
            return _either([self._node(each) for each in _get(schema, "anyOf", [])])
        if isinstance(kind, list):
            bare = {key: value for key, value in schema.items() if key not in (*LOW, *HIGH)}
            return _either([self._node({**(schema if each == "integer" else bare), "type": each}) for each in kind])
        if kind == "integer":
            self._check(schema, "type", *LOW, *HIGH)
            return f"/{_range(_bound(schema, LOW, 1), _bound(schema, HIGH, -1))}/"
        if kind == "array" and "items" in schema:
            self._check(schema, "type", "items", "minItems", "maxItems")
            return self._array(schema)
        if kind == "object" or "properties" in schema:
            self._check(schema, "type", "properties", "required", "additionalProperties")
            return self._object(schema)
        raise ValueError(f"integers beyond 2^53 are not kept in a schema of {', '.join(schema)}")

    def _check(self, schema: dict[str, Any], *known: str) -> None:
        unknown = set(schema) - NOTES - set(known)
        if unknown:
            raise ValueError(f"integers beyond 2^53 are not kept beside {sorted(unknown)[0]}")

    def _definition(self, ref: str) -> str:
        rule = f"definition_{list(self.defined).index(ref)}"
        if rule not in self.rules:
            self.rules[rule] = ""
            self.rules[rule] = self._node(self.defined[ref])
        return rule

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = _get(schema, "minItems", 0), _get(schema, "maxItems", 0) if "maxItems" in schema else None
        item = self._node(schema["items"])
        more = f'(", " {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}' if most != 1 else ""
        inner = f"({item} {more})" if most != 0 else '""'
        return f'"[" {inner}{"" if least else "?"} "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        """With no other properties than those that are named."""
        if schema.get("additionalProperties", True) not in (True, False):
            raise ValueError("integers beyond 2^53 are not kept beside additionalProperties that are a schema")
        named, required = _get(schema, "properties", {}), _get(schema, "required", [])
        if set(required) - set(named):
            raise ValueError("integers beyond 2^53 are not kept beside required properties without a schema")
        pairs = [(f"{_quoted(_json(key) + ': ')} {self._node(each)}", key in required) for key, each in named.items()]
        must = next((index for index, (_, needed) in enumerate(pairs) if needed), None)
        if must is None:
            begun = [f"{pair} {_more(pairs[index + 1 :])}" for index, (pair, _) in enumerate(pairs)]
            return f'"{{" ({" | ".join(begun)})? "}}"'
        before = " ".join(f'({pair} ", ")?' for pair, _ in pairs[:must])
        return f'"{{" {before} {pairs[must][0]} {_more(pairs[must + 1 :])} "}}"'


def _get(schema: dict[str, Any], key: str, absent: Any) -> Any:
    """A value of the kind that stands for its absence."""
    value = schema.get(key, absent)
    if type(value) is not type(absent):
        raise ValueError(f"{key} must be of another type than {type(value).__name__}")
    return value


def _more(pairs: Sequence[tuple[str, bool]]) -> str:
    return " ".join(f'(", " {pair}){"" if needed else "?"}' for pair, needed in pairs)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a schema that holds nothing, with the key that it stands under."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in ("default", "examples") or isinstance(each, dict):  # a property may have that name
                yield from _leaves(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, key)
    else:
        yield key, value


def _large(key: str, value: Any) -> bool:
    """Whether llguidance would take another number for this one. It takes larger bounds for the largest of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or (key in HIGH and value >= WIDE - 1):
        return False
    return not -WIDE < value < WIDE or int(float(value)) != value


def _literals(values: Sequence[Any], kind: Any) -> list[str]:
    kinds = [kind] if isinstance(kind, str) else kind or []
    fits = [value for value in values if not kinds or any(_is(value, each) for each in kinds)]
    if not fits:
        raise ValueError("no value of the enum has its type")
    return [_quoted(_json(value)) for value in fits]


def _is(value: Any, kind: str) -> bool:
    if value is None or isinstance(value, bool):
        return kind == ("null" if value is None else "boolean")
    return isinstance(value, TYPES.get(kind, ()))


def _bound(schema: dict[str, Any], keys: tuple[str, str], step: int) -> int | None:
    """The least or the largest integer that is permitted; None: there is none."""
    result = []
    for key in keys:
        value = schema.get(key)
        if value is None:
            continue
        if type(value) is not int and not (isinstance(value, float) and math.isfinite(value)):
            raise ValueError(f"integers beyond 2^53 need {key} as a number")
        whole = math.ceil(value) if step > 0 else math.floor(value)
        result.append(whole + step if key == keys[1] and whole == value else whole)
    return (max if step > 0 else min)(result) if result else None


def _range(low: int | None, high: int | None) -> str:
    """A regular expression of the integers from ``low`` to ``high``."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"no integer is at least {low} and at most {high}")
    parts = []
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        parts.append("-" + _lengths(least, None if low is None else -low))
    if high is None or high >= 0:
        parts.append(_lengths(max(0, low or 0), high))
    return "|".join(parts)


def _lengths(low: int, high: int | None) -> str:
    """Those from ``low`` on that are not negative, by how many digits they have."""
    parts = [] if high is not None else [f"[1-9][0-9]{{{len(str(low))},}}"]
    top = 10 ** len(str(low)) - 1 if high is None else high
    while low <= top:
        end = min(top, 10 ** len(str(low)) - 1)
        parts.append(_digits(str(low), str(end)))
        low = end + 1
    return f"({'|'.join(parts)})"


def _digits(low: str, high: str) -> str:
    """Those between two of the same length."""
    if not low or low[0] == high[0]:
        return low[:1] + _digits(low[1:], high[1:]) if low else ""
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:] != "0" * rest:
        parts.append(low[0] + _digits(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        parts.append(high[0] + _digits("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + f"[0-9]{{{rest}}}" * (rest > 0))
    return f"({'|'.join(parts)})"


def _either(options: Sequence[str]) -> str:
    return f"({' | '.join(options)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    """As Lark writes it."""
    return json.dumps(text)
