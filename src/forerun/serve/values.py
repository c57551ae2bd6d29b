"""Arguments of calls as models write them that do not write JSON: read as what they mean."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from forerun.engine.schemas import of_each_type

GEMMA_QUOTE = '<|"|>'
GEMMA_KEY = re.compile(r"[^\s:{}\[\],]+")
GEMMA_NAMED = re.compile(r"([{,]\s*)(" + GEMMA_KEY.pattern + r")\s*(?=:)")
GEMMA_NONE = re.compile(r"([\[:,]\s*)None(?=\s*[,}\]])")
GEMMA_LAST = re.compile(r"([^\s\[{]\s*|^\s*),(?=\s*[}\]])")
"""A comma behind a value, and nothing behind it."""
CONSTANTS = {"true": True, "false": False, "null": None}


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    (simple, *_) = alternatives(schema, schema) or [{}]
    properties = simple.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of one type each that a schema consists of; {} stands for anything."""
    return _alternatives(schema, root, set()) or [{}]


def _alternatives(schema: Any, root: Mapping[str, Any], seen: set[str]) -> list[dict[str, Any]]:
    """Those of references that were not ``seen``: a second time they add nothing."""
    if not isinstance(schema, Mapping):
        return [{}]
    if isinstance(ref := schema.get("$ref"), str):
        if ref in seen:
            return []
        seen.add(ref)
        home, _, name = ref.removeprefix("#/").partition("/")
        defined = root.get(home)
        return _alternatives(defined.get(name) if isinstance(defined, Mapping) else None, root, seen)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(each := schema.get(key), list) and (key != "allOf" or len(each) == 1):
            return [simple for one in each for simple in _alternatives(one, root, seen)]
    if isinstance(kinds := schema.get("type"), list):
        return of_each_type(dict(schema), kinds)
    return [dict(schema)]


def literals_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of an enum or a constant."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def written(value: Any) -> str:
    """A value as it stands in a parameter."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of a parameter, which is a text if its ``schema`` permits that."""
    simple = alternatives(schema, root)
    for value in (value for one in simple for value in literals_of(one) or ()):
        if text == written(value):
            return value
    kinds = [one.get("type") for one in simple if literals_of(one) is None]
    if "string" in kinds and not ("null" in kinds and text in ("null", "None")):
        return text
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def loads(text: str) -> Any:
    """A JSON value. Numbers beyond float64 are its largest: JSON has no infinity."""
    return json.loads(text, parse_constant=_refused, parse_float=lambda number: _finite(float(number)))


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, number))


def gemma_value(text: str) -> Any:
    """The value that ``text`` is in Gemma 4's form, made JSON before it is read. Raises ValueError where it is none,
    RecursionError where it is too deep."""
    parts = text.split(GEMMA_QUOTE)
    if len(parts) % 2 == 0:
        raise ValueError("a text does not end")
    for index, part in enumerate(parts):
        if index % 2:  # a text between quotes
            parts[index] = json.dumps(part)
        else:
            part = GEMMA_NAMED.sub(lambda found: found[1] + json.dumps(found[2]), part)
            parts[index] = GEMMA_LAST.sub(r"\1", GEMMA_NONE.sub(r"\1null", part))
    return loads("".join(parts))


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """The calls in a list of Python's, whose arguments are named literals; None: it is something else."""
    calls = []
    try:
        tree = ast.parse(text, mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else ():
            name = ""
            if isinstance(call, ast.BinOp) and isinstance(call.op, ast.Sub):  # a name with hyphens
                name, call = f"{ast.unparse(call.left)}-".replace(" - ", "-"), call.right
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                return None
            values = {keyword.arg: ast.literal_eval(Constants().visit(keyword.value)) for keyword in call.keywords}
            text = json.dumps(values, ensure_ascii=False, allow_nan=False)
            text.encode()  # half a character is no text
            calls.append((name + ast.unparse(call.func), text))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


class Constants(ast.NodeTransformer):
    """JSON's constants as Python's, and numbers that JSON has."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(_finite(node.value)) if isinstance(node.value, float) else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node
