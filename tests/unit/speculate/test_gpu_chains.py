"""Chains that a GPU drafts without the host, under Triton's interpreter: those of the kernel on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.models.run import graphs
from forerun.models.run.fused import RAW
from forerun.models.run.graphs import Graph, Graphs
from forerun.speculate.draft import drafters
from forerun.speculate.draft.chain import ChainRunner
from forerun.speculate.draft.graph_chain import Bucket, GraphChains
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.dflash import TrainedDFlash
from forerun_lab.heads.eagle import TrainedEagle
from tiny import ALPHABET, save_checkpoint, tiny_llama

ON_GPU = pytest.mark.elsewhere("the interpreter: lab/benchmarks/gpu_check.py runs on the GPU itself")
pytestmark = [ON_GPU] if torch.cuda.is_available() else []
METHODS = ("draft_model", "eagle", "mtp")
ASKED = [([9, 3, 8], 3, {}), ([20, 11], 5, {"temperature": 0.8}), ([5], 8, {"temperature": 1.1, "top_k": 20})]
"""Prompts, ``max_tokens`` and options: the first drafts have at most 1, 3 and 6 tokens."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = tiny_llama(layers=1, num_attention_heads=2, num_key_value_heads=1)
    return save_checkpoint(model, tmp_path_factory.mktemp("gpu") / "target")


@pytest.fixture(scope="module")
def models(target, tmp_path_factory):
    """What each method drafts with. All of the head's weights are random: a new one's attention gives zeros."""
    folders = {method: tmp_path_factory.mktemp(method) for method in ("eagle", "mtp", "dflash")}
    options = {"heads": 2, "kv_heads": 1, "width": 16, "inner_size": 48, "draft_vocab_size": 60}
    head = TrainedEagle(Sizes(32, len(ALPHABET), 1, 5, options))
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.03 if parameter is head.fc.weight else 0.3)  # steps change a feature
    head.d2t.fill_(20)
    head.save(folders["eagle"])
    drafters["mtp"].example(Path(target), folders["mtp"])
    options = {**options, "draft_vocab_size": None, "blocks": 2, "causal": [True, False], "group": 16, "markov": 4}
    block = TrainedDFlash(Sizes(32, len(ALPHABET), 1, 5, options))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    block.save(folders["dflash"])
    return {"draft_model": target, **{method: str(folder) for method, folder in folders.items()}}


@pytest.fixture
def drafts(target, models, monkeypatch):
    """``drafts(interpreted, **way)``: tokens and parents of the first drafts, and what the draft's cache then holds."""

    def get(interpreted, method="draft_model", *, learned=False, **way):
        monkeypatch.setenv("FORERUN_INTERPRET", str(int(interpreted)))
        way = {"method": method, "model": models[method], "num_speculative_tokens": 3, **way}
        llm = LLM(target, device="cpu", dtype="float32", speculative_config=way, max_model_len=32, page_size=8)
        (drafter,) = llm.engine.router.drafters.values()
        assert method == "dflash" or type(drafter.chains) is (GraphChains if interpreted else ChainRunner)
        propose, made = drafter.propose, []

        def record(sequences, budgets):
            made[:] = propose(sequences, budgets)
            return made

        monkeypatch.setattr(drafter, "propose", record)
        for tokens, most, options in ASKED:
            given = {"temperature": 0.0, "max_tokens": most, "ignore_eos": True, "seed": 3, **options}
            llm.engine.add(tokens, SamplingParams(**given))
        while not any(map(len, made)):  # a head drafts once the target has read the prompt
            llm.engine.step()
        for _ in range(3 if learned else 0):  # so that a bucket comes back
            for part in drafter.head.tensors.values():
                if part.is_floating_point():
                    part.neg_()
            drafter.head.pack()
            llm.engine.step()
        if interpreted and method != "draft_model":
            assert drafter.decoder.graphs is llm.engine.model.graphs
            ran = {key[1] for key in drafter.decoder.graphs._graphs[drafter.attention][1] if isinstance(key, tuple)}
            assert ran == {(RAW,), *([()] if method == "dflash" else [])}  # what it reads before it drafts, too
        (pool,) = drafter.pools()
        return [(each.tokens, each.parents) for each in made], [*pool.keys, *pool.values]

    return get


