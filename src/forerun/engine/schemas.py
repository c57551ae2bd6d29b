"""JSON schemas as Lark rules, for what llguidance's own JSON schemas cannot do.

``SchemaRules`` keeps integers beyond 2^53, which llguidance rounds; ``SpelledRules`` describes values that are not
written as JSON, in tool calls for example.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON as ``json.dumps`` writes it, unless the schema's ``x-guidance`` says otherwise. A model
that may put any white space between tokens may never stop."""
WIDE = 1 << 63
LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
HOMES = ("$defs", "definitions")
NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "format", *HOMES}
"""Keys that restrict neither an integer nor what contains one."""
OF_NUMBERS = {*LOW, *HIGH, "multipleOf"}
OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": OF_NUMBERS,
    "number": OF_NUMBERS,
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Keys that restrict values of one type alone."""
TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def grammars(name: str, schema: Any) -> list[dict[str, Any]]:
    """A schema as llguidance grammars, the first called ``name``. Raises ValueError for integers too large to keep."""
    if not isinstance(schema, dict):
        raise ValueError(f"the schema {name} must be an object")
    try:
        return SchemaRules(name, schema).written()
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class SchemaRules:
    """Rules for JSON with integers of any size. Parts of the schema that llguidance can do are left to it."""

    prefix = ""
    """Prefix of the rules' names."""

    def __init__(self, name: str, schema: dict[str, Any]) -> None:
        self.name = name
        self.schema = schema
        self.parts: dict[str, dict[str, Any]] = {}
        self.rules: dict[str, str] = {}
        self.defined = {f"#/{home}/{key}": each for home in HOMES for key, each in _get(schema, home, {}).items()}
        self.large: set[str] = set()
        """References to definitions that contain large integers, or refer to one that does."""
        while more := {ref for ref, each in self.defined.items() if ref not in self.large and self._holds(each)}:
            self.large |= more

    def written(self) -> list[dict[str, Any]]:
        """The whole schema as llguidance grammars."""
        if not self._holds(self.schema):
            return [{"name": self.name, "json_schema": {"x-guidance": COMPACT, **self.schema}}]
        rules = {"start": self._node(self.schema)} | self.rules
        lark = "\n".join(f"{rule}: {text}" for rule, text in rules.items())
        parts = [{"name": name, "json_schema": {"x-guidance": COMPACT, **part}} for name, part in self.parts.items()]
        return [{"name": self.name, "lark_grammar": lark}, *parts]

    def _refused(self, where: str) -> ValueError:
        return ValueError(f"integers beyond 2^53 are not kept {where}")

    def _holds(self, schema: Any) -> bool:
        """Whether it contains a large integer."""
        return any(_large(key, value) or (key == "$ref" and value in self.large) for key, value in _leaves(schema))

    def _whole(self, schema: Any) -> bool:
        """Whether llguidance can do all of it."""
        return not self._holds(schema)

    def _part(self, schema: Any) -> str:
        """Leaves a schema without large integers to llguidance; returns the grammar's reference."""
        if any(key == "$ref" and value not in self.defined for key, value in _leaves(schema)):
            raise ValueError("$ref beside integers beyond 2^53 must name one of the root's $defs")
        if not isinstance(schema, dict) and schema is not True:
            raise ValueError(f"{_json(schema)[:40]} beside integers beyond 2^53 is no schema that an answer can meet")
        small: dict[str, dict[str, Any]] = {home: {} for home in HOMES}
        for ref, each in self.defined.items():
            if ref not in self.large:
                _, home, key = ref.split("/", 2)
                small[home][key] = each
        given = {} if schema is True else {key: value for key, value in schema.items() if key not in HOMES}
        return self._named({**given, **small})

    def _named(self, schema: dict[str, Any]) -> str:
        name = f"{self.name}_{len(self.parts)}"
        self.parts[name] = schema
        return f"@{name}"

    def _node(self, schema: Any) -> str:
        """The Lark expression of a schema."""
        own = isinstance(schema, dict) and {key: value for key, value in schema.items() if key not in HOMES}
        if self._whole(own if isinstance(schema, dict) else schema):
            return self._part(schema)
        if not isinstance(schema, dict) or not set(schema) - NOTES:
            return self._anything(schema)
        kind = schema.get("type")
        if "$ref" in schema:
            self._check(schema, "$ref")
            return self._definition(schema["$ref"])
        if "const" in schema or "enum" in schema:
            self._check(schema, "type", "const" if "const" in schema else "enum")
            return self._literals([schema["const"]] if "const" in schema else _get(schema, "enum", []), kind)
        if "anyOf" in schema:
            self._check(schema, "anyOf")
            return either([self._node(each) for each in _get(schema, "anyOf", [])])
        if isinstance(kind, list):
            return either([self._node(each) for each in of_each_type(schema, kind)])
        if kind == "integer":
            self._check(schema, "type", *LOW, *HIGH)
            return f"/{_range(_bound(schema, LOW, 1), _bound(schema, HIGH, -1))}/"
        if kind == "array":
            self._check(schema, "type", "items", "minItems", "maxItems")
            return self._array(schema)
        if kind == "object" or "properties" in schema:
            self._check(schema, "type", "properties", "required", "additionalProperties")
            return self._object(schema)
        return self._other(schema)

    def _anything(self, schema: Any) -> str:
        raise self._refused(f"beside {_json(schema)[:40]}")

    def _other(self, schema: dict[str, Any]) -> str:
        raise self._refused(f"in a schema of {', '.join(schema)}")

    def _check(self, schema: dict[str, Any], *known: str) -> None:
        unknown = set(schema) - NOTES - set(known)
        if unknown:
            raise self._refused(f"beside {sorted(unknown)[0]}")

    def _definition(self, ref: Any) -> str:
        if not isinstance(ref, str) or ref not in self.defined:
            raise self._refused(f"beside $ref {_json(ref)[:40]}, which is none of the root's $defs")
        rule = f"{self.prefix}definition_{list(self.defined).index(ref)}"
        if rule not in self.rules:
            self.rules[rule] = ""
            self.rules[rule] = self._node(self.defined[ref])
        return rule

    def _literals(self, values: Sequence[Any], kind: Any) -> str:
        return either([quoted(_json(value)) for value in fitting(values, kind)])

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = _get(schema, "minItems", 0), _get(schema, "maxItems", 0) if "maxItems" in schema else None
        item = self._node(schema.get("items", True))
        more = (
            f"({self._between} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}" if most != 1 else ""
        )
        inner = f"({item} {more})" if most != 0 else '""'
        return f'"[" {inner}{"" if least else "?"} "]"'

    _between = '", "'
    """Between items."""

    def _key(self, key: str) -> str:
        return quoted(_json(key) + ": ")

    def _object(self, schema: dict[str, Any]) -> str:
        """An object that has only the properties that the schema names."""
        if schema.get("additionalProperties", True) not in (True, False):
            raise self._refused("beside additionalProperties that are a schema")
        return f'"{{" {self._pairs(schema)} "}}"'

    def _properties(self, schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
        """The properties: (name, schema, whether it is required)."""
        named, required = _get(schema, "properties", {}), _get(schema, "required", [])
        if not all(isinstance(key, str) and key in named for key in required):
            raise self._refused("beside required properties without a schema")
        return [(key, each, key in required) for key, each in self._ordered(named)]

    def _pairs(self, schema: dict[str, Any], key_of: Callable[[str], str] | None = None) -> str:
        """An object's properties in order, the optional ones left out or not, with separators between them."""
        key_of = key_of or self._key
        named = self._properties(schema)
        pairs = [(self._part_of(f"{key_of(key)} {self._node(each)}"), needed) for key, each, needed in named]
        tails = [""]  # tails[i]: what may follow pair i - 1
        for pair, needed in reversed(pairs):
            tails.append(self._part_of(f"({self._between} {pair}){'' if needed else '?'} {tails[-1]}"))
        tails.reverse()
        first = next((index for index, (_, needed) in enumerate(pairs) if needed), None)
        if first is None:
            by_first = [f"{pair} {tails[index + 1]}" for index, (pair, _) in enumerate(pairs)]
            return f"({' | '.join(by_first)})?" if by_first else ""
        before = " ".join(f"({pair} {self._between})?" for pair, _ in pairs[:first])
        return f"{before} {pairs[first][0]} {tails[first + 1]}"

    def _part_of(self, text: str) -> str:
        """A part of an object's rule; a subclass may make it a rule of its own."""
        return text

    def _ordered(self, named: dict[str, Any]) -> list[tuple[str, Any]]:
        return list(named.items())


class SpelledRules(SchemaRules):
    """Rules for values in a notation other than JSON (here Python's), to be added to a larger grammar.

    Raises ValueError for a schema that the notation cannot express: nothing in a schema is ignored.
    """

    form = "Python"
    words: Mapping[Any, Sequence[str]] = {True: ("True", "true"), False: ("False", "false"), None: ("None", "null")}
    """The spellings of true, false and null."""

    def __init__(self, name: str, schema: dict[str, Any]) -> None:
        super().__init__(name, schema)
        self.prefix = f"{name}_"
        self.names: dict[str, str] = {}
        """Names of rules by their text."""

    def _refused(self, where: str) -> ValueError:
        return ValueError(f"a call in {self.form}'s form cannot be forced {where}")

    def _whole(self, schema: Any) -> bool:
        """Whether it is a plain number."""
        if not isinstance(schema, dict) or {"const", "enum", "anyOf", "oneOf", "allOf", "$ref"} & set(schema):
            return False
        return schema.get("type") in ("integer", "number") and not self._holds(schema)

    def _part(self, schema: Any) -> str:
        """Leaves a string or a number to llguidance, equal schemas once."""
        return next((f"@{name}" for name, each in self.parts.items() if each == schema), None) or self._named(schema)

    def _anything(self, schema: Any) -> str:
        if schema is False:
            raise self._refused("where a schema is false, which no value meets")
        rule = f"{self.prefix}any"
        if rule not in self.rules:
            self.rules[rule] = ""
            words = map(self._word, self.words)
            scalars = [self._node({"type": kind}) for kind in ("string", "number")]
            items = f'"[" ({rule} ({self._between} {rule})*)? "]"'
            self.rules[rule] = either([*scalars, *words, items, self._map(rule)])
        return rule

    def _map(self, value: str) -> str:
        """An object with any keys."""
        pair = f"{self._any_key()} {value}"
        return f'"{{" ({pair} ({self._between} {pair})*)? "}}"'

    def _any_key(self) -> str:
        return f'{self._node({"type": "string"})} ": "'

    def _other(self, schema: dict[str, Any]) -> str:
        several = [key for key in ("oneOf", "allOf") if key in schema]
        if len(several) == 1 and (several == ["oneOf"] or len(_get(schema, "allOf", [])) == 1):
            self._check(schema, several[0])
            return either([self._node(each) for each in _get(schema, several[0], [])])
        kind = schema.get("type")
        if kind in ("boolean", "null"):
            self._check(schema, "type")
            return either([self._word(value) for value in ((None,) if kind == "null" else (True, False))])
        if kind == "string":
            self._check(schema, "type", "minLength", "maxLength", "pattern")
            return self._string(schema)
        return super()._other(schema)

    def _word(self, value: bool | None) -> str:
        return either([quoted(word) for word in self.words[value]])

    def _string(self, schema: dict[str, Any]) -> str:
        return super()._other(schema)  # as JSON has it

    def _literals(self, values: Sequence[Any], kind: Any) -> str:
        return either([self._literal(value) for value in fitting(values, kind)])

    def _literal(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return self._word(value)
        if isinstance(value, dict):
            pairs = [f"{self._key(key)} {self._literal(each)}" for key, each in self._ordered(value)]
            return " ".join(['"{"', f" {self._between} ".join(pairs), '"}"'])
        if isinstance(value, list):
            return " ".join(['"["', f" {self._between} ".join(map(self._literal, value)), '"]"'])
        return self._text(value) if isinstance(value, str) else quoted(_json(value))

    def _text(self, value: str) -> str:
        return quoted(_json(value))

    def arguments(self) -> str:
        """The expression of a call's arguments, without brackets. Fills ``rules`` and ``parts``, which it refers to."""
        try:
            for choices in _one_ofs(self.schema):
                self._check_apart(choices)
            return self._arguments(self.schema)
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None

    def _arguments(self, schema: Any, depth: int = 0) -> str:
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(ref, str) and ref in self.defined and depth < len(self.defined):
            return self._arguments(self.defined[ref], depth + 1)
        if not isinstance(schema, dict):
            raise self._refused("where its parameters are no object")
        self._check(schema, "type", "properties", "required", "additionalProperties")
        if isinstance(schema.get("additionalProperties"), dict) and not schema.get("properties"):
            raise self._refused("with parameters that have no names")
        return self._pairs(schema, self._name)

    def _check_apart(self, choices: Sequence[Any]) -> None:
        """Refuses the schemas of a ``oneOf`` unless no value can meet two of them, in llguidance's judgement."""
        from llguidance import LLMatcher  # from an extra, as in engine/grammar.py

        refs = [each.get("$ref") if isinstance(each, dict) else None for each in choices]
        plain = [self.defined.get(ref, each) if isinstance(ref, str) else each for ref, each in zip(refs, choices)]
        homes = {home: self.schema[home] for home in HOMES if home in self.schema}
        schema = LLMatcher.grammar_from_json_schema({**homes, "oneOf": plain})
        if "oneOf" in LLMatcher.validate_grammar(schema):
            raise self._refused("with a oneOf of which two schemas may permit the same value")

    def _name(self, key: str) -> str:
        """A parameter's name with what separates it from the value."""
        return self._key(key)

    def _terminal(self, text: str) -> str:
        """Makes ``text`` a terminal, which the lexer matches as one token."""
        return self._rule(f"{self.prefix}text_{len(self.rules)}".upper(), text)

    def _part_of(self, text: str) -> str:
        return self._rule(f"{self.prefix}part_{len(self.rules)}", text)

    def _rule(self, name: str, text: str) -> str:
        """Adds a rule and returns its name; equal texts share one."""
        name = self.names.setdefault(text, name)
        self.rules[name] = text
        return name

    def _object(self, schema: dict[str, Any]) -> str:
        more = schema.get("additionalProperties", True)
        if "properties" not in schema and more is not False and not schema.get("required"):
            return self._map(self._node(more))
        return f'"{{" {self._pairs(schema)} "}}"'


def free_text(schema: Mapping[str, Any], *never: str) -> str:
    """A terminal for unquoted text that meets a string ``schema`` and contains none of the texts ``never``."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [f"/(?s:.{{{least},{most}}})/" if least or most != "" else "/(?s:.*)/"]
    if "pattern" in schema:
        parts.append(f"/{_pattern(schema['pattern'])}/")
    if never:
        parts.append(f"~/(?s:.*)({'|'.join(_escaped(text) for text in never)})(?s:.*)/")
    return f"({' & '.join(parts)})"


def _pattern(text: Any) -> str:
    """A schema's ``pattern``, which may match anywhere in a text, as a regular expression for the whole text."""
    if not isinstance(text, str):
        raise ValueError("a pattern must be a text")
    begins, ends = text.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$\Z", text) is not None
    inner = text[begins : len(text) - ends]
    inner = re.sub(r"\\(.)|/", lambda found: ASCII.get(found[1] or "/", found[0]), inner, flags=re.S)
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]", "/": r"\/"}
"""Character classes of JSON schemas as ASCII: llguidance's cover all alphabets."""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def of_each_type(schema: dict[str, Any], kinds: Sequence[Any]) -> list[dict[str, Any]]:
    """Splits a schema of several types into one for each type, with the keys that apply to it."""
    typed = set().union(*OF_TYPE.values())
    return [
        {key: value for key, value in schema.items() if key not in typed or key in OF_TYPE.get(each, ())}
        | {"type": each}
        for each in kinds
    ]


def _get(schema: dict[str, Any], key: str, absent: Any) -> Any:
    """The value of ``key``, or ``absent``. Raises ValueError for another type than that of ``absent``."""
    value = schema.get(key, absent)
    if type(value) is not type(absent):
        raise ValueError(f"{key} must be of another type than {type(value).__name__}")
    return value


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all scalars in a schema, each with its key."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in ("default", "examples") or isinstance(each, dict):  # a property may have that name
                yield from _leaves(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, key)
    else:
        yield key, value


def _one_ofs(schema: Any) -> Iterator[list[Any]]:
    """Yields all lists under ``oneOf`` in a schema."""
    if isinstance(schema, dict):
        for key, each in schema.items():
            if key == "oneOf" and isinstance(each, list):
                yield each
            yield from _one_ofs(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _one_ofs(each)


def _large(key: str, value: Any) -> bool:
    """Whether llguidance would change this number. It clamps upper bounds to 64 bits, which does no harm."""
    if not isinstance(value, int) or isinstance(value, bool) or (key in HIGH and value >= WIDE - 1):
        return False
    return not -WIDE < value < WIDE or int(float(value)) != value


def fitting(values: Sequence[Any], kind: Any) -> list[Any]:
    """The values of an enum that have its type ``kind``. Raises ValueError if there are none."""
    kinds = [kind] if isinstance(kind, str) else kind or []
    fits = [value for value in values if not kinds or any(_is(value, each) for each in kinds)]
    if not fits:
        raise ValueError("no value of the enum has its type")
    return fits


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES.get(kind, ())) and isinstance(value, bool) == (kind == "boolean")


def _bound(schema: dict[str, Any], keys: tuple[str, str], step: int) -> int | None:
    """The least (``step`` 1) or largest (-1) integer that the inclusive and exclusive bounds permit; None: no bound."""
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
    """A regular expression of the integers from ``low`` >= 0 to ``high``, split by number of digits."""
    parts = [] if high is not None else [f"[1-9][0-9]{{{len(str(low))},}}"]
    top = 10 ** len(str(low)) - 1 if high is None else high
    while low <= top:
        end = min(top, 10 ** len(str(low)) - 1)
        parts.append(_digits(str(low), str(end)))
        low = end + 1
    return f"({'|'.join(parts)})"


def _digits(low: str, high: str) -> str:
    """A regular expression of the integers between two with the same number of digits."""
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


def either(options: Sequence[str]) -> str:
    return f"({' | '.join(options)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def quoted(text: str) -> str:
    """``text`` as a Lark string."""
    return json.dumps(text)
