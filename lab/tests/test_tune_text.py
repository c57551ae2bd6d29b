"""What a model writes to learn from."""

from itertools import islice
from types import SimpleNamespace

import pytest

from chat_model import save_chat_model
from forerun import LLM
from forerun.speculate.names import drafters
from forerun.tune.data import rendered
from forerun_lab.tune.data import Data, user_turns
from forerun_lab.tune.features import PLACEHOLDER, HiddenStateRecorder, Writer

SAID = [("stop", " What is rain? "), ("length", "And then the"), ("stop", "  "), ("stop", "Hello;")]


@pytest.fixture
def writer(tmp_path):
    with drafters.lent(HiddenStateRecorder.name, HiddenStateRecorder):
        llm = LLM(save_chat_model(tmp_path), speculative_config={"method": HiddenStateRecorder.name, "layers": [1]})
    record = llm.engine.router.drafters[HiddenStateRecorder.name]
    assert isinstance(record, HiddenStateRecorder)
    return Writer(llm, record, Data(), rows=10)


def asked(writer, monkeypatch):
    """The texts of each call's prompts while a part is written: openings are answered with ``SAID``, others with a
    word."""
    result = []

    def written(prompts, *_):
        result.append([writer.llm.tokenizer.decode(prompt) for prompt in prompts])
        said = SAID if len(result) == 1 else [("stop", "So.")] * len(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(finish_reason=a, text=b, token_ids=[2])]) for a, b in said]

    monkeypatch.setattr(writer, "_generate", written)
    writer.write_part(3, 0.0)
    return result


def test_half_of_the_conversations_begin_with_a_turn_of_the_models_own(writer, monkeypatch):
    openings, first, again = asked(writer, monkeypatch)
    assert [text.replace(" ", "") for text in openings] == ["u:"] * 4
    made = [turn for _, turn in islice(user_turns(3, []), 6)]
    expected = [writer.llm.tokenizer.decode(rendered(writer.llm, [{"role": "user", "content": t}])) for t in made]
    own = [text.replace(" ", "") for text in first[:2]]
    assert own == ["u:Whatisrain?;a:", "u:Hello;;a:"]
    assert first[2:] == expected
    assert len(again) == 2


def test_a_template_that_hides_what_is_said_gets_made_turns_alone(writer, monkeypatch):
    monkeypatch.setattr(writer.llm.tokenizer, "chat_template", "{{ messages[0].content | upper }};")
    first, _ = asked(writer, monkeypatch)
    assert len(first) == 8
    assert not any(PLACEHOLDER.upper() in text for text in first)
