"""The references' tables, made again: arithmetic by enumeration, runs that go on, and the command."""

import json

import numpy
import pytest
import torch

from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun_lab.reproduce import pairs, seq2seq
from forerun_lab.reproduce.distributions import LENIENCE, NgramCounts, Sums
from forerun_lab.reproduce.parts import Settings
from forerun_lab.reproduce.run import PARTS, reproduce

pytestmark = pytest.mark.slow

QUICK = [name for name, part in PARTS.items() if part.seconds]


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path / "out", tokens=64, minutes=0.02)


def column(folder, name, title):
    made = json.loads((folder / f"{name}.json").read_text())
    index = made["columns"].index(title)
    return [row[index] for row in made["rows"]]


def test_what_takes_seconds_is_made_and_agrees(settings):
    page = reproduce(settings, QUICK).read_text()
    assert all(f"--only {name}`" in page for name in QUICK)
    assert column(settings.folder, "table-4", "agrees") == ["yes"] * 12
    assert column(settings.folder, "reference-003", "agrees") == ["yes"] * 6
    assert column(settings.folder, "reference-004", "agrees") == ["yes"] * 4 + ["NO"] * 3
    made = json.loads((settings.folder / "table-1.json").read_text())
    assert all(
        float(row[3]) == row_printed for row, row_printed in zip(made["rows"], [1.53, 1.58, 1.23, 1.63, 1.11, 1.60])
    )
    kept = [float(cell.split()[0]) for cell in column(settings.folder, "reference-000", made_title(settings))]
    assert kept == pytest.approx([1.0, 1.0, 0.31 / 0.81, 1.0], abs=0.015)  # four standard errors


def made_title(settings):
    titles = json.loads((settings.folder / "reference-000.json").read_text())["columns"]
    return titles[-1]


def test_a_run_goes_on_and_makes_again_what_it_is_reported_to(settings):
    reproduce(settings, ["table-1"])
    index = settings.folder / "table-1.json"
    before = index.stat().st_mtime_ns
    reproduce(settings, ["table-1", "figure-3"])
    assert index.stat().st_mtime_ns == before
    index.write_text("{")
    page = reproduce(settings, ["figure-3"]).read_text()
    assert "--only table-1" not in page
    assert "--only figure-3" in page
    reproduce(settings, ["table-1"], again=True)
    assert json.loads(index.read_text())["rows"]


def test_unknown_tables_and_numbers_are_refused(settings, tmp_path, capsys):
    with pytest.raises(ConfigError, match="unknown table table-9: choose from figure-2"):
        reproduce(settings, ["table-9"])
    assert run(["reproduce", "--out", str(tmp_path / "x"), "--tokens", "0"]) == 2
    assert run(["reproduce", "--out", str(tmp_path / "x"), "--only", "figure-2"]) == 0
    assert (tmp_path / "x" / "reproduction.md").exists()


def test_rates_are_the_sums_of_their_definitions():
    draw = numpy.random.default_rng(0)
    p, q = draw.dirichlet([0.3] * 7, 50), draw.dirichlet([0.3] * 7, 50)
    sums = Sums()
    sums.add(torch.tensor(p[:20]), torch.tensor(q[:20]))
    sums.add(torch.tensor(p[20:]), torch.tensor(q[20:]))
    result = sums.means()
    accept = [sum(b * min(1.0, a / b) for a, b in zip(x, y)) for x, y in zip(p, q)]
    assert result.sampled == pytest.approx(numpy.mean(accept))
    most = [max(a / b for a, b in zip(x, y)) for x, y in zip(p, q)]
    assert result.rejection == pytest.approx(numpy.mean([1 / m for m in most]))
    assert result.greedy == numpy.mean([x.argmax() == y.argmax() for x, y in zip(p, q)])
    for index, keep in enumerate(LENIENCE):
        lenient = [sum(b * min(1.0, a / (keep * b)) for a, b in zip(x, y)) for x, y in zip(p, q)]
        assert result.lenient[index] == pytest.approx(numpy.mean(lenient))
        kept = [x[y.argmax()] >= keep * x.max() for x, y in zip(p, q)]
        assert result.lenient_greedy[index] == pytest.approx(numpy.mean(kept))


def test_counted_drafts_are_shares():
    counts = NgramCounts([[0, 1, 0, 1, 2], [1, 2]], vocabulary=4)
    assert counts.q([3], 1)[0].tolist() == pytest.approx([3 / 11, 4 / 11, 3 / 11, 1 / 11])
    unigram = counts.q([0], 1)[0].tolist()
    after = counts.q([1, 3], 2)
    assert after[0].tolist() == pytest.approx(
        [(unigram[0] + 1) / 4, unigram[1] / 4, (unigram[2] + 2) / 4, unigram[3] / 4]
    )
    assert after[1].tolist() == pytest.approx(unigram)  # nothing has followed it
    assert torch.allclose(after.sum(-1), torch.ones(2, dtype=torch.float64))


def test_functions_lose_their_docstrings():
    text = 'def f(x):\n    """Adds one.\n\n    More."""\n    return x + 1\n\ndef g():\n    return 2\n'
    assert pairs.functions(text) == [("def f(x):\n    return x + 1", "Adds one.")]
    assert pairs.functions("def f(:") == []


def test_training_goes_on_where_it_was(settings):
    end = 1
    task = pairs.PairTask(
        "toy", pairs._word_tokenizer(["<pad>", "</s>", "a", "b"]), end, [([2, 3, 1], [3, 2, 1])] * 4, []
    )
    first = Settings(settings.folder, 1, 0.02)
    folder = pairs.trained(task, "draft", first)
    steps = torch.load(folder / "training.pt", weights_only=True)["step"]
    longer = Settings(settings.folder, 1, 0.04)
    pairs.trained(task, "draft", longer)
    assert torch.load(folder / "training.pt", weights_only=True)["step"] > steps > 0
    result = pairs.batch([([2, 1], [3, 1]), ([2, 3, 1], [1])])
    assert result["input_ids"].tolist() == [[2, 1, 0], [2, 3, 1]]
    assert result["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert result["labels"].tolist() == [[3, 1], [1, -100]]


def test_rates_come_first_and_train_their_pair(settings, monkeypatch):
    pair = ([2, 3, 1], [3, 2, 1])
    task = pairs.PairTask("toy", pairs._word_tokenizer(["<pad>", "</s>", "a", "b"]), 1, [pair] * 4, [pair] * 4)
    monkeypatch.setitem(seq2seq.TASKS, "toy", lambda: task)
    assert set(seq2seq.rates("toy", settings, 0.0)) == {"unigram", "bigram", "draft"}
    assert (settings.folder / "models" / "toy-target" / "training.pt").exists()
