"""Drafters made of drafters, synthetic acceptance and vocabularies, on their own."""

import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from forerun import LLM, ConfigError, Draft, Drafter, DrafterConfig, SamplingParams, SpeculativeConfig
from forerun.core.batch import Scores
from forerun.core.request import RequestState
from forerun.core.tree import Trial, Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept import rules
from forerun.speculate.accept.synthetic import Synthetic
from forerun.speculate.draft import DraftContext, drafters
from forerun.speculate.draft.heterogeneous import Vocabulary, VocabularyMap, VocabularyReading
from forerun.speculate.draft.nested import merge
from refusals import refused
from tiny import byte_tokenizer

VOCAB = 20


class Scripted(Drafter):
    """Proposes what a test says, per sequence id."""

    config_class = DrafterConfig

    def __init__(self, config, context):
        super().__init__(config, context)
        self.script = {}
        self.asked = []
        self.seen = []

    def propose(self, sequences, budgets):
        self.asked = [sequence.id for sequence in sequences]
        return [self.script.get(sequence.id, Draft()) for sequence in sequences]

    def observe(self, sequences, drafts, verdicts, result):
        self.seen = list(zip(drafts, verdicts))


@pytest.fixture
def scripted():
    """Two drafters that propose what they are told."""
    for name in ("first", "second"):
        drafters.register(name)(type(name.title(), (Scripted,), {"name": name}))
    yield
    for name in ("first", "second"):
        drafters.remove(name)


def build(method, **options):
    cls = drafters[method]
    options["drafters"] = [{"method": "first", "num_speculative_tokens": 3}, {"method": "second"}]
    context = DraftContext(SimpleNamespace(), Sampler(VOCAB), rules["recursive"](), None, 8, 256)
    return cls.build(cls.config_class.from_dict(method, options), context)


def sequence(key):
    return RequestState(key, [1, 2, 3], 3, SamplingParams(temperature=0.0), 1, num_computed_tokens=2)


def rows(*weights):
    q = torch.zeros(len(weights), VOCAB)
    for row, distribution in zip(q, weights):
        for token, weight in distribution.items():
            row[token] = weight
    return q


def test_merging_joins_nodes_and_keeps_every_trial_with_its_own_q():
    model = Draft(q=rows({5: 0.9, 6: 0.1}, {7: 1.0}, {8: 0.5, 9: 0.5}))
    model.add(5, -1, 0)
    model.add(5, -1, 0)
    model.add(8, 0, 2)
    table = Draft(q=rows({6: 0.5, 5: 0.5}, {8: 1.0}))
    table.add(5, -1, 0)
    table.add(8, 0, 1)
    table.add(4, 1)
    (tree,) = merge([[model], [table]])
    assert tree.tokens == [5, 8, 4]
    assert tree.parents == [-1, 0, 1]
    drawn = [
        [(tree.tokens[t.node], tree.q[t.q_row] if t.q_row >= 0 else None) for t in trials] for trials in tree.trials
    ]
    assert [[token for token, _ in trials] for trials in drawn] == [[5, 5, 5], [8, 8], [4], []]
    expected = [[model.q[0], model.q[0], table.q[0]], [model.q[2], table.q[1]]]
    for trials, distributions in zip(drawn, expected):
        for (_, q), distribution in zip(trials, distributions, strict=True):
            assert torch.equal(q, distribution)
    assert drawn[2][0][1] is None


def test_merging_shares_one_q_between_the_sequences_of_a_round():
    q = rows({5: 1.0}, {6: 1.0})
    first, second = Draft.chain([5], q, [0]), Draft.chain([6], q, [1])
    merged = merge([[first, second], [Draft.chain([7]), Draft()]])
    assert merged[0].q is merged[1].q
    assert merged[0].q.shape == (2, VOCAB)
    assert merged[1].trials == [[Trial(0, 1)], []]


@pytest.mark.usefixtures("scripted")
def test_a_merged_part_sees_its_own_nodes_of_the_accepted_path():
    merged = build("merged")
    first, second = merged.inner
    first.script[1] = Draft.tree([4, 5, 6], [-1, -1, 1])
    second.script[1] = Draft.chain([5, 6, 7])
    (tree,) = merged.propose([sequence(1)], [3])
    path, node = [], -1
    for token in (5, 6, 7):
        node = tree.children(node)[token]
        path.append(node)
    verdict = Verdict(path=path, token=9, tokens=[5, 6, 7, 9])
    merged.observe([sequence(1)], [tree], [verdict], SimpleNamespace())
    assert [(v.path, v.accepted) for _, v in first.seen] == [([1, 2], 2)]
    assert [(v.path, v.accepted) for _, v in second.seen] == [([0, 1, 2], 3)]
    assert merged.proposed == [{}, {}]


