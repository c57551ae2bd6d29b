"""Heads that learn while they serve: what they learn from, what it costs, and that no token changes."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun import LLM, ConfigError, SamplingParams, drafters
from forerun.core.request import RequestState
from forerun.engine.async_engine import AsyncEngine
from forerun.models.load import load_model
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.drafters.table import Tables
from forerun_lab.heads.adapt import Adaptation, Learner
from refusals import refused
from tiny import ALPHABET, save_checkpoint, tiny_llama

pytestmark = pytest.mark.slow

RING = (len(ALPHABET) - 2) // 2
FIRST = {"low": 2, "high": 2 + RING}
STEP = {"low": 1, "high": 5}
EAGER = {"share": None, "every": 12, "window": 16, "batch": 16, "lr": 0.02}


@pytest.fixture(scope="module")
def rings(tmp_path_factory):
    """A target whose likeliest next token is the next one on a ring, one ring of low ids and one of high ids. The
    rings' states are at right angles, so that a head that knows one ring knows nothing of the other."""
    model = tiny_llama(layers=1)
    states = torch.zeros(len(ALPHABET), 32)
    output = torch.zeros(len(ALPHABET), 32)
    for side, first in enumerate(FIRST.values()):
        for index in range(RING):
            angles = [2 * math.pi * (k + 1) * index / RING for k in range(8)]
            row = [value for angle in angles for value in (math.cos(angle), math.sin(angle))]
            states[first + index, 16 * side : 16 * side + 16] = torch.tensor(row)
    for name, first in FIRST.items():
        for index in range(RING):
            output[first + (index + STEP[name]) % RING] = 0.8 * states[first + index]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.copy_(states)
        model.lm_head.weight.copy_(output)
    folder = tmp_path_factory.mktemp("rings")
    save_checkpoint(model, folder)
    return folder


def prompts(ring, count, seed):
    rng = random.Random(seed)
    return [[FIRST[ring] + rng.randrange(RING) for _ in range(6)] for _ in range(count)]


def params(count, temperature):
    return [SamplingParams(temperature=temperature, max_tokens=40, seed=s, ignore_eos=True) for s in range(count)]


class Served:
    """Requests of one ring, answered with a head; the engine is closed afterwards."""

    def __init__(self, target, method, head, texts, temperature, adapt=None, **options):
        config = {"method": method, "model": str(head), "num_speculative_tokens": 3, "adapt": adapt, **options}
        llm = LLM(str(target), speculative_config=config)
        state = torch.get_rng_state()
        answers = llm.generate(texts, params(len(texts), temperature))
        self.others_numbers = torch.equal(state, torch.get_rng_state())
        """Nobody else's random numbers were touched."""
        self.learner = llm.engine.router.drafters[method].learner
        llm.close()
        self.tokens = [answer.outputs[0].token_ids for answer in answers]
        self.errors = [answer.metrics.draft_error for answer in answers]
        self.matched = sum(answer.metrics.matched for answer in answers)
        self.rate = self.matched / sum(answer.metrics.tested for answer in answers)


def plainly(target, texts, temperature):
    answers = LLM(str(target)).generate(texts, params(len(texts), temperature))
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.mark.parametrize(
    ("method", "temperature"), [("medusa", 0.8), ("blockwise", 0.0), ("parallel", 0.8), ("eagle", 0.0)]
)
def test_a_head_follows_its_text_and_is_kept(rings, tmp_path, method, temperature):
    """It learns one ring, is saved, meets the other one, learns that, is saved, and knows it: no token differs."""
    fresh, low, high = (tmp_path / name for name in ("fresh", "low", "high"))
    drafters[method].example(rings, fresh)
    learning, asked = prompts("high", 24, 2), prompts("high", 6, 3)
    first = Served(rings, method, fresh, prompts("low", 12, 1), temperature, {**EAGER, "save": str(low)})
    before = Served(rings, method, low, asked, temperature)
    while_learning = Served(rings, method, low, learning, temperature, {**EAGER, "save": str(high)})
    after = Served(rings, method, high, asked, temperature)
    assert after.rate > before.rate + 0.2
    assert while_learning.tokens == plainly(rings, learning, temperature)
    assert before.tokens == after.tokens == plainly(rings, asked, temperature)
    assert not any(first.errors + before.errors + while_learning.errors + after.errors)
    saved = drafters[method].head_class.load(high)
    assert saved.record["adapted_steps"] == while_learning.learner.steps > 30
    assert saved.record["adapted_tokens"] == while_learning.learner.seen >= 24 * 45
    assert before.learner is None


