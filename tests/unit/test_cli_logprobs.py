"""``generate`` with several answers and with log-probabilities."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from forerun.cli.main import run

PROMPT = "the cat sat on the mat; the cat"
HOT = ["--temperature", "0.5", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture
def generate(capsys, tiny_target, tiny_draft):
    def call(*options):
        assert run(["generate", PROMPT, "--model", tiny_target, "--spec-model", tiny_draft, *HOT, *options]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return call


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def reference(folder, ids, temperature=1.0):
    """transformers' log-probabilities [len(ids) - 1, vocabulary] of what follows each token."""
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def agrees(item, row, count, tokenizer):
    values, best = row.topk(count)
    assert item["logprob"] == pytest.approx(float(row[item["token"]]), abs=1e-3)
    assert item["rank"] == 1 + int((row > row[item["token"]]).sum())
    assert item["text"] == tokenizer.decode([item["token"]])
    assert [top["token"] for top in item["top"]] == best.tolist()
    assert [top["logprob"] for top in item["top"]] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize(("mode", "temperature"), [(None, 1.0), ("raw_logprobs", 1.0), ("processed_logprobs", 0.5)])
def test_logprobs_are_transformers_own_in_the_mode_asked_for(generate, tokenizer, tiny_target, mode, temperature):
    answer = json.loads(generate("--logprobs", "3", *(["--logprobs-mode", mode] if mode else []), "--json"))
    prompt = tokenizer.encode(PROMPT)
    rows = reference(tiny_target, [*prompt, *answer["token_ids"]], temperature)[len(prompt) - 1 :]
    assert [item["token"] for item in answer["logprobs"]] == answer["token_ids"]
    for item, row in zip(answer["logprobs"], rows, strict=True):
        agrees(item, row, 3, tokenizer)
    assert "prompt_logprobs" not in answer


def test_tokens_that_cannot_come_have_a_number_in_json(generate):
    answer = json.loads(generate("--logprobs", "3", "--logprobs-mode", "processed_logprobs", "--top-k", "1", "--json"))
    for item in answer["logprobs"]:
        assert [top["logprob"] for top in item["top"]] == [0.0, -9999.0, -9999.0]
        assert item["logprob"] == 0.0


def test_prompt_logprobs_begin_with_the_second_token(generate, tokenizer, tiny_target):
    answer = json.loads(generate("--prompt-logprobs", "1", "--json"))
    prompt = tokenizer.encode(PROMPT)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert [item["token"] for item in rest] == prompt[1:]
    for item, row in zip(rest, reference(tiny_target, prompt), strict=True):
        agrees(item, row, 1, tokenizer)
    assert "logprobs" not in answer


def test_several_answers(generate):
    one = json.loads(generate("--json"))
    answer = json.loads(generate("--n", "3", "--json"))
    assert "outputs" not in one
    assert answer["outputs"][0]["token_ids"] == answer["token_ids"]
    assert len({tuple(output["token_ids"]) for output in answer["outputs"]}) == len(answer["outputs"]) == 3
    assert answer["completion_tokens"] == 18
    out = generate("--n", "3")
    assert [f"--- {i} of 3\n{PROMPT}{item['text']}" in out for i, item in enumerate(answer["outputs"], 1)] == [True] * 3
    assert "18 tokens" in out


def test_the_text_output_shows_them_too(generate):
    result = json.loads(generate("--logprobs", "1", "--prompt-logprobs", "0", "--json"))
    out = generate("--logprobs", "1", "--prompt-logprobs", "0").split("log-probabilities, ")
    assert [part.splitlines()[0] for part in out[1:]] == ["prompt", "answer"]
    prompt, answer = (part.split("\n\n")[0].splitlines()[1:] for part in out[1:])
    assert prompt[0].split() == ["'t'", "-"]
    for line, item in zip([*prompt[1:], *answer], [*result["prompt_logprobs"][1:], *result["logprobs"]], strict=True):
        assert line.startswith(f"  {item['text']!r}")
        assert f"{item['logprob']:.2f}  rank {item['rank']}" in line
        assert all(f"{top['text']!r} {top['logprob']:.2f}" in line for top in item["top"])
    assert "log-probabilities" not in generate()
