"""DFlash2's selector: a token is drawn from a row's candidates by scores that depend on the token before it, so q is
another row at every node. With that row, rules that compare p and q emit the target's distribution."""

from types import SimpleNamespace

import numpy
import programs
import pytest
import torch
from enumeration import TORCH, Tables, distance, plain_distribution, round_distribution

from forerun.speculate.accept import RatioRule, rules
from forerun.speculate.draft.heads.dflash import DFlash, DFlashHead
from forerun.speculate.draft.heads.head import Sizes

VOCABULARY, SIZE, DEPTH, TOP, RANK = 5, 16, 3, 3, 4
ROUNDING = 1e-7
"""Scores of candidates are float32."""
LOSSLESS = [name for name in rules if issubclass(rules[name], RatioRule) and rules[name].lossless]


class Block:
    """A drafter's states and output layer, in float64: a block's states know the committed prefix alone."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.head = DFlashHead.example(Sizes(SIZE, VOCABULARY, 2, DEPTH, {"selector": {"rank": RANK, "top": TOP}}))
        self.head.to(device=torch.device("cpu"), dtype=torch.float64)
        for name, codes in self.head.tensors.items():
            if name.startswith("candidate_selector."):
                codes.normal_(0.0, 0.9)
        self.head.pack()
        self.output = torch.randn(VOCABULARY, SIZE, dtype=torch.float64) * 0.4

    def state(self, prefix, depth):
        return torch.tensor(numpy.random.default_rng([depth, *prefix]).normal(size=SIZE))

    @torch.no_grad()
    def drafters_q(self, prefix, path, temperature):
        """What the drafter says that its token is drawn from."""
        state = self.state(prefix, len(path))[None]
        before = torch.tensor([(*prefix, *path)[-1]])
        logits = DFlash.revise(
            SimpleNamespace(head=self.head, to_target_ids=lambda said: said), state @ self.output.T, state, before
        )
        return (logits[0] / temperature).softmax(-1).numpy()

    def law(self, prefix, path, temperature, *, selects=True):
        """The same, candidate by candidate."""
        codes = {name.removeprefix("candidate_selector."): each.numpy() for name, each in self.head.tensors.items()}
        state, before = self.state(prefix, len(path)).numpy(), (*prefix, *path)[-1]
        said = self.output.numpy() @ state
        weights = numpy.zeros(VOCABULARY)
        read = codes["hidden_projection.weight"] @ state
        for token in sorted(range(VOCABULARY), key=lambda each: -said[each])[: TOP if selects else VOCABULARY]:
            score = float(numpy.sum(codes["predecessor_codebook"][before] * read * codes["successor_codebook"][token]))
            weights[token] = numpy.exp((said[token] + (score if selects else 0.0)) / temperature)
        return weights / weights.sum()

    def program(self, widths, temperature, *, selects=True):
        """A chain, or a tree with children drawn with replacement: tokens come from ``law``, q from the drafter."""

        def grow(sketch, parent, level):
            path = tuple(sketch.draft.path_tokens(parent))
            q = self.drafters_q(sketch.prefix, path, temperature)
            row = sketch.row(q if selects else self.law(sketch.prefix, path, temperature, selects=False))
            law = self.law(sketch.prefix, path, temperature)
            for _ in range(widths[level]):
                sketch.draft.add(sketch.choices.choose(law), parent, row)

        return programs.by_levels(len(widths), grow)


def errors(name, block, widths, temperature, *, selects=True):
    kind, target = rules[name], Tables(11, VOCABULARY)
    rule = kind(kind.config_class(replacement=True)) if "replacement" in kind.options() else kind()
    emitted = round_distribution(TORCH, rule, block.program(widths, temperature, selects=selects), target, (0,))
    length = len(widths) + 1
    plain = plain_distribution(target, (0,), length)
    whole = {}
    for tokens, mass in emitted.items():
        for tail, share in plain_distribution(target, (0, *tokens), length - len(tokens)).items():
            whole[(*tokens, *tail)] = whole.get((*tokens, *tail), 0.0) + mass * share
    return distance(whole, plain)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_rounds_have_the_targets_distribution(name, temperature):
    for seed in range(2):
        block = Block(seed)
        assert errors(name, block, (1, 1, 1), temperature) < ROUNDING
        if rules[name].trees:
            assert errors(name, block, (2, 1), temperature) < ROUNDING


@pytest.mark.parametrize("name", LOSSLESS)
def test_q_without_the_selector_would_be_noticed(name):
    assert errors(name, Block(0), (1, 1), 1.0, selects=False) > 1e-3
