"""``LLM.chat``: conversations through a template of the test's own, so that the prompt is known."""

from __future__ import annotations

import io

import pytest

from forerun import SamplingParams
from forerun.core.errors import ForerunError, RequestError

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
        wanted = model.generate(prompt, GREEDY)
        assert len(answer) == 1
        assert answer[0].prompt == prompt
        assert answer[0].prompt_token_ids == wanted[0].prompt_token_ids
        assert answer[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids


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


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (FIRST, {"chat_template": None}, "this model has no chat template: give chat_template"),
        (FIRST, {"continue_final_message": True}, "set add_generation_prompt=False"),
        (FIRST, {"chat_template": "{{ raise_exception('no system here') }}"}, "refuses these messages: no system here"),
        (FIRST, {"chat_template": "{% for %}"}, "refuses these messages: "),
        (FIRST, {"chat_template": "{{ messages[0].content + 1 }}"}, "refuses these messages: "),
        (FIRST, {"chat_template": "{{ 1 / 0 }}"}, "refuses these messages: division by zero"),
        (FIRST, {"chat_template": "{{ messages[0].content.__class__.__mro__ }}"}, "refuses these messages: "),
        (FIRST, {"chat_template": ""}, "leaves out what message 0, of the role user, says"),
        ("hello", {}, "messages are a list of mappings with role and content, not str"),
        (None, {}, "messages are a list of mappings with role and content, not NoneType"),
        ([], {}, "a conversation is a list of at least one message, not an empty list"),
        ([FIRST, []], {}, "a conversation is a list of at least one message, not an empty list"),
        (["hello"], {}, "a conversation is a list of at least one message, not str"),
        ([{"content": "x"}], {}, "a message is a mapping with role and content, not one with content"),
        ([{"role": 1, "content": "x"}], {}, "a message is a mapping with role and content"),
        ([FIRST, [5]], {}, "a message is a mapping with role and content, not int"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(llm, messages, options, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm().chat(messages, GREEDY, **{"chat_template": TEMPLATE, **options})
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ForerunError)
    assert not llm().engine.busy


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