@pytest.mark.parametrize("method", METHODS)
def test_budgets_that_differ_and_garbage_in_padding(drafts, monkeypatch, method):
    expected, _ = drafts(False, method, num_speculative_tokens=5)
    assert [len(tokens) for tokens, _ in expected] == [1, 3, 5]
    got, kept = drafts(True, method, num_speculative_tokens=5)
    assert got == expected
    write = Bucket.write

    def spoil(self, batch, tables, chosen, depths):
        garbage, rows, count = np.random.default_rng(0), self.sizes.rows, len(chosen)
        self.logits.normal_()
        if self.batch.embeds is not None:
            self.batch.embeds.normal_()
        self.numbers.host[:] = garbage.integers(1, 9, len(self.numbers.host))
        write(self, batch, tables, chosen, depths)
        assert rows > count
        self.host["options"].reshape(rows, 4)[count:] = garbage.random((rows - count, 4), np.float32).view(np.int32)
        for name in ("now", "keys"):
            padding = self.host[name].reshape(-1, rows, 3)[:, count:]
            padding[:] = garbage.integers(1, 9, padding.shape)
        self.host["forward"][: 2 * rows].reshape(2, rows)[:, count:] = 5  # token ids and positions

    monkeypatch.setattr(Bucket, "write", spoil)
    got, cache = drafts(True, method, num_speculative_tokens=5)
    assert got == expected
    assert all(map(torch.equal, cache, kept))


def test_a_head_that_has_learned_drafts_by_its_new_weights(drafts):
    expected, _ = drafts(False, "eagle", learned=True)
    assert any(tokens for tokens, _ in expected)
    assert drafts(True, "eagle", learned=True)[0] == expected


@pytest.mark.parametrize("most", [1, 3])
def test_a_capture_runs_a_step_before_and_writes_nothing_else(drafts, monkeypatch, most):
    """Torch wants a body to have run before it is captured."""
    expected, _ = drafts(False, "mtp", num_speculative_tokens=most)
    make, beyond = Bucket.__init__, []

    def guarded(self, *given):
        make(self, *given)
        room = torch.full((len(self.found) + 2, *self.found.shape[1:]), 7, dtype=torch.int32)
        self.found, rest = room.split([len(self.found), 2])
        beyond.append(rest)

    def run_once(self, body):
        body()
        return body

    monkeypatch.setattr(Bucket, "__init__", guarded)
    monkeypatch.setattr(Graphs, "_record", run_once)
    assert drafts(True, "mtp", num_speculative_tokens=most)[0] == expected
    assert all(bool((each == 7).all()) for each in beyond)
    assert beyond


@pytest.mark.parametrize(
    "way", [{"confidence_threshold": 0.02}, {"confidence_threshold": 0.04, "draft_vocab_size": 60}], ids=["", "reduced"]
)
def test_a_floor_that_cuts_in_the_middle(drafts, way):
    expected, _ = drafts(False, **way)
    shapes = [parents for _, parents in expected]
    assert [-1, 0, 0] in shapes  # the second choice beside the last token
    assert [-1, 0, 1] in shapes
    assert drafts(True, **way)[0] == expected


def test_garbage_in_the_padding_of_blocks_and_of_what_they_read(drafts, monkeypatch):
    expected, _ = drafts(False, "dflash", num_speculative_tokens=5)
    assert [len(tokens) for tokens, _ in expected] == [1, 3, 5]
    got, kept = drafts(True, "dflash", num_speculative_tokens=5)
    assert got == expected
    run, write, padded = Graph.__call__, graphs.write_numbers, []

    def spoil(self, batch, tables):
        if self.padded.embeds is not None:
            self.padded.embeds.normal_()
        return run(self, batch, tables)

    def write_garbage(to, batch, tables, sizes):
        write(to, batch, tables, sizes)
        padded.append(sizes.rows - batch.num_rows)
        to[: 2 * sizes.rows].reshape(2, sizes.rows)[:, batch.num_rows :] = 5  # token ids and positions

    monkeypatch.setattr(Graph, "__call__", spoil)
    monkeypatch.setattr(graphs, "write_numbers", write_garbage)
    got, cache = drafts(True, "dflash", num_speculative_tokens=5)
    assert got == expected
    assert all(map(torch.equal, cache, kept))
    assert max(padded) > 0
