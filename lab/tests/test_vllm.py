"""The proposer for vLLM with the arguments that vLLM gives one; ``lab/benchmarks/vllm_proposer.py`` runs it
inside vLLM."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from forerun import ConfigError, Draft
from forerun_lab.drafters.token_recycling import UNSEEN
from forerun_lab.vllm import Proposer, first_branch
from refusals import refused

LONGEST = 64
PERIOD = [3, 5, 7, 9]


def proposer(tokenizer, k=4, **options):
    model = SimpleNamespace(model=tokenizer, tokenizer=None, max_model_len=LONGEST, get_vocab_size=lambda: 98)
    return Proposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            model_config=model,
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            additional_config={"forerun": options} if options else None,
        )
    )


class Batch:
    """vLLM's input batch: rows of ids and how many count; what is behind them is what an earlier request left."""

    def __init__(self):
        self.ids = np.random.default_rng(0).integers(0, 98, (8, LONGEST), dtype=np.int32)
        self.counts = np.zeros(8, dtype=np.int32)
        self.rows = 0

    def add(self, tokens):
        self.ids[self.rows, : len(tokens)] = tokens
        self.counts[self.rows] = len(tokens)
        self.rows += 1

    def drop(self, row):
        """The last row takes its place."""
        self.rows -= 1
        self.ids[row] = self.ids[self.rows]
        self.counts[row] = self.counts[self.rows]

    def step(self, drafts, sampled):
        for row, tokens in enumerate(sampled):
            end = self.counts[row]
            self.ids[row, end : end + len(tokens)] = tokens
            self.counts[row] += len(tokens)
        return drafts.propose(sampled, self.counts, self.ids)


def test_a_repeating_text_is_continued(tiny_target):
    for method in ("ngram", "prompt_lookup", "suffix", "token_recycling"):
        batch, drafts = Batch(), proposer(tiny_target, method=method)
        batch.add(PERIOD * 4)
        assert batch.step(drafts, [[3]]) == [[5, 7, 9, 3]], method
        assert batch.step(drafts, [[5, 7]]) == [[9, 3, 5, 7]], method
        assert batch.step(drafts, [[]]) == [[]], method


def test_a_table_counts_the_text_it_is_given(tiny_target, tmp_path):
    text = tmp_path / "counted.txt"
    text.write_text("abcd" * 9)
    drafts = proposer(tiny_target, method="table", table_file=str(text))
    a, b, c, d = drafts.drafter.context.tokenizer.encode("abcd", add_special_tokens=False)
    batch = Batch()
    batch.add([7, 8, a])
    assert batch.step(drafts, [[b]]) == [[c, d, a, b]]


def test_rows_that_move_keep_what_they_have_taught(tiny_target):
    """Compared with a proposer of its own for each request, that never sees another."""
    draw = random.Random(0)
    for method in ("ngram", "prompt_lookup"):
        shared, batch, alone = proposer(tiny_target, method=method), Batch(), []
        for _ in range(40):
            if batch.rows < 6 and draw.random() < 0.3:
                prompt = [draw.choice(PERIOD) for _ in range(draw.randrange(3, 9))]
                batch.add(prompt)
                alone.append((proposer(tiny_target, method=method), Batch()))
                alone[-1][1].add(prompt)
            elif batch.rows and draw.random() < 0.2:
                row = draw.randrange(batch.rows)
                batch.drop(row)
                last = alone.pop()
                if row < len(alone):
                    alone[row] = last
            full = [row for row in range(batch.rows) if batch.counts[row] > LONGEST - 8]
            for row in reversed(full):
                batch.drop(row)
                last = alone.pop()
                if row < len(alone):
                    alone[row] = last
            sampled = [[draw.choice(PERIOD) for _ in range(draw.randrange(4))] for _ in range(batch.rows)]
            expected = [own[1].step(own[0], [tokens])[0] for own, tokens in zip(alone, sampled)]
            assert batch.step(shared, sampled) == expected


def test_what_has_ended_is_past(tiny_target):
    """``suffix`` knows a finished request's answer, and not its prompt."""
    drafts, batch = proposer(tiny_target, method="suffix"), Batch()
    batch.add([11, 12, 13, 14])
    batch.step(drafts, [[21]])
    batch.step(drafts, [[22, 23, 24, 25, 26]])
    batch.drop(0)
    batch.step(drafts, [])
    batch.add([40, 41, 21, 22])
    assert batch.step(drafts, [[23]])[0][:2] == [24, 25]
    batch.drop(0)
    batch.add([50, 51, 11, 12])
    assert batch.step(drafts, [[13]]) == [[]]


def test_drafts_end_with_the_context(tiny_target):
    drafts, batch = proposer(tiny_target, method="ngram"), Batch()
    batch.add(PERIOD * 15)
    assert [len(batch.step(drafts, [[PERIOD[i % 4]]])[0]) for i in range(4)] == [2, 1, 0, 0]


def test_taken_tokens_stand_for_logits(tiny_target):
    """The follower that came twice lately is before the one that came earlier."""
    drafts = proposer(tiny_target, method="token_recycling").drafter
    drafts.follow([5, 6, 5, 7, 5, 7])
    ids, logs = drafts.ids[5].tolist(), drafts.logs[5].exp().tolist()
    assert ids[:3] == [7, 6, UNSEEN]
    assert logs[:2] == pytest.approx([0.75, 0.125])


def test_a_tree_gives_its_first_branch():
    assert first_branch(Draft.tree([1, 2, 3, 4], [-1, -1, 0, 1])) == [1, 3]
    assert first_branch(Draft()) == []


def test_a_drafter_of_ones_own(tiny_target, tmp_path, monkeypatch):
    (tmp_path / "mine_for_vllm.py").write_text(
        "from forerun import Draft, Drafter, DrafterConfig, drafters\n"
        "@drafters.register('mine_for_vllm')\n"
        "class Mine(Drafter[DrafterConfig]):\n"
        "    name = 'mine_for_vllm'\n"
        "    def propose(self, sequences, budgets):\n"
        "        return [Draft.chain([s.tokens[-1] + 1] * b) for s, b in zip(sequences, budgets)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    batch, drafts = Batch(), proposer(tiny_target, k=2, module="mine_for_vllm", method="mine_for_vllm")
    batch.add([1, 2])
    assert batch.step(drafts, [[9]]) == [[10, 10]]
    assert "mine_for_vllm" in sys.modules


@pytest.mark.parametrize(("options", "message"), [
    ({"method": "draft_model"}, "needs more than token ids"),
    ({"method": "eagle"}, "needs more than token ids"),
    ({"method": "pattern"}, "needs more than token ids"),
    ({"method": "suffix", "tree_nodes": 8}, "vLLM takes chains"),
    ({"method": "ngram", "prompt_lookup_max": 3}, "has no option 'prompt_lookup_max'"),
    ({"method": "ngram", "num_speculative_tokens": 9}, "remove it from"),
    ({"method": "nothing"}, "nothing"),
])  # fmt: skip
def test_what_vllm_cannot_serve_is_refused(tiny_target, options, message):
    refused(ConfigError, message, proposer, tiny_target, **options)
