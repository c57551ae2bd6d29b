"""Thoughts before an answer: grammars that begin behind them, and texts told apart, whole and in pieces."""

import json
import re
import sys

import pytest
from forms import FORMATS, GEMMA, HARMONY, HERMES, MISTRAL, PYTHONIC, QWEN
from hypothesis import given, settings
from hypothesis import strategies as st
from running import TEMPLATE, run_server
from test_tools import CASES, FENCED, NAMES, read, told

from forerun import LLM, ConfigError, SamplingParams, StructuredOutputsParams
from forerun.core.request import RequestState
from forerun.models.text.reasoning import PARSERS, Boundary, Markers
from forerun.serve.app import ServerOptions
from forerun.serve.reasoning import ReasoningParser
from forerun.serve.tools.base import ToolParser

CHAT = "/v1/chat/completions"
THINK, ANSWER = "def", "return"
"""Single tokens of the bundled tokenizer, which stand for the markers of a model that thinks."""
CHOICES = ["yes", "no"]
LISTED = "message.output_text.logprobs"
DRAFTERS = [{"method": "draft_model", "num_speculative_tokens": 3}, {"method": "pattern"}]


@pytest.fixture(scope="module")
def thinking(model_folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(PARSERS, "tiny", Markers(THINK, ANSWER))
        yield LLM(str(model_folder), speculative_config=DRAFTERS[1], page_size=16, reasoning_parser="tiny")


@pytest.fixture(scope="module")
def server(thinking):
    with run_server(thinking, ServerOptions(served_model_name="tiny", chat_template=TEMPLATE)) as running:
        yield running


def one(llm, text):
    (token,) = llm.tokenizer.encode(text, add_special_tokens=False)
    return token


def permitted(llm, output, path, prompt, *, tentative=0):
    """The tokens that a new constraint permits."""
    constraint = llm.engine.grammars.start(StructuredOutputsParams(choice=CHOICES))
    sequence = RequestState(0, [*prompt, *output], len(prompt), SamplingParams(), 0)
    sequence.tentative = tentative
    mask = constraint.allowed(sequence, path)
    assert mask is not None
    return {i for i in range(32 * len(mask)) if int(mask[i // 32]) >> (i % 32) & 1}


def test_a_grammar_begins_behind_the_thoughts(thinking):
    think, end = one(thinking, THINK), one(thinking, ANSWER)
    prompt, text = thinking.tokenizer.encode("x = "), thinking.tokenizer.encode("a b c", add_special_tokens=False)
    first = permitted(thinking, [], [], [*prompt, think, end])
    """The prompt has closed the thoughts, so that the grammar stands at its beginning."""
    eos = set(thinking.model.info.eos_ids)
    free = set(range(32 * -(-thinking.model.info.vocab_size // 32))) - eos
    assert first < free
    assert one(thinking, "yes") in first or one(thinking, "y") in first
    assert permitted(thinking, [], [], prompt) == first | {think}
    assert permitted(thinking, [], [], [*prompt, think]) == free
    assert permitted(thinking, [think], [], prompt) == free
    assert permitted(thinking, [], [think], prompt) == free
    assert permitted(thinking, [think, *text], [], prompt) == free
    for cut in range(len(text) + 3):  # committed, tentative or drafted: it is the same
        output = [think, *text, end]
        assert permitted(thinking, output[:cut], output[cut:], prompt) == first
        assert permitted(thinking, output, [], prompt, tentative=len(output) - cut) == first
    yes = thinking.tokenizer.encode("yes", add_special_tokens=False)
    assert permitted(thinking, [think, end], yes, prompt) == eos
    assert permitted(thinking, yes, [], prompt) == eos
    assert permitted(thinking, [think, *yes, end, *yes], [], prompt) == eos


@pytest.mark.parametrize("drafter", DRAFTERS, ids=["draft_model", "pattern"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing_about_thoughts_or_answer(thinking, model_folder, drafter, temperature):
    bias = {one(thinking, ANSWER): 6.0, one(thinking, THINK): 6.0}
    shape = StructuredOutputsParams(choice=CHOICES)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=60, structured_outputs=shape, logit_bias=bias)
        for seed in range(6)
    ]
    prompts = ["def f(", "import ", "x", "class A", "while", "if x"]
    plain = thinking.generate(prompts, params, speculate=False)
    more = {"model": str(model_folder)} if drafter["method"] == "draft_model" else {}
    llm = LLM(str(model_folder), speculative_config={**drafter, **more}, page_size=16, reasoning_parser="tiny")
    drafted = llm.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    ended = [out.outputs[0].text for out in plain if out.outputs[0].finish_reason == "stop"]
    assert ended
    assert all(text.rpartition(ANSWER)[2] in CHOICES for text in ended)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_and_its_thoughts_come_apart(server, thinking, stream):
    bias = {str(one(thinking, ANSWER)): 9.0, str(one(thinking, THINK)): 9.0}
    seen = 0
    for seed in range(8):
        body = {
            "messages": [{"role": "user", "content": "hi"}], "seed": seed, "max_tokens": 40, "stream": stream,
            "structured_outputs": {"choice": CHOICES}, "logit_bias": bias,
        }  # fmt: skip
        prompt = server.post("/tokenize", {"messages": body["messages"]}).json()["tokens"]
        rest = {name: body[name] for name in ("seed", "max_tokens", "structured_outputs", "logit_bias")}
        raw = server.post("/v1/completions", {"prompt": prompt, "logprobs": 0, **rest}).json()["choices"][0]
        text, tokens = raw["text"], raw["logprobs"]["tokens"]
        answer = server.post(CHAT, body)
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            deltas = [event["choices"][0]["delta"] for event in events]
            thoughts, content = ("".join(d.get(k, "") for d in deltas) for k in ("reasoning_content", "content"))
        else:
            message = answer.json()["choices"][0]["message"]
            thoughts, content = message["reasoning_content"] or "", message["content"] or ""
            ends = tokens.index(ANSWER) + 1 if ANSWER in tokens else len(tokens)
            details = answer.json()["usage"]["completion_tokens_details"]
            assert details == {"reasoning_tokens": ends if tokens[0] == THINK else 0}
        begun, marker, after = text.removeprefix(THINK).partition(ANSWER)
        assert (thoughts, content) == ((begun, after) if text.startswith(THINK) else ("", text))
        seen += bool(marker)
    assert seen


def test_responses_have_an_item_of_thoughts(server, thinking):
    bias = {str(one(thinking, ANSWER)): 8.0, str(one(thinking, THINK)): 11.0}
    body = {"input": "hi", "seed": 3, "max_output_tokens": 40, "logit_bias": bias}
    answer = server.post("/v1/responses", body).json()
    assert [item["type"] for item in answer["output"]][:1] == ["reasoning"]
    assert 1 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= answer["usage"]["output_tokens"]
    again = server.post("/v1/responses", {**body, "previous_response_id": answer["id"], "stream": True})
    assert again.status_code == 200
    events = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: ")]
    said = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    (item,) = [item for item in events[-1]["response"]["output"] if item["type"] == "reasoning"]
    assert item["content"] == [{"type": "reasoning_text", "text": said}]


def test_log_probabilities_of_a_response_are_its_texts(server, thinking):
    bias = {str(one(thinking, ANSWER)): 8.0, str(one(thinking, THINK)): 9.0, str(thinking.tokenizer.eos_token_id): 4.0}
    seen = set()
    for seed in range(8):
        body = {"input": "hi", "seed": seed, "max_output_tokens": 40, "logit_bias": bias, "include": [LISTED]}
        whole = server.post("/v1/responses", body).json()
        again = server.post("/v1/responses", {**body, "stream": True}).text
        events = [json.loads(line[6:]) for line in again.splitlines() if line.startswith("data: ")]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        said = [token for event in deltas for token in event["logprobs"]]
        for answer in (whole, events[-1]["response"]):
            kinds = {item["type"]: item["content"][0] for item in answer["output"]}
            part = kinds.get("message", {"text": "", "logprobs": []})
            assert said == part["logprobs"]
            listed = "".join(token["token"] for token in said)
            assert listed in (part["text"], part["text"] + thinking.tokenizer.eos_token)
            seen |= {len(kinds), listed == part["text"]}
    assert seen == {True, False, 2}


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ("<|channel|>analysis<|message|>so it is<|end|><|start|>assistant<|channel|>final<|message|>yes", "<|end|>"),
        ("<|channel|>analysis<|message|>so it is<|end|><|start|>assistant<|channel|>commentary to=f", "<|end|>"),
        ("<|channel|>analysis<|message|>so it", "it"),
        ("<|channel|>final<|message|>yes", None),
        ("", None),
    ],
)
def test_the_thoughts_of_gpt_oss_end_with_their_message(answer, count):
    words = re.findall(r"<\|\w+\|>|\w+|\W", answer)

    class Words:
        """A tokenizer of words and markers."""

        @staticmethod
        def encode(text, add_special_tokens):
            return re.findall(r"<\|\w+\|>|\w+|\W", text)

        decode = "".join

    expected = 0 if count is None else words.index(count) + 1
    assert Boundary(Words, "openai_gptoss").num_thoughts(["<|start|>", "assistant"], words) == expected


def test_a_tokenizer_without_the_markers_is_refused(model_folder):
    llm = LLM(str(model_folder), speculative_config=None, reasoning_parser="deepseek_r1")
    shape = StructuredOutputsParams(choice=CHOICES)
    with pytest.raises(ConfigError, match="needs a tokenizer in which '<think>' is 1 token"):
        llm.generate(["x"], SamplingParams(structured_outputs=shape))
    with pytest.raises(ConfigError, match="reasoning_parser is one of deepseek_r1, qwen3"):
        LLM(str(model_folder), reasoning_parser="nobody")


class Spelled:
    """A tokenizer of single letters and gpt-oss's special tokens."""

    PIECES = ("<|channel|>", "<|message|>", "final", "analysis", "<think>", "</think>")

    def encode(self, text, **_):
        ids = []
        while text:
            piece = next((p for p in self.PIECES if text.startswith(p)), text[0])
            ids.append(self.PIECES.index(piece) if piece in self.PIECES else 100 + ord(piece))
            text = text.removeprefix(piece)
        return ids

    def decode(self, ids):
        return "".join(self.PIECES[i] if i < 100 else chr(i - 100) for i in ids)


@pytest.mark.parametrize(
    ("name", "prompt", "opened"),
    [
        ("qwen3", "hi", None), ("qwen3", "a</think>b", None), ("qwen3", "a<think>\n", True),
        ("qwen3", "<think>a", None),
        ("qwen3", "<think>\n\n</think>\n\n", False), ("deepseek_r1", "hi", True), ("deepseek_r1", "</think>\n", False),
        ("openai_gptoss", "assistant", True), ("openai_gptoss", "<|channel|>final<|message|>", False),
    ],
)  # fmt: skip
def test_a_prompt_says_whether_thoughts_are_open(name, prompt, opened):
    spelled = Spelled()
    boundary = Boundary(spelled, name)
    assert boundary.opened(spelled.encode(prompt)) is opened
    ids = spelled.encode(f"abc{PARSERS[name].end}de")
    assert boundary.ends_at(ids) == len(ids) - 2
    assert boundary.ends_at(ids, len(ids) - 2) is None


TAGGED = [
    (None, "<think>a</think>b", "a", "b"),
    (None, "a</think>b", "", "a</think>b"),
    (None, "<thin", "", "<thin"),
    (None, "", "", ""),
    (None, "<think>a</thin", "a</thin", ""),
    (True, "a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (True, "<think>a < b</think>\n\nb", "a < b", "\n\nb"),
    (True, "never ends", "never ends", ""),
    (False, "<think>a</think>b", "", "<think>a</think>b"),
]
MESSAGES = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.", "Hm.", "Hi.", []),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
     '<|constrain|>json<|message|>{"a": 1}<|call|>', "Hm.", "", [("add", '{"a": 1}')]),
    (' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": {}}', "", "", [("add", '{"a": {}}')]),
    ("<|channel|>commentary<|message|>Let me see.<|end|>", "", "Let me see.", []),
    ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", "", "{}", []),
    ("plain text", "", "plain text", []),
    ("<|channel|>final<|message|>a <| b", "", "a <| b", []),
    ("<|channel|>ana", "", "", []),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.ad", "Hm.", "", []),
    (" to=functions.add", "", "", []),
    ("<|channel|>final<|message|>Hi.<|end|><|start|>", "", "Hi.", []),
    ("a", "", "a", []),
    ('<|channel|>commentary to=functions.add<|message|>{"a": "<|call|>{<|end|>\\""}<|call|>', "", "",
     [("add", '{"a": "<|call|>{<|end|>\\""}')]),
]  # fmt: skip


@pytest.mark.parametrize(("opened", "text", "thoughts", "content"), TAGGED)
def test_thoughts_between_tags(opened, text, thoughts, content):
    for pieces in ([text], [*text, ""]):
        assert read(ReasoningParser(PARSERS["qwen3"], opened, None), pieces) == (thoughts, content, [])
        assert read(ReasoningParser(PARSERS["qwen3"], opened, ToolParser({"add": {}})), pieces) == (
            thoughts,
            content,
            [],
        )


def test_a_label_is_no_thought_and_calls_come_behind_thoughts():
    text = "<|channel>thought\nHm.<channel|><|tool_call>call:add{a:1}<tool_call|>"
    for pieces in ([text], [*text, ""]):
        parser = GEMMA.parser({"add": {}})
        assert read(ReasoningParser(PARSERS["gemma4"], None, parser), pieces) == ("Hm.", "", [("add", '{"a": 1}')])


@pytest.mark.parametrize(("text", "thoughts", "content", "calls"), MESSAGES)
def test_messages_of_gpt_oss(text, thoughts, content, calls):
    for pieces in ([text], [*text, ""]):
        assert read(HARMONY.parser({"add": {}}), pieces) == (thoughts, content, calls)


Q = '<|"|>'
QUOTED = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
LARGEST = sys.float_info.max
SCHEMAS = {
    "add": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": ["array", "null"]}}},
    "get_weather": {},
}
CALLED = [
    (QWEN, "So:\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=s>\n4\n</parameter>\n"
     "<parameter=l>\n[1, \"x\"]\n</parameter>\n</function>\n</tool_call>", "So:",
     [("add", {"a": 3, "s": "4", "l": [1, "x"]})]),
    (QWEN, "<tool_call><function=get_weather></function></tool_call>\n<tool_call><function=add>"
     "<parameter=s>a\nb < c</parameter></function></tool_call>", "", [("get_weather", {}), ("add", {"s": "a\nb < c"})]),
    (QWEN, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", [("add", {"a": 1})]),
    (QWEN, "<tool_call><function=add><parameter=a>3", "<tool_call><function=add><parameter=a>3", []),
    (QWEN, "<tool_call><function=add>none</function></tool_call>",
     "<tool_call><function=add>none</function></tool_call>", []),
    (GEMMA, f"Well. <|tool_call>call:add{{a:3,s:{Q}x, y}}{Q},l:[1,{{b:true}},null,{Q}{Q}]}}<tool_call|>",
     "Well.", [("add", {"a": 3, "s": "x, y}", "l": [1, {"b": True}, None, ""]})]),
    (GEMMA, "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{ a : -1.5 }<tool_call|>", "",
     [("f", {}), ("g", {"a": -1.5})]),
    (QWEN, "So:\n<function=add>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>", "So:",
     [("add", {"s": "x"})]),
    (QWEN, "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\nDone.", "Done.", [("add", {"a": 1})]),
    (QWEN, "<function=add>\n</function>\n<function=get_weather>\n</function>", "", [("add", {}), ("get_weather", {})]),
    (QWEN, "Use <function=add> or <function=b>\n</function>.", "Use <function=add> or <function=b>\n</function>.", []),
    (QWEN, f"<tool_call>\n<function=add>\n<parameter=s>\nAs in\n{QUOTED}\n\n</parameter>\n</function>\n</tool_call>\n"
     f"{QUOTED}", "", [("add", {"s": f"As in\n{QUOTED}\n"}), ("add", {"a": 3})]),
    (QWEN, "<tool_call>\n<function=add>\n<parameter=s>\nx</parameter></function></tool_call>\n</parameter>\n"
     "</function>\n</tool_call>", "", [("add", {"s": "x</parameter></function></tool_call>"})]),
    (QWEN, f"<tool_call><function=add><parameter=s>\nx</parameter></function></tool_call>{QUOTED}", "",
     [("add", {"s": "x"}), ("add", {"a": 3})]),
    (QWEN, "<tool_call>\n<function=add>\n<parameter=s>\nx\n<parameter=a>\n1\n</function>\n</tool_call>", "",
     [("add", {"s": "x", "a": 1})]),
    (QWEN, "<tool_call>\n<function=add>\n<parameter=a>\n1e999\n</parameter>\n</function>", "",
     [("add", {"a": LARGEST})]),
    (GEMMA, '<|tool_call>call:add{"a":1,"s":"it\'s None, [\'a\'] and {x: 1}, a: \\"b\\"",l:["x",]}<tool_call|>', "",
     [("add", {"a": 1, "s": "it's None, ['a'] and {x: 1}, a: \"b\"", "l": ["x"]})]),
    (GEMMA, f"<|tool_call>call:add{{s:{Q}a<tool_call|>b{Q},l:[None,1e999]}}<tool_call|>", "",
     [("add", {"s": "a<tool_call|>b", "l": [None, LARGEST]})]),
    (GEMMA, f"<|tool_call>call:f{{{Q}a b{Q}:{Q}c{Q},http://x:{{d e:1}}}}<tool_call|>", "",
     [("f", {"a b": "c", "http://x": {"d e": 1}})]),
    (HERMES, '<tool_call>{"arguments": {"a": 1e999, "s": "\\ud800"}, "name": "add"}</tool_call>', "",
     [("add", {"a": LARGEST, "s": "\ud800"})]),
    (HERMES, '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>',
     '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', []),
    (GEMMA, "<|tool_call>call:f{a<tool_call|> x", "<|tool_call>call:f{a<tool_call|> x", []),
    (GEMMA, "<|tool_call>call:f{a:1", "<|tool_call>call:f{a:1", []),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]f{"c": 1}', "",
     [("add", {"a": {"b": "}"}}), ("f", {"c": 1})]),
    (MISTRAL, 'Hm [TOOL_CALLS]add[CALL_ID]abc12[ARGS]{}', "Hm", [("add", {})]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]', "",
     [("add", {"a": 1}), ("f", {})]),
    (MISTRAL, "[TOOL_CALLS]what is this?", "[TOOL_CALLS]what is this?", []),
    (PYTHONIC, "[add(a=3, s='x)]', l=[1, {'b': True}]), get_weather()]", "",
     [("add", {"a": 3, "s": "x)]", "l": [1, {"b": True}]}), ("get_weather", {})]),
    (PYTHONIC, '<|python_start|>[add(s="\\"q\\"", a=None)]<|python_end|>', "",
     [("add", {"s": '"q"', "a": None})]),
    (PYTHONIC, "[add(a=1e999, s='it's, [1]' 'x', l=(8, -2.5,), from=r'\\d'), "
     "get_weather(a=(1), in=\"\"\"a\n'b'\"\"\")]", "",
     [("add", {"a": LARGEST, "s": "it's, [1]x", "l": [8, -2.5], "from": "\\d"}),
      ("get_weather", {"a": 1, "in": "a\n'b'"})]),
    (PYTHONIC, "[add(s='\\ud83d\\ude00 \\x41\\'\\/')]", "", [("add", {"s": "\U0001f600 A'/"})]),
    (PYTHONIC, "[add(s='\\ud83d')]", "[add(s='\\ud83d')]", []),
    (PYTHONIC, "[1, 2, 3]", "[1, 2, 3]", []),
    (PYTHONIC, "[other(a=1)]", "[other(a=1)]", []),
    (PYTHONIC, "[add(a=open('x'))]", "[add(a=open('x'))]", []),
    (PYTHONIC, "[add(a=1", "[add(a=1", []),
    (HERMES, "[add(a=1)]", "[add(a=1)]", []),
    (HERMES, "[TOOL_CALLS]add[ARGS]{}", "[TOOL_CALLS]add[ARGS]{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLED, ids=range(len(CALLED)))
def test_calls_in_other_forms(form, text, content, calls):
    for pieces in ([text], [*text, ""]):
        said, made = told(form.parser(SCHEMAS), pieces)
        assert (said, [(name, json.loads(arguments)) for name, arguments in made]) == (content, calls)


WORDS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "<|tool_call>",
     "<tool_call|>", "call:add{", "a:", Q, "[TOOL_CALLS]", "[ARGS]", "add", "{", "}", "[", "]", "(", ")", "a=", "1",
     ",", " ", "\n", '"', "'", "<|python_start|>", "<|python_end|>", "x", "<think>", "</think>", "<|channel|>analysis",
     "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.add", "<|python_tag|>", "\\", ";", ": ", "<", "Ada",
     '{"name": "add", "arguments": ', '{"name": "add', '"parameters": {"a": [1]}', '{"type": "function", ',
     '"name": "add"', "```", "```json\n"]
)  # fmt: skip
TEXTS = [*(case[1] for case in (*CALLED, *TAGGED)), *(case[0] for case in (*MESSAGES, *CASES, *FENCED))]


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(st.one_of(st.lists(WORDS, max_size=12).map("".join), st.sampled_from(TEXTS)), st.data())
def test_cuts_change_nothing(text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    for form in FORMATS:

        def parser(form=form):
            return form.parser(SCHEMAS)

        assert read(parser(), pieces) == read(parser(), [text])
        for opened in (None, True) if form is not HARMONY else ():
            whole = read(ReasoningParser(PARSERS["qwen3"], opened, parser()), [text])
            assert read(ReasoningParser(PARSERS["qwen3"], opened, parser()), pieces) == whole
    for fenced in (False, True):
        whole = told(ToolParser(NAMES, fenced=fenced), [text])
        assert told(ToolParser(NAMES, fenced=fenced), pieces) == whole
        assert told(ToolParser(NAMES, parallel=False, fenced=fenced), pieces)[1] == whole[1][:1]
