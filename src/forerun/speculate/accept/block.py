"""``block``: block verification (Sun et al., arXiv 2403.10444)."""

from __future__ import annotations

import torch

from forerun.core.scores import Scores
from forerun.core.tree import Draft
from forerun.speculate.accept.base import Decision, RatioRule, Trials, column, gather_q, rules, take


@rules.register("block")
class Block(RatioRule):
    """Verify a chain x_1 .. x_n as one block. Lossless, and the best of all rules that see one path.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i | x_<i) / q(x_i | x_<i)), S_i = sum_x max(0, w_i p(x | x_<=i) -
    q(x | x_<=i)): the longest prefix whose own test passes is kept, the test of length i < n passing with
    probability S_i / (S_i + 1 - w_i), that of n with w_n; the token behind it is drawn from norm(max(0, w_i p - q)),
    behind x_n from p. All tests are made, also past a failed one.
    """

    name = "block"
    trees = False

    def decide(self, p: torch.Tensor, scores: Scores, trials: Trials) -> Decision:
        residual = p.clone()
        count = len(trials.row)
        if not count:
            return Decision(p.new_empty(0), residual)
        q = gather_q(scores, trials, range(count), p)
        tokens = column(trials.token, p)
        at = take(p, trials.row)
        weight, before = self._weights(at.gather(1, tokens) / q.gather(1, tokens), trials)
        left = (before * at).sub_(q).clamp_(min=0.0)
        mass = left.sum(dim=1, keepdim=True)
        residual[trials.row] = left.addcmul_(at, (mass <= 0.0).to(at.dtype))
        inner = [t for t in range(1, count) if trials.parent[t] >= 0]
        accept = weight.clone()
        if inner:
            lengths = [t - 1 for t in inner]
            rest = mass[inner]
            denominator = rest + 1.0 - weight[lengths]
            accept[lengths] = torch.where(denominator > 0.0, rest / denominator, 1.0)
        return Decision(accept[:, 0], residual)

    @staticmethod
    def _weights(ratio: torch.Tensor, trials: Trials) -> tuple[torch.Tensor, torch.Tensor]:
        """w of every trial's prefix with and without its own token, [trials, 1] each."""
        weight, before = ratio.clamp(max=1.0), torch.ones_like(ratio)
        for depth in range(1, max(trials.parent) + 2):
            level = [t for t, parent in enumerate(trials.parent) if parent == depth - 1]
            before[level] = weight[[t - 1 for t in level]]
            weight[level] = (before[level] * ratio[level]).clamp_(max=1.0)
        return weight, before

    def walk(self, draft: Draft, passed: list[list[bool]]) -> tuple[list[int], bool]:
        """The longest prefix that passes."""
        length = max((i + 1 for i, results in enumerate(passed) if results and results[0]), default=0)
        return list(range(length)), False
