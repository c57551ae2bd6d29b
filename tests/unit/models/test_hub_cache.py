"""What ``forerun rm`` removes from a hub's cache: what was named, and nothing else, byte for byte."""

import os
import random
import shutil
from collections import Counter

import pytest
from huggingface_hub import constants

from forerun.core.errors import ModelError
from forerun.models.files import fetch
from forerun.models.files.inventory import on_disk, remove
from refusals import refused

COMMITS = [letter * 40 for letter in "abc"]
REPOSITORIES = ["models--me--one", "models--me--two", "models--you--copy", "datasets--me--one"]
GGUFS = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "x/m-Q8_0.gguf", "s-f16-00001-of-00002.gguf", "s-f16-00002-of-00002.gguf"]
OTHERS = ["config.json", "model.safetensors", "pytorch_model.bin", "README.md", "unet/model.safetensors"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with an empty cache in it, and the home of Forerun's own models."""
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "forerun"))
    return tmp_path


class Cache:
    """A hub's cache as huggingface_hub lays it out, with all the links that people and other programs put there."""

    def __init__(self, root, seed):
        self.root, self.hub, self.draw = root, root / "hub", random.Random(seed)
        for repository in self.draw.sample(REPOSITORIES, self.draw.randint(1, 4)):
            for commit in self.draw.sample(COMMITS, self.draw.randint(1, 2)):
                self.revision(self.hub / repository, commit)

    def revision(self, folder, commit):
        for name in self.draw.sample(GGUFS + OTHERS, self.draw.randint(1, 6)):
            place = folder / "snapshots" / commit / name
            place.parent.mkdir(parents=True, exist_ok=True)
            self.put(folder, place)
        refs = folder / "refs" / self.draw.choice(["main", "refs/pr/1"])
        refs.parent.mkdir(parents=True, exist_ok=True)
        refs.write_text(commit)
        if self.draw.random() < 0.2:
            (folder / "blobs").mkdir(exist_ok=True)
            (folder / "blobs/e.incomplete").write_bytes(b"half")

    def put(self, folder, place):
        """One file of a snapshot: mostly a link to a blob, which several revisions share where it is the same."""
        content = bytes([self.draw.randrange(6)]) * self.draw.randint(5, 900)
        kind = self.draw.choices(["blob", "file", "outside", "neighbour", "linked", "shared"], [8, 1, 1, 2, 1, 2])[0]
        blob = folder / "blobs" / f"{content[0]}"
        blob.parent.mkdir(exist_ok=True)
        if kind == "file":
            place.write_bytes(content)
            return
        if kind == "outside":
            blob = self.own(f"{self.draw.randrange(3)}.gguf", content)
        elif kind == "neighbour" and (others := sorted(self.hub.glob("*/blobs/?"))):
            blob = self.draw.choice(others)
        elif not os.path.lexists(blob) and kind == "linked":
            blob.symlink_to(self.own("linked", content))
        elif not os.path.lexists(blob) and kind == "shared":
            blob.symlink_to(os.path.relpath(self.stored(content, blob), blob.parent))
        elif not os.path.lexists(blob):
            blob.write_bytes(content)
        place.symlink_to(os.path.relpath(blob, place.parent))

    def own(self, name, content):
        path = self.root / "mine" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    def stored(self, content, blob):
        """A file of the store that repositories share, whose manifest names the blobs that lead to it."""
        digest = f"{content[0]:02x}" * 32
        path = self.hub / "blobs" / digest[:2] / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        (self.hub / "blobs/.huggingface-shared-blobs").write_text("1\n")
        if not path.exists():
            path.write_bytes(content)
        with path.with_name(f"{digest}.refs").open("a") as file:
            file.write(f"{blob.relative_to(self.hub).as_posix()}\n")
        return path


def everything(root):
    """All files and links below ``root``, with their content."""
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if (path.is_symlink() or path.is_file()) and not path.name.endswith(".lock")
    }


def size(state):
    return sum(len(content) for content in state.values() if isinstance(content, bytes))


def passed(before, entry):
    """The paths that a link leads through, the last of which is a file."""
    result = [entry]
    while isinstance(target := before[result[-1]], str):
        result.append(type(entry)(os.path.normpath(result[-1].parent / target)))
    return result


def expected(hub, before, folder, names):
    """What must be gone once ``names`` of a repository (None: all) are removed; None: it must be refused."""
    entries = {path for path in before if path.relative_to(hub.parent).parts[2:3] == ("snapshots",)}
    mine = {path for path in entries if path.is_relative_to(folder)}
    gone = {path for path in mine if names is None or "/".join(path.relative_to(folder).parts[2:]) in names}
    needed = {path for entry in entries - gone for path in passed(before, entry)}
    inside = {path for path in before if path.is_relative_to(folder)}
    if names is None:
        if inside & needed:
            return None
        gone = inside
    else:
        gone |= {path for entry in gone for path in passed(before, entry) if path.parent == folder / "blobs"} - needed
        if not any(path.parent.name == "blobs" or path in mine for path in inside - gone):
            gone = inside
    for store in {path for path in before if path.is_relative_to(hub / "blobs") and len(path.name) == 64}:
        users = {path for path in before if path.parent.name == "blobs" and store in passed(before, path)}
        if users and users <= gone:
            gone |= {store, store.with_name(f"{store.name}.refs")}
    return gone


