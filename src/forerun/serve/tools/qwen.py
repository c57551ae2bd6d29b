"""Qwen 3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from forerun.engine.schemas import SpelledRules, either, free_text, of_each_type, quoted
from forerun.models.text.chat import CLOSING, OPENING, PYTHON_TAG, loads
from forerun.serve.tools.base import Calls, Unfinished, WholeParser, as_text
from forerun.serve.tools.grammar import CallGrammar, ToolFormat, formats

FUNCTION = "<function="
HEAD = regex.compile(r"([^<>\s]+)\s*>\s*(?=<parameter=|</function>)")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
END = re.compile(r"\s*</function>")
CLOSE = re.compile(r"()\n?</parameter>")
LINE = re.compile(r"\n(?:(<parameter=[^>\n]+>(?=\n))|</parameter>)")
"""A tag on a line of its own, as templates write it. Group 1: it opens a parameter."""
ANY = re.compile(r"\n?(?:</parameter>|(?=<parameter=|</function>))")
AFTER_FUNCTION = {"strict": r"\s*(?:</?tool_call>|<function=)", "last": r"\s*(?:</?tool_call>|<function=|\Z)", "": ""}
NEXT = {when: re.compile(rf"\s*(?:<parameter=[^>\n]+>|</function>{end})") for when, end in AFTER_FUNCTION.items()}
"""What comes after the closing tag of a parameter."""
JSON = json.JSONDecoder(strict=False)


class QwenParser(WholeParser):
    """Values are strings where the function's schema permits that, or says nothing, else JSON.

    Models leave out the opening marker at times; such a call must name a known function. A string may hold tags. It
    ends with a closing tag before what may follow it; tags of a call that it quotes come in pairs. If the answer ends
    before such a tag, the first closing tag counts, before what may follow or anywhere.
    """

    start_markers = (PYTHON_TAG, OPENING, FUNCTION)

    def _read_head(self) -> bool:
        begins = self._buffer.lstrip()
        if self._marker.strip() == OPENING:
            if begins != FUNCTION and FUNCTION.startswith(begins) and not self._last:
                return False
            if not begins.startswith(FUNCTION):
                return super()._read_head()
            cut = len(self._buffer) - len(begins) + len(FUNCTION)
            self._marker, self._buffer = self._marker + self._buffer[:cut], self._buffer[cut:]
        elif not self._marker.endswith(FUNCTION):
            return super()._read_head()
        self._enclosed = OPENING in self._marker
        self.closing = CLOSING if self._enclosed else "</function>"
        name = self._buffer.partition(">")[0].rstrip()
        head = HEAD.match(self._buffer, partial=not self._last)
        known = self._enclosed or any(
            function == name or (function.startswith(name) and name == self._buffer) for function in self.functions
        )
        if head is None or not known:
            return self._reject(0)
        return not head.partial and self._begin_calls()

    def parse_calls(self, text: str) -> tuple[Calls, int]:
        for level in range(3 if self._last else 1):
            try:
                return self._parse_call(text, level)
            except Unfinished:
                pass
        raise Unfinished

    def _parse_call(self, text: str, level: int) -> tuple[Calls, int]:
        """As ``parse_calls``, where a string ends at a tag before what may follow (``level`` 0, where its tags come in
        pairs, or 1) or at any tag (2)."""
        head = HEAD.match(text)
        if head is None:
            raise ValueError("the call does not begin")
        schema = self.functions.get(head[1]) or {}
        properties = properties_of(schema)
        values: dict[str, Any] = {}
        position = head.end()
        while parameter := PARAMETER.match(text, position):
            key = parameter[1].strip()
            permitted = alternatives(properties.get(key, {"type": "string"}), schema)
            values[key], position = self._value(text, parameter.end(), permitted, level)
        end = END.match(text, position)
        if end is None:
            raise Unfinished if not text[position:].strip() else ValueError("the call does not end")
        return [(head[1], as_text(values))], end.end()

    def _value(self, text: str, start: int, schemas: Sequence[Mapping[str, Any]], level: int) -> tuple[Any, int]:
        """Returns the value of the parameter that begins at ``start``, and where its closing tag ends."""
        if not any(schema.get("type") == "string" for schema in schemas):
            begins = len(text) - len(text[start:].lstrip())
            try:
                _, end = JSON.raw_decode(text, begins)
            except (ValueError, RecursionError):
                end = -1
            tag = ANY.match(text, len(text) - len(text[end:].lstrip())) if end >= 0 else None
            if tag is not None and self._ends(text, tag.end(), level):
                return typed(text[begins:end], schemas), tag.end()
        depth, framed = 0, text.startswith("\n", start)
        for tag in (ANY if level == 2 else LINE if framed and level == 0 else CLOSE).finditer(text, start):
            if level == 0 and tag[1]:
                depth += 1
            elif depth:
                depth -= 1
            elif self._ends(text, tag.end(), level):
                return typed(text[start : tag.start()].removeprefix("\n"), schemas), tag.end()
        raise Unfinished

    def _ends(self, text: str, position: int, level: int) -> bool:
        """Whether a parameter's closing tag may end at ``position``."""
        when = "" if not self._enclosed else "strict" if level == 0 else "last"
        return level == 2 or NEXT[when].match(text, position) is not None


