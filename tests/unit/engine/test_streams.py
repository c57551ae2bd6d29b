"""``stream`` and ``chat_stream`` of ``LLM`` and ``AsyncLLM``, and how outputs show themselves."""

import asyncio
import copy
import pickle
import re
from contextlib import aclosing
from dataclasses import replace
from html import unescape

import pytest

from forerun import LLM, AsyncLLM, BeamSearchParams, ConfigError, RequestError, SamplingParams
from refusals import refused

PROMPT = [5, 6, 7, 8, 5, 6, 7]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=5)
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}the "


@pytest.fixture(scope="module")
def options(tiny_target, tiny_draft):
    config = {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 3, "length": "fixed"}
    return {"model": tiny_target, "speculative_config": config, "trace": True}


@pytest.fixture(scope="module")
def llm(options):
    return LLM(**options)


def check(got, expected):
    """The pieces are the answer ``expected``, token by token."""
    answer = expected.outputs[0]
    assert [token for piece in got for token in piece.token_ids] == answer.token_ids
    assert "".join(piece.text for piece in got) == answer.text
    origins = [origin for round_ in answer.trace for origin in round_.origins]
    assert [piece.drafted for piece in got if piece.token_ids] == [origin == "accepted" for origin in origins]
    assert [piece.output is None for piece in got] == [True] * (len(got) - 1) + [False]
    last = got[-1].output
    assert (last.outputs[0].text, last.outputs[0].token_ids) == (answer.text, answer.token_ids)
    assert last.metrics.num_accepted_draft_tokens == expected.metrics.num_accepted_draft_tokens > 0


def test_a_stream_is_the_answer_token_by_token(llm):
    (expected,) = llm.generate(PROMPT, PARAMS)
    check(list(llm.stream(PROMPT, PARAMS)), expected)
    assert expected.outputs[0].drafted.count(True) == expected.metrics.num_accepted_draft_tokens
    stopped = replace(PARAMS, stop=expected.outputs[0].text[9:11])
    (expected,) = llm.generate(PROMPT, stopped)
    assert expected.outputs[0].finish_reason == "stop"
    check(list(llm.stream(PROMPT, stopped)), expected)
    line = {"prompt": "the 12", "stop_at": "line"}
    (expected,) = llm.generate(line, PARAMS)
    assert "".join(piece.text for piece in llm.stream(line, PARAMS)) == expected.outputs[0].text
    assert not any(piece.drafted for piece in llm.stream(PROMPT, PARAMS, speculate=False))


def test_conversations_are_streamed(llm):
    (expected,) = llm.chat(MESSAGES, PARAMS, chat_template=TEMPLATE)
    got = list(llm.chat_stream(MESSAGES, PARAMS, chat_template=TEMPLATE))
    check(got, expected)
    assert got[-1].output.prompt == expected.prompt == "hi the "


def test_a_stream_that_is_left_ends_its_request(llm):
    for _ in llm.stream(PROMPT, PARAMS):
        refused(ConfigError, "close its stream first", llm.generate, PROMPT, PARAMS)
        refused(ConfigError, "close its stream first", next, llm.stream(PROMPT, PARAMS))
        break
    assert not llm.engine.jobs
    llm.engine.check()
    assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    refused(RequestError, "set n to 1", next, llm.stream(PROMPT, SamplingParams(n=2)))
    refused(RequestError, "takes SamplingParams", next, llm.stream(PROMPT, [PARAMS]))
    assert not llm.engine.jobs


