"""What is left of p beside q: torch and the kernel against the definition in float64."""

from dataclasses import replace

import numpy
import pytest
import torch

from forerun import SamplingParams, kernels
from forerun.core.batch import Scores
from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import POINT_MASS, Draft
from forerun.sampling.draw import Sampler
from forerun.speculate.accept import base, chains, rules
from forerun.speculate.accept.chains import Token
from forerun.speculate.accept.compare import Comparison, CompiledComparison, compare
from here import where


def draws(size, temperatures, drawn, depth=3):
    """A chain per temperature over random logits, drawn from a q or a point mass; and p in float64."""
    generator = numpy.random.default_rng(size + depth)
    sequences, drafts, first, distributions = [], [], [], []
    logits = generator.normal(size=(len(drawn) * (depth + 1), size)) * 2.0
    logits[:, size // 2] = -numpy.inf  # a banned token
    for index, (temperature, q_drawn) in enumerate(zip(temperatures, drawn)):
        params = SamplingParams(temperature=temperature)
        sequences.append(RequestState(index, [1, 2], 1, params, seed=index, scheduled=1, num_computed_tokens=1))
        first.append(index * (depth + 1))
        rows = logits[first[-1] : first[-1] + depth + 1]
        if temperature:
            powers = numpy.exp(rows - rows.max(axis=1, keepdims=True))
            distributions.append(powers / powers.sum(axis=1, keepdims=True))
        else:
            distributions.append(numpy.eye(size)[rows.argmax(axis=1)])
        if index % 3 == 0:  # drafts that are sometimes right
            tokens = rows[:depth].argmax(axis=1).tolist()
        else:
            tokens = [int(generator.choice(size, p=distribution)) for distribution in distributions[-1][:depth]]
        near = numpy.abs(distributions[-1][:depth] + 0.2 * generator.random((depth, size)) / size) + 1e-9
        q = torch.tensor(near / near.sum(axis=1, keepdims=True), dtype=torch.float32) if q_drawn else None
        drafts.append(Draft.chain(tokens, q, range(depth) if q_drawn else [POINT_MASS] * depth))
    return Scores(sequences, drafts, first, torch.tensor(logits, dtype=torch.float32)), numpy.concatenate(distributions)


@pytest.mark.parametrize("name", where(kernels.has("acceptance"), ["token", "block", "lenient"]))
@pytest.mark.parametrize("size", [6, 300, 4097])
def test_the_kernel_weighs_chains_as_the_definition_does(name, size):
    temperatures, drawn = [1.0, 1.0, 0.0, 1.0, 1.0], [True, True, True, False, False]
    scores, p = draws(size, temperatures, drawn)
    rule, compared = rules[name](), compare(scores, Sampler(size))
    assert isinstance(compared, CompiledComparison)
    accept, trials = rule.decide(compared), compared.trials
    exact = Sampler(size)
    exact.compiled = None
    expected = Comparison(replace(scores, warped=torch.tensor(p).log()), exact)
    assert numpy.allclose(accept, rule.decide(expected), atol=2e-4)
    assert numpy.allclose(compared.tops, scores.warped.amax(dim=1).numpy())
    for ours, theirs in zip(compared.residual.double().numpy(), expected.residual.numpy()):
        if theirs.sum() > 1e-4:  # below, rounding decides whether anything is left
            assert numpy.allclose(ours / ours.sum(), theirs / theirs.sum(), atol=2e-3)
    overlaps = compared.overlaps()
    for trial, (row, token, index) in enumerate(zip(trials.row, trials.token, trials.index)):
        q = scores.drafts[index].q
        q_row = numpy.eye(size)[token] if q is None else q[trials.q_row[trial]].double().numpy()
        assert abs(overlaps[row] - numpy.minimum(p[row], q_row).sum()) < 1e-4


@pytest.mark.parametrize(
    "form", where(lambda form: form is Comparison or kernels.has("acceptance"), [Comparison, compare])
)
@pytest.mark.parametrize("name", ["coupled", "token", "block", "recursive", "traversal"])
@pytest.mark.parametrize("faulty", [None, 0, 1, 2])
def test_a_verdict_tells_what_was_tested_and_how_much_p_and_q_had_in_common(form, name, faulty, monkeypatch):
    """Positions up to the first rejected one; a row of NaN ends its path, tests nothing and has no token."""
    monkeypatch.setattr(base if name != "coupled" else chains, "compare", form)
    scores, p = draws(40, [1.0, 0.0, 1.0, 1.0], [True, False, True, False])
    for index in range(4) if faulty is not None else ():
        scores.warped[4 * index + faulty] = torch.nan
    met = set()
    for index, (draft, verdict) in enumerate(zip(scores.drafts, rules[name]().accept(scores, Sampler(40)))):
        reached = len(verdict.path)
        assert verdict.path == [*range(reached)]
        assert reached <= (3 if faulty is None else faulty)
        assert verdict.error == (base.NAN if reached == faulty else None)
        assert verdict.tested == (reached if reached == faulty else min(reached + 1, 3))
        common = 0.0
        for row, token in enumerate(draft.tokens[: verdict.tested]):
            q = numpy.eye(40)[token] if draft.q is None else draft.q[row].double().numpy()
            common += numpy.minimum(p[4 * index + row], q).sum()
        assert verdict.overlap == pytest.approx(common, abs=1e-4)
        met.add(verdict.error)
    assert faulty != 0 or met == {base.NAN}


@pytest.mark.parametrize(
    "form", where(lambda form: form is Comparison or kernels.has("acceptance"), [Comparison, compare])
)
def test_siblings_count_the_overlap_of_the_first_one(form):
    q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    scores = torch.tensor([0.2, 0.5, 0.3]).log().repeat(9, 1)
    drafts = [Draft(q=q), Draft(q=q), Draft()]
    for draft, rows in zip(drafts, [(0, 1), (POINT_MASS, 0), (POINT_MASS, POINT_MASS)]):
        for token, row in zip((2, 1), rows):
            draft.add(token, -1, row)
    params = [SamplingParams(temperature=temperature) for temperature in (1.0, 1.0, 0.0)]
    sequences = [RequestState(index, [1], 1, each, seed=index) for index, each in enumerate(params)]
    sampler = Sampler(3)
    sampler.compiled = None if form is Comparison else sampler.compiled
    compared = compare(Scores(sequences, drafts, [0, 3, 6], scores), sampler)
    compared.pick()
    assert compared.overlaps() == pytest.approx({0: 0.2 + 0.25 + 0.25, 3: 0.3, 6: 0.0}, abs=1e-6)


def test_a_rule_for_chains_says_who_sent_a_tree():
    drafts = [Draft.chain([1]), Draft.tree([1, 2], [-1, -1])]
    drafts[0].method, drafts[1].method = "ngram", "suffix"
    sequences = [RequestState(index, [1], 1, SamplingParams(temperature=1.0), seed=index) for index in range(2)]
    with pytest.raises(ConfigError, match="accept='token' supports chains only, but suffix drafted a tree"):
        Token().accept(Scores(sequences, drafts, [0, 2], torch.zeros(5, 3)), Sampler(3))


class Sceptic(Token):
    """Asks for nothing."""

    def decide(self, compared):
        return [0.0] * len(compared.trials.row)


@pytest.mark.parametrize(
    "form", where(lambda form: form is Comparison or kernels.has("acceptance"), [Comparison, compare])
)
@pytest.mark.parametrize("rule", [Sceptic, *(rules[name] for name in ("token", "block", "recursive", "traversal"))])
def test_rounds_with_and_without_drafts(form, rule, monkeypatch):
    """A rule decides for itself and not as its parent does, whatever it asks for."""
    monkeypatch.setattr(base, "compare", form)
    scores, _ = draws(50, [1.0, 0.0], [True, False])
    drafted = rule().accept(scores, Sampler(50))
    assert rule is not Sceptic or not any(verdict.path for verdict in drafted)
    plain = replace(scores, drafts=[Draft(), Draft()], first=[0, 1], warped=scores.warped[[0, 4]], contexts=None)
    one, other = rule().accept(plain, Sampler(50))
    assert one.path == other.path == []
    assert other.token == int(scores.warped[4].argmax())
    assert 0 <= one.token < 50
    assert one.tested == other.tested == 0


@pytest.mark.parametrize("name", ["recursive", "traversal"])
def test_the_q_of_drafts_stays_as_it_was(name):
    """Draws without replacement change a rule's own rows alone; in inference mode a view does not tell its base."""
    with torch.inference_mode():
        draft = Draft(q=torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]))
        for token, parent, row in ((0, -1, 0), (1, -1, 0), (2, 0, 1), (1, 0, 1)):
            draft.add(token, parent, row)
        kept = draft.q.clone()
        sequence = RequestState(0, [1], 1, SamplingParams(temperature=1.0), seed=3)
        rules[name]().accept(Scores([sequence], [draft], [0], torch.zeros(5, 3)), Sampler(3))
        assert torch.equal(draft.q, kept)
