"""A model that returns NaN ends the requests that meet it, and nobody else's."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun import SamplingParams, kernels
from forerun.core.tree import Draft
from harness import until_idle
from tiny import ALPHABET, save_checkpoint

POISON = ALPHABET.index("Z")


def params(**given):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": 1, **given})


@pytest.fixture(scope="module")
def poisoned(tiny_target, tmp_path_factory):
    """A checkpoint whose token Z has a NaN embedding."""
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    return save_checkpoint(model, tmp_path_factory.mktemp("poisoned"))


@pytest.mark.parametrize("speculative_config", [None, {"method": "ngram"}])
@pytest.mark.parametrize("path", ["native", "hf"])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_logits_end_one_request(llm, poisoned, tiny_target, speculative_config, path, page_size, temperature):
    """The neighbours, and whoever gets the memory afterwards, are not affected."""
    options = {"max_num_seqs": 3, "page_size": page_size, "model_path": path, "max_model_len": 64}
    model = llm(speculative_config, poisoned, **options)
    prompts = ["a good prompt", "a bad prompt: Z", "another good prompt, good prompt"]
    sampling = params(temperature=temperature, logit_bias={POISON: -100.0})
    expected = [out.outputs[0].token_ids for out in llm(None, tiny_target, **options).generate(prompts, sampling)]
    for _ in range(2):
        outputs = [out.outputs[0] for out in model.generate(prompts, sampling)]
        assert [out.finish_reason for out in outputs] == ["length", "error", "length"]
        assert outputs[1].stop_reason == "the model returned NaN logits"
        assert outputs[1].token_ids == []
        assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]
    again = model.generate([prompts[0]] * 3, sampling)
    assert [out.outputs[0].token_ids for out in again] == [expected[0]] * 3
    model.engine.check()


def clean(engine):
    """Whether no page of any pool holds NaN."""
    return not any(tensor.isnan().any() for pool in engine.pools for tensor in [*pool.keys, *pool.values])


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_prompt_with_nan_ends_where_it_is_read(llm, poisoned, tiny_target, page_size):
    """Its logits were never asked for; nobody may share, or get, what it has written."""
    options = {"max_num_seqs": 2, "page_size": page_size, "max_model_len": 64, "max_num_batched_tokens": 16}
    engine = llm(None, poisoned, num_pages=8 if page_size else None, **options).engine
    good = [*range(5, 25)]
    sampling = params(logit_bias={POISON: -100.0})
    expected = llm(None, tiny_target, **options).generate(good, sampling)[0].outputs[0].token_ids
    for _ in range(2):
        bad = engine.add([*good[:18], POISON, *range(5, 40)], params())[0]
        engine.step()  # without the faulty token
        assert bad.finish is None
        [update] = engine.step()
        assert update.finish.reason == "error"
        assert update.finish.stopped_by == "the model returned NaN logits"
        assert clean(engine)
    jobs = [engine.add(good, sampling)[0] for _ in range(2)]
    until_idle(engine)
    assert [job.output_ids for job in jobs] == [expected] * 2


@pytest.mark.parametrize("end", ["abort", "pause", "preempt", "finish"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_nan_of_a_draft_model_stays_with_its_request(llm, poisoned, tiny_target, page_size, end):
    """However a request loses its pages, the next one that gets them is drafted for as well as before."""
    options = {"max_num_seqs": 2, "page_size": page_size, "max_model_len": 64}
    config = {"method": "draft_model", "model": poisoned, "num_speculative_tokens": 3}
    engine = llm(config, tiny_target, **options).engine
    good, sampling = [*range(5, 25)], params(logit_bias={POISON: -100.0}, max_tokens=20)

    def answer():
        job = engine.add(good, sampling)[0]
        until_idle(engine)
        return job.output_ids, job.metrics.num_accepted_draft_tokens

    before = answer()
    assert before[1] == 14  # all of them: the same weights but for one token
    bad = engine.add([6, POISON, *range(30, 40)], params(max_tokens=30))[0]
    for _ in range(4):
        engine.step()
    assert not clean(engine)
    if end == "preempt":
        engine.scheduler.preempt(bad.sequence)
        engine.abort(bad)
    elif end == "pause":
        engine.pause(bad)
        engine.abort(bad)
    elif end == "abort":
        engine.abort(bad)
    until_idle(engine)
    assert clean(engine)
    assert answer() == before
    engine.check()


@pytest.mark.parametrize("path", ["native", "hf"])
@pytest.mark.parametrize("page_size", [None, 8])
def test_nan_behind_a_stop_does_not_stay(llm, poisoned, monkeypatch, path, page_size):
    """The drafted token that ends the answer makes the row behind it NaN, which plain decoding never looks at. Where
    torch attends, NaN behind the mask spoils the rows before it, too."""
    model = llm({"method": "ngram"}, poisoned, max_num_seqs=1, page_size=page_size, max_model_len=64, model_path=path)
    ngram = model.engine.router.drafters["ngram"]
    monkeypatch.setattr(ngram, "propose", lambda sequences, budgets: [Draft.chain([POISON]) for _ in budgets])
    sampling = params(logit_bias={POISON: 100.0}, stop_token_ids=[POISON])
    output = model.generate([*range(5, 12)], replace(sampling, min_tokens=3))[0].outputs[0]
    if kernels.library() is not None:
        assert (output.finish_reason, output.stop_reason) == ("stop", POISON)
    assert clean(model.engine)
