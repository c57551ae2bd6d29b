"""An exported head in the ``speculators`` package: its own loader, and the same first guesses.

    python -m venv speculators && speculators/bin/pip install speculators==0.9.0 gguf
    forerun export forerun:eagle --out exported
    PYTHONPATH=src speculators/bin/python lab/benchmarks/speculators_round_trip.py exported head-folder target-folder

Feeds both modules the same random features and tokens, and compares the likeliest token at every place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from first_guess import LENGTH, said
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel


@torch.no_grad()
def main(exported: str, head: str, target: str) -> None:
    ours = said(head, target)
    config = SpeculatorModelConfig.from_pretrained(exported)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(exported, config=config, dtype=torch.float32)
    loaded = theirs.state_dict()
    written = load_file(Path(exported) / "model.safetensors")
    lacking = [name for name, value in written.items() if not torch.equal(loaded[name], value.to(loaded[name].dtype))]
    theirs.load_verifier_weights()
    theirs.eval()
    answer = theirs(ours.features, ours.tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=1)
    guesses = answer[0] if isinstance(answer, tuple) else answer
    same = int((guesses[0].reshape(-1)[:LENGTH] == ours.logits.argmax(-1).reshape(-1)).sum())
    print(f"{len(written)} tensors, not loaded as written: {lacking}; same first guess at {same} of {LENGTH}")


if __name__ == "__main__":
    main(*sys.argv[1:])
