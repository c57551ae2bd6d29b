"""Tokens per round of history drafters, a tuned head and both combined, on held-out prompts.

python -m forerun_lab.bench.tune_figures --model smollm2 --head FOLDER --out FILE [--text FILE]
[--temperature T] [--prompts N] [--max-tokens N] [--depth N]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from forerun.engine.llm import LLM
from forerun.measure.environment import environment
from forerun.measure.rounds import PLAIN, engine_of, measure
from forerun.sampling.params import SamplingParams
from forerun.tune.data import held_out
from forerun_lab.tune.choose import CONFIDENT, HISTORY, with_datastore

TREES = (8, 16)
"""Nodes of the compared trees."""


def ways(head: str, depth: int, text: Path | None) -> dict[str, dict[str, Any]]:
    """Every compared config by its name in tables; ``text`` is a datastore of the model's own text."""
    eagle = {"method": "eagle", "model": head, "num_speculative_tokens": depth, "quantization": "q8_0"}
    suffix = HISTORY[1] if text is None else with_datastore(text)
    sure = {**eagle, **CONFIDENT}
    trees = {nodes: {**eagle, "tree_nodes": nodes} for nodes in TREES}
    return {
        "none": PLAIN,
        **{item["method"]: item for item in HISTORY},
        **({} if text is None else {"suffix with text": suffix}),
        "eagle": eagle,
        "eagle, as it is sure": sure,
        **{f"eagle, tree of {nodes}": tree for nodes, tree in trees.items()},
        "merged eagle + suffix": {"method": "merged", "drafters": [eagle, suffix]},
        **{
            f"merged tree of {nodes} + suffix": {"method": "merged", "drafters": [tree, suffix]}
            for nodes, tree in trees.items()
        },
        "cascade suffix, eagle": {"method": "cascade", "drafters": [suffix, sure]},
    }


def figures(
    llm: LLM, compared: dict[str, dict[str, Any]], count: int, tokens: int, temperature: float
) -> list[dict[str, Any]]:
    """A row for each config: tokens per round, also by category, their standard error, and drafted tokens per
    round. An answer's first token comes with its prompt and is not counted."""
    turns = held_out()[:: max(1, len(held_out()) // count)]
    chats = [[{"role": "user", "content": turn}] for _, turn in turns]
    prompts = [
        list(answer.prompt_token_ids) for answer in llm.chat(chats, SamplingParams(max_tokens=1), use_tqdm=False)
    ]
    params = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=i) for i in range(len(prompts))]
    rows = []
    for name, config in compared.items():
        result = measure(engine_of(llm, config), prompts, params)
        each = [(len(answer) - 1) / max(1, m.rounds) for answer, m in zip(result.answers, result.metrics)]
        kinds: dict[str, list[float]] = defaultdict(list)
        for (kind, _), value in zip(turns, each):
            kinds[kind].append(value)
        rows.append(
            {
                "way": name,
                "temperature": temperature,
                "tokens_per_round": (sum(map(len, result.answers)) - len(each)) / sum(m.rounds for m in result.metrics),
                "standard_error": stdev(each) / len(each) ** 0.5,
                "drafted_per_round": sum(m.num_draft_tokens for m in result.metrics)
                / sum(m.rounds for m in result.metrics),
                "by_category": {kind: round(fmean(values), 3) for kind, values in kinds.items()},
                "tokens_per_second": result.tokens_per_second,
            }
        )
        print(f"T = {temperature}: {name:24} {rows[-1]['tokens_per_round']:.3f} tokens a round", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--quantization")
    parser.add_argument("--prompts", type=int, default=44)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        quantization=args.quantization,
        threads=torch.get_num_threads(),
        max_num_seqs=1,
        max_model_len=2048,
        speculative_config=None,
    )
    compared = ways(args.head, args.depth, args.text)
    rows = [
        row
        for temperature in args.temperature or (0.0, 0.8)
        for row in figures(llm, compared, args.prompts, args.max_tokens, temperature)
    ]
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "options": options,
        "environment": environment(llm, {"model": args.model, "quantization": args.quantization}),
        "rows": rows,
    }
    args.out.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
