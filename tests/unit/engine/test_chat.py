"""``LLM.chat``: conversations through a template of the test's own, so that the prompt is known."""

import io
import json

import pytest

from forerun import SamplingParams
from forerun.core.errors import RequestError
from forerun.models.text.chat import conversations, render_chat
from forerun.models.text.tokenizer import load_tokenizer
from forerun.serve.tools import format_of, formats
from refusals import refused
from terminal import Terminal

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}/{% endfor %}"
    "{% if add_generation_prompt %}[{{ name or 'it' }}] {% endif %}"
)
FIRST = [{"role": "user", "content": "the cat"}]
LONGER = [*FIRST, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "and?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_a_conversation_is_answered_as_its_prompt_is(llm):
    model = llm()
    for messages, prompt in (
        (FIRST, "[user] the cat/[it] "),
        (LONGER, "[user] the cat/[assistant] sat/[user] and?/[it] "),
    ):
        answer = model.chat(messages, GREEDY, chat_template=TEMPLATE)
        expected = model.generate(prompt, GREEDY)
        assert len(answer) == 1
        assert answer[0].prompt == prompt
        assert answer[0].prompt_token_ids == expected[0].prompt_token_ids
        assert answer[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_several_conversations_have_options_one_by_one(llm):
    longer = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    answers = llm().chat([FIRST, LONGER], [GREEDY, longer], chat_template=TEMPLATE)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [3, 5]
    assert [answer.prompt.count("/") for answer in answers] == [1, 3]


def test_the_template_sees_its_variables_and_the_last_message_may_go_on(llm):
    def prompt(messages, **options):
        return llm().chat(messages, GREEDY, chat_template=TEMPLATE, **options)[0].prompt

    assert prompt(FIRST, chat_template_kwargs={"name": "she"}) == "[user] the cat/[she] "
    assert prompt(FIRST, add_generation_prompt=False) == "[user] the cat/"
    begun = [*FIRST, {"role": "assistant", "content": "it sat on"}]
    continued = prompt(begun, add_generation_prompt=False, continue_final_message=True)
    assert continued == "[user] the cat/[assistant] it sat on"


def test_the_models_own_template_is_the_default(llm, monkeypatch):
    model = llm()
    assert model.get_tokenizer() is model.tokenizer
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ messages[0].content }}!")
    assert model.chat(FIRST, GREEDY)[0].prompt == "the cat!"


def test_special_tokens_are_written_by_the_template_alone(llm, monkeypatch):
    model = llm()
    eos = model.tokenizer.eos_token
    given = model.chat(FIRST, GREEDY, chat_template=eos + "{{ messages[0].content }}")[0].prompt_token_ids
    assert given == [0, *model.tokenizer.encode("the cat")]


@pytest.mark.parametrize(("messages", "options", "message"), [
    (FIRST, {"chat_template": None}, "this model has no chat template: pass chat_template"),
    (FIRST, {"continue_final_message": True}, "set add_generation_prompt=False"),
    (FIRST, {"chat_template": "{{ raise_exception('no system here') }}"}, "refuses these messages: no system here"),
    (FIRST, {"chat_template": "{% for %}"}, "refuses these messages: "),
    (FIRST, {"chat_template": "{{ messages[0].content + 1 }}"}, "refuses these messages: "),
    (FIRST, {"chat_template": "{{ 1 / 0 }}"}, "refuses these messages: division by zero"),
    (FIRST, {"chat_template": "{{ messages[0].content.__class__.__mro__ }}"}, "refuses these messages: "),
    (FIRST, {"chat_template": ""}, "leaves out what message 0, of the role user, says"),
    (FIRST, {"chat_template_kwargs": 3}, "chat_template_kwargs is a mapping, not int"),
    (FIRST, {"chat_template_kwargs": {"messages": []}}, "messages is no variable of a template"),
    ("hello", {}, "messages are a list of mappings with role and content, not str"),
    (None, {}, "messages are a list of mappings with role and content, not NoneType"),
    ([], {}, "a conversation is a list of at least one message, not an empty list"),
    ([FIRST, []], {}, "a conversation is a list of at least one message, not an empty list"),
    (["hello"], {}, "a conversation is a list of at least one message, not str"),
    ([{"content": "x"}], {}, "a message is a mapping with role and content, not one with content"),
    ([{"role": 1, "content": "x"}], {}, "a message is a mapping with role and content"),
    ([FIRST, [5]], {}, "a message is a mapping with role and content, not int"),
])  # fmt: skip
def test_what_is_no_conversation_is_refused_in_one_line(llm, messages, options, message):
    refused(RequestError, message, llm().chat, messages, GREEDY, **{"chat_template": TEMPLATE, **options})
    assert not llm().engine.busy


