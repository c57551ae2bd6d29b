"""``forerun generate`` with an encoder-decoder."""

import json

import pytest

pytestmark = pytest.mark.slow

PROMPT = "the cat sat on the mat; the cat"


def test_an_encoder_decoder(forerun, seq2seq, tmp_path, capsys):
    """The prompt is its source: it is counted, and the answer does not go on behind it."""
    folder, unused = seq2seq("flan"), str(tmp_path / "unused")
    capsys.readouterr()  # what saving it says
    pair = ["--model", folder, "--max-tokens", "12", "--ignore-eos"]
    code, out, err = forerun("generate", PROMPT, *pair, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["prompt_tokens"] == len(PROMPT)
    assert answer["completion_tokens"] == 12
    code, out, _ = forerun("generate", PROMPT, *pair, "--spec-method", "draft_model", "--spec-model", folder)
    assert code == 0
    assert out.startswith(f"{answer['text']}\n")
    assert "drafted tokens (100%)" in out
    for wrong, message in (
        (["--spec-method", "eagle"], "use draft_model"),
        (["--max-model-len", "8"], "the encoder reads at most 8"),
        (["--model-path", "hf"], "only the native path supports"),
        (["--prompt-logprobs", "1"], "do not support prompt_logprobs"),
        (["--dtype", "float16"], "t5 overflows float16"),
    ):
        code, out, err = forerun("generate", PROMPT, *pair, *wrong)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    for command in (["tune", folder, "--out", unused], ["train", "medusa", "--target", folder, "--out", unused]):
        code, _, err = forerun(*command)
        assert code == 2
        assert "is an encoder-decoder, but forerun" in err


def test_check(forerun, seq2seq):
    """Every part of it: identity, hand-made trees, bits, and the distribution of the output."""
    few = ["--prompts", "4", "--max-tokens", "12", "--samples", "60", "--methods", "ngram", "--accept", "token"]
    code, out, _ = forerun("check", "--model", seq2seq("bart"), *few, "--prompt-set", "repetitive", "--json")
    results = json.loads(out)
    assert code == 0
    assert results["passed"]
    assert {result["check"] for result in results["results"]} == {
        "same-seed identity",
        "bit-equal logits",
        "distribution",
    }
