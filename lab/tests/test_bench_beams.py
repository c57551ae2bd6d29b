"""The table of beams: peers' beams beside ours on the same weights, and what counts as the same."""

import json
import sys

import pytest

from forerun_lab.bench import beams
from forerun_lab.bench.beams import BeamResult, BeamRow
from forerun_lab.peers import outside
from tiny_seq2seq import EOS, START, save_seq2seq

pytestmark = pytest.mark.slow

STUB = f"""
import json, sys
print(json.dumps({{"threads": json.loads(sys.stdin.readline())["threads"]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    beams = [[asked["source"][0], {EOS}, 7]] * asked["width"]
    print(json.dumps({{"beams": beams, "scores": [-1.5] * asked["width"], "seconds": 0.25}}), flush=True)
"""


def measured(monkeypatch, tmp_path, *options):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["beams", *options, "--prompts", "2", "--prompt-set", "random", "--out", str(out)])
    beams.main()
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["decoder", "bart"])
def test_transformers_finds_the_same_beams(kind, tiny_target, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "bart"
    if kind == "bart":
        save_seq2seq("bart", folder, encoder_layers=2)  # transformers 5.23 wants both sides as deep
    model = str(folder) if kind == "bart" else tiny_target
    short = ("--widths", "1,3", "--tokens", "8", "--prompt-tokens", "9", "--settings", '[{"method": "ngram"}]')
    result = measured(monkeypatch, tmp_path, "--model", model, *short)
    rows = {(row["beams"], row["setting"]): row for row in result["rows"]}
    assert set(rows) == {(width, name) for width in (1, 3) for name in ("plain", "ngram", "transformers")}
    assert all(row["same_beams"] == 1.0 for row in rows.values())
    assert rows[3, "ngram"]["scores_off_by"] == 0.0
    assert rows[3, "transformers"]["scores_off_by"] < 1e-4
    assert rows[1, "plain"]["steps_per_round"] == 1.0
    assert "| 3 | transformers |" in capsys.readouterr().out


def test_ctranslate2_searches_in_a_python_of_its_own(seq2seq, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "WORKERS", tmp_path)
    (tmp_path / "ctranslate2_worker.py").write_text(STUB)
    target = beams.LLM(seq2seq("t5"))
    worker, search = beams.ctranslate2_search(target, sys.executable)
    result = search([9, 8], beams.BeamSearchParams(2, 6))
    worker.end()
    assert (result.beams, result.scores, result.steps) == ([[START, 9]] * 2, [-1.5] * 2, 1)
    assert result.rounds is None
    with pytest.raises(beams.ConfigError, match="encoder-decoders only: remove it"):
        beams.ctranslate2_search(llm(), sys.executable)


def test_ours_are_the_same_to_the_last_bit_and_peers_by_their_tokens():
    plain = BeamResult([[1, 2], [1, 3]], [-1.0, -2.0], 2.0, 4, 4)
    close = [-1.0, -2.0000001]
    own, peer = BeamResult(plain.beams, close, 1.0, 4, 2, 8), BeamResult(plain.beams, close, 4.0, 4)
    other = BeamResult([[1, 2], [1, 4]], [-1.0, -2.0], 1.0, 4)
    base = BeamRow(2, "plain", [plain])
    rows = [BeamRow(2, "x", [result]).as_dict(base) for result in (own, peer, other)]
    assert [row["same_beams"] for row in rows] == [0.0, 1.0, 0.0]
    assert [row["speedup"] for row in rows] == [2.0, 0.5, 2.0]
    assert rows[0]["steps_per_round"] == 2.0
    assert rows[1]["scores_off_by"] == pytest.approx(1e-7)
    assert rows[2]["scores_off_by"] is None