def test_an_async_llm_answers_many_at_once(llm, options):
    prompts = [PROMPT, [9, 8, 7, 9, 8]]
    expected = llm.generate(prompts, PARAMS)
    (chatted,) = llm.chat(MESSAGES, PARAMS, chat_template=TEMPLATE)

    async def collect(stream):
        return [piece async for piece in stream]

    async def ask():
        async with AsyncLLM(**options) as other:
            assert repr(other) == f"AsyncLLM({options['model']!r}, drafts: draft_model)"
            assert other.get_default_sampling_params() == SamplingParams()
            assert other.get_tokenizer().vocab_size == other._llm.get_tokenizer().vocab_size
            results = await asyncio.gather(
                other.generate(prompts, PARAMS),
                collect(other.stream(prompts[0], PARAMS)),
                collect(other.stream(prompts[1], PARAMS)),
                other.chat(MESSAGES, PARAMS, chat_template=TEMPLATE),
                collect(other.chat_stream(MESSAGES, PARAMS, chat_template=TEMPLATE)),
            )
            long = SamplingParams(max_tokens=200, ignore_eos=True)
            async with aclosing(other.stream(PROMPT, long)) as stream:
                async for _ in stream:
                    break
            assert not other._engine.streams
            with pytest.raises(RequestError, match="vocabulary"):
                await other.generate([PROMPT, [10**6]], PARAMS)
            with pytest.raises(RequestError, match="set n to 1"):
                await anext(other.stream(PROMPT, SamplingParams(n=2)))
            assert (await other.beam_search(PROMPT, BEAMS))[0].sequences == llm.beam_search(PROMPT, BEAMS)[0].sequences
            return results

    whole, first, second, chat, chat_pieces = asyncio.run(ask())
    assert [each.outputs[0].token_ids for each in whole] == [each.outputs[0].token_ids for each in expected]
    check(first, expected[0])
    check(second, expected[1])
    assert chat[0].outputs[0].text == chatted.outputs[0].text
    check(chat_pieces, chatted)


def test_the_more_urgent_of_waiting_requests_goes_first(options):
    async def ended():
        async with AsyncLLM(**options, max_num_seqs=1) as llm:
            results = await asyncio.gather(*(llm.generate(PROMPT, PARAMS, priority=[-rank]) for rank in range(4)))
            return [output.metrics.end for (output,) in results]

    _, *ends = asyncio.run(ended())
    assert ends == sorted(ends, reverse=True)  # the first may have begun


def test_an_async_llm_queues_what_it_is_given(options):
    async def ask():
        async with AsyncLLM(options["model"], speculative_config=None) as llm:
            return await llm.generate([PROMPT] * 1400, SamplingParams(max_tokens=1))

    assert len(asyncio.run(ask())) == 1400


def test_outputs_show_themselves_in_short(llm, options):
    assert repr(llm) == f"LLM({options['model']!r}, drafts: draft_model)"
    (output,) = llm.generate({"prompt": "the 12 <b>", "prompt_token_ids": PROMPT}, PARAMS)
    assert repr(output).startswith("RequestOutput('the 12 <b>', [CompletionOutput('")
    assert len(repr(output)) < 400
    with LLM(options["model"], speculative_config=None) as other:
        assert repr(other) == f"LLM({options['model']!r}, drafts: none)"
    assert repr(other) == "LLM(closed)"


def test_a_notebook_shows_accepted_tokens_marked(llm):
    seen = ""
    for seed in range(12):
        (output,) = llm.generate(PROMPT, replace(PARAMS, seed=seed, temperature=1.5))
        answer, shown = output.outputs[0], output._repr_html_()
        body, line = re.fullmatch(r"<pre [^>]*>(.*)</pre><small>([^<]*)</small>", shown, re.DOTALL).groups()
        assert unescape(re.sub("</?mark>", "", body)) == answer.text
        assert not re.search(r"<(?!/?mark>)|&(?!(lt|gt|amp|quot|#x27);)", body)
        marked = len(unescape("".join(re.findall("<mark>(.*?)</mark>", body, re.DOTALL))))
        texts = [llm.get_tokenizer().decode([token], skip_special_tokens=True) for token in answer.token_ids]
        assert marked == sum(len(text) for text, drafted in zip(texts, answer.drafted) if drafted)
        assert f"{output.metrics.num_accepted_draft_tokens} of {output.metrics.num_draft_tokens} drafted" in line
        seen += body
        for copied in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
            assert copied == output
    outputs = llm.generate([PROMPT] * 21, SamplingParams(max_tokens=1))
    assert outputs._repr_html_() == "<hr>".join([*(each._repr_html_() for each in outputs[:20]), "21 outputs"])
    assert "<mark>" in seen
    assert "&lt;" in seen
