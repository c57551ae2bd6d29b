"""The speed of two source trees in turns: ``python lab/benchmarks/before_after.py OTHER`` with a checkout of another
commit (``git worktree add --detach OTHER COMMIT``) beside this one.

Each case runs in a process of its own, for one tree after the other, with fixed draft lengths, so that no policy is
compared. It prints each pair of speeds, the median of their ratios, and whether the tokens are the same. ``mtp`` runs
on a random model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "src" / "forerun" / "pretrained"
TEXTS = (
    "def parse(",
    "Once upon a time there was a king who lived in a small village. He said that",
    "import os\nimport sys\n\nclass Tree:\n    def __init__(self):\n",
    "The three rules of the house are: one, two,",
)
THREADS, TOKENS = 2, 48


def cases(folder: Path) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """By name: a model, and how it drafts."""
    from forerun.models.files.inventory import here

    smollm2, coder, small = (str(here(name)) for name in ("smollm2", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"))
    head = {"method": "eagle", "model": str(BUNDLED / "smollm2" / "eagle"), "quantization": "q4_0"}
    draft = {"method": "draft_model", "num_speculative_tokens": 4, "length": "fixed"}
    sure = {"num_speculative_tokens": 3, "confidence_threshold": 0.5, "length": "fixed"}
    bundled, random = str(BUNDLED / "target"), str(folder / "random")
    return {
        "SmolLM2, plain": (smollm2, None),
        "SmolLM2, suffix": (smollm2, {"method": "suffix", "length": "fixed"}),
        "SmolLM2, its head": (smollm2, {**head, **sure}),
        "bundled pair, plain": (bundled, None),
        "bundled pair": (bundled, {**draft, "model": str(BUNDLED / "draft")}),
        "1.5B, plain": (coder, None),
        "1.5B and 0.5B": (coder, {**draft, "model": small, "confidence_threshold": 0.6}),
        "random model, plain": (random, None),
        "random model, mtp": (
            random,
            {"method": "mtp", "model": str(folder / "mtp"), "num_speculative_tokens": 2, "length": "fixed"},
        ),
    }


def make_random(folder: Path) -> None:
    """A model of ten layers with a layer for multi-token prediction."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from forerun.speculate.draft import drafters

    size = json.loads((BUNDLED / "target" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = Qwen3Config(
        vocab_size=size, hidden_size=1024, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "random")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "target" / name, folder / "random")
    (folder / "mtp").mkdir()
    drafters["mtp"].example(folder / "random", folder / "mtp")


def run(model: str, way: dict[str, Any] | None, seconds: float) -> None:
    """Prints the median of tokens per second, and a hash of the tokens."""
    import torch

    from forerun import LLM, SamplingParams

    torch.set_num_threads(THREADS)
    llm = LLM(model, speculative_config=way, max_model_len=1024)

    def answers() -> list[list[int]]:
        return [
            llm.generate([text], SamplingParams(temperature=t, seed=seed, max_tokens=TOKENS, ignore_eos=True))[0]
            .outputs[0]
            .token_ids
            for t in (0.0, 0.8)
            for seed, text in enumerate(TEXTS)
        ]

    digest = hashlib.sha256(json.dumps(answers()).encode()).hexdigest()[:12]
    speeds: list[float] = []
    end = time.perf_counter() + seconds
    while len(speeds) < 2 or time.perf_counter() < end:
        began = time.perf_counter()
        speeds.append(sum(map(len, answers())) / (time.perf_counter() - began))
    print(json.dumps([statistics.median(speeds), digest]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run, after the first answers")
    parser.add_argument("--only", action="append", help="a case; can be given several times")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        model, way = json.loads(options.run)
        run(model, way, options.seconds)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_random(folder)
        for case, given in cases(folder).items():
            if options.only and case not in options.only:
                continue
            pairs, hashes = [], set()
            for _ in range(options.pairs):
                speeds = []
                for tree in (options.other, ROOT):
                    command = [sys.executable, __file__, str(options.other), "--run", json.dumps(given)]
                    command += ["--seconds", str(options.seconds)]
                    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
                    result = subprocess.check_output(command, cwd=name, env=environment, stderr=subprocess.DEVNULL)
                    speed, digest = json.loads(result.splitlines()[-1])
                    speeds.append(speed)
                    hashes.add(digest)
                pairs.append(speeds)
            ratio = statistics.median(after / before for before, after in pairs)
            shown = ", ".join(f"{before:.0f} {after:.0f}" for before, after in pairs)
            same = "same tokens" if len(hashes) == 1 else "OTHER TOKENS"
            print(f"{case:22} {ratio:.3f}  {same}  ({shown})", flush=True)


if __name__ == "__main__":
    main()
