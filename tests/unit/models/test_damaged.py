"""Damaged checkpoints: one clear line about each, and never a model made of something else than its weights."""

import json
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, GPT2Config, GPT2LMHeadModel

from damage import CONFIG, DAMAGES, SCHEMES, edit
from described import save_described
from forerun import LLM, ConfigError, ForerunError, ModelError, SamplingParams
from forerun.models.architectures.spec import refusal
from forerun.models.files import hub
from forerun.models.files.open import Checkpoint
from forerun.models.load import load_model, parse_dtype
from refusals import refused
from tiny import save_checkpoint, save_tokenizer, tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def refuse(path, said=None, **options):
    message = str(refused((ModelError, ConfigError), said, LLM, str(path), invariant=False, **options))
    assert len(message.replace(str(path), "")) < 400
    return message


READ = ("AWQ (4 bits)", "GPTQ (4 bits)", "FP8", "compressed-tensors", "MXFP4")
SAID = {
    "a LoRA adapter": "is a LoRA adapter, not a model: use some/base as the model and this folder as --lora",
    "only a GGUF file": "model-Q4.gguf is not a GGUF file that can be used: it is truncated or damaged",
    "two GGUF files": "holds 2 GGUF files: name one, such as .*model-Q4.gguf",
    "a tokenizer with code": "it needs code of its own \\(auto_map\\), which is never run",
    "no tokens": "it has no tokens but special ones",
    "weights cut at 0": "a safetensors file is truncated or damaged",
    "weights cut at 200": "a safetensors file is truncated or damaged",
    "no weights": "has no safetensors weights$",
    "pickled weights": r"has no safetensors weights \(it has pytorch_model.bin; pickled weights are not loaded",
    "weights of MLX": "holds weights quantized for MLX, Apple's framework: use the checkpoint",
    "a tensor is missing": "lacks 1 weights, model.layers.1.mlp.up_proj.weight among them",
    "a tensor has another shape": r"up_proj.weight has shape \[63, 32\]; its config asks for \[64, 32\]",
    "generation_config.json is half an object": "generation_config.json cannot be used",
    **{f"config.json is {what}": "config.json cannot be used" for what in ("half an object", "a list", "nothing")},
    "config.json: model_type is 'telepath'": "telepath",
    **{f"weights of {scheme}": f"holds no {scheme.split(' (')[0]} weights, though its config says so"
       if scheme in READ else f"holds weights quantized with {re.escape(scheme)}, which forerun does not read.*"
       "use the checkpoint they were made from" for scheme in SCHEMES},
}  # fmt: skip
"""What of a damage is named; of the others, one line is enough."""
assert set(SAID) <= set(DAMAGES)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line(folder, name):
    DAMAGES[name](folder)
    refuse(folder, SAID.get(name))


@pytest.mark.parametrize("count", [0, -1, 6, "2", 2.5])
def test_more_experts_than_there_are(tmp_path, count):
    save_described("mixtral", tmp_path)
    assert LLM(str(tmp_path), invariant=False).generate("a", GREEDY)[0].outputs[0].finish_reason == "length"
    edit(CONFIG, num_experts_per_tok=count)(tmp_path)
    refuse(tmp_path)


@pytest.mark.parametrize("changes", [{"top_k_experts": 6}, {"top_k_experts": None}, {"num_experts": None},
                                     {"moe_intermediate_size": 0}])  # fmt: skip
def test_experts_of_gemma_4_that_are_not_said_in_full(tmp_path, changes):
    save_described("gemma4-experts", tmp_path)
    edit(CONFIG, **changes)(tmp_path)
    assert f"{next(iter(changes))} must be an integer from 1" in refuse(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_shortest_context_runs_to_its_end(tmp_path, kind):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "vocab_size": 98, "eos_token_id": 0}
    model = tiny_llama(max_position_embeddings=32) if kind == "llama" else GPT2LMHeadModel(GPT2Config(**sizes))
    save_checkpoint(model, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    assert len(LLM(str(tmp_path)).generate([5] * 20, params)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize("changes", [
    {"num_hidden_layers": 2**31 - 1}, {"num_hidden_layers": 10**400},
    {"model_type": "qwen3", "num_hidden_layers": 1001},
    {"model_type": "gpt2", "n_layer": 2**31 - 1}, {"model_type": "t5", "num_decoder_layers": 2**31 - 1},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2**31 - 1}},
])  # fmt: skip
def test_layers_are_compared_with_the_weights_before_a_config_is_made_of_them(folder, monkeypatch, changes):
    monkeypatch.setattr("transformers.AutoConfig", None)
    edit(CONFIG, **changes)(folder)
    name = next(name for name in (*changes, "num_hidden_layers") if "layer" in name)
    assert re.search(rf"does not fit its weights: {name} is \d.*, but they are 21 tensors", refuse(folder))


@pytest.mark.parametrize("path", ["native", "hf"])
def test_experts_are_compared_with_the_weights(tmp_path, monkeypatch, path):
    save_described("mixtral", tmp_path)
    edit(CONFIG, num_local_experts=2**31 - 1)(tmp_path)
    monkeypatch.setattr("forerun.models.weights.transform.bind", None)
    monkeypatch.setattr("forerun.models.run.hf.AutoModelForCausalLM", None)
    with pytest.raises(ModelError, match="does not fit its weights: num_local_experts is 2147483647, but there are"):
        load_model(tmp_path, model_path=path)


