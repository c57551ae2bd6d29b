"""What can happen to a round: nothing drafted, everything or nothing accepted, stops, limits, failures, preemption."""

import inspect
import logging
from dataclasses import replace

import echo
import pytest
from matrix import CASES, CHAINS, PAGE_SIZES, PATHS, POLICIES, RULES, TREE, Case, marked, unless_of_lab
from scripted import Scripted

from forerun.core.batch import Batch, Span
from forerun.core.tree import Draft
from forerun.models.run.base import new_attention
from forerun.speculate.accept import rules
from forerun.speculate.draft import drafters
from harness import FREE, PROMPTS, SHORT, answers, options, run
from tiny import ALPHABET

# Trees meet the same code after drafting; identity covers them.
EACH = marked(CASES, lambda cases: unless_of_lab(CHAINS))


@pytest.mark.parametrize("case", EACH)
def test_budget_zero_is_plain_decoding(engine, keys, plain, case):
    jobs = run(engine(keys(case, length="off")), SHORT)
    assert answers(jobs) == plain(which="short")
    for job in jobs:
        assert job.metrics.num_drafts == job.metrics.num_draft_tokens == 0
        assert job.metrics.alpha is job.metrics.mean_acceptance_length is job.metrics.draft_acceptance_rate is None
        assert job.metrics.rounds == len(job.output_ids) - 1


@pytest.mark.parametrize("case", EACH)
def test_prompts_in_chunks_beside_drafts(engine, keys, plain, case):
    assert answers(run(engine(keys(case), max_num_batched_tokens=24, page_size=16), SHORT)) == plain(which="short")


@pytest.mark.parametrize("case", EACH)
def test_preemption_changes_no_token(engine, keys, plain, case):
    jobs = run(engine(keys(case), page_size=16, num_pages=7), SHORT)
    assert answers(jobs) == plain(which="short")
    assert sum(job.metrics.preemptions for job in jobs) > 0


