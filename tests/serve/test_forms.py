"""Calls in every form of a model: what the grammar permits is what the form's parser reads, and what transformers
reads. Every answer that may be forced is a valid call, with thoughts before it where the form has some."""

import copy
import json
import random

import jsonschema_rs
import numpy as np
import pytest
from forms import FORMATS, GEMMA, HARMONY, HERMES, LFM2, LLAMA, MISTRAL, MISTRAL_LIST, PYTHONIC, QWEN
from running import run_server
from test_reasoning import ANSWER, THINK, one
from test_reasoning import thinking as thinking_llm  # noqa: F401
from test_tools import calls_of, read, together
from transformers import AddedToken
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as TEMPLATES
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.content_parsers import parse_content

from forerun import RequestError, SamplingParams
from forerun.core.request import RequestState
from forerun.engine.grammar import GrammarCompiler
from forerun.serve.app import ServerOptions
from forerun.serve.schema import ChatRequest
from forerun.serve.tools import tool_grammar
from refusals import refused

NAMED = {form: type(form).__name__.removesuffix("Format").lower() for form in FORMATS}
Q = '<|"|>'
ORDER = {
    "type": "object",
    "properties": {
        "what": {"type": "string", "minLength": 1, "maxLength": 12},
        "code": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"},
        "size": {"enum": ["small", "large", 7]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "price": {"type": "number"},
        "gift": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        "to": {"$ref": "#/$defs/place"},
    },
    "required": ["what", "count", "gift", "to"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 6}, "flat": {"type": ["integer", "null"]}},
            "required": ["flat"],
            "additionalProperties": False,
        }
    },
}
WIDE = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 2**60, "maximum": 2**61}},
    "required": ["id"],
}
LOOSE = {"type": "object", "properties": {"value": {}, "map": {"type": "object"}}, "required": ["map"]}
SCHEMAS = {"order": ORDER, "wide_one": WIDE, "loose": LOOSE, "stop": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
HEAD = "<|channel|>commentary to=functions."


def body(**options):
    given = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required", **options}
    return ChatRequest.model_validate(given)


@pytest.fixture(scope="module")
def tokenizer(served):
    """The bundled tokenizer and every marker as a special token."""
    result = copy.deepcopy(served.tokenizer)
    marks = sorted({mark for form in FORMATS for mark in form.markers})
    result.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    return result


def grammars(tokenizer, form, special, **options):
    """Makes constraints at the beginning of one grammar."""
    known = dict(zip(form.markers, tokenizer.convert_tokens_to_ids(list(form.markers)))) if special else {}
    shape = tool_grammar(body(**options), form, known)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return lambda: compiler.start(shape)


@pytest.fixture(scope="module")
def closing(tokenizer):
    """By token: whether it may end a text."""
    ends = ('"', "<", "}", "]", ")", ",")
    result = np.array([tokenizer.decode([token])[:1] in ends for token in range(len(tokenizer))])
    result[tokenizer.eos_token_id] = True
    return result


def walk(grammar, tokenizer, closing, seed, longest=500):
    """A random answer that the grammar permits, in favour of what ends texts; None: it has not ended."""
    drawn = random.Random(seed)
    sequence = RequestState(0, [5], 1, SamplingParams(), 0)
    while len(sequence.tokens) < longest:
        mask = grammar.allowed(sequence, [])
        allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(closing)].astype(bool)
        assert allowed.any()
        ending = allowed & closing
        (choices,) = np.nonzero(ending if ending.any() and drawn.random() < 0.4 else allowed)
        token = int(drawn.choice(choices))
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(sequence.tokens[1:])
        sequence.tokens.append(token)
    return None


def finite(text):
    return max(-1e308, min(1e308, float(text)))


def calls_in(form, text):
    """What the form's parser reads, whole and letter by letter."""
    whole = read(form.parser(SCHEMAS, calls_only=True), [text])
    assert read(form.parser(SCHEMAS, calls_only=True), [*text, ""]) == whole
    return [(name, json.loads(arguments, parse_float=finite)) for name, arguments in whole[2]]


