"""A draft model whose output layer predicts some of its tokens."""

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.models.load import load_model

SIZE = 700
PROMPTS = ["def parse(", "class Reader:", "for line in"]


def speculating(**more):
    return LLM(speculative_config={"method": "draft_model", "num_speculative_tokens": 4, **more})


@pytest.mark.parametrize("more", [{}, {"tree": [2, 2], "num_speculative_tokens": 2}, {"accept": "token"}])
def test_only_those_tokens_are_drafted(more):
    """Chains and trees, for greedy and sampled requests, by a coupled rule and one that compares p with q."""
    llm = speculating(draft_vocab_size=SIZE, **more)
    (drafter,) = llm.engine.router.drafters.values()
    permitted = set(drafter.names.tolist())
    assert len(permitted) == SIZE
    assert set(llm.engine.model.info.eos_ids) <= permitted
    seen = set()
    llm.engine.on_round = lambda result: seen.update(t for draft in result.drafts for t in draft.tokens)
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=40)
        out = llm.generate(PROMPTS, params, use_tqdm=False)
        plain = llm.generate(PROMPTS, params, use_tqdm=False, speculate=False)
        if "accept" not in more or temperature == 0.0:
            assert [o.outputs[0].token_ids for o in out] == [o.outputs[0].token_ids for o in plain]
        assert any(o.metrics.num_accepted_draft_tokens for o in out)
    assert seen <= permitted
    assert len(seen) > 20


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_its_logits_are_the_whole_layers_rows(quantization):
    from forerun import pretrained
    from forerun.core.batch import Batch, Span
    from forerun.models.base import new_attention

    names = torch.tensor([0, 3, 17, 300, 301, 999])
    result = []
    for outputs in (None, names):
        model = load_model(pretrained.path("draft"), dtype="float32", outputs=outputs, quantization=quantization)
        attention = new_attention(model, max_seqs=1, max_len=32)
        attention.pool.reserve(0, 4)
        batch = Batch([Span(0, 0, [5, 6, 7, 8], logits=[1, 3])], model.info.device)
        result.append(model.forward(batch, attention).logits)
    assert torch.equal(result[0][:, names], result[1])


def test_more_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 5000000, and .* has \d+ tokens"):
        speculating(draft_vocab_size=5_000_000)
    with pytest.raises(ConfigError, match="at least 1"):
        speculating(draft_vocab_size=0)
    with pytest.raises(ConfigError, match="leave it out"):
        speculating(draft_vocab_size=10, use_heterogeneous_vocab=True)
