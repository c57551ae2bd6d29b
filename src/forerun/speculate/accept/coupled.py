"""``coupled``: sample the target as if there were no draft, and follow the child that equals its token.

The target's token at an absolute position is argmax(log p + g), g being Gumbel noise keyed by (seed, position)
alone; drafters use the same g (the coupling of Daliri et al., arXiv 2408.07978, with one noise for every child).
So the same seed gives the same tokens with or without speculation, for any drafter, tree, batch or policy.
"""

from __future__ import annotations

from forerun.core.scores import Scores
from forerun.core.tree import Verdict
from forerun.sampling.draw import Sampler, best
from forerun.speculate.accept.base import Rule, fault, fetch, flatten, measure, overlaps, row_contexts, rules


@rules.register("coupled")
class Coupled(Rule):
    name = "coupled"
    identity = True
    needs_q = False

    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        rows = row_contexts(scores)
        top, choice = best(sampler.shared(scores.warped, rows))
        tested, shares = overlaps(scores, flatten(scores), rows, choice)
        tops, tokens, shared = fetch(top, choice, shares)
        overlap = dict(zip(tested, shared))
        verdicts = []
        for index, draft in enumerate(scores.drafts):
            path: list[int] = []
            row = scores.row(index, -1)
            error = fault(tops[row])
            while (child := draft.children(path[-1] if path else -1).get(tokens[row])) is not None:
                path.append(child)
                row = scores.row(index, child)
                error = error or fault(tops[row])
            verdict = Verdict(path=path, token=tokens[row], error=error)
            measure(verdict, scores, index, overlap)
            verdicts.append(verdict)
        return verdicts
