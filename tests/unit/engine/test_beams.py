"""Beam searches through the engine: what is shared, preempted, aborted, refused and returned."""

import json
from types import SimpleNamespace

import pytest
import torch

from forerun import BeamSearchParams, ForerunError, SamplingParams
from forerun.cache.pool import KVShape, Pool
from forerun.core.request import Beams, RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.beams import Continuation, Outcome, finished
from forerun.speculate.rollback import roll_back
from refusals import refused

pytestmark = pytest.mark.slow

PROMPT = "the cat sat on the mat; the cat sat"
SEARCH = BeamSearchParams(4, 20, ignore_eos=True)
DRAFT = {"method": "draft_model", "tree": [3, 2, 1]}


@pytest.fixture
def drafting(llm, tiny_draft):
    return lambda **options: llm({**DRAFT, "model": tiny_draft}, **options)


@pytest.fixture(scope="module")
def plain(llm):
    return llm().beam_search(PROMPT, SEARCH)[0].sequences


def group(**given):
    root = RequestState(0, [1, 2], 2, None, seed=0, max_tokens=2 + 8)
    options = {"width": 2, "length_penalty": 1.0, "early_stopping": False, "ends": frozenset({9}), **given}
    return Beams(root, new_id=lambda: 1, **options)


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "best", "over"),
    [(True, 1.0, -0.1, True), (False, 1.0, -3.9, False), (False, 1.0, -4.1, True), ("never", 1.0, -7.9, False),
     ("never", 1.0, -8.1, True), ("never", -1.0, -0.24, False), ("never", -1.0, -0.26, True)],
)  # fmt: skip
def test_when_enough_have_finished(early_stopping, penalty, best, over):
    """At a length of 4 of 8, the worst finished beam having a score of -1."""
    beams = group(early_stopping=early_stopping, length_penalty=penalty)
    live = [Continuation(0, 3, best)]
    assert not finished(beams, live, 4)
    beams.finished = [_hypothesis(-0.5), _hypothesis(-1.0)]
    assert finished(beams, live, 4) == over
    assert finished(beams, [], 4)


def _hypothesis(score):
    from forerun.core.request import Hypothesis

    return Hypothesis([9], score, score, True)


def test_the_output_is_as_in_vllm(llm):
    model = llm()
    result = model.beam_search([{"prompt": "abc"}, {"prompt_token_ids": [7, 8]}], BeamSearchParams(3, 5))
    for output, prompt in zip(result, ("abc", model.tokenizer.decode([7, 8]))):
        assert len(output.sequences) == 3
        for sequence in output.sequences:
            assert sequence.text.startswith(prompt)
            assert sequence.tokens[: len(prompt)] == model.tokenizer.encode(prompt)
            assert sequence.finish_reason in ("stop", "length")
            length = len(sequence.tokens) - len(prompt) + (sequence.finish_reason == "stop")
            assert sequence.score == pytest.approx(sequence.cum_logprob / length)
        scores = [sequence.score for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert output.metrics.rounds == 4  # the prompt was the first


def test_beams_share_the_pages_of_what_they_have_in_common(drafting, plain):
    model = drafting(page_size=4)
    pool, held = model.engine.target.attention.pool, []
    model.engine.on_round = lambda result: held.append({page for table in pool.block_tables.values() for page in table})
    try:
        assert model.beam_search(PROMPT, SEARCH)[0].sequences == plain
    finally:
        model.engine.on_round = None
    apart = 4 * pool.pages_for(len(PROMPT) + 20)
    assert max(map(len, held)) < 0.6 * apart


@pytest.mark.parametrize(
    "pages", [{"num_pages": 34, "page_size": 4, "prefix_caching": False}, {"page_size": None, "num_pages": 5}]
)
def test_pages_that_run_short(drafting, plain, pages):
    """Searches give way to earlier ones, begin anew, and find the same beams; what cannot move is read again."""
    model = drafting(**pages, max_num_seqs=10, max_model_len=80, max_prefill_tokens=64)  # nothing follows the clock
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=30)
    alone = model.generate("hello", sampled, speculate=False)[0].outputs[0]
    answers = model.generate([PROMPT, "hello", PROMPT, "hello"], [SEARCH, sampled, SEARCH, sampled])
    for index in (0, 2):
        assert [one.token_ids for one in answers[index].outputs] == [one.tokens[len(PROMPT) :] for one in plain]
    assert answers[1].outputs[0].token_ids == answers[3].outputs[0].token_ids == alone.token_ids
    assert sum(answer.metrics.preemptions for answer in answers) > 0
    model.engine.check()


