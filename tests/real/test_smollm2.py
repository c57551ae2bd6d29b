"""SmolLM2-135M-Instruct as ``forerun fetch smollm2`` brings it."""

import json

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.cli.main import run
from forerun.engine import tuned
from forerun.engine.client import EngineFacts
from forerun.models.files.open import Checkpoint
from forerun.models.run.hf import read_module
from forerun.models.text.tokenizer import load_tokenizer
from forerun.serve.schema import ChatRequest
from forerun.serve.tools import formats, tool_grammar
from forerun.serve.tools.base import ToolParser

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CAPITAL = [{"role": "user", "content": "What is the capital of Japan?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
PLACE = {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}}
PARAMETERS = {"type": "object", "properties": PLACE, "required": ["city", "unit"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
LIST = [{"role": "user", "content": "Count from one to ten, twice."}]
TEXTS = [
    "", " ", "\n\n\t ", "Hello, World!", "it's 2024, 1234567 times", "résumé e\u0301", "нещо на Български", "កាន់តែពិសេស",
    "🚀 (normal) 😶‍🌫️ (joined)", "def f(x):\n    return x ** 2\n",
    "<|im_start|>user\nhi<|im_end|>\n", "\u00a0\u2003x", "\r\n\r\n",
]  # fmt: skip


def test_every_text_comes_back_from_its_tokens(smollm2):
    tokenizer = load_tokenizer("smollm2")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_digits_stand_alone_and_control_tokens_are_one(smollm2):
    """As the model was trained: a year is four tokens, and a turn's end is the token that ends texts."""
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer.tokenize("In 2024, x") == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġx"]
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("hi<|im_end|>")[-1] == 2
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


def test_the_template_writes_the_conversation(smollm2):
    text = load_tokenizer("smollm2").apply_chat_template(CAPITAL, tokenize=False, add_generation_prompt=True)
    question = f"<|im_start|>user\n{CAPITAL[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{question}"


def test_it_knows_the_capital_of_japan_and_stops(assistant):
    """Nearest rival of any token: a logit less by 1, so that no way of rounding changes the answer."""
    answer = assistant.chat(CAPITAL, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert answer.text == "The capital of Japan is Tokyo."
    assert answer.finish_reason == "stop"
    assert assistant.model.info.eos_ids == {0, 2}
    assert EngineFacts.of(assistant.engine).quantization == "Q4_1 and Q8_0"


def test_it_calls_a_tool_where_it_must_and_says_what_came_of_it(assistant):
    body = ChatRequest.model_validate({"messages": WEATHER, "tools": [TOOL], "tool_choice": "required",
                                       "parallel_tool_calls": False})  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=tool_grammar(body, formats["hermes"]()))
    for speculate in (True, False):
        answer = assistant.chat(WEATHER, params, tools=[TOOL], speculate=speculate)[0].outputs[0]
        parser = ToolParser({"weather": {}})
        parser.push(answer.text, last=True)
        (call,) = parser.calls
        assert json.loads(call.arguments) == {"city": "Paris", "unit": "celsius"}
        assert answer.finish_reason == "stop"
    made = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'}
    turns = [*WEATHER, {"role": "assistant", "content": None, "tool_calls": [made]}, result]
    said = assistant.chat(turns, SamplingParams(temperature=0, max_tokens=40), tools=[TOOL])[0].outputs[0].text
    assert "21" in said


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_seed_gives_the_same_tokens_with_and_without_drafts(assistant, temperature):
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=32)
    drafted = assistant.chat([CAPITAL, LIST], params)
    plain = assistant.chat([CAPITAL, LIST], params, speculate=False)
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    assert sum(out.metrics.num_draft_tokens for out in drafted) > 0
    assert sum(out.metrics.num_draft_tokens for out in plain) == 0


def test_log_probabilities_are_transformers_own(smollm2):
    ids = load_tokenizer("smollm2").apply_chat_template(CAPITAL, add_generation_prompt=True, return_dict=False)
    model = read_module(Checkpoint.at(smollm2), torch.float32, attention=None)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    del model
    llm = LLM("smollm2", quantization="float32", max_model_len=256)
    assert llm.model.info.path.startswith("native")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    answer = llm.generate({"prompt_token_ids": ids}, params)[0]
    assert answer.outputs[0].token_ids == [expected[-1].argmax().item()]
    prompt = zip(ids[1:], (answer.prompt_logprobs or [])[1:], strict=True)
    result = [entry[token].logprob for token, entry in prompt]
    truth = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.tensor(result) == pytest.approx(truth, abs=2e-3)


def test_the_command_line_knows_it_by_name(smollm2, capsys):
    options = ["--model", "smollm2", "--max-tokens", "2", "--max-model-len", "64", "--json"]
    assert run(["generate", "The capital of France is", *options]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == " Paris."


def test_the_tuned_folder_that_comes_along_drafts_and_changes_no_token(smollm2):
    """The head was made for these very weights. As far as it pays depends on the hour; a fixed length does not."""
    llm = LLM("smollm2", speculative_config={**tuned.load(True, "smollm2"), "length": "fixed"}, max_model_len=256)
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=48)
        drafted = llm.chat([CAPITAL, LIST], params, use_tqdm=False)
        plain = llm.chat([CAPITAL, LIST], params, speculate=False, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
        assert sum(out.metrics.num_accepted_draft_tokens for out in drafted) > 0
