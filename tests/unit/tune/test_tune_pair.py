"""What ``forerun tune --draft`` finds and leaves, on tiny models."""

import json
import shutil
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.core.errors import ConfigError
from forerun.engine import tuned
from forerun.models.files.open import resolve
from forerun.models.load import load_shared, sharing
from forerun.tune.config import PairConfig
from forerun.tune.run import tune_pair
from refusals import refused
from tiny import save_checkpoint, tiny_llama

QUICK = {"minutes": 3 / 60, "answer": 16, "progress": False}
DRAFT = "forerun:draft"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    said = []
    out = tmp_path_factory.mktemp("pair") / "out"
    config = PairConfig(model="forerun:target", draft=DRAFT, concurrency=(1, 2), **QUICK)
    tune_pair(config, out, said.append)
    assert "measured on 1 prompts each" in said[0]
    assert "over plain decoding" in said[-2]
    return out


@pytest.mark.slow
def test_what_a_search_leaves(folder):
    result = json.loads((folder / "tuned.json").read_text("utf-8"))
    ways = [row["config"] for row in result["measured"]]
    assert {"none", "draft_model", "cascade", "suffix"} == {way["method"] for way in ways}
    assert any("tree_nodes" in way for way in ways)
    assert len({way.get("confidence_threshold") for way in ways}) > 2
    assert len({json.dumps([row["config"], row["temperature"], row["concurrency"]]) for row in result["measured"]}) == (
        len(result["measured"])
    )
    assert {(row["temperature"], row["concurrency"]) for row in result["measured"]} == {
        (temperature, count) for temperature in (0.0, 0.7) for count in (1, 2)
    }
    assert "int8_rows" in {row["config"]["quantization"] for row in result["forms"]}
    assert all(form["speedup"] > 0 and form["step"] >= 0 and 0 <= form["guessed"] <= 1 for form in result["forms"])
    costs = {int(rows): cost for rows, cost in result["verify_cost"]["1"].items()}
    assert costs[1] == 1.0
    assert len(costs) > 3
    assert max(costs) > 8
    assert list(costs.values()) == sorted(costs.values())
    assert result["check"]["passed"]
    assert result["check"]["answers"] >= 6
    chosen = result["speculative_config"]
    assert chosen == {"method": "none"} or chosen["length"] == "adaptive"
    page = (folder / "report.html").read_text("utf-8")
    assert "Weight formats of the draft" in page
    assert "<script" not in page


def recommend(to, draft):
    """A folder that recommends the draft, whatever was quickest."""
    to.mkdir()
    config = {"method": "cascade", "drafters": [{"method": "suffix"}, {"method": "draft_model", "model": draft}]}
    tuned.save(to, "forerun:target", config, [], draft=draft)
    return to


def copied_draft(to):
    return Path(shutil.copytree(resolve(DRAFT), to))


@pytest.mark.parametrize("named", [True, False])
def test_a_tuned_folder_uses_its_draft_and_keeps_every_token(tmp_path, named):
    draft = DRAFT if named else str(copied_draft(tmp_path / "draft"))
    own = recommend(tmp_path / "own", draft)
    plain, quick = LLM(), LLM(tuned=own)
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
        said = [llm.generate(["def add(a, b):\n"], params, use_tqdm=False)[0] for llm in (plain, quick)]
        assert said[0].outputs[0].token_ids == said[1].outputs[0].token_ids
        assert said[1].metrics.num_draft_tokens > 10


def test_another_draft_is_refused(tmp_path):
    draft = copied_draft(tmp_path / "draft")
    own = recommend(tmp_path / "own", str(draft))
    shutil.rmtree(draft)
    refused(ConfigError, r"was tuned with the draft .*: no model is called", LLM, tuned=own)
    tiny_llama().save_pretrained(draft)
    refused(ConfigError, r"was tuned with the draft .* differs \(\w+\): run forerun tune again", LLM, tuned=own)
    shutil.rmtree(own)
    own.mkdir()
    tuned.save(own, "forerun:target", {"method": "none"}, [], draft=str(draft))
    shutil.rmtree(draft)
    assert tuned.load(own, "forerun:target") == {"method": "none"}  # what did not pay is not missed


