"""What is kept in the cache folder, every kind of file under every attack: what is damaged there, or what others can
have written, is neither believed nor run, but made again."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kinds

from compiler import install_compiler
from forerun import kernels
from forerun.core import tiles
from forerun.core.errors import ModelError
from forerun.measure.environment import logits
from forerun.models.files import fetch as fetching
from forerun.models.files.open import Checkpoint
from forerun.models.formats import NUMBERS, blocks, prefetch, weight_cache
from forerun.models.formats import triton as on_gpu
from forerun.models.load import load_model
from forerun.speculate.draft import datastore
from gguf_files import write_model
from here import where

NOBODY = 65534
"""A user. Only root makes files of another one."""


class Counted:
    """A function that notes in ``made`` that it was called."""

    def __init__(self, function, made):
        self.function, self.made = function, made

    def __call__(self, *given, **options):
        self.made.append(1)
        return self.function(*given, **options)


# Each kind of file: ``kind(folder, patch, made)`` returns a function that uses the file, and adds to ``made`` where its
# content was made anew.


def groups(folder, patch, made):
    return lambda: tiles.measured_once("test", Counted(lambda: [[1, 2], [4]], made), tiles.as_groups)


def prefetches(folder, patch, made):
    told, layer = [], NUMBERS["streamed"].make(torch.ones(64, 64).bfloat16(), None)
    patch.setattr(prefetch, "ENOUGH", 1)
    patch.setattr(prefetch, "COUNTS", (1, 4))
    patch.setattr(prefetch, "_measure", Counted(lambda *_: [2, 1], made))
    patch.setattr(prefetch, "set_prefetch", lambda kind, ways: told.append(list(ways)))
    return lambda: prefetch.autotune([layer], torch.bfloat16) or told.pop()


def gpu_tiles(folder, patch, made):
    patch.setenv("FORERUN_INTERPRET", "1")
    layer = on_gpu.make(torch.ones(40, 96), None)
    patch.setattr(on_gpu, "_milliseconds", Counted(lambda alike, tile: abs(tile.outputs - 16), made))
    return lambda: on_gpu.autotune([layer], "A GPU") or layer.tile.outputs


def configs(folder, patch, made):
    model = Path(shutil.copytree(folder.parent / "model", folder.parent / "copy"))
    read = Checkpoint.transformers_config
    patch.setattr(Checkpoint, "transformers_config", lambda self: made.append(1) or read(self))
    return lambda: Checkpoint(model).config.hidden_size  # ``at`` remembers it


def compiled(folder, patch, made):
    log = install_compiler(folder.parent / "bin", patch)
    patch.delenv("FORERUN_SANITIZE", raising=False)

    def use():
        assert kernels.library.__wrapped__() is not None
        made.extend([1] * log.exists())
        log.unlink(missing_ok=True)

    return use


def weights(folder, patch, made):
    kinds = {"attn_v": Kinds.Q6_K, "token_embd": Kinds.Q6_K, "ffn_up": Kinds.Q8_0, "blk": Kinds.Q4_K}
    model = write_model(folder.parent / "model.gguf", kinds=kinds, width=256)
    blocks.can_run()  # packs blocks itself, once
    patch.setattr(weight_cache, "LARGE", 0)
    patch.setattr(blocks, "pack", Counted(blocks.pack, made))
    return lambda: logits(load_model(model, invariant=False), [[5, 9, 3, 40, 17]]).tolist()


def orders(folder, patch, made):
    texts = [[int(token) for token in np.random.default_rng(0).integers(0, 9, 60)]]
    patch.setattr(datastore, "LARGE", 0)
    patch.setattr(datastore, "_suffix_array", Counted(datastore._suffix_array, made))
    return lambda: datastore.Datastore(texts).match(texts[0][:5], 5).length


def fetched(folder, patch, made):
    given = folder.parent / "given.gguf"
    given.write_bytes(b"GGUF and more")
    digest = hashlib.sha256(given.read_bytes()).hexdigest()
    known = fetching.Known("Tiny", "tiny.gguf", 13, digest, "none", "nobody", "tiny==1", "tiny/tiny.gguf")
    patch.setitem(fetching.KNOWN, "tiny", known)

    def use():
        try:
            return fetching.fetched("tiny").read_bytes()
        except ModelError:
            made.append(1)
            return fetching.fetch("tiny", given).read_bytes()

    return use


def flip(index):
    """One bit of the byte ``index``, or of the one at that part of the file."""

    def damage(content):
        at = index if isinstance(index, int) else int(index * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :]

    return damage


CUT = {
    "empty": lambda content: b"", "text": lambda content: b"Dear diary\n",
    "half": lambda content: content[: len(content) // 2], "all but a byte": lambda content: content[:-1],
    "longer": lambda content: content + bytes(64),
}  # fmt: skip
CHANGED = {
    "zeros": lambda content: bytes(len(content)), "the first byte": flip(0), "a size": flip(60), "a third": flip(0.33),
    "two thirds": flip(0.67), "a huge number": lambda content: content[:32] + b"\xff" * 8 + content[40:],
}  # fmt: skip
"""Of the same length: for files that have a hash."""
OTHERWISE = {
    name: lambda content, text=text: text.encode()
    for name, text in {
        "null": "null", "a number": "5", "an object": '"12"', "numbers alone": "[5]", "text within": '[["4"]]',
        "no size": "[[5]]", "backwards": "[[8, 4]]", "a group of none": "[[]]", "true": "[1, true]",
        "too large": "[1, 3]", "negative": "[1, -1]", "a fraction": "[1, 2.0]", "too many": "[1, 2, 3]",
        "too few": "[1]", "brackets": "[" * 100_000, "a long number": f"[{'9' * 5000}]",
    }.items()
}  # fmt: skip
"""What is JSON, and no measurement."""
OF_CONFIGS = {name: OTHERWISE[name] for name in ("null", "a number", "numbers alone", "brackets")}
DAMAGES = {
    groups: CUT | OTHERWISE, prefetches: CUT | OTHERWISE, gpu_tiles: CUT | OTHERWISE,
    configs: CUT | CHANGED | OF_CONFIGS, compiled: CUT | CHANGED, weights: CUT | CHANGED,
    orders: CUT | CHANGED, fetched: CUT,
}  # fmt: skip
OURS = (prefetches, compiled, weights)
KINDS = [*(kind for kind in DAMAGES if kind not in OURS), *where(kernels.library() is not None, OURS)]


@pytest.fixture
def cache(tmp_path, tiny_target, monkeypatch):
    shutil.copytree(tiny_target, tmp_path / "model")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def everyone(path, content):
    path.write_bytes(content)
    path.chmod(0o646)


def anothers(path, content):
    path.write_bytes(content)
    os.chown(path, NOBODY, NOBODY)


def linked(path, content):
    other = path.with_name("other")
    everyone(other, content)
    path.symlink_to(other)


HANDED = [everyone, linked, *([anothers] if os.geteuid() == 0 else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_or_others_is_made_again(cache, monkeypatch, kind):
    made = []
    use = kind(cache, monkeypatch, made)
    expected = use()
    assert made
    path = max((path for path in cache.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    good = path.read_bytes()

    def damaged(path, content):
        assert content != good
        path.write_bytes(content)

    attacks = {name: (damaged, damage(good)) for name, damage in DAMAGES[kind].items()}
    attacks |= {attack.__name__: (attack, good) for attack in HANDED}
    for name, (attack, content) in [("nothing", (damaged, None)), *attacks.items()]:
        if content is not None:
            path.unlink()  # this process may have mapped the file
            attack(path, content)
        made.clear()
        assert use() == expected, name
        assert bool(made) == (content is not None), name
        assert (path.read_bytes(), path.is_symlink(), path.stat().st_mode & 0o022) == (good, False, 0), name
        made.clear()
        assert use() == expected, name
        assert not made, name


@pytest.mark.parametrize(
    "kind", [groups, configs, orders, *where(kernels.library() is not None, [prefetches, weights])]
)
def test_where_nothing_can_be_kept_it_is_made_each_time(cache, monkeypatch, kind):
    made = []
    use = kind(cache, monkeypatch, made)
    expected = use()
    shutil.rmtree(cache)
    cache.write_text("no folder")
    for _ in range(2):
        made.clear()
        assert use() == expected
        assert made