@pytest.mark.usefixtures("scripted")
def test_cascade_asks_the_next_only_about_what_the_first_is_unsure_of():
    cascade = build("cascade", min_confidence=0.6)
    first, second = cascade.inner
    for key, sure in ((1, 0.7), (2, 0.5), (3, None)):
        first.script[key] = Draft.chain([4])
        first.script[key].confidence = sure
        second.script[key] = Draft.chain([8, 9])
    drafts = cascade.propose([sequence(1), sequence(2), sequence(3)], [3, 3, 3])
    assert [draft.tokens for draft in drafts] == [[4], [8, 9], [8, 9]]
    assert [draft.method for draft in drafts] == ["first", "second", "second"]
    assert second.asked == [2, 3]


def test_a_cascade_must_read_what_its_draft_model_must_read():
    """Otherwise nothing says that a draft costs the reading of a prompt."""
    llm = LLM(speculative_config={"method": "cascade"})
    one, cascade = sequence(1), llm.engine.router.drafters["cascade"]
    one.tokens = list(range(10, 60))
    assert cascade.backlog(one) == len(one.tokens)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("options", "tokens"), [({}, [4]), ({"min_confidence": 0.9}, [8]), ({"min_confidence": 0.6}, [4, 5])]
)
def test_a_cascades_own_threshold_goes_before_prices(options, tokens):
    cascade, one = build("cascade", **options), sequence(1)
    one.worth = lambda draft: 1
    first, second = cascade.inner
    first.script[1], second.script[1] = Draft.chain([4, 5]), Draft.chain([8])
    first.script[1].confidence, first.script[1].evidence = 0.7, [0, 0]
    assert [draft.tokens for draft in cascade.propose([one], [3])] == [tokens]


def test_options_of_drafters_inside_drafters():
    inner = [{"method": "ngram"}, {"method": "suffix", "tree": [2, 2, 1]}]
    config = SpeculativeConfig.parse({"method": "merged", "num_speculative_tokens": 2, "drafters": inner}).drafter
    assert [part.config.num_speculative_tokens for part in config.drafters] == [2, 3]
    assert config.nodes_by_depth() == [0, 1 + 2, 2 + 6, 2 + 10]


# synthetic acceptance


def accepted_shares(config, depth, rounds=2000):
    rates = SpeculativeConfig.parse({"method": "random", "num_speculative_tokens": depth, **config}).synthetic
    rule = Synthetic(rules["coupled"](), rates)
    sampler = Sampler(VOCAB)
    counts = [0] * depth
    for start in range(0, rounds, 200):
        sequences = [
            RequestState(i, [1] * (1 + i % 7), 1, SamplingParams(temperature=1.0), seed=start + i) for i in range(200)
        ]
        drafts = [Draft.chain(list(range(depth))) for _ in sequences]
        warped = torch.zeros(200 * (depth + 1), VOCAB)
        scores = Scores(sequences, drafts, [i * (depth + 1) for i in range(200)], warped)
        for verdict in rule.accept(scores, sampler):
            assert verdict.path == list(range(len(verdict.path)))
            assert 0 <= verdict.token < VOCAB
            for position in verdict.path:
                counts[position] += 1
    return [count / rounds for count in counts]


def test_synthetic_rates_are_unconditional():
    fractions = accepted_shares({"synthetic_acceptance_rates": [0.8, 0.64, 0.512]}, 3)
    assert fractions == pytest.approx([0.8, 0.64, 0.512], abs=0.04)


def test_synthetic_length_is_reached_with_the_least_variance():
    fractions = accepted_shares({"synthetic_acceptance_length": 2.4}, 4)
    assert fractions == pytest.approx([1.0, 0.4, 0.0, 0.0], abs=0.04)