@pytest.mark.parametrize(("stream", "use_tqdm", "shown"), [
    (Terminal, None, True), (io.StringIO, None, False), (io.StringIO, True, True), (Terminal, False, False),
])  # fmt: skip
def test_a_bar_counts_the_answers_where_somebody_looks(llm, monkeypatch, stream, use_tqdm, shown):
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    seen = []
    params = SamplingParams(temperature=0, max_tokens=3, n=2)
    answers = llm().chat([FIRST, LONGER], params, chat_template=TEMPLATE, use_tqdm=use_tqdm, on_update=seen.append)
    assert sum(len(update.tokens) for update in seen) == sum(len(one.token_ids) for a in answers for one in a.outputs)
    assert ("4/4" in written.getvalue()) == shown
    assert bool(written.getvalue()) == shown


QWEN = (  # the roles of Qwen 2.5's
    "{%- if messages[0]['role'] == 'system' %}{{ '[system] ' + messages[0]['content'] + '/' }}"
    "{%- else %}{{ '[system] You are helpful./' }}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or m.role == 'assistant' %}"
    "{{ '[' + m.role + '] ' + m.content + '/' }}{%- endif %}{%- endfor %}"
)
RULE, OTHER = ({"role": "developer", "content": text} for text in ("Say BANANA.", "Nothing else."))
SYSTEM = {"role": "system", "content": "Be kind."}


def rendered(messages, template=TEMPLATE, **options):
    tokenizer = load_tokenizer("forerun:target")
    return render_chat(tokenizer, messages, chat_template=template, add_generation_prompt=False, **options)


@pytest.mark.parametrize("template", [TEMPLATE, QWEN])
@pytest.mark.parametrize(("messages", "text"), [
    ([RULE, *FIRST], "Say BANANA."),
    ([RULE, OTHER, *FIRST], "Say BANANA.\n\nNothing else."),
    ([SYSTEM, RULE, *FIRST], "Be kind.\n\nSay BANANA."),
    ([SYSTEM, *FIRST, RULE], "Be kind.\n\nSay BANANA."),
])  # fmt: skip
def test_the_developer_is_the_system_where_a_template_does_not_know_the_role(template, messages, text):
    before = [dict(message) for message in messages]
    assert rendered(messages, template) == f"[system] {text}/[user] the cat/"
    assert messages == before


def test_a_template_that_knows_the_developer_gets_the_role():
    template = TEMPLATE + "{# developer #}"
    assert rendered([RULE, *FIRST], template) == "[developer] Say BANANA./[user] the cat/"


@pytest.mark.parametrize(
    ("left_out", "index", "template"),
    [
        ({"role": "critic", "content": "Too long."}, 1, QWEN),
        ({"role": "user", "content": [{"type": "text", "text": "seen?"}]}, 1, "{{ messages[0].content }}"),
        ({"role": "user", "content": "cat"}, 1, "{{ messages[0].content }}"),  # a part of the message before it
        (SYSTEM, 1, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"),
    ],
)
def test_what_a_template_leaves_out_is_an_error(left_out, index, template):
    with pytest.raises(
        RequestError, match=f"leaves out what message {index}, of the role {left_out['role']}"
    ) as caught:
        rendered([*FIRST, left_out], template)
    assert caught.value.param == f"messages.{index}.content"


def test_what_a_template_changes_is_not_left_out(caplog):
    turn = {"role": "assistant", "content": "<think>hm</think>\n\nit sat  "}
    for change in ("m.content.split('</think>')[-1]", "m.content | tojson", "m.content | trim | upper"):
        assert rendered([*FIRST, turn, *FIRST], "{% for m in messages %}{{ " + change + " }}/{% endfor %}")
    backwards = "{% for m in messages | reverse %}{{ m.content }}/{% endfor %}"
    assert rendered(LONGER, backwards) == "and?/sat/the cat/"
    assert not caplog.records


def test_words_beside_calls_that_a_template_leaves_out_are_logged(caplog):
    call = {"type": "function", "id": "a", "function": {"name": "look", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "I look it up.", "tool_calls": [call]}
    calls = "{% for m in messages %}{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}/{% endfor %}"
    assert rendered([*FIRST, turn], calls) == "the cat/look/"
    assert "message 1, of the role assistant, says beside its calls" in caplog.text


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_a_part_that_is_no_text_is_an_error(kind):
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {}}]
    with pytest.raises(RequestError, match=f"a message holds '{kind}': only texts are read"):
        rendered([{"role": "user", "content": parts}])


PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}/{% endfor %}"
KNOWING = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}[{{ m.role }}"
    "{{ ' ' + m.name if m.name }}] {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}/{% endfor %}"
)
ONE = SamplingParams(temperature=0, max_tokens=1)
ASK = {"role": "user", "content": "sum?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "\u00e9"]}'}}
CALLED = [ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]


def prompt(llm, messages, template, **options):
    return render_chat(llm().tokenizer, messages, chat_template=template, add_generation_prompt=False, **options)


def test_a_template_that_knows_tools_writes_them(llm):
    (answer,) = llm().chat([ASK], ONE, chat_template=KNOWING, tools=[ADD])
    assert answer.prompt == prompt(llm, [ASK], KNOWING, tools=[ADD]) == "(add)[user] sum?/"
    assert prompt(llm, CALLED, KNOWING) == '[user] sum?/[assistant] add={"a": [1, "\u00e9"]}/[tool add] 1/'


def test_any_other_template_has_them_in_words(llm):
    told = prompt(llm, [{"role": "system", "content": "Hi."}, ASK], PLAIN, tools=[ADD, ADD])
    assert told.startswith("[system] Hi.\n\n")
    assert told.endswith("/[user] sum?/")
    assert told.count(json.dumps(ADD["function"])) == 2
    assert prompt(llm, [ASK], PLAIN, tools=[]) == "[user] sum?/"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "\u00e9"]}}\n</tool_call>'
    answer = "<tool_response>\n1\n</tool_response>"
    assert prompt(llm, CALLED, PLAIN) == f"[user] sum?/[assistant] {call}/[user] {answer}/"
    said = {**CALLED[1], "content": "Let me see.", "tool_calls": [CALL, CALL]}
    both = [ASK, said, CALLED[2], {**CALLED[2], "content": "no"}, ASK]
    answers = f"{answer}\n{answer.replace('1', 'no')}"
    assert prompt(llm, both, PLAIN) == (
        f"[user] sum?/[assistant] Let me see.\n{call}\n{call}/[user] {answers}/[user] sum?/"
    )


def test_a_model_of_several_templates_uses_the_one_for_tools(llm, monkeypatch):
    monkeypatch.setattr(llm().tokenizer, "chat_template", {"default": PLAIN, "tool_use": KNOWING})
    assert prompt(llm, [ASK], None, tools=[ADD]) == "(add)[user] sum?/"
    assert prompt(llm, [ASK], None) == "[user] sum?/"


@pytest.mark.parametrize(("template", "form"), [
    (PLAIN, "hermes"),
    (KNOWING, "hermes"),
    ("{{ tools }} write <tool_call>{\"name\": n, \"parameters\": p}", "hermes"),
    ("{{ tools }} {{- 'Respond with {\"name\": function name, \"parameters\": dictionary}.' }}", "llama3"),
    ('{{ tools }} {{- "{\\"name\\": function name, \\"parameters\\": dictionary}." }}', "llama3"),
    ("{{ tools }} {{ '<|python_tag|>' }}", "llama3"),
    ("{\"name\": n, \"parameters\": p}", "hermes"),
])  # fmt: skip
def test_the_form_that_a_template_asks_for(llm, template, form):
    assert type(format_of(llm().tokenizer, template)) is formats[form]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "add"}, "tools are a list of mappings, not str"),
        ({"tools": [3]}, "a tool is a mapping with a function, which has a name"),
        ({"tools": [{"function": {"name": 3}}]}, "a tool is a mapping with a function, which has a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "a tool call is a mapping with a function"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "a tool call is a mapping with a function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 3}}]}]},
         "arguments: must be a JSON object, as text"),
        ({"messages": [{"role": "tool", "content": [1]}]}, "the content of a message of the role tool must be text"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused_in_one_line(llm, options, message):
    given = {"messages": [ASK], "tools": None, **options}
    refused(RequestError, message, prompt, llm, given["messages"], PLAIN, tools=given["tools"])


def test_an_assistants_message_may_have_no_content():
    """It has calls, or reasoning alone, or an answer that ended before it began."""
    for message in (CALLED[1], {"role": "assistant", "reasoning_content": "Hm."}, {"role": "assistant"}):
        assert conversations([ASK, message]) == [[ASK, message]]
    with pytest.raises(RequestError, match="a message is a mapping with role and content"):
        conversations([ASK, {"role": "user", "tool_calls": []}])
