"""A drafter in the fewest lines that do: what the conformance tests need to cover the next one."""

from forerun.core.tree import Draft
from forerun.speculate.draft.base import Drafter


class Echo(Drafter):
    """Repeats what followed the last occurrence of the current token; siblings are the tokens next to it."""

    name = "echo"

    def propose(self, sequences, budgets):
        return [self._draft(sequence.tokens, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, tokens, budget):
        draft, node = Draft(), -1
        before = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        for depth, token in enumerate(tokens[before[-1] + 1 :][:budget] if before else []):
            node = draft.add(token, node)
            for step in range(1, self.config.width(depth)):
                draft.add((token + step) % self.context.sampler.vocab_size, draft.parents[node])
        return draft