def by_transformers(form, text):
    """What transformers reads; None: it has nothing for the form."""
    if form in (PYTHONIC, LFM2):
        inner = text.removeprefix(LFM2.markers[0]).removesuffix(LFM2.markers[1])
        try:
            return [(call["name"], call["arguments"]) for call in parse_content(inner, "python-call-list", {})]
        except ValueError as error:
            if "integer outside the range" in str(error):  # it refuses those beyond 2^53
                return None
            raise
    kind = {GEMMA: "gemma4", HERMES: "qwen3"}.get(form)
    if kind is None:
        return None
    template = next(template for kinds, template in TEMPLATES.items() if kind in kinds)
    message = parse_response(text, template, prefix="")
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.parametrize("special", [True, False], ids=["special", "spelled"])
@pytest.mark.parametrize("form", FORMATS, ids=NAMED.get)
def test_what_may_be_forced_is_read_as_valid_calls(tokenizer, closing, form, special):
    ended, seen, thoughts = 0, set(), 0
    start = grammars(tokenizer, form, special)
    for seed in range(16):
        text = walk(start(), tokenizer, closing, seed)
        if text is None:
            continue
        ended += 1
        calls = calls_in(form, text)
        thoughts += text.count("analysis")
        assert calls, text
        for name, arguments in calls:
            seen.add(name)
            jsonschema_rs.validator_for(SCHEMAS[name]).validate(arguments)
        theirs = by_transformers(form, text)
        assert theirs is None or theirs == calls, text
    assert ended >= 8
    assert len(seen) >= 3
    assert thoughts == 0 or form is HARMONY
    assert thoughts > 0 or form is not HARMONY or not special


