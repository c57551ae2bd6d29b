"""Checkpoints of random weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.models.load import load_model
from forerun.models.text.tokenizer import load_tokenizer
from forerun_lab.shapes import random_checkpoint


def test_random_checkpoints_have_their_shape_and_load(tmp_path):
    folder = random_checkpoint(tmp_path / "tiny", "tiny", vocabulary=300)
    model = load_model(folder)
    assert (model.info.vocab_size, model.info.num_layers, model.info.dtype) == (300, 2, torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in reference.parameters())
    norms = sum(parameter.numel() for parameter in reference.parameters() if parameter.dim() == 1)
    assert model.info.token_bytes == 2 * (parameters - norms)  # tied
    weights = torch.cat([p.detach().float().flatten() for n, p in reference.named_parameters() if "norm" not in n])
    assert float(weights.std()) == pytest.approx(0.02, rel=0.02)
    assert load_tokenizer(folder).encode("w3 w299") == [3, 299]
