"""A drafter's own cache is filled as drafts are asked for: a part per round, and only as far as its context goes."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from drafting import watch
from forerun import LLM, SamplingParams
from forerun.speculate.draft import drafters
from forerun.speculate.draft.chain import CatchUpConfig
from harness import until_idle
from tiny import save_checkpoint, tiny_llama

pytestmark = pytest.mark.slow

CHUNK = 10
SHORT = ["def f(x):", "abcabc", "hello"]
LONG = ["0123456789abc, " * 8, "the quick brown fox " * 5]
CONTEXT = 48
PROMPTS = [*SHORT, LONG[0]]
COLD = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
HOT = SamplingParams(temperature=0.8, seed=5, max_tokens=90, ignore_eos=True)
PARAMS = [COLD, HOT, COLD, HOT]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=230, ignore_eos=True)
METHODS = {
    "draft_model": {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3},
    "tree": {"method": "draft_model", "model": "DRAFT", "tree": [2, 1, 1]},
    "staged": {"method": "staged", "model": "DRAFT"},
    "tli": {"method": "draft_model", "model": "STRANGER", "use_heterogeneous_vocab": True, "num_speculative_tokens": 3},
    "slem": {
        "method": "draft_model", "model": "STRANGER", "use_heterogeneous_vocab": True,
        "heterogeneous_vocab_method": "slem",
    },
}  # fmt: skip


def in_turns(names):
    """A draft model without pages too: the others keep their tokens in the same pool."""
    return [(name, 16) for name in names] + [("draft_model", None)]


@pytest.fixture
def configured(tiny_target, tiny_draft, tiny_stranger, tmp_path):
    """``configured(name, **more)``: the ``speculative_config`` of one of ``METHODS``, or of eagle."""

    def get(name, **more):
        if name == "eagle":
            return {"method": name, **drafters[name].example(Path(tiny_target), tmp_path), **more}
        keys = METHODS[name]
        return {**keys, "model": {"DRAFT": tiny_draft, "STRANGER": tiny_stranger}[keys["model"]], **more}

    return get


def own_pool(engine):
    (pool,) = engine.router.pools()
    return pool


def settled(engine):
    """Requests that have drafted for a few rounds."""
    jobs = [engine.add(engine.tokenizer.encode(text), ENDLESS, trace=True)[0] for text in SHORT]
    for _ in range(6):
        engine.step()
    return jobs


@pytest.mark.parametrize(("name", "page_size"), in_turns([*METHODS, "eagle"]))
def test_long_prompts_are_read_in_parts_while_others_draft(name, page_size, tiny_target, configured):
    """Two prompts at once: their drafter reads ``CHUNK`` tokens of both together in a round, and everybody else goes on
    drafting; afterwards the newcomers draft, too."""
    options = {
        "max_num_seqs": len(SHORT) + len(LONG),
        "page_size": page_size,
        "prefix_caching": False,
        "max_prefill_tokens": 64,
    }
    engine = LLM(tiny_target, speculative_config=configured(name, prefill_chunk=CHUNK), **options).engine
    jobs, pool = settled(engine), own_pool(engine)
    new = [engine.add(engine.tokenizer.encode(text), HOT, trace=True)[0] for text in LONG]
    lengths, parts, rounds = [0, 0], 0, 0
    while not all(job.metrics.num_drafts for job in new):
        drafting = [job for job in jobs if job.finish is None]
        before = [job.metrics.num_drafts for job in drafting]
        assert engine.step()
        assert [job.metrics.num_drafts for job in drafting] == [count + 1 for count in before]
        grown = [pool.length(job.sequence.id) - length for job, length in zip(new, lengths)]
        lengths = [length + more for length, more in zip(lengths, grown)]
        caught_up = sum(more for job, more in zip(new, grown) if not job.metrics.num_drafts)
        assert caught_up <= CHUNK
        parts += caught_up
        rounds += caught_up > 0
    assert drafting, "nobody was left to be held up"
    assert rounds >= parts / CHUNK > 8
    compare(engine, [*jobs, *new])


def drafted_by(engine):
    """Every draft that is made from here on, by its sequence and the tokens that were committed then."""
    result = {}
    watch(engine.router, lambda sequences, _, drafts: result.update(
        {(one.id, len(one.tokens)): draft for one, draft in zip(sequences, drafts) if len(draft)}
    ))  # fmt: skip
    return result


@pytest.mark.usefixtures("cpu_attention")
@pytest.mark.parametrize("name", [*METHODS, "eagle"])
def test_what_is_read_in_parts_makes_the_same_drafts(name, tiny_target, configured):
    """Of the same text, as far as both engines drafted there."""
    made = []
    for more in ({}, {"prefill_chunk": CHUNK}):
        engine = LLM(tiny_target, speculative_config=configured(name, **more), max_num_seqs=2).engine
        drafts = drafted_by(engine)
        for text in LONG:
            engine.add(engine.tokenizer.encode(text), COLD)
        until_idle(engine)
        made.append({key: (draft.tokens, draft.parents) for key, draft in drafts.items()})
    whole, parts = made
    both = whole.keys() & parts.keys()
    assert len(both) > 20
    assert {key: whole[key] for key in both} == {key: parts[key] for key in both}
    assert min(length for number, length in parts if number == 0) > min(n for number, n in whole if number == 0) + 5


@pytest.mark.usefixtures("cpu_attention")
@pytest.mark.parametrize("name", ["draft_model", "eagle"])
def test_a_second_turn_makes_the_same_drafts(name, tiny_target, configured):
    """Whatever of it comes from the prefix cache, also where others read the same text at that moment."""
    made, cached = [], []
    for caching in (False, True):
        options = {"page_size": 4, "prefix_caching": caching, "max_num_seqs": 3}
        engine = LLM(tiny_target, speculative_config=configured(name), **options).engine
        drafts = drafted_by(engine)
        jobs = [engine.add(engine.tokenizer.encode(LONG[1]), HOT)[0]]
        until_idle(engine)
        for cut in (0, 30, 0):
            said = jobs[-1].sequence.tokens[: len(jobs[-1].sequence.tokens) - cut]
            turn = said + engine.tokenizer.encode("" if cut else SHORT[0])
            jobs += [engine.add(turn, replace(params, max_tokens=20))[0] for params in (HOT, COLD)]
            until_idle(engine)
        compare(engine, jobs)
        made.append({key: (draft.tokens, draft.parents) for key, draft in drafts.items()})
        cached.append([job.metrics.num_cached_tokens for job in jobs])
    assert not any(cached[0])
    assert min(cached[1][1:]) > len(LONG[1])
    both = made[0].keys() & made[1].keys()
    assert len(both) > 50
    assert {key: made[0][key] for key in both} == {key: made[1][key] for key in both}


@pytest.mark.parametrize(("missing", "fractions"), [
    ([4, 1, 4], [4, 1, 4]),
    ([4, 100, 4, 4], [4, 8, 4, 4]),
    ([100, 7, 3], [1, 7, 3]),
    ([100, 50, 8, 9], [0, 0, 8, 0]),
    ([], []),
])  # fmt: skip
def test_who_lacks_least_reads_first(missing, fractions):
    assert CatchUpConfig(num_speculative_tokens=3, prefill_chunk=8).shares(missing) == fractions


def compare(engine, jobs):
    """Every answer, once it has ended, with a lone plain decode by the same engine."""
    until_idle(engine)
    for job in jobs:
        assert job.metrics.draft_error is None
        prompt = job.sequence.tokens[: job.sequence.num_prompt]
        (alone,) = engine.add(prompt, job.sequence.params, speculate=False)
        until_idle(engine)
        assert job.output_ids == alone.output_ids
    engine.check()


@pytest.fixture(scope="session")
def short_sighted(tmp_path_factory, tiny_draft):
    """The draft with a context of ``CONTEXT``, where the target's is 256."""
    model = tiny_llama(layers=1, max_position_embeddings=CONTEXT)
    model.load_state_dict(LlamaForCausalLM.from_pretrained(tiny_draft).state_dict())
    return save_checkpoint(model, tmp_path_factory.mktemp("short_sighted"))


