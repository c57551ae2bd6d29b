"""Loading a model reads its config, what its fingerprint is made of, and the list of plug-ins once."""

import json
import shutil

from forerun.models.files.open import Checkpoint

COUNT = """
import collections, sys
from forerun import LLM
from forerun.models.files.open import Checkpoint

opened = collections.Counter()


def count(event, arguments):
    if event != "open" or not isinstance(arguments[0], str):
        return
    frame, files = sys._getframe(), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    if not any("/transformers/" in file for file in files):
        opened["/".join(arguments[0].split("/")[-2:])] += 1


sys.addaudithook(count)
LLM("forerun:target", max_model_len=256)
assert [opened[f"{name}/config.json"] for name in ("target", "draft")] == [1, 1]
packages = {name: number for name, number in opened.items() if name.endswith("/entry_points.txt")}
assert max(packages.values(), default=0) <= 2, max(packages.values())
before = opened["target/model.safetensors"]
assert len({Checkpoint.open("forerun:target").fingerprint() for _ in range(3)}) == 1
assert opened["target/model.safetensors"] <= before + 1
"""


def test_loading_reads_each_config_once(warm):
    """In a process of its own, which has read nothing yet."""
    done = warm.run(code=COUNT)
    assert done.returncode == 0, done.stderr


def test_what_is_kept_follows_the_files(tiny_target, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_target, folder)
    before, config = Checkpoint.at(folder).fingerprint(), Checkpoint.at(folder).config
    config.vocab_size += 1  # the caller's own
    assert Checkpoint.at(folder).config.vocab_size == config.vocab_size - 1
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 77}))
    assert Checkpoint.at(folder).config.max_position_embeddings == 77
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert Checkpoint.at(folder).fingerprint() != before
