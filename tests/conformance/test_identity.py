"""Every drafter under every rule, in every cache layout: the tokens of plain decoding."""

from pathlib import Path

import pytest
from matrix import CASES, COMBINATIONS, PAGE_SIZES, PATHS, SHAPES, Case, marked

from drafting import CONFIGS, fill
from forerun.speculate.accept import rules
from forerun.speculate.draft import drafters
from harness import REQUESTS, SHORT, TOKENS, answers, run, set_prices
from tiny import ALPHABET

WIDE_CASES = [
    Case("ngram", "chain"),
    Case("draft_model", "tree"),
    Case("layerskip", "chain"),
    Case("eagle", "best-first"),
]


def promised(rule):
    """Per answer: whether the rule promises the tokens of plain decoding."""
    kind = rules[rule]
    same = [kind.identity or (kind.lossless and params.greedy) for _, params in REQUESTS for _ in range(params.n)]
    assert any(same) == kind.lossless
    return same


def test_the_requests_reach_what_they_are_for(plain):
    result = plain()
    assert len(result) == len(promised("coupled"))
    assert {answer.reason for answer in result} == {"stop", "length"}
    assert {answer.stopped_by for answer in result} >= {None, ALPHABET.index("*"), "/e/[", "@@@@"}
    assert any("2" in answer.text[:3] for answer in result if answer.stopped_by == "/e/[")
    assert any(answer.reason == "stop" and answer.stopped_by is None for answer in result)
    assert any(answer.reason == "length" and len(answer.tokens) < TOKENS for answer in result)
    assert sum(len(answer.tokens) == TOKENS for answer in result) >= 6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_plain_decoding_in_batches(engine, plain, page_size, path):
    assert answers(run(engine(page_size=page_size, path=path))) == plain(path)


@pytest.mark.parametrize("combination", marked(COMBINATIONS))
def test_same_tokens_as_plain_decoding(engine, keys, plain, combination):
    _, _, rule, page_size, path, length = combination
    config = keys(combination.case, accept=rule, length=length)
    built = engine(config, path=path, page_size=page_size, max_num_seqs=16)
    set_prices(built, lambda: 0.001)
    jobs = run(built)
    assert sum(job.metrics.num_draft_tokens for job in jobs) > 0
    for got, expected, same in zip(answers(jobs), plain(path), promised(rule), strict=True):
        if same:
            assert got == expected
    assert not any(job.metrics.draft_error for job in jobs)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafters_of_drafters_and_other_vocabularies(engine, plain, tiny_draft, tiny_stranger, name):
    config = fill(CONFIGS[name], {"DRAFT": tiny_draft, "STRANGER": tiny_stranger})
    jobs = run(engine(config, max_num_seqs=3), SHORT)
    assert answers(jobs) == plain(which="short")
    assert sum(job.metrics.num_draft_tokens for job in jobs) > 0
    assert not any(job.metrics.draft_error for job in jobs)


@pytest.fixture(scope="module")
def plain_and_wide(engine, wide_target):
    return answers(run(engine(model=wide_target, max_num_seqs=1), SHORT))


@pytest.mark.parametrize(("case", "page_size"), [*zip(WIDE_CASES, PAGE_SIZES * 2, strict=False)], ids=str)
def test_heads_that_no_kernel_serves(engine, wide_target, plain_and_wide, tmp_path, case, page_size):
    """A target, and what drafts with its heads or layers, that runs layer by layer."""
    config = {"method": case.method, **drafters[case.method].example(Path(wide_target), tmp_path)}
    jobs = run(engine({**config, **SHAPES[case.shape]}, model=wide_target, page_size=page_size), SHORT)
    assert answers(jobs) == plain_and_wide
    assert sum(job.metrics.num_accepted_draft_tokens for job in jobs) > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_drafter_drafts(engine, keys, case):
    jobs = run(engine(keys(case)), SHORT)
    assert sum(job.metrics.num_draft_tokens for job in jobs) > 0
    assert sum(job.metrics.rounds for job in jobs) < sum(len(job.output_ids) for job in jobs)