@torch.no_grad()
def test_what_is_learnt_is_what_the_target_said(rings, tmp_path):
    """The buffer holds the newest windows of every request's text, the target's states of them, and from these its
    distributions: all as transformers computes them for the whole text at once."""
    drafters["blockwise"].example(rings, tmp_path)
    texts = [prompts("low", 3, 5)[0], prompts("high", 3, 6)[1]]
    adapt = {"share": None, "every": 1000, "window": 10, "buffer_tokens": 55}
    served = Served(rings, "blockwise", tmp_path, texts, 0.8, adapt)
    learner, reference = served.learner, AutoModelForCausalLM.from_pretrained(rings, dtype=torch.float32)
    assert (learner.steps, learner.tokens.shape, learner.filled, learner.partial) == (0, (5, 10), 5, {})
    pieces = {}
    for prompt, tokens in zip(texts, served.tokens):
        text = prompt + tokens
        out = reference(torch.tensor([text]), output_hidden_states=True)
        for start in range(0, len(text) - 10, 10):
            pieces[tuple(text[start : start + 10])] = (start, out.hidden_states[-1][0, start : start + 10], out.logits)
    assert len(pieces) == 8
    for window, states in zip(learner.tokens, learner.states):
        start, expected, logits = pieces[tuple(window.tolist())]
        assert start >= 10  # the first windows have made room for newer ones
        torch.testing.assert_close(states[:, 0], expected, rtol=1e-4, atol=1e-5)
        rows = learner.target.lm_head(states[:, 0])
        torch.testing.assert_close(rows, logits[0, start : start + 10], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learner.output, reference.lm_head.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(learner.embedding, reference.get_input_embeddings().weight)


def test_the_same_requests_teach_the_same(rings, tmp_path):
    drafters["parallel"].example(rings, tmp_path)
    texts = prompts("high", 6, 2)
    runs = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        runs.append(Served(rings, "parallel", tmp_path, texts, 0.8, EAGER))
        assert runs[-1].others_numbers
    first, second = (list(run.learner.head.parameters()) for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert runs[0].matched == runs[1].matched
    untouched = drafters["parallel"].head_class.load(tmp_path)
    assert not all(torch.equal(a, b) for a, b in zip(first, untouched.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"tree": (3, 2, 1)}, {"tree_nodes": 6}, {"accept": "token"}])
def test_trees_and_other_rules_are_served_too(rings, tmp_path, options):
    drafters["medusa"].example(rings, tmp_path)
    texts = prompts("high", 2, 2)
    served = Served(rings, "medusa", tmp_path, texts, 0.0, EAGER, **options)
    assert served.tokens == plainly(rings, texts, 0.0)
    assert not any(served.errors)
    assert served.learner.steps > 3


class Slow:
    """A clock that learning moves: a step of it takes two seconds."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def learner(rings):
    """On half a second of learning per second at most; and its clock."""
    clock = Slow()
    head = MedusaHead(Sizes(32, len(ALPHABET), 1, 3))
    options = Adaptation(every=10, window=8, batch=2, share=0.25, buffer_tokens=64)
    made = Learner(head, load_model(rings), options, clock)
    step = made._step

    def slow():
        step()
        clock.now += 2.0

    made._step = slow
    return made, clock


def feed(learner, sequence, count):
    """``count`` more tokens of a request have been read."""
    sequence.tokens += [3] * count
    sequence.num_computed_tokens += count
    learner.watch(sequence, {learner.layers[-1]: torch.randn(count, 32)})


def test_steps_keep_to_their_share_of_time_and_tokens(learner):
    made, clock = learner
    sequence = RequestState(1, [], 0, None, 0)
    for _ in range(100):
        feed(made, sequence, 3)
        before = made.steps
        made.learn()
        assert made.steps - before <= 1
        assert made.steps <= made.seen / 10
        assert made.steps <= 1 or made.spent <= 0.25 * clock.now
        clock.now += 1.0
    assert made.spent == 2 * made.steps
    assert 0.8 * 0.25 <= made.spent / clock.now <= 0.25
    assert made.filled == 8
    made.forget(sequence)
    assert made.partial == {}


def test_without_a_share_only_tokens_count(learner, rings):
    made, clock = learner
    free = Learner(made.head, made.target, Adaptation(every=10, window=8, share=None), clock)
    sequence = RequestState(1, [], 0, None, 0)
    for _ in range(40):
        feed(free, sequence, 5)
        free.learn()
    assert free.steps == 40 * 5 // 10
    feed(free, sequence, 500)
    for _ in range(10):
        free.learn()
    assert free.steps == 20 + 4  # a long prompt does not owe fifty steps


def test_logits_that_are_no_numbers_teach_nothing(learner):
    made, _ = learner
    before = [parameter.clone() for parameter in made.head.parameters()]
    sequence = RequestState(1, [4] * 16, 0, None, 0, num_computed_tokens=16)
    made.watch(sequence, {made.layers[-1]: torch.full((16, 32), float("nan"))})
    made.learn()
    assert made.steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, made.head.parameters(), strict=True))


def test_clear_errors(rings, tmp_path):
    drafters["medusa"].example(rings, tmp_path / "medusa")
    drafters["lookahead"].example(rings, tmp_path / "lookahead")

    def serve(adapt, method="medusa"):
        config = {"method": method, "model": str(tmp_path / method), "adapt": adapt}
        return LLM(str(rings), speculative_config=config)

    assert serve(False).engine.router.drafters["medusa"].learner is None
    for adapt, message in (
        ({"rate": 1}, "adapt has no option 'rate'; it has every, share"),
        ("yes", "adapt must be true or a mapping"),
        ({"share": 2.0}, "share must be a number above 0 and at most 1"),
        ({"every": "often"}, "every must be an integer"),
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"buffer_tokens": 8}, "must hold a window"),
        ({"window": 5}, "window must be above 5 for a head that guesses 4 tokens ahead"),
    ):
        refused(ConfigError, message, serve, adapt)
    refused(ConfigError, r"'lookahead' .* cannot adapt: remove 'adapt'", serve, True, "lookahead")
    with pytest.raises(ConfigError, match=r"has no option 'adapt'.*it belongs to"):
        LLM(str(rings), speculative_config={"method": "ngram", "adapt": True})
    refused(ConfigError, "has another model", serve, {"save": str(rings)})
    blocked = tmp_path / "file"
    blocked.write_text("")
    llm = serve({"save": str(blocked)})
    refused(ConfigError, "adapt: the head cannot be saved in", llm.close)


def test_a_table_follows_its_text_and_is_kept(rings, tmp_path):
    """It was counted on one ring's text and is asked for the other's: at T = 0 and 0.8, no token differs."""
    counted, learnt = tmp_path / "counted.txt", tmp_path / "learnt.json"
    counted.write_text("".join(ALPHABET[FIRST["low"] + index % RING] for index in range(3 * RING)))
    texts, asked = prompts("high", 12, 2), prompts("high", 4, 3)

    def serve(texts, file, temperature, **adapt):
        config = {"method": "table", "table_file": str(file), **adapt}
        llm = LLM(str(rings), speculative_config=config)
        answers = llm.generate(texts, params(len(texts), temperature))
        llm.close()
        assert [answer.outputs[0].token_ids for answer in answers] == plainly(rings, texts, temperature)
        assert not any(answer.metrics.draft_error for answer in answers)
        return sum(a.metrics.matched for a in answers) / sum(a.metrics.tested for a in answers)

    before = {temperature: serve(asked, counted, temperature) for temperature in (0.0, 0.8)}
    serve(texts, counted, 0.8, adapt=True, adapt_save=str(learnt))
    after = {temperature: serve(asked, learnt, temperature) for temperature in (0.0, 0.8)}
    assert max(before.values()) < 0.1
    assert after[0.0] > 0.9
    assert after[0.8] > 0.5


@torch.no_grad()
def test_a_table_counts_what_the_target_said(tiny_target, tmp_path):
    """Behind every token that it read while decoding: the probabilities of its likeliest followers."""
    counted = tmp_path / "counted.txt"
    counted.write_text(ALPHABET[5] * 2)
    config = {"method": "table", "table_file": str(counted), "adapt": True, "adapt_weight": 2.0}
    llm = LLM(str(tiny_target), speculative_config=config)
    text = prompts("high", 1, 4)[0]
    tokens = llm.generate([text], params(1, 0.8))[0].outputs[0].token_ids
    p = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)(torch.tensor([text + tokens])).logits[0]
    expected = {5: {5: 1.0}}
    for before, row in zip([text[-1], *tokens[:-1]], p[len(text) - 1 :].softmax(-1)):
        for token in row.topk(8).indices.tolist():
            followers = expected.setdefault(before, {})
            followers[token] = followers.get(token, 0.0) + 2.0 * float(row[token])
    result = llm.engine.router.drafters["table"].tables.after
    assert result.keys() == expected.keys()
    for before, followers in expected.items():
        assert result[before] == pytest.approx(followers, rel=1e-3)


def test_a_table_forgets_rare_followers_and_refuses_damaged_files(rings, tmp_path):
    tables = Tables({0: 1.0}, {}, torch.device("cpu"))
    for token in range(300):
        tables.add(7, [token], [1.0 + token])
    assert 64 <= len(tables.after[7]) <= 128
    assert {298, 299} <= set(tables.after[7])
    assert tables.counts(7).ids[0] == 299
    damaged = tmp_path / "damaged.json"
    for content in ('{"forerun_table": 1', '{"forerun_table": 1}', '{"forerun_table": 1, "anywhere": [], "after": {}}'):
        damaged.write_text(content)
        with pytest.raises(ConfigError, match=r"damaged\.json cannot be used"):
            LLM(str(rings), speculative_config={"method": "table", "table_file": str(damaged)})
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("mine")
    wrong = {"method": "table", "adapt": True, "adapt_save": str(thesis)}
    refused(ConfigError, "is no table of counts", LLM, str(rings), speculative_config=wrong)
    refused(ConfigError, "set 'adapt' too", LLM, str(rings), speculative_config={"method": "table", "adapt_save": "x"})
    with pytest.raises(ConfigError, match="adapt_weight must be a number above 0"):
        LLM(str(rings), speculative_config={"method": "table", "adapt": True, "adapt_weight": 0.0})


def test_a_head_inside_another_drafter_learns_and_a_server_keeps_it(rings, tmp_path):
    drafters["medusa"].example(rings, tmp_path / "fresh")
    head = {"method": "medusa", "model": str(tmp_path / "fresh"), "adapt": {**EAGER, "save": str(tmp_path / "kept")}}
    merged = LLM(str(rings), speculative_config={"method": "merged", "drafters": [head, {"method": "ngram"}]})
    texts = prompts("high", 2, 2)
    answers = merged.generate(texts, params(2, 0.8))
    assert [answer.outputs[0].token_ids for answer in answers] == plainly(rings, texts, 0.8)
    AsyncEngine(merged.engine).close()
    kept = MedusaHead.load(tmp_path / "kept")
    assert kept.record["adapted_steps"] > 3
    assert isinstance(kept, MedusaHead)
    assert any(float(block.weight.detach().abs().sum()) > 0 for block in kept.blocks)
