"""Drafters on made-up tokens, without a model; and what one drafts first in an engine."""

from types import SimpleNamespace

from forerun import LLM
from forerun.core.request import RequestState
from forerun.sampling.draw import Sampler
from forerun.sampling.params import SamplingParams
from forerun.speculate.accept import rules
from forerun.speculate.draft import DraftContext, drafters

MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05, "logit_bias": {30: 2.0, 31: -100.0}},
    {"temperature": 0.8, "frequency_penalty": 0.4, "bad_words": ["e", "at", "self", "("]},
    {"temperature": 0.8, "stop": ["e", "self", "\n\n"], "min_tokens": 3},
    {"temperature": 0.8, "n": 2},
]
"""Options of requests for the soaks."""
VOCAB = 50
TREE_NODES = 9
DRAFT = {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3}
STRANGER = {**DRAFT, "model": "STRANGER", "use_heterogeneous_vocab": True}
STAGED = {"method": "staged", "model": "DRAFT", "num_speculative_tokens": 5}
CONFIGS = {
    "ngram-counts": {"method": "ngram", "counts_as_q": True},
    "model-best-first": {**DRAFT, "tree_nodes": TREE_NODES, "num_speculative_tokens": 4},
    "merged": {"method": "merged", "drafters": [{"method": "ngram"}, DRAFT]},
    "cascade": {"method": "cascade", "drafters": [{"method": "ngram"}, DRAFT], "min_confidence": 0.5},
    "staged": STAGED,
    "staged-twice": {**STAGED, "drafter": {**STAGED, "num_speculative_tokens": 3}},
    "staged-model": {**STAGED, "drafter": {"method": "draft_model", "model": "DRAFT", "tree": [2, 1]}},
    "tli": STRANGER,
    "tli-best-first": {**STRANGER, "tree_nodes": TREE_NODES, "num_speculative_tokens": 4},
    "tli-tree": {**STRANGER, "tree": [2, 2, 1]},
    "slem": {**STRANGER, "heterogeneous_vocab_method": "slem"},
}


PROMPTS = ["def foo(x): return x", "abcabcabcabc", "hello world, hello wor", "x"]


def params(temperature):
    """Of ``PROMPTS``."""
    given = {"temperature": temperature, "max_tokens": 20, "ignore_eos": True}
    return [SamplingParams(**given, seed=seed) for seed in range(len(PROMPTS))]


class Letters:
    """A tokenizer of single letters."""

    def encode(self, text, **options):
        return [ord(letter) - ord("a") for letter in text if "a" <= letter <= "z"]


def build(method, rule="coupled", **options):
    cls = drafters[method]
    context = DraftContext(
        target=SimpleNamespace(info=SimpleNamespace(vocab_size=VOCAB)), sampler=Sampler(VOCAB), rule=rules[rule](),
        tokenizer=Letters(), max_num_seqs=8, max_model_len=4096,
    )  # fmt: skip
    return cls.build(cls.config_class.from_dict(method, options), context)


def sequence(tokens, *, prompt=None, temperature=0.0, seed=1, key=1):
    prompt = len(tokens) if prompt is None else prompt
    return RequestState(key, list(tokens), prompt, SamplingParams(temperature=temperature), seed, num_computed_tokens=1)


def watch(drafter, see):
    """From here on, ``see(sequences, budgets, drafts)`` is called with all that a drafter, or the router, drafts."""
    propose = drafter.propose

    def watched(sequences, budgets):
        drafts = propose(sequences, budgets)
        see(sequences, budgets, drafts)
        return drafts

    drafter.propose = watched


def drafts_of(answer):
    """Of a traced answer, each round's draft: what was committed when it was made, and its tokens."""
    committed = list(answer.prompt_token_ids)
    for entry in answer.outputs[0].trace:
        if entry.drafted:
            kept = [token for token, origin in zip(entry.tokens, entry.origins) if origin == "accepted"]
            yield list(committed), kept + list(entry.rejected)
        committed += entry.tokens


def first_draft(target, config, prompt, **options):
    """The first draft of a greedy request: its tokens, and what was committed when it was made."""
    llm = LLM(str(target), speculative_config=config, trace=True, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    committed, drafted = next(drafts_of(llm.generate([prompt], params)[0]))
    return drafted, committed


def fill(options, places):
    """Options with what ``places`` has in place of its names, at any depth."""
    if isinstance(options, dict):
        return {key: fill(value, places) for key, value in options.items()}
    if isinstance(options, list):
        return [fill(value, places) for value in options]
    return places.get(options, options) if isinstance(options, str) else options


def noisy_text(rng, length, letters=4):
    """Random tokens in which parts of earlier text come back."""
    text = [rng.randrange(letters) for _ in range(5)]
    while len(text) < length:
        if rng.random() < 0.5:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(1, 12)]
        else:
            text.append(rng.randrange(letters))
    return text[:length]


def occurrences(part, text):
    """Where ``part`` ends in ``text``."""
    return [i for i in range(len(part), len(text) + 1) if text[i - len(part) : i] == part]
