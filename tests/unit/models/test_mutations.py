"""Small changes to small files of every format, in a seeded order: each leaves a model that runs, or is one line."""

import random
import shutil
from pathlib import Path

import pytest
from test_lora import adapter
from test_prequantized import CASES, write

from damage import CONFIG, WEIGHTS, edit, mutate_json, mutate_tensor, together
from forerun import ForerunError
from forerun.measure.environment import logits
from forerun.models.load import load_model

pytestmark = pytest.mark.slow

TRIES = 60
ADAPTER, ADDED = "adapter_config.json", "adapter_model.safetensors"
KEYS = {
    "rank_pattern": {"q_proj": 4, "layers.1.*": 4}, "alpha_pattern": {"v_proj": 2}, "use_rslora": True,
    "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": True, "lora_ga_config": None,
    "alora_invocation_tokens": None, "layer_replication": None, "loftq_config": {},
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 64}  # fmt: skip


def some_load(intact, seed, load, *changes):
    """The intact folder loads. Some changed copies do, too, and the others are refused in one line."""
    load(intact)
    result = set()
    for number in range(TRIES):
        copy = Path(shutil.copytree(intact, intact.with_name(f"copy{number}")))
        chosen = random.Random(f"{seed} {number}")
        chosen.choice(changes)(chosen)(copy)
        try:
            load(copy)
            result.add("loaded")
        except ForerunError as error:
            message = str(error).replace(str(copy), "")
            assert "\n" not in message
            assert 0 < len(message) < 500
            result.add("refused")
        except Exception as error:
            raise AssertionError(f"change {number} of {seed}: {type(error).__name__}") from error
        shutil.rmtree(copy)
    assert result == {"loaded", "refused"}


def run(folder, **options):
    logits(load_model(folder, invariant=False, **options), [[5, 9, 12]])


@pytest.mark.parametrize("name", CASES)
def test_quantized_weights(tmp_path, name):
    write(tmp_path / "intact", name)
    some_load(
        tmp_path / "intact", name, run,
        lambda chosen: mutate_tensor(WEIGHTS, chosen),
        lambda chosen: mutate_tensor(WEIGHTS, chosen),
        lambda chosen: mutate_json(CONFIG, chosen, "quantization_config"),
    )  # fmt: skip


@pytest.mark.parametrize("rope", ["rope_parameters", "rope_scaling"])
def test_configs(tiny_target, tmp_path, rope):
    intact = Path(shutil.copytree(tiny_target, tmp_path / "intact"))
    together(edit(CONFIG, **{rope: ROPE}))(intact)
    some_load(
        intact, rope, run,
        lambda chosen: mutate_json(CONFIG, chosen),
        lambda chosen: mutate_json(CONFIG, chosen, rope),
    )  # fmt: skip


@pytest.mark.parametrize("path", ["native", "hf"])
def test_adapters(tiny_target, tmp_path, path):
    adapter(tmp_path / "intact", tiny_target, **KEYS)

    def load(folder):
        run(Path(tiny_target), lora=str(folder), model_path=path)

    some_load(
        tmp_path / "intact", path, load,
        lambda chosen: mutate_tensor(ADDED, chosen),
        lambda chosen: mutate_json(ADAPTER, chosen),
    )  # fmt: skip
