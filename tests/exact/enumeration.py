"""Every draft that a drafter could draw, every outcome of every test: laws by enumeration.

Nothing here knows how a rule works. A rule is used as ``accept`` uses it, through its two halves: ``decide`` over a
comparison of p with q (probabilities of the tests, residuals), and ``walk`` (which path the tests' results keep).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import torch

from forerun import SamplingParams
from forerun.core.batch import Scores
from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.sampling.draw import Sampler
from forerun.speculate.accept import rules
from forerun.speculate.accept.compare import CompiledComparison, compare

Prefix = tuple[int, ...]
Distribution = dict[Prefix, float]
HOT = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)


def variants(name):
    """A rule with siblings drawn with replacement and without, where that is an option of it."""
    kind = rules[name]
    if "replacement" in kind.options():
        return [kind(kind.config_class(replacement=value)) for value in (False, True)]
    return [kind()]


@dataclass(frozen=True)
class Form:
    """How p is compared with q."""

    name: str
    dtype: torch.dtype
    exact: float
    """What rounding may do to a probability."""

    def compare(self, scores):
        sampler = Sampler(scores.warped.shape[1])
        if self is TORCH:
            sampler.compiled = None
        compared = compare(scores, sampler)
        assert isinstance(compared, CompiledComparison) == (self is COMPILED)
        return compared


TORCH = Form("torch", torch.float64, 1e-9)
COMPILED = Form("compiled", torch.float32, 2e-6)


class Tables:
    """A random distribution for every prefix, some of them with zeros, some nearly certain."""

    def __init__(self, seed, vocab, sharpness=1.0):
        self.seed = seed
        self.vocab = vocab
        self.sharpness = sharpness
        self.known = {}

    def __call__(self, prefix, name=0):
        key = (name, *prefix)
        if key not in self.known:
            generator = numpy.random.default_rng([self.seed, name, len(prefix), *prefix])
            row = generator.gamma(0.7, size=self.vocab) ** self.sharpness
            if generator.random() < 0.2:
                row[generator.integers(self.vocab)] = 0.0
            self.known[key] = row / row.sum()
        return self.known[key]


@dataclass
class Choices:
    """One run of a drafting program: a list of choices to repeat, then the first possibility of each further one."""

    script: list[int]
    taken: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    probability: float = 1.0

    def choose(self, weights):
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        index = len(self.taken)
        pick = self.script[index] if index < len(self.script) else 0
        self.taken.append(pick)
        self.widths.append(len(possible))
        self.probability *= weights[possible[pick]] / weights.sum()
        return possible[pick]


class Sketch:
    """A draft in the making, with the rows of q that its tokens are drawn from."""

    def __init__(self, choices, prefix):
        self.choices = choices
        self.prefix = prefix
        self.draft = Draft()
        self.rows = []

    def path(self, node):
        return (*self.prefix, *self.draft.path_tokens(node))

    def row(self, q):
        self.rows.append(q)
        return len(self.rows) - 1

    def draw(self, parent, row, without=()):
        """Draw a token under ``parent`` from row ``row`` of q, with the tokens ``without`` taken out of it."""
        weights = self.rows[row].copy()
        weights[list(without)] = 0.0
        return self.draft.add(self.choices.choose(weights), parent, row)

    def finished(self):
        if self.rows:
            self.draft.q = torch.tensor(numpy.stack(self.rows), dtype=torch.float64)
        return self.draft


Program = Callable[[Sketch], None]


def drafts(program, prefix):
    """Every draft the program may draw behind ``prefix``, with its probability."""
    script = []
    while script is not None:
        sketch = Sketch(Choices(script), prefix)
        program(sketch)
        yield sketch.choices.probability, sketch.finished()
        taken, widths = sketch.choices.taken, sketch.choices.widths
        while taken and taken[-1] + 1 == widths[len(taken) - 1]:
            taken.pop()
        script = [*taken[:-1], taken[-1] + 1] if taken else None


def target_rows(target, prefix, draft):
    return numpy.stack([target((*prefix, *draft.path_tokens(node))) for node in range(-1, len(draft))])


def round_distribution(form, rule, program, target, prefix, params=HOT):
    """Law of the tokens that one round emits behind ``prefix``. All drafts go through ``decide`` as one batch."""
    result = list(drafts(program, prefix))
    rows = [target_rows(target, prefix, draft) for _, draft in result]
    first = list(itertools.accumulate((len(r) for r in rows[:-1]), initial=0))
    logits = torch.tensor(numpy.concatenate(rows)).log().to(form.dtype)
    sequences = [RequestState(i, list(prefix), len(prefix), params, seed=i) for i in range(len(result))]
    scores = Scores(sequences, [draft for _, draft in result], first, logits)
    compared = form.compare(scores)
    accept = rule.decide(compared)
    assert compared.residual.dtype == form.dtype
    distribution = {}
    cursor = 0
    for index, (probability, draft) in enumerate(result):
        counts = [len(t) for t in draft.trials]
        chances = accept[cursor : cursor + sum(counts)]
        cursor += sum(counts)
        for outcome in itertools.product((True, False), repeat=len(chances)):
            mass = probability * float(numpy.prod([a if o else 1.0 - a for a, o in zip(chances, outcome)]))
            if mass <= 0.0:
                continue
            results = iter(outcome)
            path = rule.walk(draft, [[next(results) for _ in range(count)] for count in counts])
            row = scores.row(index, path[-1] if path else -1)
            weights = compared.residual[row].double().numpy()
            for token in weights.nonzero()[0]:
                emitted = (*(draft.tokens[node] for node in path), int(token))
                distribution[emitted] = distribution.get(emitted, 0.0) + mass * weights[token] / weights.sum()
    return distribution


def plain_distribution(target, prefix, length):
    """Law of ``length`` tokens behind ``prefix``, one by one."""
    distribution = {(): 1.0}
    for _ in range(length):
        distribution = {
            (*tokens, token): mass * fraction
            for tokens, mass in distribution.items()
            for token, fraction in enumerate(target((*prefix, *tokens)))
        }
    return distribution


def rounds_distribution(step, target, prefix, length, rounds):
    """Law of the first ``length`` tokens behind ``prefix``: ``rounds`` rounds in a row, the rest one by one."""
    if length <= 0:
        return {(): 1.0}
    distribution = {}
    first = step(prefix) if rounds > 0 else plain_distribution(target, prefix, 1)
    for tokens, mass in first.items():
        head = tokens[:length]
        for tail, fraction in rounds_distribution(
            step, target, (*prefix, *head), length - len(head), rounds - 1
        ).items():
            distribution[head + tail] = distribution.get(head + tail, 0.0) + mass * fraction
    return distribution


def distance(one, other):
    """The largest difference between two laws, token by token."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
