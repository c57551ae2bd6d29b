"""Calls with random arguments, written as chat templates write them, are read again by value: whole and in pieces.

The writers follow the templates of Hermes 3, Llama 3.1, Qwen3-Coder, Gemma 4, Mistral Small and Nemo, Llama 4's guide,
LFM2.5 and gpt-oss. ``--full`` reads 1,120 answers in each format.
"""

import json
import random
import re

import pytest
from forms import FORMATS
from test_tools import told

TAGS = (
    "<tool_call>", "</tool_call>", "<function=run>", "</function>", "<parameter=a>", "</parameter>", "<|tool_call>",
    "<tool_call|>", "call:run{", "[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|python_start|>", "<|python_end|>", "<|python_tag|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>",
    "<|channel|>final", "\n</parameter>\n", "\n<parameter=b>\n", "\n</function>\n",
)  # fmt: skip
PARTS = (
    "'", '"', "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", ";", "\n", "\t", " ", "None", "null", "True", "['a']",
    "{x: 1}", "it's", 'say "hi"', "a, b", "C:\\new", "é", "漢字", "😀", "\u2028", "\x85", "```", "1e999", "x",
    "run",
)  # fmt: skip
NAMES = ("run", "get_weather", "a-b", "do.it", "wait")
KEYS = (
    "a", "text", "from", "class", "in", "None", "name", "arguments", "user-id", "a.b", "$top", "@type", "größe", "X1",
)  # fmt: skip
NUMBERS = (0, -1, 7, 2**53 + 1, -(2**63), 10**30, 0.5, -2.25, 1e22, 1e300, 5e-324, 1e-7, 123456789.125)
END = r"</parameter>\s*(?:<parameter=[^>\n]+>|</function>\s*(?:</?tool_call>|<function=))"
NEVER = (rf"\n{END}|\n<parameter=[^>\n]+>\n", rf"{END}|\n</parameter>")
"""Not in a text in Qwen's format, which has no quotes: an end of a call as templates write it, and lines that open and
close a parameter."""


class Arguments:
    """Random arguments, each with its schema, that the format called ``form`` can write."""

    def __init__(self, form, seed):
        self.form = form
        self.random = random.Random(f"{form} {seed}")
        self.never = self.random.choice(NEVER)

    def text(self):
        while True:
            parts = self.random.choices(TAGS, k=self.random.choice((0, 0, 1, 3)))
            parts += self.random.choices(PARTS, k=self.random.choice((0, 1, 3, 9, 30)))
            self.random.shuffle(parts)
            text = "".join(parts)
            if self.form != "qwen3_coder" or not re.search(self.never, f"\n{text}\n"):
                return text

    def key(self):
        """A key of an object, which may be any text; Gemma's stand without quotes."""
        if self.form == "gemma4":
            return self.random.choice(("a b", "http://x/y", "c'd", 'e"f', "größe", "1", "a.b-c", "None", "#"))
        return self.text()

    def value(self, depth=0):
        """(schema, value)"""
        kind = self.random.choice(("string", "string", "integer", "number", "boolean", "nothing", "array", "object"))
        if kind == "array" and depth < 3:
            return {"type": "array"}, [self.value(depth + 1)[1] for _ in range(self.random.randrange(4))]
        if kind == "object" and depth < 3:
            values = {self.key(): self.value(depth + 1)[1] for _ in range(self.random.randrange(4))}
            return {"type": "object"}, values
        if kind == "integer":
            return {"type": kind}, self.random.choice([each for each in NUMBERS if isinstance(each, int)])
        if kind == "number":
            return {"type": kind}, self.random.choice(NUMBERS)
        if kind == "boolean":
            return {"type": kind}, self.random.choice((True, False))
        if kind == "nothing":
            return {"anyOf": [{"type": "string"}, {"type": "null"}]}, None
        return {"type": "string"}, self.text()

    def calls(self):
        """(schemas by function, calls)"""
        names = self.random.sample(NAMES, k=self.random.choice((1, 1, 2, 3)))
        schemas, calls = {name: {} for name in NAMES}, []
        for name in names:
            keys = self.random.sample(KEYS, k=self.random.randrange(5))
            drawn = {key: self.value() for key in keys}
            schemas[name] = {"type": "object", "properties": {key: schema for key, (schema, _) in drawn.items()}}
            calls.append((name, {key: value for key, (_, value) in drawn.items()}))
        return schemas, calls

    def pieces(self, text):
        if self.random.random() < 0.1:
            return [*text, ""]
        cuts = sorted(self.random.sample(range(len(text)), k=min(len(text), self.random.choice((1, 4, 16)))))
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def by_gemma(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return "{" + ",".join(f"{key}:{by_gemma(each)}" for key, each in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(by_gemma, value)) + "]"
    return str(value)


def by_qwen(value):
    return dumps(value) if isinstance(value, (dict, list)) else str(value)


def by_lfm2(value):
    if isinstance(value, str):
        return repr(value) if re.search(r"['\\]", value) else f"'{value}'"
    return dumps(value) if isinstance(value, dict) else str(value)


def of_python(calls, write):
    written = (f"{name}({', '.join(f'{key}={write(each)}' for key, each in args.items())})" for name, args in calls)
    return f"[{', '.join(written)}]"


def of_qwen(calls):
    texts = []
    for name, args in calls:
        parameters = "".join(f"<parameter={key}>\n{by_qwen(each)}\n</parameter>\n" for key, each in args.items())
        texts.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(texts)


WRITERS = {
    "gemma4": lambda calls: "".join(f"<|tool_call>call:{name}{by_gemma(args)}<tool_call|>" for name, args in calls),
    "harmony": lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(args)}<|call|>"
        for name, args in calls
    ),
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{dumps({'name': name, 'arguments': args})}\n</tool_call>" for name, args in calls
    ),
    "lfm2": lambda calls: f"<|tool_call_start|>{of_python(calls, by_lfm2)}<|tool_call_end|>",
    "llama3": lambda calls: "; ".join(dumps({"name": name, "parameters": args}) for name, args in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(args)}" for name, args in calls),
    "mistral_list": lambda calls: (
        "[TOOL_CALLS]" + dumps([{"name": name, "arguments": args, "id": "abcdefghi"} for name, args in calls])
    ),
    "pythonic": lambda calls: of_python(calls, repr),
    "qwen3_coder": of_qwen,
}


def by_value(calls):
    """With values in JSON, whose keys are sorted."""
    return [(name, json.dumps(args, sort_keys=True)) for name, args in calls]


@pytest.mark.parametrize("format", FORMATS, ids=WRITERS)
def test_what_templates_write_is_read_again(format, request):
    form = list(WRITERS)[FORMATS.index(format)]
    for seed in range(1120 if request.config.getoption("--full") else 60):
        drawn = Arguments(form, seed)
        schemas, calls = drawn.calls()
        text = WRITERS[form](calls)
        for pieces in ([text], drawn.pieces(text)):
            content, made = told(format.parser(schemas), pieces)
            made = by_value((name, json.loads(arguments)) for name, arguments in made)
            assert (content, made) == ("", by_value(calls)), (seed, text, pieces)
