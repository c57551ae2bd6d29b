"""A run that goes on, is stopped, or was another one: what a folder holds, what is said, and what is never lost."""

import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun.models.files.open import Checkpoint
from forerun_lab.train.config import DistillConfig, HeadTrainConfig, ModelShape, TargetConfig
from forerun_lab.train.corpus import Excerpt, TokenStream, encode_files, list_files, read_text, split_files
from forerun_lab.train.distill import train_draft_model
from forerun_lab.train.heads import train_head
from forerun_lab.train.target import train_target
from forerun_lab.tune import loop, progress
from forerun_lab.tune.config import LoopSettings, Stopped
from refusals import refused

pytestmark = pytest.mark.slow

TEXT = "def f(x):\n    return x + 1\n" * 100
SMALL = {"batch_tokens": 512, "length": 64, "threads": 1, "progress": False}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name in "abcd":
        (folder / f"{name}.py").write_text(f"# {name}\n{TEXT}")
    return folder


@pytest.fixture(scope="module")
def other_target(tiny_target, tmp_path_factory):
    """A target of the same shapes with other weights."""
    folder = shutil.copytree(tiny_target, tmp_path_factory.mktemp("other") / "other")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(77)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_target, corpus, tmp_path_factory):
    """The configuration of a run that has ended."""
    config = HeadTrainConfig(
        method="medusa", depth=2, target=Path(tiny_target), corpus=corpus, tokens=1024,
        out=tmp_path_factory.mktemp("trained") / "head", **SMALL,
    )  # fmt: skip
    train_head(config)
    return config


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_another_targets_run_is_refused_and_both_are_named(trained, other_target, capsys):
    before = files(trained.out)
    arguments = ["train", "medusa", "--target", str(other_target), "--out", str(trained.out), "--depth", "2"]
    small = ["--corpus", str(trained.corpus), "--tokens", "1024", "--batch-tokens", "512", "--length", "64"]
    assert run([*arguments, *small, "--threads", "1", "--no-progress"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for target in (trained.target, other_target):
        assert f"{target} ({Checkpoint.at(target).fingerprint()})" in err
    assert "--no-resume" in err
    assert files(trained.out) == before


def test_a_model_is_not_overwritten_by_a_head(trained, other_target):
    before = files(other_target)
    for change in ({"target": other_target}, {}):
        refused(ConfigError, "has another model", train_head, replace(trained, out=other_target, **change))
    assert files(other_target) == before


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"method": "blockwise"}, "another method: medusa, not blockwise"),
        ({"seed": 1}, "another seed: 0, not 1"),
        ({"depth": 3}, "another depth: 2, not 3"),
        ({"length": 32}, "another length: 64, not 32"),
        ({"generated_tokens": 600}, "another generated_tokens: 0, not 600"),
        ({"held_out": 2}, "another held_out: None, not 2"),
    ],
)
def test_a_run_with_other_settings_is_refused(trained, change, what):
    with pytest.raises(ConfigError, match=rf"{trained.out} holds a run with {what}"):
        train_head(replace(trained, **change))


def test_a_run_on_other_text_is_refused(trained, tmp_path):
    changed = shutil.copytree(trained.corpus, tmp_path / trained.corpus.name)
    same = train_head(replace(trained, corpus=changed))
    assert same == trained.out
    (changed / "a.py").write_text(f"# a\n{TEXT}# one line more\n")
    with pytest.raises(ConfigError, match=r"another corpus: (\w+) \(\w{16}\), not \1 \(\w{16}\)"):
        train_head(replace(trained, corpus=changed))


def test_length_and_rates_of_a_run_may_change_and_starting_over_is_possible(trained, other_target, tmp_path):
    out = shutil.copytree(trained.out, tmp_path / "head")
    longer = replace(trained, out=out, tokens=1536, lr=1e-4, eval_tokens=512)
    record = json.loads((train_head(longer) / "config.json").read_text())
    assert record["tokens"] == 1536
    assert torch.load(out / "run" / "checkpoint.pt", weights_only=True)["state"]["plans"] == [[0, 1024], [1024, 1536]]
    other = replace(longer, target=Path(other_target), resume=False)
    assert json.loads((train_head(other) / "config.json").read_text())["target"] == str(other_target)
    with pytest.raises(ConfigError, match="another target"):
        train_head(longer)


