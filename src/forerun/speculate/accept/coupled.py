"""``coupled``: sample the target as if there were no draft, and follow the child that equals its token.

The target's token at an absolute position is argmax(log p + g), g being Gumbel noise keyed by (seed, position)
alone; drafters use the same g (the coupling of Daliri et al., arXiv 2408.07978, with one noise for every child).
So the same seed gives the same tokens with or without speculation, for any drafter, tree, batch or policy.
"""

from __future__ import annotations

from forerun.core.scores import Scores
from forerun.core.tree import Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import Rule, follow, rules
from forerun.speculate.accept.compare import compare


@rules.register("coupled")
class Coupled(Rule):
    name = "coupled"
    identity = True
    needs_q = False

    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        return follow(compare(scores, sampler))
