"""Verification gives the logits of decoding: chains and trees, alone and in mixed batches, and after rolling back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from matrix import PATHS, marked, pairwise

from described import MAIN
from forerun import kernels
from forerun.attention.base import Attention
from forerun.attention.kernel import KernelAttention
from forerun.core.batch import Batch, Span
from forerun.core.tree import Draft
from forerun.models.load import load_model
from forerun.models.run.base import Model, new_attention

LLAMA, WIDE = "llama", "wide heads"
PROMPT = 23
LAYOUTS = [None, 4, 16]


def some_tokens(count, seed=0):
    return torch.randint(2, 98, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def model(tiny_target, wide_target, described):
    folders = {LLAMA: tiny_target, WIDE: wide_target}
    loaded = {}

    def get(path, invariant, name):
        key = path, invariant, name
        if key not in loaded:
            loaded[key] = load_model(folders.get(name) or described(name), model_path=path, invariant=invariant)
        return loaded[key]

    return get


@dataclass
class Feeder:
    """A model with a cache; every span asks for the logits of all its rows."""

    model: Model
    attention: Attention
    known: dict[tuple[tuple[int, ...], int], torch.Tensor]
    """What ``alone`` gave."""

    def feed(self, *spans):
        for span in spans:
            span.logits = list(range(span.count))
        logits = self.model.forward(Batch(list(spans)), self.attention).logits
        return list(logits.split([span.count for span in spans]))

    def decode(self, key, start, tokens):
        """Logits of ``tokens`` fed one at a time."""
        return torch.cat([self.feed(Span(key, start + i, [token]))[0] for i, token in enumerate(tokens)])

    def alone(self, tokens, count):
        """Logits of the last ``count`` tokens, the rest prefilled, in a slotted cache of their own."""
        if (tuple(tokens), count) not in self.known:
            fresh = Feeder(self.model, new_attention(self.model, max_seqs=1, max_len=64), {})
            start = len(tokens) - count
            if start:
                fresh.feed(Span(0, 0, tokens[:start]))
            self.known[tuple(tokens), count] = fresh.decode(0, start, tokens[start:])
        return self.known[tuple(tokens), count]


BOTH = ("kernel", "torch")
CACHES = [*product(product(PATHS, (True, False), (LLAMA,)), BOTH), (("native", True, WIDE), "kernel")]
"""What meets every tree: a model and its attention, which torch computes for wide heads anyway. To the bit in every
layout, otherwise in pages alone: the layout is the cache's, which computes nothing."""
FAMILIES = [("native", True, name) for name in MAIN]
"""Whose layers differ: the cache under them does not, so that one tree with each attention tells the rest."""


@pytest.fixture
def backend(request):
    """How the model is run, whether to the bit, and which it is."""
    return request.param


@pytest.fixture(scope="module")
def known():
    """``Feeder.known`` of each model and attention."""
    return {}


@pytest.fixture
def feeder(request, backend, model, cpu_attention, known):
    kept = known.setdefault((*backend, request.node.callspec.params["cpu_attention"]), {})

    def build(page_size=None):
        chosen = model(*backend)
        return Feeder(chosen, new_attention(chosen, max_seqs=10, max_len=64, page_size=page_size, slack=16), kept)

    return build


@pytest.fixture
def same(backend):
    """Equal to the last bit in invariant mode, close otherwise."""

    def check(got, expected):
        assert got.shape == expected.shape
        if backend[1]:
            assert torch.equal(got, expected)
        else:
            assert (got - expected).abs().max() < 2e-4 * expected.abs().max()

    return check


def shapes():
    """Hand-made trees: a chain, a comb, a bush, two chains, and one whose node order is not depth first."""
    ids = iter(some_tokens(200, seed=7))

    def tree(*parents):
        draft = Draft()
        for parent in parents:
            while draft.add(token := next(ids), parent) != len(draft) - 1:
                draft.trials[parent + 1].pop()
            assert draft.tokens[-1] == token
        return draft

    return {
        "chain": tree(-1, 0, 1, 2, 3),
        "comb": tree(-1, -1, 1, 1, 3, 3, 5),
        "bush": tree(-1, -1, -1, 0, 0, 1, 1, 2, 2),
        "two chains": tree(-1, 0, 1, 2, -1, 4, 5, 6),
        "mixed order": tree(-1, -1, 0, 1, 0, 3, 2, 2, 5),
        "single": tree(-1),
    }


SHAPES = shapes()
EVERY = [
    *((*run, *case) for run, *case in product(CACHES, SHAPES, LAYOUTS) if run[0][1] or case[1] == 4),
    *((run, *case) for run in FAMILIES for case in (("kernel", "mixed order", 4), ("torch", "comb", None))),
]


def usual(every):
    """Every pair of values, and all trees where most models run."""
    return [*pairwise(every), *(case for case in every if case[:2] == CACHES[0])]


TREES = pytest.mark.parametrize(
    ("backend", "cpu_attention", "shape", "page_size"),
    [pytest.param(*case.values[0], id=case.id, marks=case.marks) for case in marked(EVERY, usual)],
    indirect=["backend", "cpu_attention"],
)


