"""A draft model or a head may begin with the last tokens of a text, or wait until reading it pays."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.batch import HiddenStates
from forerun.core.request import RequestState
from forerun.speculate.draft import drafters
from forerun.speculate.length.base import Fixed
from simulated import Machine, play

pytestmark = pytest.mark.usefixtures("prices_as_delivered")

PROMPT = "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef w(path):\n"


@pytest.fixture(params=[{}, {"tree": [2, 1, 1]}], ids=["chain", "tree"])
def llm(request):
    config = {"method": "draft_model", "num_speculative_tokens": 3, **request.param}
    return LLM(speculative_config=config, page_size=16, max_num_seqs=2)


def reading(llm, count):
    """The engine's policy lets drafters begin with so many tokens."""

    class Reading(Fixed):
        behind: list[int] = []  # noqa: RUF012

        def budgets(self, sequences):
            for sequence in sequences:
                sequence.reads = count
                self.behind.append(self.setting.backlog(sequence))
            return super().budgets(sequences)

    llm.engine.policy = Reading(llm.engine.policy.setting)
    return llm.engine.policy


@pytest.mark.slow
@pytest.mark.parametrize(("count", "temperature"), [(1, 0.8), (8, 0.0), (1000, 0.8), (None, 0.0)])
def test_the_tokens_are_the_same_however_much_is_read(llm, count, temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=32)
    (plain,) = llm.generate([PROMPT], params, use_tqdm=False, speculate=False)
    policy = reading(llm, count)
    (drafter,) = llm.engine.router.drafters.values()
    fed = []
    forward = drafter.model.forward
    drafter.chains = None  # so that every forward is seen
    drafter.model.forward = lambda batch, attention: fed.append(batch.num_rows) or forward(batch, attention)
    (out,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids
    length = len(out.prompt_token_ids) + 1
    assert fed[0] == (length if count is None else min(count, length))
    assert max(policy.behind) == length, "it tells what it would have to read of all"
    assert not drafter.skipped
    llm.engine.check()


def test_what_is_cached_is_not_behind(llm):
    policy = reading(llm, None)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    llm.generate([PROMPT * 3], params, use_tqdm=False)
    policy.behind.clear()
    llm.generate([PROMPT * 3], params, use_tqdm=False)
    assert max(policy.behind) <= 16 + 2


USUAL = {"per_sequence": 0.0, "per_draft_token": 0.0, "multiple": 1}
PAIR = {**USUAL, "base": 40.9, "per_row": 3.4, "draft": 1.0, "per_level": 12.2, "per_token_behind": 2.5}
"""A 1.5B target and its 0.5B draft on two cores, in milliseconds."""


def seconds(machine, prefill, rate, policy, streams=1, **given):
    """Of three runs, with ``prefill`` milliseconds for each prompt token that the target reads."""
    runs = [play(machine, policy, streams, lambda *_: rate, seed=seed, **given) for seed in range(3)]
    return sum(run.work for run in runs) + 3 * given["requests"] * given["prompt"] * 1e-3 * prefill


@pytest.mark.parametrize("prompt", [50, 300, 1500])
@pytest.mark.parametrize("length", [8, 32, 128])
def test_whole_requests_are_not_slower(prompt, length):
    """Time to read the prompt included, from the first answer on; drafts as far as possible lose a third of a short
    answer to a long prompt."""
    whole = partial(seconds, Machine(**PAIR), 3.8, 0.87, depth=7, length=length, requests=8, prompt=prompt)
    speed = whole(None) / whole("adaptive")
    assert speed > (0.97 if length < 128 else 1.1 if prompt == 1500 else 1.3)
    if prompt == 1500 and length == 8:
        assert whole(None) / whole("fixed") < 0.7


HEAD = {**USUAL, "base": 8.6, "per_row": 0.6, "draft": 0.6, "per_level": 0.5, "per_token_behind": 0.18}
"""SmolLM2 and its bundled head on two cores, in milliseconds."""


@pytest.mark.parametrize("prompt", [300, 1500])
@pytest.mark.parametrize("length", [3, 8, 15, 128])
def test_a_head_waits_where_reading_does_not_pay(prompt, length):
    """One that cannot begin with the last tokens: it reads a whole prompt or none of it."""
    given = {"depth": 4, "length": 500, "requests": 12, "prompt": prompt, "ends": lambda request: length}
    whole = partial(seconds, Machine(**HEAD), 1.8, 0.7, **given)
    assert whole(None) / whole("adaptive") > (0.97 if length < 128 else 1.04)


def test_a_draft_that_was_useless_once_is_read_again():
    """Nothing is accepted in the first three answers; in the last ones drafts are used, though prompts must be read."""
    given = {"depth": 7, "length": 128, "requests": 16, "prompt": 300}
    result = play(Machine(**PAIR), "adaptive", 1, lambda request, _: 0.9 * (request > 2), **given)
    late = result.drafted[-200:]
    assert sum(nodes > 0 for nodes in late) > 100


def test_a_batch_of_short_answers_does_not_pay_for_reading():
    """Drafts of one answer are twice as fast here, those of four at once hardly pay: rows cost what they compute."""
    machine, given = Machine(**(PAIR | {"per_row": 5.0})), {"depth": 7, "length": 64, "requests": 16, "prompt": 120}
    whole = partial(seconds, machine, 0.0, 0.7, streams=4, **given)
    assert whole(None) / whole("adaptive") > 0.98


@pytest.fixture
def headed(tiny_target, tmp_path):
    config = {"method": "eagle", **drafters["eagle"].example(Path(tiny_target), tmp_path), "prefill_chunk": 16}
    return LLM(tiny_target, speculative_config=config, page_size=4, max_num_seqs=2)


class Waiting(Fixed):
    """Drafts begin after ``tokens`` of an answer."""

    tokens = 0

    def budgets(self, sequences):
        self.backlogs = {sequence.id: self.setting.backlog(sequence) for sequence in sequences}
        budgets = super().budgets(sequences)
        return [n * (s.num_output >= self.tokens) for n, s in zip(budgets, sequences)]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["answered", "cancelled", "preempted"])