def test_a_failed_round_ends_every_beam(drafting):
    engine = drafting(page_size=8).engine
    jobs = engine.add([5, 6, 7], SEARCH)
    engine.step()
    engine.step()
    assert len(engine.fail("broken")) == 4
    assert {job.finish.reason for job in jobs if job.finish} == {"error"}
    engine.check()


def test_nan_ends_the_search_and_nobody_else(drafting, monkeypatch, plain):
    model = drafting(page_size=8)
    engine, forward = model.engine, model.model.forward

    def spoilt(batch, attention):
        output = forward(batch, attention)
        cursor = 0
        for span in batch.spans:
            if 40 in span.tokens and attention is engine.target.attention:  # the second prompt's last letter
                output.logits[cursor : cursor + len(span.logits)] = float("nan")
            cursor += len(span.logits)
        return output

    monkeypatch.setattr(model.model, "forward", spoilt)
    answers = model.generate([PROMPT, {"prompt_token_ids": [5, 40]}], SEARCH)
    assert [one.token_ids for one in answers[0].outputs] == [one.tokens[len(PROMPT) :] for one in plain]
    assert {(one.finish_reason, one.stop_reason) for one in answers[1].outputs} == {
        ("error", "the model returned NaN logits")
    }
    with pytest.raises(ForerunError, match="beam search failed: the model returned NaN logits"):
        model.beam_search({"prompt_token_ids": [5, 40]}, SEARCH)
    engine.check()


def test_a_drafter_that_cannot_fork_loses_its_beams_and_nothing_else(drafting, monkeypatch, plain):
    def broken(source, sequence):
        raise KeyError(source.id)

    model = drafting(page_size=8)
    with monkeypatch.context() as patch:
        patch.setattr(model.engine.router.drafters["draft_model"], "fork", broken)
        result = model.beam_search(PROMPT, SEARCH)[0]
    assert result.sequences == plain
    assert "KeyError" in str(result.metrics.draft_error)
    model.engine.check()
    assert model.beam_search(PROMPT, SEARCH)[0].metrics.draft_error is None


def test_a_policy_learns_how_far_a_group_came(drafting, plain, monkeypatch):
    """One token a step, whichever beams go on."""
    model, seen, forked = drafting(page_size=8), [], []

    def observe(sequences, drafts, verdicts, seconds):
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            seen.append((sequence.group.steps, draft.depth, len(verdict.tokens), verdict.matched, verdict.tested))

    monkeypatch.setattr(model.engine.policy, "observe", observe)
    monkeypatch.setattr(model.engine.policy, "fork", lambda source, sequence: forked.append(sequence))
    assert model.beam_search(PROMPT, SEARCH)[0].sequences == plain
    assert forked
    assert max(steps for steps, *_ in seen) > 1
    for steps, depth, tokens, matched, tested in seen:
        assert tokens == steps
        assert (matched, tested) == (min(depth, steps - 1), min(depth, steps))


@pytest.mark.parametrize(("given", "message"), [
    ({"beam_width": 0}, "beam_width must be an integer from 1 to 16384, not 0"),
    ({"beam_width": True}, "beam_width must be an integer"),
    ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, not 0"),
    ({"max_tokens": None}, "max_tokens must be an integer of at least 1, not None"),
    ({"temperature": 0.5}, "beam search does not sample: temperature must be 0, not 0.5"),
    ({"length_penalty": float("nan")}, "length_penalty must be a number from -10 to 10, not nan"),
    ({"length_penalty": 11}, "length_penalty must be a number from -10 to 10, not 11"),
    ({"early_stopping": "always"}, "early_stopping must be true, false or 'never', not 'always'"),
    ({"num_return_sequences": 5}, "num_return_sequences 5 exceeds beam_width 4"),
    ({"num_return_sequences": 0}, "num_return_sequences must be an integer of at least 1, not 0"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
    ({"beam_width": 98}, "beam_width 98 exceeds the 97 tokens that may follow"),
    ({"beam_width": 9}, "9 beams are more than the 8 sequences decoded together"),
    ({"max_tokens": 200}, "may need 203 tokens of KV cache for each of 4 beams; the pool holds 256"),
])  # fmt: skip
def test_what_cannot_be_searched(llm, given, message):
    model = llm(page_size=8, num_pages=32)

    def search():
        params = BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **given})
        model.generate(["abc", "xyz"], [SamplingParams(max_tokens=4), params])

    refused(ForerunError, message, search)
    assert not model.engine.busy
    model.engine.check()
    assert len(model.beam_search("abc", BeamSearchParams(2, 4))[0].sequences) == 2


