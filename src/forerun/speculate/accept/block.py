"""``block``: block verification (Sun et al., arXiv 2403.10444)."""

from __future__ import annotations

from forerun.core.tree import Draft
from forerun.speculate.accept.base import RatioRule, rules
from forerun.speculate.accept.compare import Comparison


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

    def decide(self, compared: Comparison) -> list[float]:
        weights, left = compared.chains(linked=True)
        follows = [parent >= 0 for parent in compared.trials.parent]
        accept = []
        for t, weight in enumerate(weights):
            if t + 1 < len(follows) and follows[t + 1]:
                rest = left[t + 1]  # S of a prefix: the mass left where the next token was drafted
                remaining = rest + 1.0 - weight
                accept.append(rest / remaining if remaining > 0.0 else 1.0)
            else:
                accept.append(weight)
        return accept

    def walk(self, draft: Draft, passed: list[list[bool]]) -> tuple[list[int], bool]:
        """The longest prefix that passes."""
        length = max((i + 1 for i, results in enumerate(passed) if results and results[0]), default=0)
        return list(range(length)), False