# As the templates of Qwen3.5-4B, gemma-4-31B-it, LFM2.5-8B-A1B, Ministral 3, gpt-oss-120b and Llama 4's guide have it.
WRITTEN_BY_QWEN = (
    "<tool_call>\n<function=order>\n<parameter=what>\nx\n</parameter>\n<parameter=count>\n2\n</parameter>\n"
    '<parameter=gift>\nTrue\n</parameter>\n<parameter=note>\nNone\n</parameter>\n<parameter=to>\n{"flat": 1}\n'
    "</parameter>\n</function>\n</tool_call>"
)
WRITTEN = [
    (
        QWEN,
        '<tool_call>\n<function=loose>\n<parameter=map>\n{"a": [1, null]}\n</parameter>\n</function>\n</tool_call>',
        [("loose", {"map": {"a": [1, None]}})],
    ),
    (
        QWEN,
        "<tool_call>\n<function=order>\n<parameter=what>\n12\n</parameter>\n<parameter=size>\n7\n</parameter>\n"
        "<parameter=count>\n2\n</parameter>\n<parameter=gift>\ntrue\n</parameter>\n<parameter=note>\na\n\nb\n</parameter>\n"
        '<parameter=to>\n{"flat": null}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        [
            ("order", {"what": "12", "size": 7, "count": 2, "gift": True, "note": "a\n\nb", "to": {"flat": None}}),
            ("stop", {}),
        ],
    ),
    (
        QWEN,
        '<tool_call>\n<function=loose>\n<parameter=map>\n{"a": ["x</parameter>y", "<parameter=b>"]}\n</parameter>\n'
        "</function>\n</tool_call>",
        [("loose", {"map": {"a": ["x</parameter>y", "<parameter=b>"]}})],
    ),
    (
        GEMMA,
        f"<|tool_call>call:order{{count:2,gift:false,tags:[{Q}a,]{Q}],to:{{flat:3,street:{Q}{Q}}},what:{Q}1}}{Q}}}<tool_call|>"
        "<|tool_call>call:stop{}<tool_call|>",
        [
            ("order", {"count": 2, "gift": False, "tags": ["a,]"], "to": {"flat": 3, "street": ""}, "what": "1}"}),
            ("stop", {}),
        ],
    ),
    (
        PYTHONIC,
        '[order(what="a)", count=1, gift=True, to={"flat": None}), stop()]',
        [("order", {"what": "a)", "count": 1, "gift": True, "to": {"flat": None}}), ("stop", {})],
    ),
    (
        LFM2,
        '<|tool_call_start|>[loose(map={"a": [1.5, "b"]})]<|tool_call_end|>',
        [("loose", {"map": {"a": [1.5, "b"]}})],
    ),
    (QWEN, WRITTEN_BY_QWEN, [("order", {"what": "x", "count": 2, "gift": True, "note": None, "to": {"flat": 1}})]),
    (
        LFM2,
        "<|tool_call_start|>[order(what='a b', count=1, gift=False, to={\"flat\": null})]<|tool_call_end|>",
        [("order", {"what": "a b", "count": 1, "gift": False, "to": {"flat": None}})],
    ),
    (MISTRAL, "[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{}", [("stop", {})]),
    (
        MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "stop", "arguments": {}, "id": "abcdefghi"}, {"name": "loose", "arguments": '
        '{"map": {}}}]',
        [("stop", {}), ("loose", {"map": {}})],
    ),
    (MISTRAL, '[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]loose[ARGS]{"map": {}}', [("stop", {}), ("loose", {"map": {}})]),
    (HARMONY, HEAD + 'loose <|constrain|>json<|message|>{"map": {}}', [("loose", {"map": {}})]),
    (HARMONY, " to=functions.stop<|channel|>commentary json<|message|>{}", [("stop", {})]),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + HEAD + "stop<|message|>{}",
        [("stop", {})],
    ),
]
NOT_PERMITTED = [
    (QWEN, "<tool_call>\n<function=order>\n<parameter=what>\n</parameter>\n"),
    (QWEN, "<tool_call>\n<function=order>\n<parameter=count>\n2\n</parameter>\n"),
    (QWEN, "<tool_call>\n<function=other>"),
    (GEMMA, "<|tool_call>call:order{what:"),
    (GEMMA, f"<|tool_call>call:loose{{map:{{a:{Q}b"  + "<tool_call|>"),
    (PYTHONIC, "[order(what=3"), (PYTHONIC, "[order(count=1"), (PYTHONIC, "stop()"), (LFM2, "[stop()]"),
    (HARMONY, "<|channel|>final<|message|>"), (HARMONY, HEAD + "other<|message|>"),
]  # fmt: skip


def taken(tokenizer, grammar, text):
    """Whether the grammar permits every token of a text, and the end behind it."""
    sequence = RequestState(0, [5], 1, SamplingParams(), 0)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for count, token in enumerate([*ids, tokenizer.eos_token_id]):
        mask = grammar.allowed(sequence, ids[:count])
        if mask is None or not int(mask[token // 32]) >> (token % 32) & 1:
            return False, token != tokenizer.eos_token_id
    return True, False


@pytest.mark.parametrize(("form", "text", "calls"), WRITTEN, ids=range(len(WRITTEN)))
def test_what_templates_write_may_be_forced_and_is_read(tokenizer, form, text, calls):
    assert taken(tokenizer, grammars(tokenizer, form, True)(), text) == (True, False)
    assert calls_in(form, text) == calls


@pytest.mark.parametrize(("form", "text"), NOT_PERMITTED, ids=range(len(NOT_PERMITTED)))
def test_what_is_no_such_call_may_not_be_forced(tokenizer, form, text):
    assert taken(tokenizer, grammars(tokenizer, form, True)(), text) == (False, True)


def test_thoughts_of_gpt_oss_belong_to_the_grammar_of_its_calls(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["analysis", "final"])
    marks = dict(zip(HARMONY.markers, tokenizer.convert_tokens_to_ids(list(HARMONY.markers))))
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id], reasoning_parser="openai_gptoss")
    schema = {"type": "json_schema", "json_schema": {"name": "ok", "schema": {"const": "yes"}}}
    thought = "<|channel|>analysis<|message|>Hm. {<|end|><|start|>assistant"
    forced, free = (
        tool_grammar(body(**more), HARMONY, marks) for more in ({}, {"tool_choice": "auto", "response_format": schema})
    )
    for before in ("", thought):
        for shape in (forced, free):
            assert taken(tokenizer, compiler.start(shape), f"{before}{HEAD}stop<|message|>{{}}") == (True, False)
        said = f'{before}<|channel|>final<|message|>"yes"'
        assert taken(tokenizer, compiler.start(free), said) == (True, False)
        assert taken(tokenizer, compiler.start(forced), said) == (False, True)
    assert taken(tokenizer, compiler.start(forced), thought[:-30])[0] is False


