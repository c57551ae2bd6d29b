"""Prefix caching where layers keep a state: every answer has the bits that an engine without a past gives.

Conversations go on, go back and branch off anywhere, on few pages and fewer kept states, with every way to feed them.
"""

import random

import pytest
from test_soak import Request, compare, soak

from forerun import SamplingParams
from hybrids import KINDS, MIXTURES

LONGEST = 144
PAGE_SIZE = 8
BURSTS = 4
DRAFTS = {
    "plain": [],
    "ngram": [{"method": "ngram", "num_speculative_tokens": 4}],
    "tree": [{"method": "draft_model", "tree": (2, 2, 1)}],
    "chains": [
        {"method": "draft_model", "num_speculative_tokens": 3},
        {"method": "staged", "num_speculative_tokens": 3},
    ],
}
MODELLED = ("draft_model", "staged")
"""A draft model is one with state, of another kind than the target or of the same."""


class Talk:
    """Random requests, each behind a part of what was said before."""

    def __init__(self, built, alone, seed, methods):
        self.built, self.alone = built, alone
        self.draw = random.Random(seed)
        self.methods = methods
        self.texts = [[]]

    def prompt(self):
        said = self.draw.choice(self.texts[-8:])
        said = said[: self.draw.choice([len(said), len(said), self.draw.randint(0, len(said))])][: LONGEST - 50]
        new = self.draw.choice([0, 1, 3, 9, 30]) if said else self.draw.choice([7, 8, 25, 70])
        return said + [self.draw.randrange(2, self.alone.model.info.vocab_size) for _ in range(new)]

    def request(self):
        draw = self.draw
        chosen = draw.choice([{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "n": 3}])
        count = draw.choice([1, 6, 25, 45])
        params = SamplingParams(**chosen, max_tokens=count, seed=draw.randrange(99), ignore_eos=True, logprobs=1)
        method = draw.choice([None, *self.methods])
        how = {"speculate": False} if method is None else {"method": method}
        cancel = (draw.randrange(30), count + 1) if draw.random() < 0.2 else None
        return Request(self.prompt(), params, how, cancel, draw.randrange(12) if draw.random() < 0.1 else None)

    def burst(self, count):
        """So many requests at once, some of which are cancelled or set aside; then all are compared."""
        todo = [self.request() for _ in range(count)]
        soak(self.built, todo, count)
        self.built.check()
        compare(self.alone, todo)
        self.texts += [request.prompt + job.output_ids for request in todo for job in request.jobs]


def test_where_states_are_kept(engine, hybrid):
    built = engine(model=hybrid("qwen3_5"), page_size=4, max_model_len=LONGEST)
    states = built.target.attention.states
    states.interval = 16

    def ask(prompt, **options):
        (job,) = built.add(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **options))
        while built.busy:
            built.step()
        built.check()
        assert not built.scheduler.tree.matched
        return job

    text = list(range(2, 41))
    first = ask(text)
    assert first.metrics.num_cached_tokens == 0
    assert ask(text).metrics.num_cached_tokens == 36  # the last full page that leaves a token to read
    said = text + first.output_ids
    assert ask([*said, 5]).metrics.num_cached_tokens == len(said) - 1  # the answer's last token was never fed
    for shared, kept in ((35, 32), (30, 28)):  # a page and two before the last full one
        assert ask(text[:shared] + [43] * 9).metrics.num_cached_tokens == kept
    assert ask(text[:22] + [41] * 10).metrics.num_cached_tokens == 16  # an interval's end; 20 are in known pages
    assert built.stats.prefix_reread == 4
    assert ask(text[:22] + [42] * 10).metrics.num_cached_tokens == 20  # where one left it
    assert ask(text, prompt_logprobs=0).metrics.num_cached_tokens == 0
    assert built.stats.state_hits == 6
    used = len(states.kept)
    built.scheduler.tree.evict(1)
    assert len(states.kept) < used  # pages that go take their states with them
    built.target.attention.pool.scrub()
    assert not states.kept
    off = engine(model=hybrid("qwen3_5"), page_size=4, max_model_len=LONGEST, prefix_caching=False)
    assert off.target.attention.states.max_kept == 0
    assert off.scheduler.tree is None


# Mixtures have one set of drafts each: their states are those of the kinds without experts. What fewer drafts ask of
# states is a part of what "chains" do.
@pytest.mark.parametrize(
    ("kind", "drafts"),
    [("lfm2", "plain"), ("qwen3_5", "ngram"), *((kind, "tree") for kind in KINDS),
     *((kind, "chains") for kind in KINDS if kind not in MIXTURES)],
)  # fmt: skip
def test_conversations(engine, hybrid, kind, drafts):
    model = hybrid(KINDS[(KINDS.index(kind) + (drafts == "chains")) % len(KINDS)])
    configs = [{**keys, "model": model} if keys["method"] in MODELLED else keys for keys in DRAFTS[drafts]]
    alone = engine(model=hybrid(kind), max_num_seqs=1, max_model_len=LONGEST)
    limits = {"page_size": PAGE_SIZE, "num_pages": 24, "max_num_seqs": 6, "max_prefill_tokens": 11}
    built = engine(configs or None, model=hybrid(kind), max_model_len=LONGEST, **limits)
    assert built.identity
    for pool in built.pools:
        if pool.states is not None:
            pool.states.resize(pool.states.count, 6)
            pool.states.interval = 24
    talk = Talk(built, alone, seed=len(drafts), methods=[keys["method"] for keys in configs])
    for _ in range(BURSTS):
        talk.burst(talk.draw.choice([1, 4, 8]))
    assert built.stats.prefix_hits > 0.2 * built.stats.prefix_queries
    assert built.stats.preemptions > 0
