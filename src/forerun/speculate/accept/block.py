"""``block``: block verification (Sun et al., arXiv 2403.10444)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from forerun.core.scores import Scores
from forerun.core.tree import Draft
from forerun.sampling.compiled import Compiled, Weighed
from forerun.sampling.warp import Row
from forerun.speculate.accept.base import Decision, RatioRule, Trials, column, gather_q, rules, slots, take
from forerun.speculate.accept.left import reduce_rows, weigh_chains


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
        count = len(trials.row)
        if not count:
            return Decision(p.new_empty(0), p)
        q = gather_q(scores, trials, range(count), p)
        tokens = column(trials.token, p)
        at = take(p, trials.row)
        weight, before = self._weights(at.gather(1, tokens) / q.gather(1, tokens), trials)
        residual, mass = reduce_rows(p, q, trials.row, before)
        # S of a prefix is the mass left where the next token was drafted; a chain's last prefix has none.
        rest = torch.cat([mass[1:], mass[:1]])
        room = rest + 1.0 - weight
        last = column([t + 1 == count or trials.parent[t + 1] < 0 for t in range(count)], p) > 0
        accept = torch.where(room > 0.0, rest / room, 1.0)
        return Decision(torch.where(last, weight, accept)[:, 0], residual)

    def weigh(self, scores: Scores, trials: Trials, rows: Seq[Row], compiled: Compiled) -> tuple[Weighed, list[float]]:
        follows = [parent >= 0 for parent in trials.parent]
        weighed = weigh_chains(scores, trials, rows, compiled, follows)
        accept = []
        for t, weight in enumerate(weighed.weights):
            if t + 1 < len(follows) and follows[t + 1]:
                rest = weighed.left[t + 1]
                room = rest + 1.0 - weight
                accept.append(rest / room if room > 0.0 else 1.0)
            else:
                accept.append(weight)
        return weighed, accept

    @staticmethod
    def _weights(ratio: torch.Tensor, trials: Trials) -> tuple[torch.Tensor, torch.Tensor]:
        """w of every trial's prefix with and without its own token, [trials, 1] each."""
        depth = max(trials.parent) + 1
        grid = ratio.new_ones(trials.index[-1] + 1, depth + 2)
        places = [index * (depth + 2) + parent + 2 for index, parent in zip(trials.index, trials.parent)]
        flat = grid.view(-1, 1)
        flat[slots(places)] = ratio
        for length in range(1, depth + 2):
            grid[:, length] = (grid[:, length - 1] * grid[:, length]).clamp_(max=1.0)
        return take(flat, places), take(flat, [spot - 1 for spot in places])

    def walk(self, draft: Draft, passed: list[list[bool]]) -> tuple[list[int], bool]:
        """The longest prefix that passes."""
        length = max((i + 1 for i, results in enumerate(passed) if results and results[0]), default=0)
        return list(range(length)), False