@pytest.mark.parametrize(("name", "page_size"), in_turns(["checkpoint", *METHODS]))
def test_drafts_stop_where_the_drafts_context_ends(name, page_size, tiny_target, short_sighted, configured):
    """By the checkpoint, or by ``max_model_len``: decoding goes on without drafts; one prompt is beyond it at once."""
    if name == "checkpoint":
        config = {"method": "draft_model", "model": short_sighted, "num_speculative_tokens": 3}
    else:
        config = configured(name, max_model_len=CONTEXT)
    engine = LLM(tiny_target, speculative_config=config, max_num_seqs=4, page_size=page_size).engine
    drafts = drafted_by(engine)
    jobs = [engine.add(engine.tokenizer.encode(text), p)[0] for text, p in zip(PROMPTS, PARAMS)]
    compare(engine, jobs)
    assert [len(job.output_ids) for job in jobs] == [COLD.max_tokens] * len(jobs)
    reached = {}
    for (number, length), draft in drafts.items():
        reached[number] = max(reached.get(number, 0), length + draft.depth)
    *begun, beyond = [reached.get(job.sequence.id, 0) for job in jobs]
    assert beyond == 0
    assert min(begun) >= CONTEXT - 8
    if name not in ("tli", "slem"):  # a context of the draft's own tokens
        assert max(begun) <= CONTEXT