def test_starting_over_leaves_nothing_of_the_old_run_to_go_on_from(trained, other_target, tmp_path, monkeypatch):
    out = shutil.copytree(trained.out, tmp_path / "head")
    (out / "run" / "generated.pt").write_bytes(b"the other target's text")

    def broken(*rest):
        raise KeyError

    monkeypatch.setattr("forerun_lab.tune.loop._step", broken)
    with pytest.raises(KeyError):
        train_head(replace(trained, out=out, target=Path(other_target), resume=False))
    assert sorted(path.name for path in (out / "run").iterdir()) == ["log.jsonl", "run.json"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"target": 3}'])
def test_a_folder_that_does_not_say_what_it_trains_is_refused(trained, tmp_path, content):
    out = shutil.copytree(trained.out, tmp_path / "head")
    record = out / "run" / "run.json"
    record.unlink() if content is None else record.write_text(content)
    with pytest.raises(ConfigError, match=r"does not say what it trains \(run\.json"):
        train_head(replace(trained, out=out))


def test_a_target_of_another_corpus_is_refused_before_its_tokenizer_is_taken(corpus, tmp_path):
    shape = ModelShape(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, positions=64)
    config = TargetConfig(out=tmp_path / "t", corpus=corpus, tokens=512, vocab_size=270, shape=shape, **SMALL)
    train_target(config)
    (tmp_path / "elsewhere").mkdir()
    for name in "ab":
        (tmp_path / "elsewhere" / f"{name}.py").write_text("something = 'else'\n" * 200)
    with pytest.raises(ConfigError, match="another corpus"):
        train_target(replace(config, corpus=tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="another vocab_size: 270, not 280"):
        train_target(replace(config, vocab_size=280))


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.lm_head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.lm_head(self.embedding(tokens))


def noisy_loss(model, batch):
    """One that draws, as those of look-ahead heads do."""
    kept = torch.rand(batch.shape[0], batch.shape[1] - 1) < 0.5
    kept[0, 0] = True
    return F.cross_entropy(model(batch[:, :-1])[kept], batch[:, 1:][kept])


STREAM = TokenStream((torch.arange(500) * 7 % 11).int(), seed=3)


def settings(out, **others):
    options = {"batch_tokens": 40, "micro_tokens": 20, "length": 10, "long_length": 20, "threads": 1, "progress": False}
    return LoopSettings(out=out, **{"tokens": 200, "eval_tokens": 80, **options, **others})


class Pressing:
    """Sends this process Ctrl-C in the middle of a step."""

    def __init__(self, at, times=1):
        self.at, self.times = at, times

    def batch(self, consumed, rows, length):
        if consumed == self.at and sys._getframe(1).f_code.co_name == "_step":
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        return STREAM.batch(consumed, rows, length)


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_ctrl_c_saves_the_step_that_runs_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, capsys):
    whole, part, rest = Bigram(), Bigram(), Bigram()
    loop.run(whole, STREAM, noisy_loss, settings(tmp_path / "whole"), lambda model: {"drawn": float(torch.rand(()))})
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match=r"stopped after 120 of 200 tokens.*the same command resumes"):
        loop.run(part, Pressing(at=80), noisy_loss, settings(tmp_path / "part"))
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopping when this step is done" in capsys.readouterr().err
    assert torch.load(tmp_path / "part" / "checkpoint.pt", weights_only=True)["state"]["tokens"] == 120
    loop.run(rest, STREAM, noisy_loss, settings(tmp_path / "part"))
    assert torch.equal(weights_of(rest), weights_of(whole))


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        loop.run(Bigram(), Pressing(at=80, times=2), noisy_loss, settings(tmp_path))


