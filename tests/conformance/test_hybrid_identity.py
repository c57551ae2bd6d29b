"""Models with state: every drafter, every rule, beams and preemption, the tokens of plain decoding."""

from functools import cache

import pytest
from matrix import CASES, COMBINATIONS, PAGE_SIZES, Case, marked, unless_of_lab
from test_beam_identity import SEARCHES, beams, search

from forerun.speculate.accept import rules
from harness import REQUESTS, SHORT, answers, check_idle, options, run
from hybrids import KINDS

COPYING = ("prompt_lookup", "ngram", "suffix")
NATIVE = [one for one in COMBINATIONS if one.path == "native"]
ROTATED = ["lfm2", "qwen3_5"]
"""Take their turns with drafters and rules, which know nothing of the kinds of layers."""
LAYOUTS = [(kind, page_size) for kind in KINDS for page_size in PAGE_SIZES]


def rotating(cases):
    """Each case with one kind, each kind with its cases."""
    return [(ROTATED[index % len(ROTATED)], case) for index, case in enumerate(cases)]


@pytest.fixture(scope="session")
def plainly(engine, hybrid):
    """``plainly(kind, "all" or "short")``: the answers of decoding one token, and one request, at a time."""

    @cache
    def get(kind, which="short"):
        return answers(run(engine(model=hybrid(kind), max_num_seqs=1), SHORT if which == "short" else REQUESTS))

    return get


@pytest.fixture(scope="session")
def config(keys, hybrid):
    """``config(kind, case)``: a ``speculative_config``. A draft model is the target, which keeps a state itself."""
    return lambda kind, case, **more: keys(case, hybrid(kind), **more)


@pytest.mark.parametrize(("kind", "page_size"), LAYOUTS)
def test_plain_decoding_in_batches(engine, hybrid, plainly, kind, page_size):
    built = engine(model=hybrid(kind), page_size=page_size)
    assert built.identity
    assert answers(run(built)) == plainly(kind, "all")


@pytest.mark.parametrize(("kind", "case"), rotating(unless_of_lab(CASES)), ids=str)
def test_a_drafter_drafts_what_plain_decoding_says(engine, hybrid, plainly, config, kind, case):
    jobs = run(engine(config(kind, case), model=hybrid(kind), max_num_seqs=16), SHORT)
    assert answers(jobs) == plainly(kind)
    assert not any(job.metrics.draft_error for job in jobs)
    drafted = sum(job.metrics.num_draft_tokens for job in jobs)
    if case.method not in COPYING:  # these texts repeat too little
        assert drafted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_draft_is_always_right(engine, hybrid, config, kind):
    """A draft with state, rolled back and read again, says what the target says."""
    for case in (Case("draft_model", "chain"), Case("draft_model", "tree")):
        requests = [(prompt, options(max_tokens=24)) for prompt, _ in SHORT[:3]]
        jobs = run(engine(config(kind, case), model=hybrid(kind)), requests)
        assert all(job.metrics.num_accepted_draft_tokens >= job.metrics.rounds for job in jobs)


@pytest.mark.parametrize("combination", marked(NATIVE, lambda every: every[:: len(every) // 12]))
def test_every_rule(engine, hybrid, plainly, config, combination):
    kind = ROTATED[NATIVE.index(combination) % len(ROTATED)]
    rule = rules[combination.rule]
    made = config(kind, combination.case, accept=combination.rule, length=combination.length)
    jobs = run(engine(made, model=hybrid(kind), page_size=combination.page_size, max_num_seqs=16), SHORT)
    same = [rule.identity or params.greedy for _, params in SHORT for _ in range(params.n)]
    for got, expected, promised in zip(answers(jobs), plainly(kind), same, strict=True):
        if promised:
            assert got == expected


def test_layers_of_the_target_in_a_cascade(engine, hybrid, plainly):
    """A best-first tree reads more nodes than it keeps, and the target's state goes back over all of them."""
    parts = [{"method": "layerskip", "exit_layer": 1, "tree_nodes": 7}, {"method": "suffix"}]
    jobs = run(engine({"method": "cascade", "drafters": parts}, model=hybrid("qwen3_5")), SHORT)
    assert answers(jobs) == plainly("qwen3_5")
    assert not any(job.metrics.draft_error for job in jobs)


@pytest.mark.parametrize("kind", KINDS)
def test_beams(engine, hybrid, config, kind):
    result = []
    for case in (None, Case("draft_model", "tree"), Case("layerskip", "chain"), Case("suffix", "chain")):
        made = None if case is None else config(kind, case)
        built = engine(made, model=hybrid(kind), page_size=4, max_num_seqs=12)
        result.append(beams(search(built, SEARCHES)))
        check_idle(built, [])
    assert all(one == result[0] for one in result)