class QwenRules(SpelledRules):
    """Rules of Qwen 3.5's parameters: a string stands as it is, anything else is JSON."""

    form = "Qwen 3.5"
    END = "\n</parameter>\n"
    NEVER = ("</parameter>", "<parameter=", CLOSING)

    def _pairs(self, schema: dict[str, Any], key_of: Callable[[str], str] | None = None) -> str:
        pairs = []
        for key, each, needed in self._properties(schema):
            if not re.fullmatch(r"[^>\s]+", key):
                raise self._refused(f"with a parameter called {json.dumps(key)}")
            opening = quoted(f"<parameter={key}>\n")
            pair = f"{opening} {self._value(each)}"
            pairs.append(pair if needed else f"({pair})?")
        return " ".join(pairs)

    def _value(self, schema: Any) -> str:
        """Returns the rule of a value and its tag. If strings are permitted, any number or list is read as one."""
        simple = alternatives(schema, self.schema)
        options = [
            quoted(self._checked(as_text(value)) + self.END) for one in simple for value in literals_of(one) or ()
        ]
        free = [one for one in simple if literals_of(one) is None]
        strings = [one for one in free if one.get("type", "string") == "string"]
        for one in strings:
            self._check(one, "type", "minLength", "maxLength", "pattern")
            options.append(self._terminal(f"{free_text(one, *self.NEVER)} {quoted(self.END)}"))
        definitions: dict[str, Any] = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        for one in free:
            if one.get("type") in ("boolean", "null") and not (strings and one["type"] == "boolean"):
                options.append(f"{self._node(one)} {quoted(self.END)}")
            elif not strings:
                options.append(f"{self._named({**definitions, **one})} {quoted(self.END)}")
        return either(options)

    def _checked(self, text: str) -> str:
        if any(tag in text for tag in self.NEVER):
            raise self._refused(f"with the value {json.dumps(text)[:60]}")
        return text


@formats.register("qwen3_coder")
class QwenFormat(ToolFormat):
    markers = (OPENING, CLOSING)
    in_template = re.compile(f"(?s){OPENING}.*{FUNCTION}")
    parser = QwenParser

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing = map(grammar.marker, self.markers)
        functions = grammar.functions(lambda name: quoted(f"\n{FUNCTION}{name}>\n"), QwenRules)
        end = quoted("</function>\n")
        return grammar.calls(f"{opening} {functions} {end} {closing}", quoted("\n"))


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    (simple, *_) = alternatives(schema, schema)
    properties = simple.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the schemas of a single type that a schema permits; {} stands for anything."""
    return _alternatives(schema, root, set()) or [{}]


def _alternatives(schema: Any, root: Mapping[str, Any], seen: set[str]) -> list[dict[str, Any]]:
    """As above, without references that were ``seen``: a second time they add nothing."""
    if not isinstance(schema, Mapping):
        return [{}]
    if isinstance(ref := schema.get("$ref"), str):
        if ref in seen:
            return []
        seen.add(ref)
        section, _, name = ref.removeprefix("#/").partition("/")
        definitions = root.get(section)
        return _alternatives(definitions.get(name) if isinstance(definitions, Mapping) else None, root, seen)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(each := schema.get(key), list) and (key != "allOf" or len(each) == 1):
            return [simple for one in each for simple in _alternatives(one, root, seen)]
    if isinstance(types := schema.get("type"), list):
        return of_each_type(dict(schema), types)
    return [dict(schema)]


def literals_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values of an enum or a constant; None if the schema is neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def typed(text: str, schemas: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the value of a parameter with these ``alternatives``: a string if one permits strings, else JSON."""
    for value in (value for schema in schemas for value in literals_of(schema) or ()):
        if text == as_text(value):
            return value
    types = [schema.get("type") for schema in schemas if literals_of(schema) is None]
    if "string" in types and not ("null" in types and text in ("null", "None")):
        return text
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
