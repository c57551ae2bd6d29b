"""Models of a hub by name: what is downloaded, what is chosen, and what a hub may do wrong."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import gguf
import pytest
from huggingface_hub import constants
from test_gguf_split import split
from transformers import LlamaForCausalLM

from forerun import LLM, SamplingParams
from forerun.cli.main import run
from forerun.core.errors import ConfigError, ModelError
from forerun.engine import auto, tuned
from forerun.models.files.fetch import KNOWN, Known, fetch, partial_file
from forerun.models.files.hub import ModelSource, choose, parse, quantization
from forerun.models.files.inventory import known_draft, on_disk, remove
from gguf_files import write_model
from hub import TOKEN, Repository, hub
from refusals import refused

pytestmark = pytest.mark.slow

CHILD = """
import contextlib, importlib, io, json, os, sys
from huggingface_hub import constants
importlib.reload(constants)
from forerun.cli.main import run
from forerun.core.errors import ForerunError
from forerun.models.files.open import resolve
for ask in json.loads(sys.argv[1]):
    if isinstance(ask, list):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(ask)
        answer = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
    elif "HF_TOKEN" in ask:  # read at every request
        os.environ.update(ask)
        answer = None
    else:
        try:
            answer = {"path": str(resolve(**ask))}
        except ForerunError as error:
            answer = {"error": str(error)}
    print("ANSWER" + json.dumps(answer), flush=True)