def test_sampling_params_are_no_beam_search(llm):
    with pytest.raises(ForerunError, match="params must be BeamSearchParams, not SamplingParams"):
        llm().beam_search("abc", SamplingParams())


def filled(pool, key, count):
    pool.reserve(key, count)
    values = torch.arange(1.0, count + 1)[:, None, None]
    pool.write(0, pool.slot_mapping(key, range(count)), values, -values)
    pool.advance(key, count)


def entries(pool, key):
    keys, values = pool.gather(0, torch.tensor(pool.block_tables[key]))
    assert torch.equal(keys, -values)
    return [int(value) for value in keys[0, : pool.length(key), 0].tolist()]


def test_what_has_no_page_to_move_to_is_forgotten():
    pool = Pool([KVShape(1, 1, 1)], 3, 4, torch.float32)
    filled(pool, 1, 11)
    pool.fork(1, 2, 11)
    assert pool.keep(2, 6, [0, 2, 3]) == 1
    assert (entries(pool, 1), entries(pool, 2)) == ([*range(1, 12)], [1, 2, 3, 4, 5, 6, 7])
    pool.check()


def test_a_sequence_counts_the_entries_that_stayed():
    pool = Pool([KVShape(1, 1, 1)], 3, 4, torch.float32)
    filled(pool, 1, 11)
    pool.fork(1, 2, 11)
    sequence = RequestState(2, [6] * 6, 1, None, seed=0, scheduled=1, num_computed_tokens=5)
    draft, verdict = Draft.tree([7, 8, 9, 10, 11], [-1, -1, 0, 2, 3]), Verdict([0, 2, 3], 5, tokens=[7, 9, 10, 5])
    target = SimpleNamespace(attention=SimpleNamespace(pool=pool), hidden=())
    roll_back(target, None, Outcome([sequence], [draft], [verdict], [0], []))
    assert sequence.num_computed_tokens == pool.length(2) == 7
    assert sequence.tokens[6:] == [7, 9, 10, 5]


def test_the_command_shows_every_beam(tiny_target, tiny_draft, plain, capsys):
    from forerun.cli.main import run

    flags = ["--model", tiny_target, "--spec-model", tiny_draft, "--beams", "4", "--max-tokens", "20", "--ignore-eos"]
    assert run(["generate", PROMPT, *flags, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["token_ids"] for one in shown["outputs"]] == [one.tokens[len(PROMPT) :] for one in plain]
    assert [one["cumulative_logprob"] for one in shown["outputs"]] == [one.cum_logprob for one in plain]
    assert run(["generate", PROMPT, *flags, "--n", "2"]) == 0
    text = capsys.readouterr().out
    assert f"--- 2 of 2, log-probability {plain[1].cum_logprob:.3f}" in text
    assert "beam steps a round" in text


@pytest.mark.parametrize(("flags", "message"), [
    (["--beams", "2", "--top-p", "0.5"], "beam search does not sample: remove --top-p or --beams"),
    (["--beams", "2", "--logprobs", "1"], "beam search does not sample: remove --logprobs or --beams"),
    (["--beams", "2", "--seed", "3"], "beam search does not sample: remove --seed or --beams"),
    (["--beams", "2", "--trace"], "beam search has no trace"),
    (["--beams", "2", "--early-stopping", "soon"], "--early-stopping is true, false or never, not 'soon'"),
    (["--length-penalty", "2"], "--length-penalty and --early-stopping need --beams"),
])  # fmt: skip
def test_flags_that_beams_do_not_have(flags, message, capsys):
    from forerun.cli.main import run

    assert run(["generate", "x", *flags]) == 2
    assert message in capsys.readouterr().err