@pytest.mark.parametrize("kind", ["gemma4_unified", "gemma4_unified_text"])
def test_layers_of_different_sizes_are_refused_by_what_differs(folder, kind):
    AutoConfig.for_model(kind).save_pretrained(folder)
    assert "gives its layers sizes of their own (head_dim), which forerun does not run" in refuse(folder)


@pytest.mark.slow
def test_every_config_of_transformers_is_read_or_refused_in_one_line(tmp_path):
    """As it stands where nothing is chosen; and all that loading asks of it before there are weights."""
    read, messages = 0, []
    for kind, made in CONFIG_MAPPING.items():
        try:
            given = made().to_dict()
        except (StrictDataclassError, ValueError, TypeError, AttributeError, KeyError, ImportError):
            continue  # some are made of others, and have no defaults
        (tmp_path / CONFIG).write_text(json.dumps({**given, "model_type": kind}, default=str))
        try:
            opened = Checkpoint.at(tmp_path)
            config = opened.transformers_config()
            refusal(config), opened.eos_ids, parse_dtype("auto", config)
            read += 1
        except ForerunError as error:
            messages.append(str(error))
    assert read > 100
    assert len(messages) > 200
    assert [text for text in messages if "\n" in text] == []


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from([2**31, 2**63, 10**40]), st.floats(),
    st.text(max_size=4), st.lists(st.integers(-1, 5), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "factor", "a"]), st.floats() | st.text(), max_size=3),
)  # fmt: skip


def test_any_config_is_refused_in_one_line_or_runs(folder):
    original = json.loads((folder / CONFIG).read_text())
    ends = set()

    @given(changes=st.dictionaries(st.sampled_from(sorted(original)), VALUES, min_size=1, max_size=2))
    @settings(
        max_examples=150, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def attack(changes):
        (folder / CONFIG).write_text(json.dumps({**original, **changes}))
        try:
            answer = LLM(str(folder), invariant=False).generate([5, 9, 12], GREEDY)[0].outputs[0]
        except ForerunError as error:
            ends.add("refused in one line" if "\n" not in str(error) else "refused")
        else:
            assert len(answer.token_ids) == 4
            ends.add("answered")

    attack()
    assert ends == {"refused in one line", "answered"}


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_of_git_lfs_is_called_so(name, folder, tmp_path):
    """A clone without Git LFS has a few lines of text in place of a file."""
    (folder / name).write_text(POINTER)
    message = "is a pointer of Git LFS, not the file itself: run `git lfs pull`"
    refused(ModelError, f"{name} {message}", lambda: LLM(str(folder)).get_tokenizer())
    other = tmp_path / "m.gguf"
    other.write_text(POINTER)
    refused(ModelError, f"m.gguf {message}", LLM, str(other))


def test_a_folder_that_is_not_there(tmp_path):
    refuse(tmp_path / "nowhere", "no checkpoint folder at .*nowhere")
    refuse("./nowhere", r"no checkpoint folder at \./nowhere")
    refuse("nowhere.gguf", r"no GGUF file at nowhere\.gguf")
    refuse(tmp_path, "has no config.json: not a Hugging Face checkpoint")
    refuse("forerun:oracle", "oracle")
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path / "config.json", "no checkpoint folder at")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(hub.hf.constants, "ENDPOINT", "http://127.0.0.1:9")
    refuse("somebody/some-model", "no folder 'somebody/some-model' here, and the hub .* cannot be reached")
    refuse("smolm2", r"no folder 'smolm2' here \(did you mean smollm2\?\), and the hub .* \(ConnectError: [^)]*\)$")


def test_a_download_that_has_begun_goes_on(monkeypatch, tmp_path):
    """The next call is promised to continue it only where it has begun."""
    monkeypatch.setattr(hub.hf.constants, "ENDPOINT", "http://127.0.0.1:9")
    for begun in (False, True):
        error = refused(
            ModelError, "cannot be reached", hub.download, hub.ModelSource("own/m", None), None, str(tmp_path)
        )
        assert str(error).endswith("; the next call continues the download of hf:own/m") is begun
        blobs = tmp_path / hub.hf.file_download.repo_folder_name(repo_id="own/m", repo_type="model") / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / "abc.incomplete").write_text("")


def test_a_missing_shard(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    save_tokenizer(tmp_path)
    load_model(tmp_path)
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    refuse(tmp_path, "lacks model-00002-of-00008.safetensors, which its model.safetensors.index.json names")


def test_the_lean_path_on_another_family(tiny_target, folder):
    assert load_model(tiny_target).info.path.startswith("native")
    assert load_model(tiny_target, model_path="hf").info.path.startswith("hf")
    edit(CONFIG, hidden_act="gelu")(folder)
    refuse(folder, "the native path does not support .*: activation 'gelu'", model_path="native")
    assert load_model(folder).info.path.startswith("hf")


@pytest.mark.parametrize(("generation", "expected"), [(None, {0}), (5, {5}), ([5, 6], {5, 6})])
def test_every_id_that_ends_a_text(folder, generation, expected):
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_model(folder).info.eos_ids == expected