def test_ctrl_c_ends_a_pause(tmp_path, monkeypatch):
    pause, naps = tmp_path / "PAUSE", []

    class Pausing(TokenStream):
        def batch(self, consumed, rows, length):
            if consumed == 40:
                pause.touch()
            return super().batch(consumed, rows, length)

    def nap(seconds):
        assert not naps
        naps.append(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.time, "sleep", nap)
    with pytest.raises(Stopped, match="after 120 of 200"):
        loop.run(Bigram(), Pausing(STREAM.tokens, 3), noisy_loss, settings(tmp_path / "out", pause_file=pause))


def test_a_command_that_is_stopped_says_how_to_go_on(tiny_target, corpus, tmp_path, capsys):
    folder = tmp_path / "h" / "run"
    over = threading.Event()

    def press():
        while not over.wait(0.02):
            if (folder / "log.jsonl").exists() and (folder / "log.jsonl").read_text():
                os.kill(os.getpid(), signal.SIGINT)
                return

    presser = threading.Thread(target=press)
    presser.start()
    arguments = ["--target", str(tiny_target), "--corpus", str(corpus), "--out", str(tmp_path / "h"), "--depth", "2"]
    small = ["--tokens", "5000000", "--length", "64", "--batch-tokens", "512", "--threads", "1"]
    try:
        assert run(["train", "medusa", *arguments, *small]) == 130
    finally:
        over.set()
        presser.join()
    out, err = capsys.readouterr()
    assert out == ""
    assert "loss: cross entropy of the guesses for tokens 1 to 2 ahead" in err
    assert "training, tokens: 512 of 5,000,000 (0%), loss " in err
    assert f"saved in {folder}: the same command resumes" in err
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]
    assert state["tokens"] == 512 * len((folder / "log.jsonl").read_text().splitlines())


def test_text_that_was_written_before_a_stop_is_not_written_again(tiny_target, corpus, tmp_path, monkeypatch):
    from forerun_lab.train import rollout

    monkeypatch.setattr(rollout, "ROWS", 1)
    monkeypatch.setattr(rollout, "CONTINUATION", 20)
    monkeypatch.setattr("forerun_lab.train.distill.measure_alpha", lambda *rest: {})
    written = []
    plain = rollout.continue_prompts

    def counted(model, prompts, tokens, temperature, seed, pause_file=None):
        if len(written) == 2 and not resumed:
            raise KeyboardInterrupt
        written.append((temperature, seed))
        return plain(model, prompts, tokens, temperature, seed, pause_file)

    monkeypatch.setattr(rollout, "continue_prompts", counted)
    config = DistillConfig(
        out=tmp_path / "d", target=Path(tiny_target), corpus=corpus, tokens=512, generated_tokens=400,
        shape=ModelShape(16, 1, 2, 1, 16, 64), **{**SMALL, "length": 16},
    )  # fmt: skip
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        train_draft_model(config)
    resumed = True
    train_draft_model(config)
    assert len(written) == len(set(written))
    generated = torch.load(tmp_path / "d" / "run" / "generated.pt", weights_only=True)
    shutil.rmtree(tmp_path / "d")
    train_draft_model(config)
    assert torch.equal(torch.load(tmp_path / "d" / "run" / "generated.pt", weights_only=True), generated)
    assert not (tmp_path / "d" / "run" / "generated").exists()


def test_a_corpus_may_be_one_file(tmp_path, tiny_target):
    path = tmp_path / "all.txt"
    path.write_text(TEXT)
    train, held_out = split_files(list_files(path), None, seed=0)
    assert read_text(train[0]) + read_text(held_out[0]) == TEXT
    assert isinstance(train[0], Excerpt)
    assert 0.05 < len(read_text(held_out[0])) / len(TEXT) < 0.15
    assert read_text(train[0]).endswith("\n")
    shape = ModelShape(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, positions=64)
    target = train_target(
        TargetConfig(
            out=tmp_path / "t", corpus=path, tokens=512, vocab_size=270, shape=shape, **{**SMALL, "length": 16}
        )
    )
    assert json.loads((target / "training.json").read_text())["held_out_files"] == []
    config = HeadTrainConfig(
        out=tmp_path / "h", target=target, corpus=path, tokens=512, depth=2, **{**SMALL, "length": 16}
    )
    train_head(config)
    with pytest.raises(ConfigError, match="the last tenth is held out"):
        split_files([path], 1, seed=0)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="too short"):
        split_files([tmp_path / "empty.txt"], None, seed=0)