def test_no_other_model_outside_is_read(tmp_path):
    """A folder names one draft, with its fingerprint; what else its configuration names must be inside."""
    own, draft, other = tmp_path / "own", copied_draft(tmp_path / "draft"), copied_draft(tmp_path / "other")
    own.mkdir()
    for config in ({"method": "draft_model", "model": str(other)}, {"method": "suffix", "datastore": str(draft)}):
        tuned.save(own, "forerun:target", config, [], draft=str(draft))
        refused(ConfigError, r"leads out of it|cannot be used", tuned.load, own, "forerun:target")
    content = json.loads((own / "tuned.json").read_text("utf-8"))
    for wrong in ("x", {"model": 3, "fingerprint": "x"}, {"model": str(other)}):
        content["draft"] = wrong
        content["seal"] = tuned._seal(own, content)
        (own / "tuned.json").write_text(json.dumps(content), encoding="utf-8")
        refused(ConfigError, "a draft without a name", tuned.load, own, "forerun:target")


def test_bad_input_is_one_line(tmp_path, capsys):
    other = tmp_path / "other"
    save_checkpoint(tiny_llama(), other)
    capsys.readouterr()
    asked = ["tune", "forerun:target", "--out", str(tmp_path / "out"), "--no-progress"]
    for more, said in (
        (["--draft", str(other)], "tokenizer differs from the target's"),
        (["--draft", str(tmp_path / "nowhere")], "no model is called"),
        (["--draft", DRAFT, "--train", "eagle"], "--train has no effect with --draft"),
        (["--draft", DRAFT, "--temperature", "warm"], "--temperature must be a comma-separated list"),
        (["--draft", DRAFT, "--temperature", "-1"], "each of temperatures must be a number of at least 0"),
        (["--draft", DRAFT, "--concurrency", "0"], "each of concurrency must be an integer of at least 1"),
        (["--draft", DRAFT, "--minutes", "0"], "minutes must be a number above 0"),
        (["--minutes", "3"], "--minutes needs --draft"),
        (["--draft", DRAFT, "--out", "/dev/null/x"], "cannot write /dev/null/x: Not a directory"),
    ):
        assert main.run([*asked, *more]) != 0
        errors = capsys.readouterr().err.strip().splitlines()
        assert said in errors[-1], errors
        assert len(errors) == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / "run").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has another tuning"):
        tune_pair(PairConfig(model="forerun:target", draft=DRAFT, **QUICK), tmp_path / "out")


def test_models_are_loaded_once_while_they_are_shared():
    with sharing() as kept:
        one, same, other = (load_shared(DRAFT, quantization=kind) for kind in ("none", "none", "q8_0"))
        assert one is same
        assert one is not other
        assert len(kept) == 2
    assert load_shared(DRAFT, quantization="none") is not one


@pytest.mark.slow
def test_a_plan_searches_as_well_and_writes_nothing(tmp_path, capsys):
    page = tmp_path / "page.html"
    asked = ["plan", "--spec-model", DRAFT, "--minutes", "0.05"]
    assert main.run([*asked, "--json", "--temperature", "0.5", "--html", str(page)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["temperature"] for row in result["measured"]} == {0.5}
    assert result["check"]["passed"]
    assert "Weight formats of the draft" in page.read_text("utf-8")
    assert list(tmp_path.iterdir()) == [page]
    for more, said in (
        (["--trees", "8"], "--trees has no effect with --minutes"),
        (["--page-size", "16"], "--page-size has no effect with --minutes"),
        (["--prompts", "9"], "--prompts has no effect with --minutes"),
    ):
        assert main.run([*asked, *more]) != 0
        assert said in capsys.readouterr().err
    assert main.run(["plan", "--minutes", "1"]) != 0
    assert "add --spec-model" in capsys.readouterr().err