"""
"""Resolves models and runs commands in a process of its own, where huggingface_hub reads its environment."""
PICKLE = b"\x80\x04cos\nsystem\n(S'exit 3'\ntR."
LARGE = b"GGUF" + bytes(24_000_000)
"""huggingface_hub writes pieces of 10 MB, from behind which it goes on."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def ask(warm, url, cache, *requests, **env):
    """``requests`` are arguments of ``resolve``, its only one, a command line, or a token for what follows."""
    ours = {name: None for name in os.environ if name.startswith("HF_") or "proxy" in name.lower()}
    ours |= {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    ours |= env
    given = [{"path_or_id": each} if isinstance(each, str) else each for each in requests]
    done = warm.run(json.dumps(given), code=CHILD, **ours)
    result = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(result) == len(requests), done.stderr
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny-q4_1.gguf")


@pytest.fixture(scope="module")
def ours(warm, model, tiny_target, tmp_path_factory):
    """A hub, a home that has nothing yet, and what was downloaded there."""
    content = model.read_bytes()
    folder = tmp_path_factory.mktemp("parts")
    split(model, folder)
    parts = {f"Q8_0/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
    checkpoint = {path.name: path.read_bytes() for path in Path(tiny_target).iterdir()}
    other = {
        "modeling_evil.py": b"raise SystemExit('the code has run')", "pytorch_model.bin": PICKLE, "README.md": b"#",
        "original/params.json": b"{}", "onnx/model.onnx": b"onnx", "additional_chat_templates/rag.jinja": b"{{ 1 }}",
    }  # fmt: skip
    quantized = {"README.md": b"#", "mmproj-F16.gguf": b"GGUF", "config.json": b"{}"}
    quantized |= {"Tiny-Q4_K_M.gguf": content, "Tiny-UD-Q4_K_M.gguf": b"GGUF", "Tiny.Q2_K.gguf": b"GGUF"}
    with hub(
        tiny=Repository(checkpoint | other),
        tiny_gguf=Repository(quantized),
        parts=Repository(parts),
        several=Repository({"a-f16.gguf": b"", "a-q8_0.gguf": b""}),
        pickled=Repository({"config.json": b"{}", "pytorch_model.bin": PICKLE}),
        token=Repository({"t.gguf": content}, "token"),
        gated=Repository({"g.gguf": content}, "gated"),
        slow=Repository({"s.gguf": content}, "slow"),
        cut=Repository({"c.gguf": LARGE}, "cut"),
        down=Repository({"d.gguf": content}, "down"),
        absent=Repository({}, "absent"),
    ) as state:
        home = tmp_path_factory.mktemp("home")
        line = ["generate", "--model", "hf:own/tiny-gguf:q4_k_m", "the 12", "--max-tokens", "6"]
        line += ["--temperature", "0", "--ignore-eos", "--json"]
        result = ask(
            warm, state.url, home, "hf:own/tiny", "hf:own/tiny-gguf", "hf:own/tiny-gguf:Tiny.Q2_K.gguf",
            "hf:own/parts:q8_0", "own/tiny", line,
        )  # fmt: skip
        yield state, home, result


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_comes_without_code_and_pickles(ours, tiny_target):
    _, _, (checkpoint, *_, bare, _) = ours
    folder = Path(checkpoint["path"])
    assert files(folder) == files(Path(tiny_target)) | {"additional_chat_templates/rag.jinja"}
    assert bare["path"] == str(folder)
    expected = LLM(tiny_target).generate("the 12", GREEDY)[0].outputs[0].token_ids
    assert LLM(str(folder)).generate("the 12", GREEDY)[0].outputs[0].token_ids == expected


def test_one_gguf_model_of_several_comes(ours, model):
    state, _, (_, preferred, named, parts, *_) = ours
    path = Path(preferred["path"])
    assert path.name == "Tiny-Q4_K_M.gguf"
    assert path.read_bytes() == model.read_bytes()
    assert files(path.parent) == {"Tiny-Q4_K_M.gguf", "Tiny.Q2_K.gguf"}
    assert Path(named["path"]).name == "Tiny.Q2_K.gguf"
    first = Path(parts["path"])
    assert (first.parent.name, first.name) == ("Q8_0", "model-00001-of-00003.gguf")
    assert files(first.parent) == {f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)}
    assert LLM(str(first)).generate("the 12", GREEDY)[0].outputs[0].token_ids
    assert state.asked["GET /own/tiny-gguf/resolve/main/Tiny-Q4_K_M.gguf"] == 1


def test_commands_take_the_name(ours, model):
    said = ours[2][-1]
    assert said["code"] == 0, said["err"]
    expected = LLM(str(model)).generate("the 12", GREEDY)[0].outputs[0].token_ids
    assert list(expected) == json.loads(said["out"])["token_ids"]


def test_a_hub_that_is_gone_does_not_take_what_is_here(warm, ours):
    _, home, result = ours
    for url, env in (("http://127.0.0.1:9", {}), (ours[0].url, {"HF_HUB_OFFLINE": "1"})):
        gguf, checkpoint, parts, absent, listed = ask(
            warm, url, home, "hf:own/tiny-gguf:Q4_K_M", "hf:own/tiny", "hf:own/parts", "hf:own/cut",
            "hf:own/tiny-gguf:q8_0", **env,
        )  # fmt: skip
        assert [gguf, checkpoint, parts] == [result[1], result[0], result[3]]
        assert "\n" not in absent["error"]
        if env:
            assert absent["error"].startswith("hf:own/cut is not whole in ")
            assert absent["error"].endswith("HF_HUB_OFFLINE is set")
        else:
            assert absent["error"].startswith(
                f"the hub {url} cannot be reached or does not answer in time (ConnectError"
            )
        assert "no GGUF model q8_0; name one" in listed["error"]


def test_hubs_that_fail_are_one_line_each_and_a_token_opens_what_asks_for_one(warm, ours, tmp_path, model):
    """A download that breaks off goes on in the middle."""
    state, *_ = ours
    before = state.asked["range"]
    cases = {
        "hf:own/nothing": "has no model own/nothing, or asks for a token: set HF_TOKEN",
        "hf:own/absent": "has no model own/absent, or asks for a token: set HF_TOKEN",
        "hf:own/token": "has no model own/token, or asks for a token: set HF_TOKEN",
        "hf:own/gated": f"hf:own/gated asks for a token: accept its terms at {state.url}/own/gated, then set HF_TOKEN",
        "hf:own/slow": "cannot be reached or does not answer in time (ReadTimeout",
        "hf:own/down": "cannot be reached or does not answer in time (HTTP 503)",
        "hf:own/several": "several GGUF models that fit no quantization; name one, as hf:own/several:FILE, of "
        "a-f16.gguf, a-q8_0.gguf",
        "hf:own/tiny-gguf:Q4_0": "hf:own/tiny-gguf has no GGUF model Q4_0; name one",
        "hf:own/tiny:Q4_0": "hf:own/tiny has no GGUF file",
        "hf:own/pickled": "hf:own/pickled has neither safetensors nor GGUF files",
        "hf:own/tiny/x": "hf:own/tiny/x names no repository",
        "hf:": "names no model of a hub",
    }
    revision = {"path_or_id": "hf:own/tiny", "revision": "v9"}
    right = {**revision, "revision": state.repositories["own/tiny"].commit}
    opened = "hf:own/token", "hf:own/gated", "hf:own/cut"
    *result, _, first, second, third = ask(
        warm, state.url, tmp_path, *cases, revision, right, {"HF_TOKEN": TOKEN}, *opened
    )
    for answer, message in zip(result, cases.values()):
        assert message in answer["error"]
        assert "\n" not in answer["error"]
    assert result[-2]["error"] == "hf:own/tiny has no revision 'v9'"
    assert Path(result[-1]["path"]).is_dir()
    assert [Path(each["path"]).read_bytes() for each in (first, second, third)] == [model.read_bytes()] * 2 + [LARGE]
    assert state.asked["range"] == before + 1


def test_a_cache_that_cannot_be_written_is_named(warm, ours, tmp_path):
    (tmp_path / "hub").write_text("")
    (result,) = ask(warm, ours[0].url, tmp_path, "hf:own/cut")
    assert result["error"].startswith(f"cannot write to {tmp_path}/hub: ")


@pytest.fixture
def tidy(ours, tmp_path, monkeypatch):
    """A copy of what came from the hub, and no fetched model."""
    cache = Path(shutil.copytree(ours[1] / "hub", tmp_path / "hub", symlinks=True))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "forerun"))
    return cache