@pytest.mark.parametrize(("count", "expected"), [(2, 1), (19, 1), (40, 4), (250, 25), (1000, 25)])
def test_a_tenth_of_few_files_is_held_out(count, expected):
    result = [Path(f"{number}.py") for number in range(count)]
    train, held_out = split_files(result, None, seed=0)
    assert (len(train), len(held_out)) == (count - expected, expected)


def test_text_too_short_for_the_last_sequences_is_an_error_before_the_first(tmp_path):
    short = TokenStream(torch.zeros(30, dtype=torch.int32), seed=0)
    with pytest.raises(ConfigError, match="30 tokens, too few for sequences of 20"):
        loop.run(Bigram(), short, noisy_loss, settings(tmp_path))
    assert not (tmp_path / "log.jsonl").exists()


def test_lines_now_and_then_where_there_is_no_terminal(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress("training, tokens", 10_000) as bar:
        for step in range(1, 101):
            now[0] += 1.0
            bar.update(step * 100, f"loss {step}")
    assert capsys.readouterr().err.splitlines() == [
        "training, tokens: 100 of 10,000 (1%), loss 1",
        "training, tokens: 2,100 of 10,000 (21%), loss 21, 1 min left",
        "training, tokens: 4,100 of 10,000 (41%), loss 41, 59 s left",
        "training, tokens: 6,100 of 10,000 (61%), loss 61, 39 s left",
        "training, tokens: 8,100 of 10,000 (81%), loss 81, 19 s left",
        "training, tokens: 10,000 of 10,000 (100%), loss 100",
    ]
    with progress.progress("training", 10, shown=False) as bar:
        bar.update(10)
        bar.say("nothing")
    assert capsys.readouterr() == ("", "")


def test_acceptance_by_position_stands_at_the_end(trained, tmp_path, capsys):
    config = replace(trained, out=tmp_path / "h", progress=True, eval_tokens=512)
    record = json.loads((train_head(config) / "config.json").read_text())
    err = capsys.readouterr().err
    assert err.count("held-out text after ") == 2
    end = err.split("up to each position", 1)[1]
    for position in (1, 2):
        fraction = record["accepted_at_0"][position - 1]
        assert f"position {position}   {fraction:4.0%}" in end
    assert record["held_out_loss"] == pytest.approx(
        record["loss_by_position"][0] + 0.8 * record["loss_by_position"][1], abs=1e-4
    )
    assert record["accepted_at_0"][0] >= record["accepted_at_0"][1]


def test_the_logged_loss_is_a_mean_per_token(trained):
    """An untrained medusa head repeats the target's own guess; its cross entropy is of the order of log(vocabulary)."""
    lines = [json.loads(line) for line in (trained.out / "run" / "log.jsonl").read_text().splitlines()]
    first = next(line["loss"] for line in lines if "loss" in line)
    record = json.loads((trained.out / "config.json").read_text())
    assert first == pytest.approx(record["untrained_loss"] / 1.8, rel=0.2)


def test_one_file_is_read_as_it_stands(tmp_path):
    from forerun_lab.train.folder import train_tokenizer

    path = tmp_path / "x.txt"
    path.write_text(TEXT)
    tokenizer = train_tokenizer([TEXT], vocab_size=260, max_length=64)
    train, held_out = split_files([path], None, seed=0)
    text = tokenizer.decode(encode_files(train, tokenizer, 0)[:-1]) + tokenizer.decode(
        encode_files(held_out, tokenizer, 0)[:-1]
    )
    assert text == TEXT
