"""Ids that the target has and the draft does not: rows of padding that one checkpoint has more of than the other."""

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun import LLM, SamplingParams
from tiny import ALPHABET, save_tokenizer, tiny_llama
from tiny_seq2seq import save_seq2seq

ROWS = len(ALPHABET) + 8
PROMPTS = [[40, 41, 42, 9, 8, 40, 41], [5, 9, ROWS - 1, 7, len(ALPHABET), 9], [8, 9, 8, 9, 8, 9, 8]]
STRANGE = 1
"""The prompt with ids that the draft lacks."""
DRAFT = {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3}
CONFIGS = {
    "chain": DRAFT,
    "tree": {**DRAFT, "tree": [3, 2, 1]},
    "staged": {"method": "staged", "model": "DRAFT"},
    "staged-model": {"method": "staged", "model": "DRAFT", "drafter": DRAFT},
    "staged-recycling": {"method": "staged", "model": "DRAFT", "drafter": {"method": "token_recycling"}},
    "cascade": {"method": "cascade", "drafters": [{"method": "ngram"}, DRAFT]},
    "tli": {**DRAFT, "use_heterogeneous_vocab": True},
    "slem": {**DRAFT, "use_heterogeneous_vocab": True, "heterogeneous_vocab_method": "slem"},
}


def params(temperature):
    return SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory, tiny_target):
    """The target with more rows than its tokenizer has tokens, likely ones."""
    folder = tmp_path_factory.mktemp("wide")
    model, known = tiny_llama(vocab_size=ROWS), LlamaForCausalLM.from_pretrained(tiny_target).state_dict()
    own = model.state_dict()
    for name, value in known.items():
        own[name][: len(value)] = value
    model.load_state_dict(own)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def check(plain, speculative, prompts, temperature):
    options = params(temperature)
    expected = plain.generate(prompts, options)
    answers = speculative.generate(prompts, options)
    assert [answer.outputs[0].token_ids for answer in answers] == [answer.outputs[0].token_ids for answer in expected]
    for index, answer in enumerate(answers):
        assert answer.metrics.draft_error is None
        assert answer.metrics.num_draft_tokens > 0, index
    others = [index for index in range(len(prompts)) if index != STRANGE]
    for index, alone in zip(others, speculative.generate([prompts[index] for index in others], options)):
        assert answers[index].metrics.accepted_per_step == alone.metrics.accepted_per_step
    speculative.engine.check()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", CONFIGS)
def test_they_cost_nobody_the_drafts(name, temperature, wide, tiny_draft, llm):
    config = filled(CONFIGS[name], tiny_draft)
    speculative = llm(config, wide)
    seen = {token for answer in llm(None, wide).generate(PROMPTS, params(2.0)) for token in answer.outputs[0].token_ids}
    assert max(seen) >= len(ALPHABET)  # answers have such ids too
    check(llm(None, wide), speculative, PROMPTS, temperature)


def filled(options, draft):
    if isinstance(options, dict):
        return {key: filled(value, draft) for key, value in options.items()}
    if isinstance(options, list):
        return [filled(value, draft) for value in options]
    return draft if options == "DRAFT" else options


@pytest.mark.parametrize("drafting", ["t5", "decoder"])
def test_they_may_be_in_a_source(drafting, tmp_path, seq2seq, tiny_draft):
    save_seq2seq("t5", tmp_path, vocab_size=ROWS)
    draft = seq2seq("t5") if drafting == "t5" else tiny_draft
    speculative = LLM(str(tmp_path), speculative_config=filled(DRAFT, draft))
    check(LLM(str(tmp_path)), speculative, PROMPTS, 0.9)


def test_the_last_row_is_read_for_them(tiny_draft, wide, llm):
    """What the draft says of them is what transformers says of its last token."""
    drafter = next(iter(llm(filled(DRAFT, tiny_draft), wide).engine.router.drafters.values()))
    heard = []
    forward = drafter.model.forward

    def listening(batch, attention):
        output = forward(batch, attention)
        heard.append(output.logits[0])
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.model, "forward", listening)
        patch.setattr(drafter, "chains", None)
        llm(filled(DRAFT, tiny_draft), wide).generate([PROMPTS[STRANGE]], params(0.0))
    last = len(ALPHABET) - 1
    reference = LlamaForCausalLM.from_pretrained(tiny_draft).eval()
    with torch.inference_mode():
        first = next(logits for logits in heard)
        text = [min(token, last) for token in PROMPTS[STRANGE]]
        answer = llm(None, wide).generate([PROMPTS[STRANGE]], params(0.0))[0].outputs[0].token_ids
        expected = reference(torch.tensor([[*text, min(answer[0], last)]])).logits[0, -1]
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)
