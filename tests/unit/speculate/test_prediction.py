"""A prediction is one more text to draft from: it changes speed, and never a token."""

import pytest

from forerun import LLM, BeamSearchParams, SamplingParams
from forerun.core.errors import RequestError
from harness import check_idle, until_idle
from refusals import refused

PROMPT = "def parse(text):\n"
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.2, "seed": 3, "top_p": 0.9}]
DRAFTERS = [
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "prompt_lookup"},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "draft_model", "num_speculative_tokens": 3, "length": "adaptive"},
    {"method": "draft_model", "num_speculative_tokens": 3, "length": "fixed"},
    {"method": "draft_model", "num_speculative_tokens": 3, "accept": "token"},
    {"method": "cascade", "drafters": [{"method": "suffix"}, {"method": "pattern"}]},
    {"method": "token_recycling"},
]


def config_of(drafter, target):
    return {**drafter, "model": target} if drafter["method"] == "draft_model" else drafter


@pytest.fixture(scope="module", params=DRAFTERS, ids=lambda drafter: "-".join(map(str, drafter.values()))[:60])
def drafting(request, tiny_target):
    return LLM(str(tiny_target), speculative_config=config_of(request.param, str(tiny_target)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_tokens_with_and_without(drafting, llm, settings):
    """Plain decoding's, whether the prediction is the answer, a part of it, or something else."""
    params = SamplingParams(max_tokens=48, ignore_eos=True, **settings)
    expected = llm().generate([PROMPT], params)[0].outputs[0].token_ids
    other = [token % 17 + 4 for token in expected]
    predictions = [expected, expected[20:], [*other[:10], *expected[10:]], other, [expected[0]] * 9, []]
    outputs = drafting.generate([{"prompt": PROMPT, "prediction": each} for each in predictions], params)
    if drafting.engine.identity or params.greedy:
        assert [output.outputs[0].token_ids for output in outputs] == [expected] * len(predictions)
    assert all(len(output.outputs[0].token_ids) == 48 for output in outputs)
    for output, prediction in zip(outputs, predictions):
        metrics = output.metrics
        assert metrics.num_accepted_prediction_tokens <= metrics.num_accepted_draft_tokens
        assert metrics.num_prediction_tokens <= (metrics.num_draft_tokens if prediction else 0)
    assert drafting.generate([PROMPT], params)[0].metrics.num_prediction_tokens == 0


@pytest.mark.parametrize("drafter", [DRAFTERS[2], DRAFTERS[3], DRAFTERS[8]])
def test_the_whole_answer_comes_in_few_rounds(drafter, tiny_target, llm):
    """From its first token on: the end of the prompt is found before the prediction."""
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.8, seed=7)
    expected = llm().generate([PROMPT], params)[0].outputs[0]
    drafting = LLM(str(tiny_target), speculative_config=config_of(drafter, str(tiny_target)))
    by_ids, by_text = (
        drafting.generate([{"prompt": PROMPT, "prediction": given}], params)[0].metrics
        for given in (expected.token_ids, expected.text)
    )
    longest = drafting.engine.router.drafters["prompt_lookup"].config.num_speculative_tokens
    assert by_ids.rounds <= -(-63 // (longest + 1))
    assert by_ids.num_accepted_prediction_tokens >= 63 - by_ids.rounds
    assert by_text.num_accepted_prediction_tokens > 32  # the text lacks special tokens
    assert list(drafting.engine.router.drafters) == list(dict.fromkeys([drafter["method"], "prompt_lookup"]))


def test_plain_decoding_ignores_it(llm):
    params = SamplingParams(max_tokens=8, temperature=0.0)
    (output,) = llm().generate({"prompt": PROMPT, "prediction": "return"}, params)
    assert output.metrics.num_drafts == 0


def test_beams_may_have_one(drafting):
    search = BeamSearchParams(beam_width=2, max_tokens=6)
    (expected,) = drafting.beam_search([PROMPT], search)
    (found,) = drafting.beam_search([{"prompt": PROMPT, "prediction": expected.sequences[0].tokens}], search)
    assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in expected.sequences]


def test_a_finished_request_leaves_nothing(drafting):
    engine, ids = drafting.engine, drafting.tokenizer.encode(PROMPT)
    for _ in range(3):
        engine.add(ids, SamplingParams(max_tokens=8, temperature=0.0), prediction=ids)
    jobs = list(engine.jobs.values())
    until_idle(engine)
    check_idle(engine, jobs)


def test_mistakes(drafting, llm):
    params = SamplingParams(max_tokens=8)
    refused(RequestError, "is not loaded", drafting.engine.add, [5], params, method=["suffix"])
    refused(RequestError, "outside the vocabulary", drafting.generate, {"prompt": "a", "prediction": [10**6]}, params)
    refused(RequestError, "a prompt is a string", drafting.generate, {"prompt": "a", "prediction": 3.5}, params)


def test_a_chosen_drafter_that_looks_up_nothing(tiny_target):
    model = LLM(str(tiny_target), speculative_config=config_of(DRAFTERS[3], str(tiny_target)))
    ids = model.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=8)
    error = refused(
        RequestError, "'draft_model' drafts from no prediction: remove one",
        model.engine.add, ids, params, method="draft_model", prediction=ids,
    )  # fmt: skip
    assert error.param == "prediction"