@pytest.mark.parametrize("tokens", [0, 5, 99])
def test_a_head_tells_what_it_must_read_and_may_wait(headed, tokens, ending):
    """The answer and the next turn's are the same; what was not read by then is not read at its end."""
    engine, prompt = headed.engine, list(range(3, 60))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    engine.policy = policy = Waiting(engine.policy.setting)
    policy.tokens = tokens
    (drafter,) = engine.router.drafters.values()
    read, run, turns = [], drafter._run, [prompt]
    drafter.chains = None  # so that every pass is seen
    drafter._run = lambda spans, feature: read.append(len(feature)) or run(spans, feature)
    for _ in range(2):
        (plain,) = headed.generate([turns[-1]], params, use_tqdm=False, speculate=False)
        read.clear()
        job = engine.add(turns[-1], params)[0]
        while not job.sequence.num_output:
            engine.step()
        cached = drafter.skipped[job.sequence.id]
        assert drafter.backlog(job.sequence) == len(job.sequence.tokens) - 1 - cached
        assert sum(len(rows) for rows in drafter.pending[job.sequence.id]) == drafter.backlog(job.sequence)
        while engine.busy:
            engine.step()
            if ending != "answered" and job.sequence.num_output > 3:
                engine.abort(job) if ending == "cancelled" else engine.scheduler.preempt(job.sequence)
                ending = "answered"
        emitted = job.sequence.tokens[len(turns[-1]) :]
        assert emitted == plain.outputs[0].token_ids[: len(emitted)]
        assert bool(read) == (tokens < len(emitted) - 1)
        assert not drafter.pending
        assert not drafter.seen
        turns.append([*turns[-1], *plain.outputs[0].token_ids, 7, 8, 9, 10])
    engine.check()


def test_a_head_keeps_its_own_rows_alone_of_a_round_that_read_a_long_prompt(headed):
    (drafter,), one = headed.engine.router.drafters.values(), RequestState(9, [1] * 9, 9, SamplingParams(), 0)
    hidden = {layer: torch.randn(500, 8) for layer in drafter.layers}
    for count in (500, 60):  # the second is a round of few rows
        drafter.add_hidden(one, HiddenStates({layer: rows[:count] for layer, rows in hidden.items()}, range(7, 9)))
    kept, few = drafter.pending.pop(one.id)
    expected = torch.cat([rows[7:9] for rows in hidden.values()], dim=1)
    assert torch.equal(kept, expected)
    assert kept.untyped_storage().nbytes() == expected.nbytes
    assert torch.equal(few.joined(drafter.layers), expected)
