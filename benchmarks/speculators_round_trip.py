"""An exported head in the ``speculators`` package: its own loader, and the same first guesses.

    python -m venv speculators && speculators/bin/pip install speculators==0.9.0 gguf
    forerun export forerun:eagle --out exported
    PYTHONPATH=src speculators/bin/python benchmarks/speculators_round_trip.py exported head-folder target-folder

Feeds both modules the same random features and tokens, and compares the likeliest token at every place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel

from forerun.speculate.draft.heads.eagle import EagleHead

LENGTH = 64


@torch.no_grad()
def main(exported: str, head: str, target: str) -> None:
    ours = EagleHead.load(Path(head), json.loads((Path(target) / "config.json").read_text())["num_hidden_layers"])
    assert isinstance(ours, EagleHead)
    config = SpeculatorModelConfig.from_pretrained(exported)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(exported, config=config, dtype=torch.float32)
    loaded = theirs.state_dict()
    written = load_file(Path(exported) / "model.safetensors")
    lacking = [name for name, value in written.items() if not torch.equal(loaded[name], value.to(loaded[name].dtype))]
    theirs.load_verifier_weights()
    theirs.eval()
    torch.manual_seed(0)
    size, vocabulary = ours.sizes.hidden_size, ours.sizes.vocab_size
    features = torch.randn(1, LENGTH, len(ours.layers) * size)
    tokens = torch.randint(0, vocabulary, (1, LENGTH))
    embedding = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"].float()
    stream = ours.enter(embedding[tokens], ours.fc(features))
    q, k, v = ours.qkv(embedding[tokens], stream, torch.arange(LENGTH))
    groups = ours.heads // ours.kv_heads
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    attended = ours._unrolled(q, [k.repeat_interleave(groups, -2)], [v.repeat_interleave(groups, -2)], seen)
    rows = embedding if ours.lm_head is None else ours.lm_head.weight
    logits = ours.norm(ours.finish(stream, attended)) @ rows.T
    answer = theirs(features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=1)
    guesses = answer[0] if isinstance(answer, tuple) else answer
    same = int((guesses[0].reshape(-1)[:LENGTH] == logits.argmax(-1).reshape(-1)).sum())
    print(f"{len(written)} tensors, not loaded as written: {lacking}; same first guess at {same} of {LENGTH}")


if __name__ == "__main__":
    main(*sys.argv[1:])