def pages(attention):
    """Every cache in every layout, and every family with ``attention`` in pages."""
    return pytest.mark.parametrize(
        ("backend", "cpu_attention", "page_size"),
        [*((*run, size) for run, size in product(CACHES, LAYOUTS)), *((run, attention, 4) for run in FAMILIES)],
        indirect=["backend", "cpu_attention"],
        ids=str,
    )


def behind(key, start, last, draft):
    """As verification lays it out: the last committed token is the root, the draft's nodes follow."""
    return Span(key, start, [last, *draft.tokens], [-1, *[parent + 1 for parent in draft.parents]])


def test_the_models_take_the_paths_that_they_are_for(model):
    """All layers in one call where there are kernels for it, otherwise one layer after the other."""
    wide = model("native", True, WIDE)
    for name in (LLAMA, *MAIN):
        served = model("native", True, name)
        assert isinstance(new_attention(served, max_seqs=1, max_len=8), KernelAttention) == kernels.has(
            "decode_float32"
        )
        assert (served.fused is not None) == kernels.has("decode_float32")
    assert not isinstance(new_attention(wide, max_seqs=1, max_len=8), KernelAttention)


@TREES
def test_every_path_of_a_tree_is_as_if_decoded(feeder, same, shape, page_size):
    draft, prompt = SHAPES[shape], some_tokens(PROMPT)
    one = feeder(page_size)
    one.feed(Span(0, 0, prompt[:-1]))
    got = one.feed(behind(0, PROMPT - 1, prompt[-1], draft))[0]
    for node in range(len(draft)):
        path = draft.path(node)
        expected = one.alone(prompt + draft.path_tokens(node), len(path) + 1)
        same(got[[0, *[step + 1 for step in path]]], expected)


@TREES
def test_keep_leaves_the_accepted_path(feeder, same, shape, page_size):
    """After ``keep``, decoding goes on as if the accepted path had been decoded, whichever path each sequence took."""
    draft, prompt, more = SHAPES[shape], some_tokens(PROMPT), some_tokens(2, seed=3)
    one, nodes = feeder(page_size), range(-1, len(draft))
    pool, ends = one.attention.pool, [len(draft.path(node)) + PROMPT for node in nodes]
    one.feed(*(Span(key, 0, prompt[:-1]) for key, _ in enumerate(nodes)))
    one.feed(*(behind(key, PROMPT - 1, prompt[-1], draft) for key, _ in enumerate(nodes)))
    for key, (node, kept) in enumerate(zip(nodes, ends)):
        pool.keep(key, PROMPT, draft.path(node))
        assert pool.length(key) == kept
        pool.check()
        if page_size is not None:
            assert len(pool.block_tables[key]) == -(-kept // page_size)
    after = one.feed(*(Span(key, kept, more) for key, kept in enumerate(ends)))
    for node, got in zip(nodes, after):
        same(got, one.alone(prompt + draft.path_tokens(node) + more, len(more)))


@pages("kernel")
def test_everything_in_one_forward(feeder, same, page_size):
    """A prefill chunk, the end of a prompt, two plain decodes, a chain and two trees share a forward, twice."""
    texts = [some_tokens(40, seed) for seed in range(6)]
    fed, turns = [0, 9, 17, 30, 23, 12], ([7, 5, 1, 1, 1, 1], [11, 1, 1, 2, 1, 3])
    ends = [sum(counts) for counts in zip(fed, *turns)]
    alone = [feeder().alone(text[:end], end - start) for text, start, end in zip(texts, fed, ends)]
    drafts = [None, None, None, SHAPES["chain"], SHAPES["bush"], SHAPES["mixed order"]]
    many = feeder(page_size)
    for key, (text, count) in enumerate(zip(texts, fed)):
        if count:
            many.feed(Span(key, 0, text[:count]))
    starts = fed
    for counts in turns:
        spans = []
        for key, (text, start, count, draft) in enumerate(zip(texts, fed, counts, drafts)):
            nodes = draft.tokens if draft else []
            parents = None
            if draft and not draft.is_chain:
                parents = [*range(-1, count - 1), *[parent + count for parent in draft.parents]]
            spans.append(Span(key, start, text[start : start + count] + nodes, parents))
        results = many.feed(*spans)
        for key, (text, start, count, draft, got) in enumerate(zip(texts, fed, counts, drafts, results)):
            same(got[:count], alone[key][start - starts[key] :][:count])
            for node in range(len(draft) if draft else 0):
                tokens = text[: start + count] + draft.path_tokens(node)
                same(got[count + node], many.alone(tokens, 1)[0])
            many.attention.pool.truncate(key, start + count)
        fed = [start + count for start, count in zip(fed, counts)]
    many.attention.pool.check()


@pages("torch")
def test_any_chunking_of_a_prompt(feeder, same, page_size):
    prompt, last = some_tokens(61), some_tokens(3, seed=5)
    expected = feeder().alone(prompt + last, len(last))
    for cuts in ([1, 61], [4, 5, 9, 33, 61], [16, 32, 48, 61], [7, 50, 60, 61]):
        one, start = feeder(page_size), 0
        for cut in cuts:
            one.feed(Span(0, start, prompt[start:cut]))
            start = cut
        same(one.decode(0, 61, last), expected)
