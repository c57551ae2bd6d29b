"""``suffix`` with and without texts to search, in turns with plain decoding, prompt by prompt, one thread, T = 0.

    python benchmarks/datastores.py MODEL QUANTIZATION OUT.json NAME=FILE [NAME=FILE ...]

QUANTIZATION is as everywhere (``none``: as the file lies); a FILE is what ``forerun tune`` keeps as text.safetensors,
or text. The prompts are those of ``categories-small``, answers have 64 tokens, and every way answers all of them twice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from forerun import LLM
from forerun.bench.categories import by_category
from forerun.bench.config import BenchConfig
from forerun.bench.contenders import EngineContender
from forerun.bench.run import make_texts, read_set, take_turns

SET = "categories-small"
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 4}
ADAPTIVE = {"length": "adaptive"}


def ways(stores: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"none": {"method": "none"}, "suffix": SUFFIX}
    found["suffix, adaptive"] = {**SUFFIX, **ADAPTIVE}
    for each in stores:
        name, _, path = each.partition("=")
        searched = {**SUFFIX, "datastore": path}
        sure = {**searched, "num_speculative_tokens": 3, "suffix_decoding_min_token_prob": 0.3}
        found |= {name: searched, f"{name}, 3, 0.3": sure, f"{name}, adaptive": {**searched, **ADAPTIVE}}
    return found


def main(model: str, quantization: str, out: str, *stores: str) -> None:
    torch.set_num_threads(1)
    config = BenchConfig(engine={"model": model}, prompt_set=SET, prompts=100, max_tokens=64, repeats=2)
    llm = LLM(model=model, quantization=quantization)
    texts = make_texts(config, llm, read_set(SET, None))
    contenders = [EngineContender(name, llm, options, 1) for name, options in ways(list(stores)).items()]
    runs = take_turns(contenders, texts.prompts, config, 0.0, 1)
    rows = by_category(contenders, runs, texts, 0.0, 1, llm.tokenizer)
    for row, found in zip([row for row in rows if row["category"] == "all"], runs, strict=True):
        speed = sum(each.tokens for each in found) / sum(each.seconds for each in found)
        ends = " to ".join(f"{end:.2f}" for end in row["speedup_interval"])
        made = f"{row['tokens_per_round']:.2f} tokens a round, {row['speedup']:.2f} ({ends}), {speed:.0f} tokens/s"
        print(f"{row['method']}: {made}, {row['same_answers']} answers the same")
    Path(out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
