"""Loading takes tensors one by one out of mapped files: what it takes of memory, and what it says meanwhile."""

import io
import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from described import save_described
from forerun import LLM, SamplingParams, kernels
from forerun.cli import console
from forerun.core.loading import watch
from forerun.models.files.checkpoint import weight_files
from forerun.models.formats import blocks
from forerun.models.load import load_model
from forerun_lab.peers.gguf import write_gguf
from gguf_files import write_model
from terminal import Terminal
from tiny import save_checkpoint, tiny_llama

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CHILD = "import json, sys, loading_child; loading_child.main(json.loads(sys.argv[1]))"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """110 MB of random numbers in bfloat16, a third of them an embedding that is the output layer too."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=32000, hidden_size=640, intermediate_size=1920, num_hidden_layers=7, num_attention_heads=10,
        num_key_value_heads=5, max_position_embeddings=128, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"], dtype="bfloat16", bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = dict(LlamaForCausalLM(config).named_parameters())
    numbers = torch.randn(32000 * 640).mul_(0.02).bfloat16()
    save_file({name: numbers[: part.numel()].view(part.shape).clone() for name, part in names.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    return folder


def test_a_load_takes_what_stays_and_a_tensor(warm, large, tmp_path):
    """Resident memory at its peak, mapped pages included, of a folder, rounded and not, and of a GGUF file."""
    cases = [(large, {}), (write_gguf(large, tmp_path / "large.gguf", torch.bfloat16), {})]
    cases += [(large, {"quantization": "q8_0"})] if blocks.can_run() else []
    done = warm.run(json.dumps([(str(path), options) for path, options in cases]), code=CHILD)
    assert done.returncode == 0, done.stderr
    result = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(result) == len(cases)
    largest = 32000 * 640 * 2
    for case in result:
        assert case["weights"] > 50 << 20
        assert case["peak"] < 1.15 * case["weights"] + largest
        assert case["stays"] < 1.15 * case["weights"]


class Watched:
    """Stands for the bar."""

    def __init__(self):
        self.total, self.steps = 0, list[int]()

    @contextmanager
    def __call__(self, title, total):
        self.total = total
        yield self.steps.append


@pytest.mark.parametrize("gguf", [False, True])
def test_every_byte_is_reported_once(tiny_target, tmp_path, gguf):
    path = write_model(tmp_path / "model.gguf") if gguf else Path(tiny_target)
    bar = Watched()
    before = watch.set(bar)
    try:
        load_model(path, invariant=False)
    finally:
        watch.reset(before)
    headers = 0 if gguf else sum(8 + int.from_bytes(f.read_bytes()[:8], "little") for f in weight_files(path))
    size = sum(file.stat().st_size for file in weight_files(path)) - headers if not gguf else bar.total
    assert sum(bar.steps) == bar.total == size
    assert len(bar.steps) > 8


def test_the_bar_is_for_terminals(monkeypatch):
    before = watch.get()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    console.watch_loading()
    assert watch.get() is before
    monkeypatch.setattr(sys, "stderr", Terminal())
    console.watch_loading()
    with watch.get()("some-model", 1 << 30) as advance:
        advance(1 << 29)
    watch.set(before)
    assert "Loading some-model" in sys.stderr.getvalue()
    assert "1.07G" in sys.stderr.getvalue()


@pytest.mark.parametrize("name", ["org/model", "/a/long/way/to/a-model-whose-name-is-rather-long-q4_k_m.gguf"])
def test_a_bar_fits_beside_its_label(monkeypatch, name):
    """The bundled names and those of files alike, in 80 columns."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    for watched, title, total in ((console.loading, name, 96 << 30), (console.in_parts, kernels.COMPILING, 11)):
        with watched(title, total) as advance:
            advance(total // 3)
    lines = re.split(r"[\r\n]+", sys.stderr.getvalue())
    assert max(map(len, lines)) <= 80
    assert all("%|" in line and line.split("|")[1].count(" ") >= 5 for line in lines if line.strip())
    assert "Loading model:" in lines[1] or "Loading a-model-whose-name" in lines[1]


def test_weights_do_not_follow_their_file(folder):
    """A model holds no view of a file, which somebody may write anew."""
    for options in ({}, {"weights": "plain"}, {"quantization": "int8_rows"}):
        llm = LLM(str(folder), **options)
        expected = llm.generate("the cat", GREEDY)[0].outputs[0].token_ids
        file = folder / "model.safetensors"
        content = file.read_bytes()
        with file.open("r+b") as opened:  # in place, as a mapping would see it
            opened.write(b"\0" * len(content))
        assert llm.generate("the cat", GREEDY)[0].outputs[0].token_ids == expected
        file.write_bytes(content)


def test_a_mixture_whose_experts_are_stacked(tmp_path):
    """As transformers has them in memory, and files may have them too."""
    module = save_described("mixtral", tmp_path)
    expected = LLM(str(tmp_path)).generate("the cat", GREEDY)[0].outputs[0].token_ids
    weights = {name: part.clone() for name, part in module.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in weights
    assert "model.layers.0.mlp.experts.gate_up_proj" not in load_file(tmp_path / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert LLM(str(tmp_path)).generate("the cat", GREEDY)[0].outputs[0].token_ids == expected


def test_names_without_their_beginning(tmp_path):
    """A checkpoint that was saved without its output layer, tied to the embedding."""
    save_checkpoint(tiny_llama(tie_word_embeddings=True), tmp_path)
    expected = LLM(str(tmp_path)).generate("the cat", GREEDY)[0].outputs[0].token_ids
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): part for name, part in weights.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert LLM(str(tmp_path)).generate("the cat", GREEDY)[0].outputs[0].token_ids == expected
