"""Who is asked for drafts, and who learns what became of a round."""

from types import SimpleNamespace

import pytest

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.draft.base import Drafter, DrafterConfig
from forerun.speculate.draft.router import Router


class Seen(Drafter):
    def __init__(self):
        super().__init__(DrafterConfig(), SimpleNamespace(sampler=SimpleNamespace(vocab_size=10)))
        self.rounds = []

    def propose(self, sequences, budgets):
        return [Draft.chain([1] * budget) for budget in budgets]

    def observe(self, sequences, drafts, verdicts, result):
        self.rounds.append([sequence.id for sequence in sequences])


class Indifferent(Seen):
    watches = False


@pytest.mark.parametrize(
    ("budgets", "watching", "indifferent"),
    [([0, 0, 0, 0], [0, 2], None), ([2, 0, 0, 0], [0, 2], None), ([0, 1, 0, 0], [0, 2], [1]), ([1] * 4, [0, 2], [1])],
)
def test_rounds_are_shown_to_whom_they_concern(budgets, watching, indifferent):
    """Sequences 0 and 2 have a drafter that watches, 1 one that does not, 3 has none."""
    router = Router({"watching": Seen(), "indifferent": Indifferent()})
    names = ["watching", "indifferent", "watching", None]
    sequences = [RequestState(i, [1], 1, SamplingParams(), 0, drafter=name) for i, name in enumerate(names)]
    for _ in range(2):  # what an earlier round asked for makes no difference
        router.propose(sequences, [1, 1, 1, 0])
        router.drafters["watching"].rounds.clear()
        router.drafters["indifferent"].rounds.clear()
        drafts = router.propose(sequences, [*budgets[:3], 0])
        router.observe(sequences, drafts, [Verdict() for _ in sequences], None)
        assert router.drafters["watching"].rounds == [watching]
        assert router.drafters["indifferent"].rounds == ([indifferent] if indifferent else [])
    assert not router.failures