def attempt(cache, folder, before):
    """Remove something of a repository. Returns what must be gone now, or None if it was refused, and the bytes."""
    files = {"/".join(path.relative_to(folder).parts[2:]) for path in before
             if path.is_relative_to(folder / "snapshots")}  # fmt: skip
    ggufs = sorted(files & set(GGUFS))
    which = cache.draw.choice(ggufs) if ggufs and cache.draw.random() < 0.7 else None
    names = None if which is None else {which} | (files & set(GGUFS[3:]) if which in GGUFS[3:] else set())
    gone = expected(cache.hub, before, folder, names)
    name = "hf:" + folder.name.removeprefix("models--").replace("--", "/") + (f":{which}" if which else "")
    if gone is None or not (ggufs or "model.safetensors" in files or files <= {"config.json"}):
        refused(ModelError, "lead to files of|holds no model", remove, name)
        return None, 0
    return gone, remove(name)


@pytest.mark.parametrize("part", range(2))
def test_only_what_was_named_goes(root, part):
    outcomes = Counter()
    for seed in range(40 * part, 40 * part + 40):
        cache = Cache(root, seed)
        before = everything(root)
        if folders := sorted(cache.hub.glob("models--*")):
            gone, freed = attempt(cache, cache.draw.choice(folders), before)
            outcomes[gone is None] += 1
            after = everything(root)
            rewritten = {path for path in after if path.suffix == ".refs" and path.parent.parent == cache.hub / "blobs"}
            assert set(before) - set(after) == (gone or set()), seed
            assert freed == size(before) - size(after), seed
            assert all(after[path] == before[path] for path in set(after) - rewritten), seed
        for path in root.iterdir():
            shutil.rmtree(path)
        (root / "hub").mkdir()
    assert outcomes[False] > 20
    assert outcomes[True] > 1


def put(root, repository, commit, *names):
    snapshot = root / "hub" / repository / "snapshots" / commit
    for name in names:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(b"GGUF" + commit.encode())
    return snapshot


def test_models_of_older_revisions_are_listed_and_removed(root):
    put(root, "models--me--one", COMMITS[0], "m-Q8_0.gguf")
    new = put(root, "models--me--one", COMMITS[1], "m-Q4_K_M.gguf", "n-Q8_0.gguf", "l-Q2_K-00001-of-00002.gguf")
    names = {"hf:me/one:m-Q8_0.gguf", "hf:me/one:m-Q4_K_M.gguf", "hf:me/one:n-Q8_0.gguf"}
    assert {each.name for each in on_disk() if each.whole} == names
    refused(ModelError, "several GGUF models that fit q8_0; name one, .* m-Q8_0.gguf, n-Q8_0", remove, "hf:me/one:q8_0")
    assert remove("hf:me/one:m-Q8_0.gguf") == remove("hf:me/one:q4_k_m") == 44
    assert remove("hf:me/one:Q2_K") == 44  # one of two parts, as a broken download leaves it
    assert [path.name for path in new.iterdir()] == ["n-Q8_0.gguf"]
    assert [each.name for each in on_disk()] == ["hf:me/one:n-Q8_0.gguf"]


def test_what_is_no_model_of_ours_or_lies_elsewhere_is_not_removed(root):
    put(root, "models--me--onnx", COMMITS[0], "config.json", "onnx/model.onnx")
    refused(ModelError, "holds no model that Forerun runs: .*`hf cache rm model/me/onnx`", remove, "hf:me/onnx")
    put(root, "models--me--broken", COMMITS[0], "config.json", "tokenizer.json")  # a download that was cut off
    assert remove("hf:me/broken") == 88
    for place in ("", "/snapshots", f"/snapshots/{COMMITS[0]}"):
        put(root, "models--me--moved", COMMITS[0], "m-Q8_0.gguf")
        path = root / f"hub/models--me--moved{place}"
        shutil.move(path, root / "large")
        path.symlink_to(root / "large")
        for name in ("hf:me/moved", "hf:me/moved:Q8_0"):
            refused(ModelError, f"{path} is a link to another folder", remove, name)
        assert len(list((root / "large").rglob("*.gguf"))) == 1
        path.unlink()
        shutil.rmtree(root / "large")
    shutil.rmtree(root / "hub")
    (root / "hub").write_text("")
    refused(ModelError, "hub cannot be read: ", on_disk)


def test_files_that_may_not_be_removed_stay_all(root, monkeypatch):
    put(root, "models--me--one", COMMITS[0], "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    before = everything(root)
    monkeypatch.setattr(os, "access", lambda path, mode: "snapshots" not in path.parts)
    refused(ModelError, "cannot be removed: permission denied", remove, "hf:me/one:Q8_0")
    assert everything(root) == before


def test_a_fetched_model_goes_without_what_lies_beside_it(root):
    folder = fetch.home("smollm2")
    folder.mkdir(parents=True)
    fetch.model_file("smollm2").write_bytes(b"short")
    (folder / "notes.txt").write_text("mine")
    assert remove("smollm2") == 5
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    own = root / "own.gguf"
    own.write_bytes(b"GGUF")
    fetch.model_file("smollm2").symlink_to(own)
    (folder / "notes.txt").unlink()
    assert remove("smollm2") == 0
    assert own.exists()
    assert not folder.exists()
    folder.symlink_to(root / "hub")
    refused(ModelError, "is a link to another folder", remove, "smollm2")
