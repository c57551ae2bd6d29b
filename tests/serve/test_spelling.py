"""Texts that a tokenizer does not spell by itself: added tokens as text, and what a normalizer changes."""

import copy
import json

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken

from forerun import LLM, SamplingParams, StructuredOutputsParams
from forerun.core.request import RequestState
from forerun.engine.grammar import GrammarCompiler
from forerun.models.chat import CallForm
from forerun.serve.schema import ChatRequest
from forerun.serve.tools import required_shape
from gguf_files import write_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPOKEN = ["<tool_call>", "<think>", "[MARK]"]
TOKENS = [*SPECIAL, *SPOKEN, *sorted(ByteLevel.alphabet()), "th", "Ã©"]
TEXTS = [*SPECIAL, *SPOKEN, "re\u0301sume\u0301", "\u1112\u1161\u11ab", "\u212b", "<|im_<|im_end|>end|>", "\u00e9"]
WAYS = [None, "ngram", "draft_model", "pattern"]


def shapes(text):
    """Structured outputs that need the text, and every answer that meets them."""
    schema = {
        "type": "object",
        "properties": {text: {"const": text}},
        "required": [text],
        "additionalProperties": False,
    }
    return [
        ({"choice": [f"a{text}b"]}, [f"a{text}b"]),
        ({"choice": [f"a{text}b", f"a{text}c", "b"]}, [f"a{text}b", f"a{text}c", "b"]),
        ({"json": {"enum": [text, f"{text}!"]}}, [json.dumps(end, ensure_ascii=False) for end in (text, f"{text}!")]),
        ({"json": schema}, [json.dumps({text: text}, ensure_ascii=False)]),
    ]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A random model whose tokenizer is like Qwen's: NFC, added tokens special and not. A draft model's trees."""
    kinds = [3] * len(SPECIAL) + [4] * len(SPOKEN) + [1] * (len(TOKENS) - len(SPECIAL) - len(SPOKEN))
    vocabulary = {"pre": "qwen2", "tokens": TOKENS, "token_type": kinds, "merges": ["t h", "Ã ©"], "eos_token_id": 2}
    changes = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()} | {"llama.context_length": 512}
    path = tmp_path_factory.mktemp("spelled") / "model.gguf"
    path = str(write_model(path, changes, extra={"token_embd.weight": (len(TOKENS), 32)}))
    drafters = [
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "draft_model", "model": path, "tree": [3, 2, 1]},
        {"method": "pattern"},
    ]
    return LLM(path, speculative_config=drafters, max_num_seqs=4)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_must_come_comes_whatever_drafts(llm, text, temperature):
    for expected, good in shapes(text):
        params = SamplingParams(
            temperature=temperature, seed=3, max_tokens=80, skip_special_tokens=False, structured_outputs=expected
        )
        answers = []
        for method in WAYS:
            prompt = llm.tokenizer.encode("the text: ")
            (job,) = llm.engine.add(prompt, params, speculate=method is not None, method=method)
            while llm.engine.busy:
                llm.engine.step()
            answers.append((job.text, job.output_ids, job.finish.reason))
        assert answers == answers[:1] * len(WAYS)
        assert answers[0][0] in good
        assert answers[0][2] == "stop"


@pytest.mark.parametrize("committed", [1, 3, 5])
def test_a_committed_token_that_is_not_permitted_is_an_error_at_once(llm, committed):
    """An answer that goes on behind tokens which its grammar does not permit, as after another replica's loss."""
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["abcd"]})
    x = llm.tokenizer.encode("x")
    (job,) = llm.engine.add([5], params, committed=[*llm.tokenizer.encode("abcd")[: committed - 1], *x])
    while llm.engine.busy:
        llm.engine.step()
    assert job.finish.reason == "error"
    assert str(job.finish.stopped_by).startswith("the grammar: ")
    assert len(job.output_ids) == committed


@pytest.mark.parametrize("several", [False, True])
def test_markers_of_calls_are_the_special_tokens_that_they_are_called(llm, several):
    tool = {"type": "function", "function": {"name": "stop", "parameters": {"properties": {}}}}
    given = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "parallel_tool_calls": several}
    body = ChatRequest.model_validate({**given, "tool_choice": "required"})
    markers = ["<tool_call>", "</tool_call>"]
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in markers], special_tokens=True)
    begin, end = tokenizer.convert_tokens_to_ids(markers)
    eos = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [eos])
    for special in (markers, []):
        shape = required_shape(body, CallForm.HERMES, frozenset(special))
        assert isinstance(shape, StructuredOutputsParams)
        forced = compiler.start(shape).forced(RequestState(0, [5], 1, SamplingParams(), 0), 200)
        assert tokenizer.decode(forced).startswith('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
        assert (forced[0] == begin, end in forced) == (bool(special), bool(special))
        assert (forced[-1] == eos) == (not several)


@pytest.mark.parametrize("least", [6, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_ends_where_the_grammar_does(llm, least, temperature):
    """As long as the grammar permits more, the end is banned; behind its last text nothing else may come."""
    for expected, longest in (({"choice": ["yes", "no"]}, 3), ({"regex": "a{1,9}"}, 9), ({"json": {"const": True}}, 4)):
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=30, min_tokens=least, structured_outputs=expected
        )
        answers = []
        for method in WAYS:
            (job,) = llm.engine.add([5], params, speculate=method is not None, method=method)
            while llm.engine.busy:
                llm.engine.step()
            answers.append((job.text, job.output_ids, job.finish.reason))
        assert answers == answers[:1] * len(WAYS)
        text, _, reason = answers[0]
        assert reason == "stop"
        assert len(text) >= min(least, longest) or text == "no"
