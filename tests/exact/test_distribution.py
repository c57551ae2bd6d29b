"""The distribution of the output equals the target's, for every rule that compares p and q, by enumeration."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import numpy
import programs
import pytest
import torch
from enumeration import (
    COMPILED,
    GREEDY,
    HOT,
    TORCH,
    Program,
    Sketch,
    Tables,
    distance,
    plain_distribution,
    round_distribution,
    rounds_distribution,
    variants,
)

from forerun import SamplingParams, kernels, theory
from forerun.core.errors import ConfigError
from forerun.speculate.accept import RatioRule, rules
from forerun.speculate.accept.chains import Lenient, LenientConfig
from here import where
from refusals import refused

RATIO = [name for name in rules if issubclass(rules[name], RatioRule)]
LOSSLESS = [name for name in RATIO if rules[name].lossless]
TREES = [name for name in LOSSLESS if rules[name].trees]


@pytest.fixture(params=[TORCH, *where(kernels.has("acceptance"), [COMPILED])], ids=lambda form: form.name)
def form(request):
    return request.param


def error(form, rule, program, target, length, rounds, params=HOT):
    """How far ``rounds`` rounds in a row are from the distribution of ``length`` tokens."""
    prefix = (0,)
    step = cache(lambda before: round_distribution(form, rule, program, target, before, params))
    aim = target
    if params.greedy:
        aim = Tables(0, target.vocab)
        aim.__class__ = type("Greedy", (Tables,), {"__call__": lambda self, before: one_hot(target(before))})
    return distance(rounds_distribution(step, aim, prefix, length, rounds), plain_distribution(aim, prefix, length))


def one_hot(row):
    return numpy.eye(len(row))[row.argmax()]


class Reduced(Tables):
    """Knows a part of the vocabulary: all but the first token."""

    def __call__(self, prefix, name=0):
        row = super().__call__(prefix, name).copy()
        row[0] = 0.0
        return row / row.sum()


class Case(NamedTuple):
    """Rounds of ``make(draft)``, or of a tree that draws with ``replacement`` or without, as the rule does."""

    make: Callable[..., Program]
    tokens: int
    rounds: int = 1
    vocab: int = 2
    seeds: Iterable[int] = range(2)
    draft: Callable[..., Tables] = Tables
    params: SamplingParams = HOT
    replaces: bool = False


def tree(*widths):
    return {"make": partial(programs.tree, widths=widths), "tokens": len(widths) + 1, "replaces": True}


CHAINS = {
    **{f"chain of {depth}, {vocab} tokens": Case(partial(programs.chain, depth=depth), depth + 1, 1, vocab, range(3))
       for depth in (1, 2, 3) for vocab in (2, 3)},
    **{make.__name__: Case(partial(make, depth=3), 4, 1, 3, range(4), partial(Tables, sharpness=2.0))
       for make in (programs.stopping_chain, programs.point_chain, programs.half_point_chain)},
    "tokens that are never drafted": Case(partial(programs.chain, depth=2), 3, 2, 4, range(3), Reduced),
    "several rounds": Case(partial(programs.chain, depth=2), 5, 3, seeds=[7]),
    "no draft": Case(lambda draft: programs.nothing, 1, 1, 3, [1]),
    "greedy": Case(partial(programs.point_chain, depth=3), 4, 2, 3, range(4), params=GREEDY),
}  # fmt: skip
OF_TREES = {
    **{f"tree {widths}": Case(**tree(*widths), vocab=vocab)
       for widths, vocab in (((2,), 3), ((3,), 3), ((2, 1), 2), ((1, 2), 2), ((2, 2), 2))},
    "a wider vocabulary": Case(**tree(2, 1), vocab=3, seeds=[3]),
    "tree with tokens that are never drafted": Case(**tree(2, 1), vocab=4, seeds=range(3), draft=Reduced),
    "uneven trees over rounds": Case(programs.uneven, 4, 3, replaces=True),
    "three drafters in one tree": Case(partial(programs.several, count=3, depth=1), 2),
    "two drafters in one tree": Case(partial(programs.several, count=2, depth=2), 4, 2),
    "draws beside point masses": Case(programs.model_and_guess, 3),
    "point masses in a tree": Case(partial(programs.point_tree, width=2, depth=2), 3),
    "greedy trees": Case(partial(programs.point_tree, width=2, depth=2), 4, 2, 3, range(4), params=GREEDY),
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [*product(LOSSLESS, CHAINS), *product(TREES, OF_TREES)])
def test_the_law_is_the_targets(form, name, case):
    """At temperature 0 that is the argmax, whether the drafter was right or not."""
    make, tokens, rounds, vocab, seeds, table, params, replaces = (CHAINS | OF_TREES)[case]
    for seed in seeds:
        target, draft = Tables(seed, vocab), table(seed + 100, vocab)
        assert table is not Reduced or min(target((0,))) > 0
        for rule in variants(name):
            program = make(draft, replacement=rule.replacement) if replaces else make(draft)
            assert error(form, rule, program, target, tokens, rounds, params) < form.exact


def accepted(form, rule, program, target):
    """Mean drafted tokens that one round keeps."""
    return sum(
        mass * (len(tokens) - 1) for tokens, mass in round_distribution(form, rule, program, target, (0,)).items()
    )


def test_published_orderings(form):
    """Block keeps at least as much as token, traversal as recursive; traversal on a chain is block."""
    token, block = rules["token"](), rules["block"]()
    for seed in range(6):
        target, draft = Tables(seed, 3), Tables(seed + 100, 3)
        line = programs.chain(draft, 3)
        assert accepted(form, block, line, target) >= accepted(form, token, line, target) - form.exact
        for one, other in zip(variants("traversal"), variants("recursive")):
            assert (
                distance(
                    round_distribution(form, one, line, target, (0,)),
                    round_distribution(form, block, line, target, (0,)),
                )
                < form.exact
            )
            assert (
                distance(
                    round_distribution(form, other, line, target, (0,)),
                    round_distribution(form, token, line, target, (0,)),
                )
                < form.exact
            )
            if seed < 3:
                fork = programs.tree(draft, (2, 1), replacement=one.replacement)
                assert accepted(form, one, fork, target) >= accepted(form, other, fork, target) - form.exact


def test_block_verification_example(form):
    """The motivating example of arXiv 2403.10444: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 against 11/9."""

    class Fixed(Tables):
        def __call__(self, prefix, name=0):
            return numpy.array([1 / 3, 2 / 3] if name == 0 else [2 / 3, 1 / 3])

    tables = Fixed(0, 2)
    line = programs.chain(tables, 2)
    assert accepted(form, rules["token"](), line, tables) == pytest.approx(10 / 9, abs=form.exact)
    assert accepted(form, rules["block"](), line, tables) == pytest.approx(11 / 9, abs=form.exact)


def test_without_replacement_keeps_more(form):
    gains = []
    for seed in range(6):
        target, draft = Tables(seed, 3), Tables(seed + 100, 3)
        without, repeated = variants("recursive")
        gains.append(
            accepted(form, without, programs.tree(draft, (3,), replacement=False), target)
            - accepted(form, repeated, programs.tree(draft, (3,), replacement=True), target)
        )
    assert min(gains) > -form.exact
    assert max(gains) > 0.01


def test_merged_trials_would_be_noticed(form):
    """The check can fail: repeated draws that collapse into one trial bias the distribution of recursive rejection."""

    def merged(sketch):
        programs.tree(draft, (2,), replacement=True)(sketch)
        sketch.draft.trials[0] = list(dict.fromkeys(sketch.draft.trials[0]))

    worst = 0.0
    for seed in range(6):
        target, draft = Tables(seed, 3), Tables(seed + 100, 3)
        worst = max(worst, error(form, variants("recursive")[1], merged, target, 2, 1))
    assert worst > 0.01


def test_dropping_tokens_by_value_would_be_noticed(form):
    def choosy(sketch):
        trial = Sketch(sketch.choices, sketch.prefix)
        programs.chain(draft, 1)(trial)
        if trial.draft.tokens[0] == 0:
            sketch.draft, sketch.rows = trial.draft, trial.rows

    target, draft = Tables(3, 2), Tables(103, 2)
    assert error(form, rules["token"](), choosy, target, 2, 1) > 0.01


# ---------------------------------------------------------------------------------------------------- lenient


@pytest.mark.parametrize("lenience", [0.1, 0.5, 0.8, 1.0])
def test_lenient_distribution(form, lenience):
    """One step is A.5's law; the bound p / l holds for every token."""
    rule = Lenient(LenientConfig(lenience))
    for seed in range(6):
        target, draft = Tables(seed, 3), Tables(seed + 100, 3)
        p, q = torch.tensor(target((0,))), torch.tensor(draft((0,), 1))
        emitted = torch.zeros(3, dtype=torch.float64)
        for tokens, mass in round_distribution(form, rule, programs.chain(draft, 1), target, (0,)).items():
            emitted[tokens[0]] += mass
        assert torch.allclose(emitted, theory.lenient_token_distribution(p, q, lenience), rtol=0.0, atol=form.exact)
        assert (emitted <= p / lenience + form.exact).all()


