"""Gemma 3 270M as a GGUF file of Q4_K, Q5_0, Q6_K and Q8_0: another architecture, tokenizer and mixture of types."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from forerun import LLM, SamplingParams
from forerun.models.run.invariance import self_test

PROMPT = "The capital of Japan is"


@pytest.fixture(scope="module")
def llm(gemma):
    return LLM(str(gemma), speculative_config={"method": "ngram"}, max_model_len=512)


def test_it_runs_packed_and_knows_something(llm, gemma):
    assert llm.model.info.path.startswith("native")
    assert llm.model.fused is not None
    assert llm.model.info.weight_bytes < 1.1 * gemma.stat().st_size  # five bits are held in bytes
    answer = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
    assert "Tokyo" in answer.outputs[0].text


def test_drafts_change_no_token_and_company_no_bit(llm):
    prompts = [PROMPT, "one two three one two three one", "def f(x):\n    return x\n\ndef g(x):\n"]
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=32)
        drafted = llm.generate(prompts, params, use_tqdm=False)
        plain = llm.generate(prompts, params, speculate=False, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    assert sum(out.metrics.num_draft_tokens for out in drafted) > 0
    assert self_test(llm.model, rows=70, chunks=(2, 17, 33)) == []


def test_its_probabilities_are_those_that_transformers_reads_out_of_the_file(llm, gemma):
    """In float32 and dequantized; inputs in 8 bits move ours by a few hundredths."""
    config = AutoConfig.from_pretrained(gemma.parent, gguf_file=gemma.name)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(str(gemma), return_tensors=True, model_to_load=shape)["tensors"]
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    left = module.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()}, strict=False)
    assert left == (["lm_head.weight"], [])  # tied
    del weights
    ids = llm.tokenizer.encode(PROMPT)
    with torch.inference_mode():
        expected = module(torch.tensor([ids])).logits[0].log_softmax(-1)
    del module
    answer = llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )[0]
    assert answer.outputs[0].token_ids == [expected[-1].argmax().item()]
    result = [entry[token].logprob for token, entry in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
    truth = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.tensor(result) == pytest.approx(truth, abs=0.35)