WRONG = [
    (PYTHONIC, "a-b", {"properties": {"a b": {}}, "required": ["a b"]}, 'with a parameter called "a b"'),
    (PYTHONIC, "1a", {}, "of the function 1a"),
    (GEMMA, "f", {"properties": {"a b": {"type": "string"}}}, 'with a parameter called "a b"'),
    (GEMMA, "f", {"properties": {"a": {"type": "string", "contentEncoding": "base64"}}}, "beside contentEncoding"),
    (GEMMA, "f", {"properties": {"a": {"const": Q}}}, "with the value"),
    (QWEN, "f", {"properties": {"a": {"enum": ["</parameter>"]}}}, "with the value"),
    (QWEN, "f", {"properties": {"a": {"not": {}}}}, "beside not"),
    (QWEN, "f", {"properties": {}, "required": ["a"]}, "beside required properties without a schema"),
    (LFM2, "f", {"additionalProperties": {"type": "string"}}, "with parameters that have no names"),
    (LFM2, "f", {"properties": {"a": {"$ref": "#/$defs/none"}}}, "none of the root's $defs"),
    (GEMMA, "f", {"properties": {"a": {"$ref": {}}}}, "none of the root's $defs"),
    (QWEN, "f", {"$ref": {}}, "beside $ref"),
    *[
        (form, "f", {"properties": {"a": {"items": {"oneOf": choices}, "type": "array"}}}, "with a oneOf of which two")
        for form in (GEMMA, QWEN, PYTHONIC, LFM2)
        for choices in ([{"type": "integer"}, {"type": "number"}], [{"enum": [1, "a"]}, {"const": "a"}])
    ],
]


@pytest.mark.parametrize(("form", "name", "schema", "message"), WRONG, ids=range(len(WRONG)))
def test_schemas_that_a_form_cannot_write_are_refused_by_name(form, name, schema, message):
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
    error = refused(RequestError, None, tool_grammar, body(tools=tools), form)
    assert message in str(error)
    assert error.param == "tools"


APART = {
    "properties": {
        "a": {"oneOf": [{"$ref": "#/$defs/b"}, {"type": "boolean"}]},
        "c": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "$defs": {"b": {"type": "object", "properties": {"d": {"oneOf": [{"const": "x"}, {"const": "y"}]}}}},
}


@pytest.mark.parametrize("form", [QWEN, GEMMA, PYTHONIC], ids=NAMED.get)
def test_one_of_is_kept_where_no_value_meets_two(tokenizer, closing, form):
    tools = [{"type": "function", "function": {"name": "f", "parameters": APART}}]
    start = grammars(tokenizer, form, True, tools=tools)
    texts = [text for seed in range(8) if (text := walk(start(), tokenizer, closing, seed)) is not None]
    assert texts
    for text in texts:
        for _, arguments in read(form.parser({"f": APART}, calls_only=True), [text])[2]:
            jsonschema_rs.validator_for(APART).validate(json.loads(arguments, parse_float=finite))


@pytest.mark.parametrize("form", [QWEN, GEMMA, PYTHONIC], ids=NAMED.get)
def test_references_are_followed_once(tokenizer, form):
    """Those that double at each of 24 steps, and those in a circle; and many parameters make no large grammar."""
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(24)}
    home = {**doubled, "d24": {"type": "string"}, "ring": {"$ref": "#/$defs/ring"}}
    wide = {f"p{index}": {"type": "string", "maxLength": 50} for index in range(40)}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}, "b": {"$ref": "#/$defs/ring"}, **wide}, "$defs": home}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in "fg"]
    shape = tool_grammar(body(tools=tools), form)
    GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).start(shape)
    assert read(
        form.parser({"f": schema}), ["<tool_call><function=f><parameter=a>3</parameter></function></tool_call>"]
    )


