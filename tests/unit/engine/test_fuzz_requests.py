"""Any options and any prompt: refused in one line, or answered; and the neighbours in the batch never notice."""

import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from forerun import LLM, ForerunError, RequestError, SamplingParams
from refusals import refused
from tiny import ALPHABET

pytestmark = pytest.mark.slow

VOCABULARY = len(ALPHABET)
EXTREME = (
    0, 1, -1, VOCABULARY - 1, VOCABULARY, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**40, 10**400, 10**5000, -(10**5000),
    1e-45, 1e-320, 1e38, 3.5e38, 1e300, -1e300, "", "\ud800", b"a",
)  # fmt: skip
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(EXTREME),
    st.lists(st.one_of(st.integers(-2, 200), st.text(max_size=3), st.sampled_from(EXTREME)), max_size=3),
    st.dictionaries(
        st.one_of(st.integers(-1, 120), st.text(max_size=2)), st.one_of(st.floats(), st.none()), max_size=3
    ),
)
NUMBER = st.one_of(st.floats(0, 10), st.sampled_from([0, 1e-45, 1e-30, 1e-3, 1e20, 1e30, 2**63, 10**29]))
IDS = st.integers(0, VOCABULARY - 1)
TEXTS = st.lists(st.text(min_size=1, max_size=3), max_size=3)
SENSIBLE = {
    "n": st.integers(1, 3),
    "temperature": NUMBER,
    "top_k": st.one_of(st.integers(-1, 200), st.sampled_from([2**31, 2**63, 10**40])),
    "top_p": st.one_of(st.floats(0, 1, exclude_min=True), st.sampled_from([1e-45, 1e-320])),
    "min_p": st.floats(0, 1),
    "repetition_penalty": NUMBER,
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(IDS, st.floats(allow_nan=False) | st.sampled_from([1e39, -1e39]), max_size=4),
    "min_tokens": st.integers(0, 4),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": TEXTS,
    "stop_token_ids": st.lists(IDS, max_size=3),
    "bad_words": TEXTS,
    "logprobs": st.one_of(st.integers(0, 5), st.just(2**63)),
    "prompt_logprobs": st.one_of(st.integers(0, 3), st.just(10**20)),
    "structured_outputs": st.sampled_from(
        [
            {"regex": "[a-z]+"}, {"regex": "("}, {"regex": "\ud800"}, {"choice": ["a\ud800"]}, {"choice": ["ab", "b"]},
            {"json": {"const": "\ud800"}}, {"json": {"a": object()}}, {"json": "{"}, {"grammar": "\ud800"},
        ]
    ),
}  # fmt: skip
ONE = st.sampled_from(SamplingParams.names()).flatmap(lambda name: st.fixed_dictionaries({name: ANYTHING}))
SEVERAL = st.fixed_dictionaries({}, optional=SENSIBLE)
PROMPTS = st.one_of(
    ANYTHING, st.text(), st.text(st.characters(), max_size=5), st.lists(IDS, max_size=300),
    st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "x"]), ANYTHING, max_size=3),
)  # fmt: skip
NEIGHBOUR = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)
QUIET = {
    "deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}  # fmt: skip


@pytest.fixture
def ask(llm):
    """Ask for one request beside another; how it ended, in one word."""
    model = llm({"method": "ngram", "num_speculative_tokens": 3}, page_size=16)
    expected = model.generate("the cat", NEIGHBOUR)[0].outputs[0].token_ids

    def attempt(prompt, options):
        try:
            params = SamplingParams(**{"max_tokens": 4, **options})
            outputs = model.generate(["the cat", prompt], [NEIGHBOUR, params])
        except ForerunError as error:
            message = str(error)
            assert "\n" not in message, message
            assert len(message) < 600, message
            end = "refused"
        else:
            assert outputs[0].outputs[0].token_ids == expected
            end = "answered"
        assert not model.engine.busy
        model.engine.check()
        return end

    return attempt


@pytest.mark.parametrize(("options", "count"), [(ONE, 400), (SEVERAL, 150)], ids=["one of anything", "several"])
def test_options(ask, options, count):
    ends = set()

    @given(options=options)
    @settings(max_examples=count, **QUIET)
    def attack(options):
        ends.add(ask("a dog", options))

    attack()
    assert ends == {"refused", "answered"}


def test_prompts(ask):
    ends = set()

    @given(prompt=PROMPTS)
    @settings(max_examples=300, **QUIET)
    def attack(prompt):
        ends.add(ask(prompt, {}))

    attack()
    assert ends == {"refused", "answered"}


def test_a_top_k_beyond_the_vocabulary_is_none(llm):
    def sample(**options):
        params = SamplingParams(seed=2, max_tokens=12, ignore_eos=True, **options)
        return llm().generate("the cat", params)[0].outputs[0].token_ids

    assert sample(top_k=2**63) == sample(top_k=10**100) == sample(top_k=VOCABULARY) == sample()
    assert sample(top_k=1) != sample()


@pytest.mark.parametrize("prompt", ["a\ud800b", {"prompt": "\udfff"}])
def test_half_a_surrogate_pair_is_no_prompt(llm, prompt):
    with pytest.raises(RequestError, match=r"half a surrogate pair .character [01]., which is no text") as caught:
        llm().generate(["fine", prompt])
    assert caught.value.param == "prompt"


def test_a_prompt_that_contains_itself_is_refused(llm):
    prompt = {}
    prompt["prompt"] = prompt
    refused(RequestError, "a prompt is a string, a list of token ids or a mapping, not dict", llm().generate, [prompt])


def test_a_text_that_the_tokenizer_fails_on_is_refused(folder):
    """The tokenizers library panics, which is no Exception in Python, where a pattern takes too many steps."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"Regex": "^(a+)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": split}))
    model = LLM(str(folder))
    refused(RequestError, r"the tokenizer fails on this text: .*retry-limit", model.generate, ["a", "a" * 40 + "c"])
    assert model.generate("a", NEIGHBOUR)[0].outputs[0].finish_reason == "length"
