"""Acceptance rules: from the target's scores, a rule decides which path of a draft is kept and which token follows it,
so that the output keeps the target's distribution."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from forerun.core.batch import Scores
from forerun.core.errors import ConfigError
from forerun.core.tree import Draft, Verdict
from forerun.sampling.draw import Sampler
from forerun.sampling.noise import ACCEPT, RESIDUAL, fold, uniform
from forerun.speculate.accept.compare import Comparison, compare, take
from forerun.speculate.names import rules as rules

# Both tests, for one sequence. p: the target's distribution behind a node; q: the drafter's, from which c was drawn.
#
#   follow_samples (coupled: the same tokens)      RatioRule (token, recursive: the same distribution)
#
#   node = root                                    node = root
#   while True:                                    while node has children:
#       x = argmax(log p(. | node) + Gumbel)           for c in children of node, as they were drawn:
#       c = the child of node that carries x               if uniform() < min(1, p(c) / q(c)):
#       if there is none: emit x, end                          node = c; go on below it
#       node = c                                           p = max(0, p - q), normalised
#                                                      if no child passed: emit a draw from p, end
#   The noise is that of plain decoding at x's     emit a draw from p    # all were accepted: a token more
#   position, so x is what it would emit there.
NAN = "the model returned NaN logits"
NO_TOKEN = "no token is permitted: the bans and masks of this request leave nothing to sample"


@dataclass(frozen=True)
class RuleConfig:
    """Options of a rule. Field names are keys of ``speculative_config``."""


class Rule(ABC):
    """An acceptance rule, registered in ``rules`` (Leviathan et al. 2023, section 2.3; each rule names its own
    source)."""

    name: ClassVar[str]
    config_class: ClassVar[type[RuleConfig]] = RuleConfig
    identity: ClassVar[bool] = False
    """Whether the same seed gives the same tokens as plain decoding."""
    lossless: ClassVar[bool] = True
    needs_q: ClassVar[bool] = True
    """Whether it compares p with q: drafts are then drawn with noise of their own, and carry their q."""
    trees: ClassVar[bool] = True
    """Whether drafts may branch."""
    replacement: bool = True
    """Whether drafters draw siblings with replacement (rules with ``needs_q``)."""

    def __init__(self, config: RuleConfig | None = None) -> None:
        self.config = config if config is not None else self.config_class()

    @classmethod
    def options(cls) -> list[str]:
        """The keys of ``speculative_config`` that are this rule's."""
        return [field.name for field in fields(cls.config_class)]

    @abstractmethod
    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        """Judge a round's drafts.

        Args:
            scores: drafts, and for every drafted position float32 logits [rows, vocabulary], before and after warping.
            sampler: draws from distributions, with noise keyed by the request's seed.

        Returns:
            One verdict per sequence of ``scores``: path, token, and the overlap of p and q. A row of NaN, or in which
            no token is permitted, ends the path and is the verdict's ``error``.

        Raises:
            ConfigError: the rule works on chains, and a draft branches.
        """


def verdict_along(
    scores: Scores, index: int, path: list[int], token: int, error: str | None, overlap: Mapping[int, float]
) -> Verdict:
    """A verdict with the overlaps of p and q along its path, given those of all rows. A row in error tests nothing."""
    nodes = [-1, *path]
    rows = [scores.row(index, node) for node in (nodes if error is None else nodes[:-1])]
    overlaps = [overlap[row] for row in rows if row in overlap]
    return Verdict(path, token, error, len(overlaps), sum(overlaps, 0.0))


def row_error(value: float) -> str | None:
    """Why nothing can be sampled from a row whose best score is ``value``; None: something can."""
    if math.isnan(value):
        return NAN
    if value == -math.inf:
        return NO_TOKEN
    return None


def valid_prefix(tops: Sequence[float]) -> tuple[int, str | None]:
    """How many nodes of a path come before a row in error, and the error, given the best scores along the path."""
    for index, top in enumerate(tops):
        if (error := row_error(top)) is not None:
            return index, error
    return len(tops) - 1, None


def follow_samples(compared: Comparison) -> list[Verdict]:
    """Samples every row with the noise of its position, and follows, from the root, the child that carries the sampled
    token for as long as there is one."""
    scores, tokens, tops = compared.scores, compared.pick(), compared.tops
    overlap, verdicts = compared.overlaps() if any(map(len, compared.scores.drafts)) else {}, []
    for index, draft in enumerate(scores.drafts):
        path: list[int] = []
        row = scores.row(index, -1)
        error = row_error(tops[row])
        while error is None and (child := draft.child(path[-1] if path else -1, tokens[row])) is not None:
            path.append(child)
            row = scores.row(index, child)
            error = row_error(tops[row])
        verdicts.append(verdict_along(scores, index, path, tokens[row], error, overlap))
    return verdicts


class RatioRule(Rule):
    """Rules that compare p with q: ``decide`` computes chances, and ``walk`` follows independent uniform tests."""

    @abstractmethod
    def decide(self, compared: Comparison) -> list[float]:
        """Returns the probability that each trial's test succeeds. Turns each row of ``compared.residual`` into the
        unnormalised distribution of the token that is emitted where the walk stops."""

    def walk(self, draft: Draft, passed: list[list[bool]]) -> list[int]:
        """Returns the accepted path, given each trial's test result, ``passed[parent + 1][rank]``.

        The default follows, from the root, the first trial that passes.
        """
        path: list[int] = []
        node = -1
        while draft.trials:
            for trial, good in zip(draft.trials[node + 1], passed[node + 1]):
                if good:
                    node = trial.node
                    path.append(node)
                    break
            else:
                break
        return path

    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        compared = compare(scores, sampler)
        ranks = compared.trials.rank
        if not self.trees and any(ranks):
            draft = scores.drafts[compared.trials.index[ranks.index(1)]]
            raise ConfigError(
                f"accept={self.name!r} supports chains only, but {draft.method or 'the drafter'} drafted a tree"
            )
        if self.lossless and all(row.effective_temperature == 0.0 for row in compared.rows):
            return follow_samples(compared)  # the same where every p is a point mass
        chances, tops, overlap = self.decide(compared), compared.tops, compared.overlaps()
        result, ends, keys = [], [], []
        chance = iter(chances)
        for index, (sequence, draft) in enumerate(zip(scores.sequences, scores.drafts)):
            round_key = fold(sequence.seed, ACCEPT, len(sequence.tokens))
            passed = [  # under ``token`` a chance is min(1, p / q)
                [uniform(fold(round_key, parent, rank)) < next(chance) for rank in range(len(trials))]
                for parent, trials in enumerate(draft.trials)
            ]
            path = self.walk(draft, passed)
            visited = [scores.row(index, node) for node in [-1, *path]]
            good, error = valid_prefix([tops[row] for row in visited])
            result.append((path[:good], error))
            ends.append(visited[good])
            keys.append(fold(sequence.seed, RESIDUAL, len(sequence.tokens), visited[good] - visited[0] - 1))
        tokens = sampler.draw(take(compared.residual, ends), keys).tolist()
        return [
            verdict_along(scores, index, path, token, error, overlap)
            for index, ((path, error), token) in enumerate(zip(result, tokens))
        ]