TOLD = {
    QWEN: "<tool_call><function=", GEMMA: "<|tool_call>", MISTRAL: "[TOOL_CALLS][ARGS]",
    MISTRAL_LIST: "[TOOL_CALLS]", HARMONY: "<|channel|>", HERMES: "<tool_call>",
    LFM2: "<|tool_call_start|>", PYTHONIC: "[func_name1(name=value)]", LLAMA: '"name": n, "parameters": p',
}  # fmt: skip


SAID = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"


def template(form):
    return f"{{# {TOLD[form]} #}}{{% for t in tools or [] %}}{{{{ t.function.name }}}} {{% endfor %}}{SAID}<assistant>"


@pytest.mark.parametrize("form", FORMATS, ids=NAMED.get)
def test_a_server_forces_calls_in_the_form_of_its_template(served, form):
    with run_server(served, ServerOptions(served_model_name="tiny", chat_template=template(form))) as server:
        for choice, parallel in (("required", True), ({"type": "function", "function": {"name": "order"}}, False)):
            asked = {
                "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice, "seed": 3,
                "max_tokens": 300, "parallel_tool_calls": parallel, "temperature": 0.7,
            }  # fmt: skip
            answers = []
            for method, stream in (({"enabled": False}, False), ({"method": "draft_model"}, True)):
                answer = server.post("/v1/chat/completions", {**asked, "speculative": method, "stream": stream})
                assert answer.status_code == 200, answer.text
                one = together(answer.text) if stream else answer.json()["choices"][0]
                answers.append((one["finish_reason"], calls_of(one), one["message"]["content"] or ""))
            assert answers == answers[:1] * 2
            finish, calls, content = answers[0]
            assert content == ""
            if finish == "tool_calls":
                assert calls
                assert parallel or [name for name, _ in calls] == ["order"]
                for name, arguments in calls:
                    jsonschema_rs.validator_for(SCHEMAS[name]).validate(json.loads(arguments, parse_float=finite))


@pytest.mark.parametrize("form", [QWEN, GEMMA, PYTHONIC, MISTRAL], ids=NAMED.get)
def test_calls_are_forced_behind_thoughts(thinking_llm, form):  # noqa: F811
    bias = {str(one(thinking_llm, ANSWER)): 9.0, str(one(thinking_llm, THINK)): 9.0}
    thoughts = 0
    with run_server(thinking_llm, ServerOptions(served_model_name="tiny", chat_template=template(form))) as server:
        for seed in range(6):
            asked = {
                "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS[-1:], "tool_choice": "required",
                "seed": seed, "max_tokens": 120, "parallel_tool_calls": False, "logit_bias": bias,
            }  # fmt: skip
            message = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]
            events = server.post("/v1/chat/completions", {**asked, "stream": True}).text.splitlines()
            deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in events if line.startswith("data: {")]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (
                message["reasoning_content"] or ""
            )
            called = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
            if called:
                assert [call["function"]["name"] for call in message["tool_calls"]] == ["stop"]
                assert (called[0]["name"], "".join(call["arguments"] for call in called)) == ("stop", "{}")
                thoughts += bool(message["reasoning_content"])
    assert thoughts