@pytest.mark.parametrize(("options", "message"), [
    ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "none above the one before"),
    ({"synthetic_acceptance_rates": [0.5]}, "one entry per drafted position: 3, not 1"),
    ({"synthetic_acceptance_length": 4.5}, "from 1 to num_speculative_tokens"),
    ({"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1, 1, 1]}, "conflicts with"),
])  # fmt: skip
def test_synthetic_options_are_checked(options, message):
    refused(ConfigError, message, SpeculativeConfig.parse, {"method": "random", **options})
    refused(ConfigError, "method 'none' has no option", SpeculativeConfig.parse, {"method": "none", **options})


def test_synthetic_acceptance_costs_and_needs_what_the_rule_does():
    inner, calls = rules["token"](), []
    inner.accept = lambda *given: calls.append(given)
    rule = Synthetic(inner, [1.0])
    assert (rule.needs_q, rule.trees, rule.replacement) == (True, False, True)
    sequence = RequestState(0, [1], 1, SamplingParams(temperature=1.0), seed=0)
    scores = Scores([sequence], [Draft.chain([2])], [0], torch.zeros(2, VOCAB))
    assert rule.accept(scores, Sampler(VOCAB))[0].path == [0]
    assert len(calls) == 1


def test_synthetic_results_are_marked_and_promise_nothing(tiny_target):
    rates = [0.9, 0.9, 0.9]
    speculative = LLM(tiny_target, speculative_config={"method": "random", "synthetic_acceptance_rates": rates})
    options = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    answer = speculative.generate(["abc"], options)[0]
    plain = speculative.generate(["abc"], options, speculate=False)[0]
    assert answer.metrics.as_dict()["synthetic"] is True
    assert speculative.engine.stats.synthetic is True
    assert answer.metrics.mean_acceptance_length > 2.5
    assert answer.outputs[0].token_ids != plain.outputs[0].token_ids
    assert not speculative.engine.rule.lossless
    assert not speculative.engine.identity
    speculative.engine.check()


# vocabularies


TEXT = "def größe(x):\n    return x  # naïve café ☕ 🎉\n" * 3
CORPUS = [TEXT, "import os\nfor path in os.listdir('.'):\n    print(path, größe(path))\n", "the quick brown fox " * 5]


def byte_bpe(size, special):
    return byte_tokenizer(CORPUS, size, [special])


def word_pieces():
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["</s>"], unk_token="</s>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_tokens_spell_the_text_they_were_made_from():
    for tokenizer in (byte_bpe(300, "<end>"), byte_bpe(420, "<stop>")):
        vocabulary = Vocabulary(tokenizer, len(tokenizer))
        assert vocabulary.spell(vocabulary.encode(TEXT)).decode() == TEXT
        assert tokenizer.eos_token_id not in vocabulary.bytes
    pieces = Vocabulary(word_pieces(), 200)
    assert pieces.word_marks
    assert pieces.spell(pieces.encode("the quick brown fox")).decode().strip() == "the quick brown fox"


@pytest.fixture(scope="module")
def bridge():
    target, draft = byte_bpe(420, "<end>"), byte_bpe(300, "<stop>")
    return VocabularyMap(Vocabulary(target, 420), Vocabulary(draft, 300), frozenset({0}), frozenset({0}))


def test_a_draft_reads_the_targets_text_whatever_the_cuts(bridge):
    assert bridge.to_draft[0] == 0
    assert all(bridge.target.bytes[i] == bridge.draft.bytes[j] for i, j in bridge.to_draft.items() if i)
    ids = bridge.target.encode(TEXT)
    rng = random.Random(0)
    for _ in range(20):
        reading, known, before = VocabularyReading(bridge), rng.randrange(1, len(ids)), []
        while True:
            reading.follow(ids[:known])
            assert reading.read == known
            assert reading.tokens[: len(before)] == before
            before = list(reading.tokens)
            whole = bridge.target.spell(ids[:known]).decode("utf-8", "ignore").encode()
            assert bridge.draft.spell(reading.tokens).startswith(whole)
            if known == len(ids):
                break
            known = min(len(ids), known + rng.randrange(1, 9))
        assert bridge.draft.spell(reading.tokens).decode() == TEXT


def test_an_end_that_both_have_is_the_same_end():
    """Of a target with several; no other end is taken for it."""
    target, draft = byte_bpe(420, "<other>"), byte_bpe(300, "<end>")
    target.add_tokens([AddedToken("<end>", special=True)])
    end = target.convert_tokens_to_ids("<end>")
    bridge = VocabularyMap(Vocabulary(target, len(target)), Vocabulary(draft, 300), frozenset({0, end}), frozenset({0}))
    assert bridge.to_draft[end] == 0
    assert 0 not in bridge.to_draft