def said(capsys, *line):
    assert run([*line, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ls_names_what_the_cache_holds_as_model_takes_it(tidy, model, capsys):
    result = {each["name"]: each for each in said(capsys, "ls")["models"]}
    assert set(result) == {
        "hf:own/tiny", "hf:own/tiny-gguf:Tiny-Q4_K_M.gguf", "hf:own/tiny-gguf:Tiny.Q2_K.gguf",
        "hf:own/parts:Q8_0/model-00001-of-00003.gguf",
    }  # fmt: skip
    one = result["hf:own/tiny-gguf:Tiny-Q4_K_M.gguf"]
    assert (one["format"], one["size"], one["whole"]) == ("GGUF Q4_K_M", model.stat().st_size, True)
    assert Path(one["path"]).read_bytes() == model.read_bytes()
    assert result["hf:own/tiny"]["format"] == "safetensors"
    parts = result["hf:own/parts:Q8_0/model-00001-of-00003.gguf"]
    assert parts["size"] == sum(path.stat().st_size for path in Path(parts["path"]).parent.iterdir())
    assert run(["ls"]) == 0
    assert f"hf:own/tiny-gguf:Tiny-Q4_K_M.gguf            GGUF Q4_K_M  {model.stat().st_size / 1e6:.1f} MB" in (
        capsys.readouterr().out.splitlines()
    )


def test_show_describes_it(tidy, model, tiny_target, capsys):
    result = said(capsys, "show", "hf:own/tiny-gguf:Tiny-Q4_K_M.gguf")
    assert result["architecture"] == "LlamaForCausalLM"
    assert result["parameters"] == sum(tensor.n_elements for tensor in gguf.GGUFReader(model).tensors)
    assert (result["context"], result["size"]) == (128, model.stat().st_size)
    result = said(capsys, "show", "hf:own/parts")
    assert result["parameters"] == sum(tensor.n_elements for tensor in gguf.GGUFReader(model).tensors)
    assert result["drafts"] == [{"name": "hf:own/tiny-gguf:Tiny-Q4_K_M.gguf", "here": True}]
    result = said(capsys, "show", tiny_target)
    assert result["parameters"] == LlamaForCausalLM.from_pretrained(tiny_target).num_parameters()
    assert (result["format"], result["context"]) == ("safetensors F32", 256)
    assert run(["show", "hf:own/parts"]) == 0
    assert "drafts with   hf:own/tiny-gguf:Tiny-Q4_K_M.gguf, its own text (suffix, ngram)" in capsys.readouterr().out
    assert run(["show", "hf:own/cut"]) == 2
    assert "hf:own/cut is not in the hub's cache: run `forerun fetch hf:own/cut`" in capsys.readouterr().err


def test_rm_takes_one_file_or_a_repository_and_nothing_else(tidy, model, capsys):
    def names():
        return {each.name for each in on_disk()}

    before = names()
    assert said(capsys, "rm", "hf:own/tiny-gguf:q4_k_m")["freed"] == model.stat().st_size
    assert names() == before - {"hf:own/tiny-gguf:Tiny-Q4_K_M.gguf"}
    assert not [path for path in tidy.rglob("*") if path.is_file() and path.read_bytes() == model.read_bytes()]
    said(capsys, "rm", "hf:own/tiny-gguf:Tiny.Q2_K.gguf")
    assert not (tidy / "models--own--tiny-gguf").exists()  # nothing of use was left
    said(capsys, "rm", "hf:own/parts:Q8_0")
    assert names() == {"hf:own/tiny"}
    for name, message in {"hf:own/cut": "hf:own/cut is not in the hub's cache", str(model): "was not fetched"}.items():
        assert run(["rm", name]) == 2
        assert message in capsys.readouterr().err
    assert model.is_file()
    said(capsys, "rm", "hf:own/tiny")
    assert names() == set()
    assert run(["ls"]) == 0
    assert capsys.readouterr().out == "none yet: forerun fetch lists what it can bring\n"


@pytest.fixture
def pair(tidy, model, monkeypatch):
    """Two known models, "large" and "small", which drafts for it; large is fetched."""
    return known_pair(model, monkeypatch)


def known_pair(model, monkeypatch):
    size, one = model.stat().st_size, {"licence": "none", "uploader": "nobody", "package": "x==1", "member": "x"}
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    for name, title, drafts in (("large", "Large-7B-Instruct", ("small",)), ("small", "Tiny", ())):
        monkeypatch.setitem(
            KNOWN,
            name,
            Known(title=title, file_name=f"{name}-q4_1.gguf", size=size, sha256=digest, drafts=drafts, **one),
        )
    return fetch("large", model)


def test_the_known_draft_of_a_known_model_is_found(pair, model, tmp_path, capsys):
    hub_draft = Path(next(each for each in on_disk() if each.name.endswith("Q4_K_M.gguf")).path)
    assert known_draft("large") in {each.path for each in on_disk() if each.name.startswith("hf:own/tiny")}
    remove("hf:own/tiny")
    remove("hf:own/tiny-gguf:Tiny.Q2_K.gguf")
    assert known_draft("large") == hub_draft  # the hub's, by its repository's name
    remove("hf:own/tiny-gguf")
    assert known_draft("large") is None
    assert said(capsys, "show", "large")["drafts"] == [{"name": "small", "here": False}]
    draft = fetch("small", model)
    assert known_draft("large") == draft
    result = said(capsys, "show", "large")
    assert result["drafts"] == [{"name": "small", "here": True}]
    assert result["auto"] == {"method": "draft_model", "model": str(draft), "lookup": "suffix"}
    titled = write_model(tmp_path / "any.gguf", {"general.name": "Large 7B Instruct GGUF"})
    folder = tmp_path / "models--org--Large-7B-Instruct" / "snapshots" / "abc"
    for target in (titled, str(titled), "hf:org/large-7b-instruct-GGUF:Q8_0", "hf:org/Large-7B-Instruct", folder):
        assert known_draft(target) == draft, target
    for other in (model, "small", "hf:org/Largest-7B-Instruct", "forerun:target", tmp_path, "nowhere"):
        assert known_draft(other) is None, other


def test_show_names_the_drafter_that_auto_takes(pair, capsys, monkeypatch):
    assert said(capsys, "show", "large")["auto"]["method"] == "draft_model"
    assert said(capsys, "show", "hf:own/tiny")["auto"] == {"method": "suffix"}
    head = {"method": "eagle", "model": "/heads/eagle", "num_speculative_tokens": 4}
    monkeypatch.setattr("forerun.engine.tuned.bundled", lambda name: name == "large")
    monkeypatch.setattr("forerun.engine.tuned.load", lambda tuned, name, lora=None: dict(head))
    assert run(["show", "large"]) == 0
    assert "auto takes    eagle: /heads/eagle, where suffix finds nothing" in capsys.readouterr().out.splitlines()


def test_a_file_gets_the_drafter_of_its_name(tidy, tmp_path, monkeypatch):
    """By path, renamed too, a known model drafts with what is bundled for it; other weights do not."""
    names = {"general.name": "A name of its own"}
    mine = write_model(tmp_path / "mine.gguf", names)
    named = known_pair(mine, monkeypatch)
    other = write_model(tmp_path / "other.gguf", {**names, "general.author": "somebody"})
    folder = tmp_path / "package" / "large"
    folder.mkdir(parents=True)
    tuned.save(folder, "large", {"method": "suffix", "num_speculative_tokens": 3}, [])
    monkeypatch.setattr("forerun.pretrained.__file__", str(folder.parent / "__init__.py"))
    for path in ("large", str(named), str(mine)):
        assert auto.choose(path)["num_speculative_tokens"] == 3, path
        assert tuned.load(True, path)["num_speculative_tokens"] == 3
    assert "num_speculative_tokens" not in auto.choose(str(other))
    refused(ConfigError, "no bundled tuning", tuned.load, True, str(other))


def test_a_draft_in_the_folder_of_its_target_drafts(pair, tmp_path):
    """Both by path: nothing was fetched, and what lies beside is known by what its file says."""
    for each in ("hf:own/tiny", "hf:own/tiny-gguf"):
        remove(each)
    target = write_model(tmp_path / "a.gguf", {"general.name": "Large 7B Instruct"})
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert auto.choose(str(target))["method"] == "suffix"
    draft = write_model(tmp_path / "c.gguf", {"general.name": "Tiny"})
    assert known_draft(target) == draft
    taken = auto.choose(str(target))["drafters"][1]
    assert (taken["method"], taken["model"]) == ("draft_model", str(draft))
    assert auto.choose("large")["method"] == "suffix"


def test_fetched_models_are_listed_and_removed(pair, model, capsys):
    result = {each["name"]: each for each in said(capsys, "ls")["models"]}
    assert result["large"] == {
        "name": "large", "format": "GGUF Q4_1", "size": model.stat().st_size, "path": str(pair), "whole": True,
    }  # fmt: skip
    assert said(capsys, "rm", "large") == {"name": "large", "freed": model.stat().st_size}
    assert not pair.parent.exists()
    assert run(["rm", "large"]) == 2
    assert "large is not on this machine" in capsys.readouterr().err
    partial_file("large").parent.mkdir()
    partial_file("large").write_bytes(model.read_bytes())
    assert ("large", "1 of 1 parts", False) in {(each.name, each.format, each.whole) for each in on_disk()}


CHOICES = {
    "preferred": (None, ["a-q4_k_m.gguf", "a-q8_0.gguf"], "a-q4_k_m.gguf"),
    "the only one": (None, ["a-q8_0.gguf", "mmproj-f16.gguf", "a.imatrix.gguf"], "a-q8_0.gguf"),
    "any case": ("q4_K_m", ["A.Q4_K_M.gguf", "A.Q4_K_S.gguf"], "A.Q4_K_M.gguf"),
    "no part of a label": ("Q4_K", ["a-Q4_K.gguf", "a-IQ4_K.gguf", "a-Q4_K_M.gguf"], "a-Q4_K.gguf"),
    "UD alone": ("Q4_K_XL", ["a-UD-Q4_K_XL.gguf", "a-Q4_K_M.gguf"], "a-UD-Q4_K_XL.gguf"),
    "UD beside": ("UD-Q4_K_M", ["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "a-UD-Q4_K_M.gguf"),
    "in a folder": ("f16", ["F16/a-F16.gguf", "Q8_0/a-Q8_0.gguf"], "F16/a-F16.gguf"),
    "by file": ("a-q8_0.gguf", ["x/a-q8_0.gguf", "a-q4_k_m.gguf"], "x/a-q8_0.gguf"),
    "by path": ("y/a.gguf", ["x/a.gguf", "y/a.gguf"], "y/a.gguf"),
    "by any part": ("a-00002-of-00002.gguf", [f"a-0000{i}-of-00002.gguf" for i in (1, 2)], "a-00001-of-00002.gguf"),
    "with drafters": ("q8", ["a-q8.gguf", *(f"{i}-a-q8.gguf" for i in ("mtp", "dflash", "eagle3"))], "a-q8.gguf"),
    "drafters alone": (None, ["dflash-a-q8_0.gguf"], "dflash-a-q8_0.gguf"),
    "a drafter by file": ("mtp-a-q8_0.gguf", ["a-q8_0.gguf", "mtp-a-q8_0.gguf"], "mtp-a-q8_0.gguf"),
    "four bits with scales": ("nvfp4", ["a-NVFP4.gguf", "a-q4_k_m.gguf"], "a-NVFP4.gguf"),
    "gguf beside safetensors": ("q8_0", ["model.safetensors", "config.json", "a-q8_0.gguf"], "a-q8_0.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_which_file_is_meant(name):
    which, offered, expected = CHOICES[name]
    assert choose(ModelSource("o/r", which), offered)[0] == expected


REFUSED = {
    "several of a kind": (None, ["a-q4_k_m.gguf", "b-q4_k_m.gguf", "b-f16.gguf"], "of a-q4_k_m.gguf, b-q4_k_m.gguf$"),
    "several of one name": ("a.gguf", ["x/a.gguf", "y/a.gguf"], "several .* x/a.gguf, y/a.gguf$"),
    "another": ("Q5_K_M", ["a-q4_k_m.gguf"], "no GGUF model Q5_K_M; name one, as hf:o/r:FILE, of a-q4_k_m.gguf$"),
    "one part of very many": ("q8_0", ["a-q8_0-00007-of-99999.gguf"], "lacks a-q8_0-00001-of-99999.gguf"),
    "a part is missing": ("q8_0", ["a-q8_0-00001-of-00002.gguf"], "lacks a-q8_0-00002-of-00002.gguf"),
    "too many to list": ("q1_0", [f"{i:02d}-q8_0.gguf" for i in range(30)], r"19-q8_0.gguf and 10 more$"),
    "nothing": (None, ["README.md"], "neither safetensors nor GGUF"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_say_which_is_listed(name):
    which, offered, message = REFUSED[name]
    refused(ModelError, message, choose, ModelSource("o/r", which), offered)


WEIGHTS = {
    "one file": ["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"],
    "shards": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "mtp.safetensors",
               "consolidated-00001-of-00001.safetensors"],
    "consolidated alone": ["consolidated.safetensors"],
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_come_once(name):
    last = {"one file": 1, "shards": 3, "consolidated alone": 1}[name]
    assert choose(ModelSource("o/r", None), ["config.json", *WEIGHTS[name]]) == ["config.json", *WEIGHTS[name][:last]]


def test_a_listing_of_many_parts_is_read_at_once():
    """Each part names the whole: a list of a list would be 10^10 names."""
    listed = [f"a-q8_0-{number:05d}-of-99999.gguf" for number in range(1, 100_000)]
    before = time.process_time()
    refused(ModelError, "lacks a-q8_0-99999-of-99999.gguf", choose, ModelSource("o/r", "q8_0"), listed[:-1])
    assert time.process_time() - before < 20


def test_names_are_read():
    assert parse("hf:o/r") == ModelSource("o/r", None)
    assert parse("hf:o/r:Q4_K_M") == ModelSource("o/r", "Q4_K_M")
    refused(ModelError, "names no model of a hub", parse, "hf:o/r:")
    labels = {
        "a-q4_k_m.gguf": "Q4_K_M", "a.IQ3_XXS.gguf": "IQ3_XXS", "x/a-bf16-00001-of-00002.gguf": "BF16", "a.gguf": None,
    }  # fmt: skip
    assert {name: quantization(name) for name in labels} == labels