@pytest.mark.parametrize("method", ["propose", "observe"])
@pytest.mark.parametrize("case", EACH)
def test_a_drafter_that_raises_costs_nobody_an_answer(engine, keys, plain, case, method, caplog):
    broken = engine(keys(case), max_num_seqs=3)
    drafter = broken.router.drafters[case.method]
    working, calls = getattr(drafter, method), []

    def fail_at_the_fifth(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise RuntimeError("the draft burnt")
        return working(*arguments)

    setattr(drafter, method, fail_at_the_fifth)
    with caplog.at_level(logging.ERROR, "forerun"):
        jobs = run(broken, SHORT)
    assert answers(jobs) == plain(which="short")
    lost = [job.metrics.draft_error for job in jobs]
    assert set(lost) == {None, "RuntimeError: the draft burnt"}
    assert not broken.router.failures
    assert sum("draft burnt" in str(record.exc_info[1]) for record in caplog.records) == 1


NONSENSE = {
    "a drafted token is outside the vocabulary of 98": lambda n: [Draft.chain([98])] * n,
    "a drafted token is outside the vocabulary of 98 ": lambda n: [Draft.chain([5, -1])] * n,
    "a draft of depth 9 for a budget of": lambda n: [Draft.chain([5] * 9)] * n,
    "a draft of 9 nodes where nodes_by_depth says": lambda n: [Draft.tree(list(range(9)), [-1] * 9)] * n,
    "drafts for": lambda n: [Draft()] * (n - 1),
}


@pytest.mark.parametrize("reason", NONSENSE)
def test_a_drafter_that_proposes_nonsense_costs_nobody_an_answer(engine, plain, monkeypatch, reason):
    monkeypatch.setattr(echo.Echo, "propose", lambda self, sequences, budgets: NONSENSE[reason](len(sequences)))
    jobs = run(engine({"method": "echo"}), SHORT)
    assert answers(jobs) == plain(which="short")
    assert any(reason.strip() in (job.metrics.draft_error or "") for job in jobs)
    assert sum(job.metrics.num_draft_tokens for job in jobs) == 0


@pytest.mark.parametrize("case", EACH)
def test_the_longest_context_is_never_exceeded(engine, keys, case):
    expected = answers(run(engine(max_model_len=40), LIMITS))
    short = engine(keys(case), max_model_len=40)
    jobs = run(short, LIMITS, lambda: within(short, 40))
    assert answers(jobs) == expected
    assert [len(job.sequence.tokens) for job in jobs] == [40, 40, 40, 40]
    assert {job.finish.reason for job in jobs} == {"length"}
    assert len(jobs[-1].output_ids) == 1


LIMITS = [
    (PROMPTS[0], options(max_tokens=None)),
    (PROMPTS[1], options(temperature=0.8)),
    (PROMPTS[2], options(max_tokens=39)),
    ("x" * 39, options(max_tokens=None)),
]


def within(engine, limit):
    for job in engine.jobs.values():
        assert len(job.sequence.tokens) <= limit


@pytest.fixture
def script(monkeypatch):
    """``script(answers)``: registers the drafter that knows them."""
    drafters.register("scripted")(Scripted)
    yield lambda expected: monkeypatch.setattr(Scripted, "answers", tuple(a.tokens for a in expected))
    drafters.remove("scripted")


SHAPES = [None, TREE]


def shaped(rule):
    return [shape for shape in SHAPES if shape is None or rules[rule].trees]


def comparable(rule, expected):
    """The requests whose tokens the rule promises, and those tokens."""
    pairs = [(r, answer) for r, answer in zip(FREE, expected) if rules[rule].identity or r[1].greedy]
    return [request for request, _ in pairs], [answer for _, answer in pairs]


LOSSLESS = [(rule, shape) for rule in RULES if rules[rule].lossless for shape in shaped(rule)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("rule", "shape"), LOSSLESS)
def test_a_draft_that_is_always_right(engine, plain, script, rule, shape, page_size, path):
    requests, expected = comparable(rule, plain(path, "free"))
    script(expected)
    config = {"method": "scripted", "accept": rule, "tree": shape}
    jobs = run(engine(config, page_size=page_size, path=path), requests)
    assert answers(jobs) == expected
    depth = 5 if shape is None else len(shape)
    for job in jobs:
        assert job.metrics.decode_tokens >= 39
        rounds, rest = divmod(job.metrics.decode_tokens, depth + 1)
        assert job.metrics.rounds == rounds + (rest > 0)
        assert job.metrics.acceptance_histogram[depth] == rounds
        assert job.metrics.match_rate == 1.0
        if shape is None:
            assert job.metrics.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("wrong_from", [0, 2])
@pytest.mark.parametrize(("rule", "shape"), LOSSLESS)
def test_a_draft_that_is_always_wrong(engine, plain, script, rule, shape, wrong_from, page_size):
    requests, expected = comparable(rule, plain(which="free"))
    script(expected)
    wrong = engine({"method": "scripted", "accept": rule, "tree": shape, "wrong_from": wrong_from}, page_size=page_size)
    jobs = run(wrong, requests)
    assert answers(jobs) == expected
    for job in jobs:
        histogram = job.metrics.acceptance_histogram
        assert len(histogram) == wrong_from + 1
        assert histogram[wrong_from] >= job.metrics.num_drafts - 1
        assert job.metrics.num_accepted_draft_tokens <= wrong_from * job.metrics.num_drafts


@pytest.mark.parametrize("stop", ["token", "string", "eos"])
@pytest.mark.parametrize("at", range(7))
def test_a_stop_inside_a_block_ends_it_there(engine, script, stop, at):
    """At every place of a block: first, inside, last, bonus."""
    whole = run(engine(), [(PROMPTS[0], options())])
    script(answers(whole))
    ids, text = whole[0].output_ids, whole[0].text
    index = 13 + at
    stopping = {
        "token": options(stop_token_ids=[ids[index]], logprobs=0),
        "string": options(stop=[text[index - 1 : index + 1]], logprobs=0),
        "eos": options(ignore_eos=False, logprobs=0),
    }[stop]
    early = engine({"method": "scripted", "num_speculative_tokens": 6})
    if stop == "eos":
        early.model = model_with(early.model, eos_ids=frozenset([ids[index]]))
    first = ids.index(ids[index]) if stop != "string" else text.index(text[index - 1 : index + 1]) + 1
    job = run(early, [(PROMPTS[0], stopping)])[0]
    assert job.output_ids == ids[: first + 1]
    assert job.finish.reason == "stop"
    assert job.text == {"token": text[:first], "string": text[: first - 1], "eos": text[:first]}[stop]
    assert job.finish.stopped_by == {"token": ids[index], "string": text[index - 1 : index + 1], "eos": None}[stop]
    rounds, rest = divmod(first, 7)
    assert job.metrics.rounds == rounds + (rest > 0)
    assert job.metrics.decode_tokens == first
    assert job.metrics.num_accepted_draft_tokens == first - rounds
    assert [item.token for item in job.logprobs] == job.output_ids
    assert early.stats.generated_tokens == len(job.output_ids)


class model_with:
    """The same model, described otherwise."""

    def __init__(self, model, **changes):
        self._model = model
        self.info = replace(model.info, **changes)

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize(("rule", "shape"), [(rule, shape) for rule in RULES for shape in shaped(rule)])
def test_the_target_accepts_itself(engine, tiny_target, rule, shape):
    own = {"method": "draft_model", "model": tiny_target, "accept": rule, "tree": shape}
    for job in run(engine(own, page_size=16), FREE):
        assert job.metrics.match_rate == 1.0
        assert job.metrics.alpha == pytest.approx(1.0, abs=1e-4)
        assert job.metrics.acceptance_histogram[3] >= job.metrics.num_drafts - 1


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("case", [case for case in CASES if case.method == "draft_model"], ids=str)
def test_a_draft_model_caches_what_it_would_compute_afresh(engine, keys, case, page_size):
    drafting = engine(keys(case, length="restless"), page_size=page_size, max_num_batched_tokens=40)
    drafter = drafting.router.drafters[case.method]
    model, pool = drafter.model, drafter.attention.pool
    assert drafter.pools() == [pool]
    compared = []

    def same_entries():
        for job in drafting.jobs.values():
            known = drafter.cached_tokens(job.sequence)
            if not known or len(compared) > 40:
                continue
            fresh = new_attention(model, max_seqs=1, max_len=128)
            model.forward(Batch([Span(0, 0, list(known))]), fresh)
            for layer in range(len(pool.layers)):
                for side in ("keys", "values"):
                    pages, offsets = pool.slot_mapping(job.sequence.id, range(len(known)))
                    got = getattr(pool, side)[layer][pages, :, offsets]
                    expected = getattr(fresh.pool, side)[layer][0, :, : len(known)].transpose(0, 1)
                    assert (got - expected).abs().max() < 1e-4
            compared.append(len(known))

    run(drafting, SHORT, same_entries)
    assert len(compared) > 20


def test_a_new_drafter_is_covered_unasked():
    assert {Case("echo", "chain"), Case("echo", "tree")} <= set(CASES)
    assert {Case(method, "chain") for method in drafters} <= set(CASES)
    assert "restless" in POLICIES
    assert len([line for line in inspect.getsource(echo).splitlines() if line.strip()]) < 40


def test_text_and_tokens_agree(plain):
    for answer in plain():
        spelt = "".join(ALPHABET[token] for token in answer.tokens if token > 1)
        assert spelt.startswith(answer.text)
