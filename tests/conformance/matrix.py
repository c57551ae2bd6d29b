"""Which combinations of registered parts are tested."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import combinations, product
from typing import NamedTuple

import pytest
from echo import Echo
from policies import Off, Restless

from forerun.core.errors import ConfigError
from forerun.speculate.accept import rules
from forerun.speculate.draft import drafters
from forerun.speculate.length import policies

TREE = (3, 2, 1)
SHAPES = {"chain": {}, "tree": {"tree": TREE}, "best-first": {"tree_nodes": 7}, "choices": {"second_choices": 2}}
"""Shapes of drafts and the keys of ``speculative_config`` that ask for them."""
PAGE_SIZES = (None, 16)
PATHS = ("native", "hf")


class Case(NamedTuple):
    """A drafter and the shape of its drafts."""

    method: str
    shape: str

    def __str__(self):
        return f"{self.method}-{self.shape}"


class Combination(NamedTuple):
    method: str
    shape: str
    rule: str
    page_size: int | None
    path: str
    length: str

    @property
    def case(self):
        return Case(self.method, self.shape)

    def __str__(self):
        layout = "slotted" if self.page_size is None else f"paged{self.page_size}"
        return f"{self.case}-{self.rule}-{layout}-{self.path}-{self.length}"


@contextmanager
def additions():
    """The tests' own drafter and policies, registered as any other."""
    drafters.register("echo")(Echo)
    for policy in (Off, Restless):
        policies.register(policy.name)(policy)
    try:
        yield
    finally:
        drafters.remove("echo")
        for policy in (Off, Restless):
            policies.remove(policy.name)


def takes(method, shape):
    try:
        drafters[method].config_class.from_dict(method, SHAPES[shape])
    except ConfigError:
        return False
    return True


def fits(combination):
    if combination.case not in CASES:
        return False
    config = drafters[combination.method].config_class(**SHAPES[combination.shape])
    return rules[combination.rule].trees or not config.branches


def pairwise(everything):
    """A subset in which every pair of values that occurs at all occurs."""
    pairs = {item: {(i, item[i], j, item[j]) for i, j in combinations(range(len(item)), 2)} for item in everything}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(everything, key=lambda item: len(pairs[item] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def marked(everything, chosen=pairwise):
    """Parameters of a test: the chosen ones, and with ``--full`` the others."""
    always = set(chosen(everything))
    return [pytest.param(item, id=str(item), marks=() if item in always else pytest.mark.full) for item in everything]


with additions():
    CASES = [Case(method, shape) for method in drafters for shape in SHAPES if takes(method, shape)]
    RULES = list(rules)
    LOSSLESS = [name for name in rules if rules[name].lossless]
    OF_LAB = {name for name in drafters if drafters[name].__module__.startswith("forerun_lab.")}
    POLICIES = [name for name in policies if name != Off.name]
    _EVERY = product(drafters, SHAPES, LOSSLESS, PAGE_SIZES, PATHS, POLICIES)
    COMBINATIONS = [combination for combination in map(Combination._make, _EVERY) if fits(combination)]

CHAINS = [case for case in CASES if case.shape == "chain"]


def unless_of_lab(cases):
    """The laboratory's drafters meet every rule and layout in the matrix, and the rest with ``--full``."""
    return [case for case in cases if case.method not in OF_LAB]
