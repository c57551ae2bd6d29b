"""Who is asked for drafts, and who learns what became of a round."""

from types import SimpleNamespace

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Trial, Verdict
from forerun.speculate.accept.base import rules
from forerun.speculate.accept.chains import Coupled
from forerun.speculate.draft import drafters
from forerun.speculate.draft.base import Drafter, DrafterConfig
from forerun.speculate.draft.router import Router
from tiny import ALPHABET


class Seen(Drafter):
    def __init__(self):
        rule = SimpleNamespace(trees=True, needs_q=False)
        super().__init__(DrafterConfig(), SimpleNamespace(sampler=SimpleNamespace(vocab_size=10), rule=rule))
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


WIDTH = len(ALPHABET)


def drawn(q, rows=(0, 1)):
    return lambda sequence: Draft.chain([5, 6][: len(rows)], q, rows)


def even(rows=2, width=WIDTH):
    return torch.full((rows, width), 1 / width)


def branching(sequence):
    return Draft.tree([5, 6], [-1, -1])


def appending(sequence):
    sequence.tokens.append(5)
    return Draft.chain([5])


def appending_and_raising(sequence):
    sequence.tokens.append(5)
    raise RuntimeError("after that")


def one(**fields):
    return lambda sequence: Draft(**{"ids": [5], "parents": [-1], "trials": [[Trial(0)], []], **fields})


FAULTS = {
    "a row beyond q": (drawn(even(), (0, 10**7)), "row 10000000 of a q of 2 rows"),
    "a negative row": (drawn(even(), (0, -7)), "of a q of 2 rows"),
    "q of a smaller vocabulary": (drawn(even(width=40)), f"q is [rows, {WIDTH}] of floats, not [2, 40]"),
    "q of one row alone": (drawn(even()[0]), f"not [{WIDTH}]"),
    "q of integers": (drawn(even().long()), "torch.int64"),
    "rows of no q": (drawn(None), "there is no q"),
    "a tree of which a node lacks its parent": (one(parents=[-3]), "must be an earlier node, or -1"),
    "a node that no trial names": (one(trials=[[], []]), "each node must be a trial of its parent"),
    "a trial that names no node": (one(trials=[[Trial(4)], []]), "name node 4"),
    "parents of other nodes": (one(parents=[]), "0 parents"),
    "a token that is no integer": (one(ids=[1.5]), "must be integers"),
    "a token beyond the vocabulary": (one(ids=[10**6]), "outside the vocabulary"),
    "a text that was added to": (appending, "changed sequence.tokens"),
    "a text that was added to before an error": (appending_and_raising, "after that"),
}
UNFIT = {
    "NaN": drawn(even() * float("nan")),
    "counts": drawn(5 * even()),
    "logarithms": drawn(even().log()),
    "negative": drawn(even() + torch.eye(2, WIDTH) * 2 / WIDTH - torch.eye(2, WIDTH).roll(1, 1) * 2 / WIDTH),
    "nothing": drawn(0 * even()),
}


@pytest.fixture
def beside(tiny_target):
    """``beside(propose, accept)``: a request with that drafter, one that decodes plainly beside it, and the tokens of
    the first without a drafter."""

    def answer(propose, accept, **methods):
        made = {"propose": lambda self, sequences, budgets: [propose(each) for each in sequences], "name": "bad"}
        with drafters.lent("bad", type("Bad", (Drafter,), {**made, **methods})):
            way = {"method": "bad", "accept": accept, "num_speculative_tokens": 2, "length": "fixed"}
            llm = LLM(tiny_target, speculative_config=way, max_model_len=64)
            params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
            (alone,) = llm.generate("ab", params, speculate=False)
            jobs = [llm.engine.add(llm.encode("ab")[1], params, speculate=each)[0] for each in (True, False)]
            while llm.engine.busy:
                llm.engine.step()
            assert not llm.engine.jobs
        return jobs, alone.outputs[0].token_ids

    return answer


@pytest.mark.parametrize("accept", ["coupled", "token", "traversal"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_draft_costs_nobody_an_answer(beside, fault, accept):
    propose, message = FAULTS[fault]
    jobs, alone = beside(propose, accept)
    assert [job.output_ids for job in jobs] == [alone, alone]
    assert message in jobs[0].metrics.draft_error
    assert jobs[1].metrics.draft_error is None


@pytest.mark.parametrize("accept", ["token", "recursive"])
@pytest.mark.parametrize("fault", UNFIT)
def test_a_q_that_is_no_distribution_is_not_compared_with_p(beside, fault, accept):
    jobs, alone = beside(UNFIT[fault], accept)
    assert [job.output_ids for job in jobs] == [alone, alone]
    assert "probabilities that add up to 1" in jobs[0].metrics.draft_error


@pytest.mark.parametrize("accept", ["token", "block"])
def test_a_tree_under_a_rule_for_chains(beside, accept):
    jobs, alone = beside(branching, accept)
    assert [job.output_ids for job in jobs] == [alone, alone]
    assert f"accept='{accept}' supports chains only" in jobs[0].metrics.draft_error


@pytest.mark.parametrize("raises", ["propose", "release"])
def test_a_drafter_that_cannot_forget_a_request(beside, raises, caplog):
    def release(self, sequence):
        raise KeyError(sequence.id)

    jobs, alone = beside(
        lambda sequence: Draft.chain([5]) if raises == "release" else 1 / 0, "coupled", release=release
    )
    assert [job.output_ids for job in jobs] == [alone, alone]
    assert (jobs[0].metrics.draft_error is None) is (raises == "release")
    assert "drafter bad failed to release a request" in caplog.text


def test_a_rule_that_leaves_a_request_out_is_named(tiny_target):
    class Short(Coupled):
        name = "short"

        def accept(self, scores, sampler):
            return super().accept(scores, sampler)[:1]

    with rules.lent("short", Short):
        llm = LLM(tiny_target, speculative_config={"method": "ngram", "accept": "short"}, max_model_len=64)
        with pytest.raises(ValueError, match="rule 'short' returned 1 verdicts for 2 sequences"):
            llm.generate(["ab", "cd"], SamplingParams(max_tokens=8))
    assert not llm.engine.jobs


def test_a_length_policy_that_leaves_a_request_out_is_named():
    with pytest.raises(ValueError, match="returned 1 budgets for 2 sequences"):
        Router({}).propose([None, None], [1])
