"""``forerun tune`` on tiny random models, in seconds."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from chat_model import QUICK
from forerun import LLM, SamplingParams, pretrained
from forerun.cli import main
from forerun.cli.bench import with_tuned
from forerun.core.errors import ConfigError
from forerun.engine import tuned
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun_lab.tune import choose, features, loop
from forerun_lab.tune import data as texts
from forerun_lab.tune import run as stages
from forerun_lab.tune.config import TuneConfig
from forerun_lab.tune.fit import factor_of
from forerun_lab.tune.kinds import EAGLE
from forerun_lab.tune.state import TuneState
from refusals import refused
from tiny import save_checkpoint, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_turns")]


def copied(tuned_folder, to):
    return Path(shutil.copytree(tuned_folder, to / "copy", ignore=shutil.ignore_patterns("run")))


def use_head(tuned_folder, tuned_target):
    """Makes a tuned folder recommend its head, whatever was quickest."""
    config = {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3}
    tuned.save(tuned_folder, tuned_target, config, ["eagle/config.json", "eagle/model.safetensors"])


def test_a_tuned_folder_keeps_every_token(tuned_folder, tuned_target, tmp_path):
    own = copied(tuned_folder, tmp_path)
    use_head(own, tuned_target)
    plain, quick = LLM(tuned_target), LLM(tuned_target, tuned=own)
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
        said = [llm.generate(["u:a dog;a:", "hello"], params, use_tqdm=False) for llm in (plain, quick)]
        tokens = [[answer.outputs[0].token_ids for answer in answers] for answers in said]
        assert tokens[0] == tokens[1]
    assert sum(answer.metrics.num_draft_tokens for answer in said[1]) > 20


def test_what_a_tuning_leaves(tuned_folder):
    result = json.loads((tuned_folder / "tuned.json").read_text("utf-8"))
    methods = [row["config"]["method"] for row in result["figures"]]
    assert {"none", "ngram", "suffix", "prompt_lookup", "eagle", "merged", "cascade"} == set(methods)
    assert str(tuned_folder / "text.safetensors") in {row["config"].get("datastore") for row in result["figures"]}
    assert all(row["tokens_per_round"] >= 1 for row in result["figures"])
    page = (tuned_folder / "report.html").read_text("utf-8")
    assert "prompt_lookup" in page
    assert "<script" not in page


def test_text_alone(tuned_target, tmp_path):
    """Nothing is trained: history is compared, with what the model wrote and without."""
    config = TuneConfig(model=tuned_target, out=tmp_path / "texts", train=("none",), **QUICK)
    own = stages.tune(config)
    result = json.loads((own / "tuned.json").read_text("utf-8"))
    assert {"none", "ngram", "suffix", "prompt_lookup"} == {row["config"]["method"] for row in result["figures"]}
    assert str(own / "text.safetensors") in {row["config"].get("datastore") for row in result["figures"]}
    assert (own / "text.safetensors").stat().st_size > 1000
    assert not (own / "run" / "held").exists() or not any((own / "run" / "held").iterdir())
    with pytest.raises(ConfigError, match="has a tuning with another training: none, not some"):
        stages.tune(TuneConfig(model=tuned_target, out=own, **QUICK))
    refused(ConfigError, "has no effect", TuneConfig, model=tuned_target, out=own, train=("none",), cpu_minutes=1.0)
    refused(ConfigError, "or none alone", TuneConfig, model=tuned_target, out=own, train=("none", "eagle"))


def test_a_finished_tuning_does_nothing_again(tuned_folder, tuned_target, monkeypatch):
    before = (tuned_folder / "eagle" / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(features.Writer, "write_part", lambda *_: pytest.fail("wrote again"))
    stages.tune(TuneConfig(model=tuned_target, out=tuned_folder, **QUICK))
    assert (tuned_folder / "eagle" / "model.safetensors").stat().st_mtime_ns == before


def test_other_weights_are_refused(tuned_folder, tmp_path):
    torch.manual_seed(9)
    other = tiny_llama(max_position_embeddings=1 << 15)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    save_checkpoint(other, tmp_path)
    refused(ConfigError, r"was tuned for .* but the weights of .*", LLM, str(tmp_path), tuned=tuned_folder)


def flipped(content):
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("tuned.json", flipped, None),
        ("eagle/config.json", flipped, None),
        ("eagle/model.safetensors", flipped, None),
        ("tuned.json", lambda content: content.replace(b'_tokens": 3', b'_tokens": 4'), "has changed since"),
        ("tuned.json", lambda content: content.replace(b'"forerun_tuned": 1', b'"forerun_tuned": 0'), "not version"),
    ],
)
def test_a_changed_folder_is_refused(tuned_folder, tuned_target, tmp_path, part, change, message):
    own = copied(tuned_folder, tmp_path)
    use_head(own, tuned_target)
    tuned.load(own, tuned_target)
    (own / part).write_bytes(change((own / part).read_bytes()))
    refused(ConfigError, message, tuned.load, own, tuned_target)


def test_what_is_no_tuned_folder(tuned_target, tmp_path):
    refused(ConfigError, "not a tuned folder", LLM, tuned_target, tuned=tmp_path)
    refused(ConfigError, "no bundled tuning for", LLM, tuned_target, tuned=True)
    with pytest.raises(ConfigError, match="conflicts with speculative_config"):
        LLM(tuned_target, tuned=tmp_path, speculative_config={"method": "ngram"})


def test_the_commands_take_it(tuned_folder, tuned_target, tmp_path, capsys):
    own = copied(tuned_folder, tmp_path)
    use_head(own, tuned_target)
    words = ["generate", "hello", "--model", tuned_target, "--json", "--max-tokens", "24", "--ignore-eos"]
    result = []
    for more in ([], ["--tuned", str(own)]):
        assert main.run([*words, *more]) == 0
        result.append(json.loads(capsys.readouterr().out))
    assert result[0]["text"] == result[1]["text"]
    assert main.run([*words, "--tuned", str(own), "--spec-method", "ngram"]) == 2
    assert "--tuned conflicts with" in capsys.readouterr().err
    assert main.run([*words, "--tuned", str(tmp_path)]) == 2
    assert "not a tuned folder" in capsys.readouterr().err


def test_bench_measures_it(tuned_folder, tuned_target, tmp_path):
    own = copied(tuned_folder, tmp_path)
    use_head(own, tuned_target)
    methods, options = with_tuned(str(own), {"model": tuned_target}, ["none"], {"max_order": 3})
    assert methods == ["none", "eagle"]
    assert options["max_order"] == 3
    assert options["eagle"] == {"model": str(own / "eagle"), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="conflicts with the tuned folder over 'eagle'"):
        with_tuned(str(own), {"model": tuned_target}, ["none"], {"eagle": [{"num_speculative_tokens": 2}]})


def test_a_time_too_short_to_train_says_so_and_measures_history(tuned_target, tmp_path):
    """One line before anything is written; with more time the same command trains."""
    said = []
    short = {**QUICK, "min_tokens": 10**9, "max_tokens": 10**9, "cpu_minutes": 1.0}
    out = stages.tune(TuneConfig(model=tuned_target, out=tmp_path, **short), said.append)
    assert "are too few" in said[0]
    assert "1,000,000,000 (--min-tokens)" in said[0]
    assert "ngram, suffix, prompt_lookup" in said[0]
    assert "trained does not pay" not in " ".join(said)
    assert not (out / "run" / "text").exists()
    result = json.loads((out / "tuned.json").read_text("utf-8"))
    assert {row["config"]["method"] for row in result["figures"]} == {"none", "ngram", "suffix", "prompt_lookup"}
    assert (out / "report.html").exists()
    stages.tune(TuneConfig(model=tuned_target, out=tmp_path, **short), said.append)
    assert said.count(said[0]) == 2
    stages.tune(TuneConfig(model=tuned_target, out=tmp_path, **QUICK), said.append)
    assert (out / "eagle" / "model.safetensors").exists()


def test_what_was_chosen_among_others_is_chosen_anew(tuned_folder, tuned_target, tmp_path):
    """Where a choice names files of a draft that is not asked for, or of another place, it does not stay."""
    shutil.copytree(tuned_folder, tmp_path / "moved")
    state = tmp_path / "moved" / "run" / "state.json"
    result = json.loads(state.read_text("utf-8"))
    result["results"]["choose"]["chosen"] = {"method": "eagle", "model": str(tuned_folder / "eagle")}
    state.write_text(json.dumps(result), "utf-8")
    out = stages.tune(TuneConfig(model=tuned_target, out=tmp_path / "moved", **QUICK))
    assert str(tuned_folder) not in (out / "tuned.json").read_text("utf-8")


def test_text_that_is_there_is_learnt_from_however_slow_the_machine_became(
    tuned_folder, tuned_target, tmp_path, monkeypatch
):
    out = Path(shutil.copytree(tuned_folder, tmp_path / "out"))
    path = out / "run" / "state.json"
    result = json.loads(path.read_text("utf-8"))
    del result["results"]["write"]
    path.write_text(json.dumps(result), "utf-8")
    monkeypatch.setattr(features.Writer, "speed", lambda *_: 1e-9)
    stages.tune(TuneConfig(model=tuned_target, out=out, **QUICK))
    assert "alone" not in json.loads(path.read_text("utf-8"))["results"]


def test_an_answer_that_leaves_no_room_for_a_prompt(tuned_target, tmp_path, monkeypatch):
    monkeypatch.setattr(features.Writer, "held_out_prompts", lambda self: [])
    with pytest.raises(ConfigError, match="leaves no room for a prompt: lower --answer"):
        stages.tune(TuneConfig(model=tuned_target, out=tmp_path, **QUICK))


def test_norms_that_hold_their_scale_less_one():
    for kind in (Gemma3RMSNorm, LlamaRMSNorm):
        norm = kind(8)
        torch.nn.init.normal_(norm.weight)
        x = torch.randn(3, 8)
        expected = norm(x) * (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() / x
        assert torch.allclose(factor_of(norm).expand(3, 8), expected, atol=1e-3)


def test_a_draft_that_cannot_start_is_refused():
    EAGLE.require(Gemma3TextConfig())
    refused(ConfigError, "which 'gpt2' has not", EAGLE.require, GPT2Config())


def test_what_is_not_trained_is_refused(tuned_target, tmp_path):
    with pytest.raises(ConfigError, match="unknown head 'ngram' in --train: choose from eagle, medusa"):
        TuneConfig(model=tuned_target, out=tmp_path, train=("ngram",))


class Kill(Exception):
    pass


def test_a_killed_tuning_goes_on(tuned_target, tmp_path, monkeypatch):
    """Stopped at every stage in turn: what was done before is not done again."""
    wrote = []
    part = features.Writer.write_part
    monkeypatch.setattr(
        features.Writer,
        "write_part",
        lambda self, seed, temperature: (wrote.append(seed), part(self, seed, temperature))[1],
    )

    def killed(*_, **__):
        raise Kill

    places = [
        (stages, "save_part"), (stages, "save_start"), (loop, "run"), (choose, "choose"), (choose, "check"),
        (stages.tuned, "save"),
    ]  # fmt: skip
    config = TuneConfig(model=tuned_target, out=tmp_path, **QUICK)
    counts = []
    for place in places:
        with monkeypatch.context() as patch:
            patch.setattr(*place, killed)
            with pytest.raises(Kill):
                stages.tune(config)
        assert not (tmp_path / "tuned.json").exists()
        counts.append(len(wrote))
    stages.tune(config)
    assert tuned.load(tmp_path, tuned_target)["method"]
    assert counts[0] < counts[1] == len(wrote) == len(set(wrote))


def test_an_interrupted_tuning_keeps_what_it_planned(tuned_target, tmp_path, monkeypatch):
    """Stopped before the first text was saved, it goes on to train, however slow the machine has become."""

    def killed(*_):
        raise Kill

    config = TuneConfig(model=tuned_target, out=tmp_path, **{**QUICK, "min_tokens": 100, "max_tokens": 200})
    with monkeypatch.context() as patch:
        patch.setattr(features.Writer, "speed", lambda *_: 1e9)
        patch.setattr(stages, "save_part", killed)
        with pytest.raises(Kill):
            stages.tune(config)
    monkeypatch.setattr(features.Writer, "speed", lambda *_: 1e-9)
    stages.tune(config)
    results = json.loads((tmp_path / "run" / "state.json").read_text("utf-8"))["results"]
    assert "eagle" in results["train"]


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_the_drafter_that_is_known_for_the_model_competes(tuned_folder, tuned_target, tmp_path, monkeypatch, method):
    """It is measured with the others, and where it is chosen the folder has its head, or names the draft."""
    model = str(tuned_folder / "eagle") if method == "eagle" else tuned_target
    known = {"method": method, "model": model, "num_speculative_tokens": 3, "length": "adaptive"}

    def measured(llm, configs, *_):
        return [
            {"config": config, "speedup": 1.0 + (config["method"] == method), "tokens_per_second": 1.0,
             "tokens_per_round": 1.0}
            for config in configs
        ]  # fmt: skip

    monkeypatch.setattr(stages, "known_drafter", lambda model: dict(known))
    monkeypatch.setattr(choose, "_measured", measured)
    out = stages.tune(TuneConfig(model=tuned_target, out=tmp_path, train=("none",), **QUICK))
    here = str(out / "bundled") if method == "eagle" else model
    assert tuned.load(out, tuned_target) == {**known, "model": here}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    said = [
        llm.generate("u:a dog;a:", params, use_tqdm=False) for llm in (LLM(tuned_target), LLM(tuned_target, tuned=out))
    ]
    assert said[0][0].outputs[0].token_ids == said[1][0].outputs[0].token_ids


def test_smollm2s_own_is_whole():
    """The bundled folder, as far as that can be said without the model."""
    assert tuned.bundled("smollm2")
    bundled = Path(pretrained.__file__).parent / "smollm2"
    content = json.loads((bundled / tuned.FILE).read_text("utf-8"))
    assert content["seal"] == tuned._seal(bundled, content)
    head = EagleHead.load(bundled / content["speculative_config"]["model"])
    assert head.sizes.vocab_size == 49_152
    assert len(head.token_ids()) == 8192
    made = [path for path in bundled.rglob("*") if path.is_file() and path.name != tuned.FILE]
    assert sorted(content["files"]) == sorted(str(path.relative_to(bundled)) for path in made)
    assert sum(path.stat().st_size for path in made) < 11 << 20


def test_another_tuning_does_not_go_on(tuned_folder, tuned_target):
    with pytest.raises(ConfigError, match="another rows: 40, not 30"):
        stages.tune(TuneConfig(model=tuned_target, out=tuned_folder, **{**QUICK, "rows": 30}))


def test_a_damaged_state_is_said(tmp_path):
    (tmp_path / "state.json").write_text("{", encoding="utf-8")
    refused(ConfigError, "cannot be read", TuneState, tmp_path, {})


def test_a_model_without_a_template_goes_on_with_texts(tmp_path):
    target = tmp_path / "target"
    save_checkpoint(tiny_llama(max_position_embeddings=1 << 15), target)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(f"{name} " * 60 for name in ("a dog", "the sea", "an old man")), encoding="utf-8")
    out = stages.tune(TuneConfig(model=str(target), out=tmp_path / "out", data=texts, **QUICK))
    assert json.loads((out / "run" / "state.json").read_text("utf-8"))["results"]["write"]["chats"] is False
    assert tuned.load(out, str(target))["method"]


def test_data_without_a_usable_line(tuned_target, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "why?"}\nno json\n{"prompt": ""}\n{"messages": [{"role": "system"}]}\n', "utf-8")
    with pytest.raises(ConfigError, match="no usable line"):
        stages.tune(TuneConfig(model=tuned_target, out=tmp_path / "out", data=path, **QUICK))
    refused(ConfigError, "no such file", texts.read, tmp_path / "nothing")


def test_data_of_every_kind(tmp_path):
    lines = [
        {"prompt": "What is rain?"},
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]},
        {"text": "word " * 100},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "b.txt").write_text("sentence " * 50 + "\n\nshort", encoding="utf-8")
    result = texts.read(tmp_path)
    assert result.turns == ["What is rain?", "Hello"]
    assert [part[:8] for part in result.paragraphs] == ["word wor", "sentence"]


def test_a_full_disk_is_said(tuned_target, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1 << 20))
    refused(ConfigError, "GB free", stages.tune, TuneConfig(model=tuned_target, out=tmp_path, **QUICK))
