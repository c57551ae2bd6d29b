"""A draft whose attention sees the first tokens and the last ones of a long text."""

from pathlib import Path

import pytest
import torch
from test_dflash import config_of
from test_published_heads import save_eagle
from transformers import LlamaForCausalLM

from drafting import watch
from forerun import LLM, SamplingParams
from forerun.speculate.draft import drafters
from published import Published, eagle_weights
from unrolled import seen_by

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu_attention")]

WINDOW, DEPTH = 9, 3
TEXT = torch.randint(3, 90, (120,), generator=torch.Generator().manual_seed(1)).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def drafted(engine, prompt, reads=None):
    """Every draft of a request, by the tokens that were committed then; and its answer."""
    result, propose = {}, engine.router.propose
    watch(engine.router, lambda sequences, _, drafts: result.update(
        {tuple(one.tokens): draft for one, draft in zip(sequences, drafts) if len(draft)}
    ))  # fmt: skip
    job = engine.add(prompt, GREEDY)[0]
    job.sequence.reads = reads
    while engine.busy:
        engine.step()
    engine.router.propose = propose
    return result, job.sequence.tokens[len(prompt) :]


@torch.no_grad()
def by_transformers(model, committed, window):
    """Greedy tokens after ``committed``, by dense passes with an explicit mask."""
    tokens = [*committed]
    for _ in range(DEPTH):
        mask = torch.zeros(len(tokens), len(tokens)).masked_fill(~seen_by(len(tokens), window), float("-inf"))
        logits = model(torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(committed) :]


def first_children(draft):
    """The chain of first children: of a tree, the likeliest tokens."""
    chain, node = [], -1
    while node in draft.parents:
        node = draft.parents.index(node)
        chain.append(draft.tokens[node])
    return chain


@pytest.mark.parametrize("shape", [{"num_speculative_tokens": DEPTH}, {"tree": [2, 1, 1]}], ids=["chain", "tree"])
def test_a_draft_model_drafts_what_an_explicit_mask_says(tiny_target, reference, shape):
    """The target drafts for itself: with all of the text in sight, it would always be right."""
    config = {"method": "draft_model", "model": tiny_target, "draft_window": WINDOW, "prefill_chunk": 50, **shape}
    engine = LLM(tiny_target, speculative_config=config, page_size=4, max_num_seqs=2).engine
    plain = LLM(tiny_target, page_size=4, speculative_config=None).engine
    prompt, different = TEXT, 0
    eager = LlamaForCausalLM.from_pretrained(tiny_target, attn_implementation="eager").eval()
    (drafter,) = engine.router.drafters.values()
    for turn in range(2):
        assert not turn or drafter.tree.match_length(prompt, len(prompt)) > len(prompt) - 9
        drafts, answer = drafted(engine, prompt)
        assert answer == drafted(plain, prompt)[1]
        assert len(drafts) > 4
        for committed, draft in drafts.items():
            chain = first_children(draft)
            assert chain == by_transformers(eager, committed, WINDOW)[: len(chain)]
            different += chain != by_transformers(eager, committed, None)[: len(chain)]
        prompt = [*prompt, *answer, 5, 6, 7]
    assert different


@pytest.mark.parametrize(("window", "reads"), [(WINDOW, None), (None, 20), (WINDOW, 30)])
def test_a_head_drafts_what_it_sees(tiny_target, tmp_path, reference, window, reads):
    config = config_of(Path(tiny_target), "dflash")
    weights = eagle_weights(config["hidden_size"])
    folder = save_eagle(tmp_path / "e", config, weights, "vLLM")
    config = {"method": "eagle", "model": str(folder), "num_speculative_tokens": DEPTH, "draft_window": window}
    engine = LLM(tiny_target, speculative_config=config, page_size=4).engine
    drafts, answer = drafted(engine, TEXT, reads)
    assert answer == drafted(LLM(tiny_target, page_size=4, speculative_config=None).engine, TEXT)[1]
    head = Published(reference, weights)
    assert len(drafts) > 4
    for committed, draft in drafts.items():
        assert draft.tokens == head.draft(list(committed), len(draft), window, len(TEXT) - (reads or len(TEXT)))


@pytest.mark.parametrize("method", ["eagle", "mtp", "dflash"])
def test_a_head_that_skips_tokens_drafts_as_behind_cached_ones(method, tiny_target, tmp_path):
    """Of what the target takes from its prefix cache, a head has no states either."""
    options = {"method": method, **drafters[method].example(Path(tiny_target), tmp_path), "num_speculative_tokens": 2}
    results = []
    for cached in (40, 0):
        llm = LLM(tiny_target, speculative_config=options, page_size=4)
        if cached:
            llm.generate([TEXT[:cached]], GREEDY, speculate=False, use_tqdm=False)
        drafts, answer = drafted(llm.engine, TEXT, reads=None if cached else len(TEXT) - 40)
        results.append((answer, {text: draft.tokens for text, draft in drafts.items()}))
    assert results[0] == results[1]
