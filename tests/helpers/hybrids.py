"""Tiny random models of layers with state and layers of attention."""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from described import CASES, SHARED_EXPERTS, SIZES
from tiny import EOS, save_checkpoint

MIXTURES = [name for name in SHARED_EXPERTS if name != "lfm2_moe-bare"]
"""Some layers have experts."""
KINDS = ["lfm2", "qwen3_5", "granite-h", "falcon_h1", "nemotron_h", *MIXTURES]
"""Of ``described.CASES``."""


def hybrid(name, **options):
    """A random model whose logits are peaked enough that a wrong state changes its choices."""
    torch.manual_seed(KINDS.index(name) % 2)
    kind, own = CASES[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **own, **options})
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for part, parameter in module.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5 if "conv" in part else 0.3)
            elif "norm" in part:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.uniform_(parameter, -1.0, 1.0)
    module.tie_weights()
    return module


def save_hybrid(kind, folder, **options):
    save_checkpoint(hybrid(kind, **options), folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": EOS}))  # else Qwen's classes add a token
    return str(folder)
