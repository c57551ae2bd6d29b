"""Tiny random checkpoints, saved by transformers, and engines on them."""

import json
import logging
import os
import random
import shutil
import signal
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM

from chat_model import QUICK, save_chat_model
from described import save_described
from forerun import LLM, kernels
from forerun.cli.main import run
from forerun.engine.config import SpeculativeConfig
from forerun.kernels import structs
from forerun.measure.plan import Trial
from forerun.speculate.length.prices import Prices
from forerun.tune import data
from forerun_lab.tune import kinds
from forerun_lab.tune.config import TuneConfig
from forerun_lab.tune.run import tune
from hybrids import save_hybrid
from promised import promising
from tiny import ALPHABET, EOS, UNKNOWN, save_checkpoint, tiny_llama
from tiny_seq2seq import save_seq2seq
from warm import Warm

# Tests make thousands of engines: each measures prices once, roughly.
DELIVERED = {name: getattr(Prices, name) for name in ("SWEEPS", "ROUNDS", "SECONDS")}
Prices.SWEEPS, Prices.ROUNDS, Prices.SECONDS = (1, 16), 20, (2.0, 0.0)

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored

# Two processes that compile the kernels begin at opposite ends: neither makes what the other has made.
PARTS = [*kernels.TYPES, *structs.QUANTS][:: -1 if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else 1]
for part in PARTS:  # no test waits for a compiler
    kernels.load(part)


@pytest.fixture
def prices_as_delivered(monkeypatch):
    """For simulated machines, whose time costs nothing."""
    for name, value in DELIVERED.items():
        monkeypatch.setattr(Prices, name, value)


@pytest.fixture(autouse=True, scope="session")
def uncollected():
    """A bench collects all garbage before it measures, and unfreezes everything behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.measure.bench.gc", Mock())
        yield


@pytest.fixture(autouse=True)
def handlers():
    """A command that runs in a test writes its log to that test's standard error, and to no later one's."""
    logger = logging.getLogger("forerun")
    before = list(logger.handlers)
    yield
    logger.handlers[:] = before


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's kernels run under its interpreter where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("FORERUN_INTERPRET", "1")


@pytest.fixture(params=["kernel", "torch"])
def cpu_attention(request, monkeypatch):
    """Caches made in the test attend through our kernel where it is here, then through torch."""
    if request.param == "torch":
        monkeypatch.setattr("forerun.models.run.base.can_attend", lambda *_: False)


@pytest.fixture(scope="session")
def warm():
    """Starts programs with everything imported."""
    one = Warm()
    yield one
    one.close()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    """Folder of a Llama with two layers, grouped queries, 98 tokens and a context of 256, float32."""
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny_target"))


@pytest.fixture
def folder(tiny_target, tmp_path):
    """A copy of ``tiny_target``, to be changed."""
    return Path(shutil.copytree(tiny_target, tmp_path / "copy"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory, tiny_target):
    """Folder of the target's first layer between its own embeddings and head: some drafts match, some do not."""
    target = LlamaForCausalLM.from_pretrained(tiny_target)
    draft = tiny_llama(layers=1)
    draft.load_state_dict(target.state_dict(), strict=False)
    return save_checkpoint(draft, tmp_path_factory.mktemp("tiny_draft"))


@pytest.fixture(scope="session")
def tiny_stranger(tmp_path_factory, tiny_draft):
    """The draft with a vocabulary of its own: other ids, and some of the target's tokens missing."""
    rest = [token for token in ALPHABET[2:] if token not in "qQzZ#~"]
    random.Random(0).shuffle(rest)
    alphabet = [EOS, UNKNOWN, *rest]
    weights = LlamaForCausalLM.from_pretrained(tiny_draft).state_dict()
    rows = torch.tensor([ALPHABET.index(token) for token in alphabet])
    for name, value in weights.items():
        if value.shape and value.shape[0] == len(ALPHABET):
            weights[name] = value[rows]
    model = tiny_llama(layers=1, vocab_size=len(alphabet))
    model.load_state_dict(weights)
    return save_checkpoint(model, tmp_path_factory.mktemp("tiny_stranger"), alphabet)


@pytest.fixture
def places(tiny_draft, tiny_stranger):
    """For the names in ``drafting.CONFIGS``."""
    return {"DRAFT": tiny_draft, "STRANGER": tiny_stranger}


@pytest.fixture(scope="session")
def seq2seq(tmp_path_factory):
    """``seq2seq(kind)``: folder of a random encoder-decoder, float32, with the alphabet of ``tiny_target``."""
    return cache(lambda kind: save_seq2seq(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def described(tmp_path_factory):
    """``described(name, **more)``: folder of what ``save_described`` saves."""

    @cache
    def get(name, **more):
        folder = tmp_path_factory.mktemp(name)
        save_described(name, folder, **more)
        return str(folder)

    return get


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """``hybrid(kind, **options)``: folder of a tiny model with state."""
    return cache(lambda kind, **options: save_hybrid(kind, tmp_path_factory.mktemp(kind), **options))


@pytest.fixture(scope="session")
def llm(tiny_target):
    """``llm(speculative_config=None, model=None, **options)``: an LLM on ``tiny_target``, loaded once per options."""
    loaded = {}

    def get(speculative_config=None, model=None, **options):
        key = json.dumps([speculative_config, model, options], sort_keys=True, default=str)
        if key not in loaded:
            loaded[key] = LLM(model or tiny_target, speculative_config=speculative_config, **options)
        return loaded[key]

    return get


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """Folder of a tiny model with a chat template."""
    return save_chat_model(tmp_path_factory.mktemp("chat_model"))


@pytest.fixture(scope="session")
def reference(tiny_target):
    """``tiny_target`` as transformers runs it."""
    return LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@contextmanager
def few():
    with pytest.MonkeyPatch.context() as patch:
        turns = data.held_out()[:6]
        patch.setattr(data, "held_out", lambda: turns)
        patch.setattr(kinds, "HELD_OUT_ROWS", 1)
        yield


@pytest.fixture(scope="module")
def few_turns():
    """A few of the held-out turns and one row, so that a tuning takes seconds."""
    with few():
        yield


@pytest.fixture(scope="session")
def tuned_target(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tuned_target"))


@pytest.fixture(scope="session")
def tuned_folder(tuned_target, tmp_path_factory):
    with few():
        return tune(TuneConfig(model=tuned_target, out=tmp_path_factory.mktemp("tuned"), **QUICK))


@pytest.fixture
def listen(monkeypatch):
    """``listen(owner, name, hear)``: before each call of that function ``hear`` gets what the call is given."""

    def to(owner, name, hear):
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, **options: (hear(*given, **options), call(*given, **options))[1]
        )

    return to


@pytest.fixture
def plan(capsys, tiny_target, monkeypatch, listen):
    """Run the command with predictions that promise much: what it recommends, and what it ran."""
    ran = []
    listen(Trial, "run", lambda self, configs: ran.extend(map(SpeculativeConfig.parse, configs)))
    monkeypatch.setattr("forerun.measure.plan.predict", promising)

    def call(*options):
        ran.clear()
        short = "--prompts 1 --prompt-tokens 12 --max-tokens 12 --prompt-set random --longest 3 --json"
        assert run(["plan", "--model", tiny_target, *short.split(), *options]) == 0
        return json.loads(capsys.readouterr().out)["recommended"], ran

    return call


@pytest.fixture
def forerun(capsys):
    """Run a command in this process: exit code, stdout, stderr."""

    def call(*arguments):
        code = run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
