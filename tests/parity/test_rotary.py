"""Every type of rotary embedding with every part of a head that it may rotate, against transformers."""

import pytest
import torch

from described import GROWING, LINEAR, LLAMA3, MSCALES, TOKENS, YARN, save_described
from forerun.core.errors import ForerunError
from forerun.models.load import load_model
from forerun.models.run.rotary import Rotary
from modules import logits_of
from rounding import apart, bound

IDS = torch.randint(3, TOKENS, (1, 40), generator=torch.Generator().manual_seed(1))
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {
    "default": PLAIN, "linear": LINEAR, "llama3": LLAMA3, "yarn": {**YARN, "original_max_position_embeddings": 16},
    "yarn-mscale": {**YARN, **MSCALES}, "proportional": {**PLAIN, "rope_type": "proportional", "factor": 2.0},
    "dynamic": {**LINEAR, "rope_type": "dynamic"},
}  # fmt: skip
PARTS = (1.0, 0.5, 0.4, 0.25)
PARTIAL = ("glm4", "qwen3_5", "qwen3_5_moe", "bamba")
"""Families that rotate parts of heads by every type. Phi-3 does by the default alone, others as Gemma 4."""


def loaded(folder):
    return load_model(folder, invariant=False, max_model_len=256)


def logits(model):
    return logits_of(model, IDS[0].tolist())


@torch.inference_mode()
def saved(folder, name, rope):
    """A config of these rotary parameters in ``folder``, and transformers' logits; None for what it cannot run."""
    if name == "mistral4":  # transformers needs them
        rope = {**GROWING, **rope}
    if name.startswith("gemma"):
        rope = {"full_attention": rope, "sliding_attention": {**PLAIN, "rope_theta": 100.0}}
    try:
        module = save_described(name, folder, rope_parameters=rope).eval()
        return module.config, module(IDS, use_cache=False).logits[0]
    except Exception:  # noqa: BLE001 - whatever its code does with numbers that it does not expect
        return None, None


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    "name", [*PARTIAL, "phi3", "llama", "gemma3", "gemma4", "falcon_h1", "glm4_moe_lite", "mistral4"]
)
def test_numbers_are_those_of_transformers_or_refused_in_one_line(tmp_path, name, kind):
    run, said = [], []
    for part in PARTS if name in PARTIAL else PARTS[::2]:  # whether a family looks at the share, one other tells
        folder = tmp_path / str(part)
        config, expected = saved(folder, name, {**ROPES[kind], "partial_rotary_factor": part})
        if not (folder / "config.json").is_file():  # transformers refuses the config
            continue
        try:
            model = loaded(folder)
        except ForerunError as error:
            said.append(str(error))
            continue
        assert expected is not None
        assert apart(logits(model), expected) < bound(config)
        run.append(part)
    assert "\n" not in "".join(said)
    if name == "glm4" or (
        name in PARTIAL and kind != "dynamic"
    ):  # dynamic ones run through transformers, without states
        assert run == [*PARTS]


@pytest.mark.parametrize("fault", ["scaled beside", "halves", "position"])
def test_a_wrong_rotation_is_far_beyond_the_bound(tmp_path, monkeypatch, fault):
    arrange, table = Rotary.arrange, Rotary.table

    def wrong(self, size):
        result = table(self, size).clone()
        if fault == "scaled beside":
            result[:, :, self.pairs :] *= self.factor
        return result.roll(1, 0) if fault == "position" else result

    monkeypatch.setattr(Rotary, "table", wrong)
    if fault == "halves":
        monkeypatch.setattr(Rotary, "arrange", lambda self, heads: arrange(self, heads.roll(self.pairs, -1)))
    config, expected = saved(tmp_path, "qwen3_5", {**ROPES["yarn"], "partial_rotary_factor": 0.5})
    assert apart(logits(loaded(tmp_path)), expected) > 100 * bound(config)