def test_lenient_chain_stays_within_its_bound(form):
    lenience = 0.4
    rule = Lenient(LenientConfig(lenience))
    for seed in range(4):
        target, program = Tables(seed, 2), programs.chain(Tables(seed + 100, 2), 2)
        step = partial(round_distribution, form, rule, program, target)
        plain = plain_distribution(target, (0,), 3)
        for tokens, mass in rounds_distribution(step, target, (0,), 3, 2).items():
            assert mass <= plain[tokens] / lenience**3 + form.exact


def test_strict_lenience_is_the_token_rule(form):
    target, draft = Tables(5, 3), Tables(105, 3)
    line = programs.chain(draft, 3)
    strict = round_distribution(form, Lenient(LenientConfig(1.0)), line, target, (0,))
    assert distance(strict, round_distribution(form, rules["token"](), line, target, (0,))) < form.exact


@pytest.mark.parametrize("lenience", [0.2, 0.5, 1.0])
def test_lenient_at_temperature_zero(form, lenience):
    """A drafted token stays where p(x) >= l max p; the argmax replaces a rejected one."""
    rule = Lenient(LenientConfig(lenience))
    for seed in range(8):
        target, draft = Tables(seed, 3), Tables(seed + 100, 3)
        drafted = int(draft((0,), 1).argmax())
        distribution = round_distribution(form, rule, programs.point_chain(draft, 1), target, (0,), GREEDY)
        p = target((0,))
        mask = theory.lenient_argmax_mask(torch.tensor(p), lenience)
        expected = (drafted, int(target((0, drafted)).argmax())) if mask[drafted] else (int(p.argmax()),)
        assert distribution == {expected: 1.0}


@pytest.mark.parametrize("value", [0, -1, 1.5, "much", True])
def test_lenience_out_of_range(value):
    refused(ConfigError, "lenience", LenientConfig, value)
