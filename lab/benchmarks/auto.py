"""Whole requests by ``auto`` beside plain decoding, first token included, by length of prompt and of answer.

``python benchmarks/auto.py MODEL --out FILE.json``: both engines are in one process and answer every prompt in turns.
FILE keeps each pair as soon as it is measured, and the same command goes on where it stopped; ``--seconds`` ends it
early. ``--show`` prints the table. Prompts are pieces of Python's standard library and of its prose (licence texts,
docstrings), a new one for each pair, so that nothing is in the prefix cache.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pydoc_data.topics
import random
import statistics
import sys
from collections.abc import Iterator
from math import comb
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.measure.environment import processor

PROMPTS, ANSWERS = (50, 300, 1500), (8, 32, 128)
MODULES = [
    "argparse",
    "ast",
    "calendar",
    "cmd",
    "csv",
    "difflib",
    "doctest",
    "heapq",
    "imaplib",
    "json",
    "mailbox",
    "nntplib",
    "pdb",
    "tarfile",
    "zipfile",
]


def texts(tokenizer: Any, length: int, seed: int) -> Iterator[list[int]]:
    """Prompts of ``length`` tokens: code and prose in turns."""
    source = random.Random(seed)
    code = [inspect.getsource(__import__(name)) for name in MODULES if name in sys.stdlib_module_names]
    prose = "\n\n".join(pydoc_data.topics.topics.values())
    while True:
        for text in (source.choice(code), prose):
            ids: list[int] = []
            while len(ids) < length:
                start = source.randrange(max(1, len(text) - 8 * length))
                ids = tokenizer.encode(text[start : start + 8 * length])
            yield ids[:length]


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    """One request alone: seconds of all of it and until its first token."""
    began = perf_counter()
    seen: list[float] = []
    output = llm.generate({"prompt_token_ids": prompt}, params, on_update=lambda update: seen.append(perf_counter()))[0]
    ended = perf_counter()
    ids = output.outputs[0].token_ids
    return {"seconds": ended - began, "first": seen[0] - began, "tokens": len(ids), "ids": ids}


def interval(ratios: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median from order statistics, whatever the distribution."""
    ordered, n, k = sorted(ratios), len(ratios), 0
    while k < n // 2 and 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n <= 0.05:
        k += 1
    return ordered[max(0, k - 1)], ordered[n - max(1, k)]


def show(pairs: list[dict[str, Any]]) -> None:
    print("temperature  prompt  answer  pairs  whole requests       decoding  plain tokens/s  same")
    cells = sorted({(p["temperature"], p["prompt"], p["answer"]) for p in pairs})
    for cell in cells:
        rows = [p for p in pairs if (p["temperature"], p["prompt"], p["answer"]) == cell]
        whole = [p["plain"]["seconds"] / p["auto"]["seconds"] for p in rows]
        decode = [
            (p["plain"]["seconds"] - p["plain"]["first"]) / (p["auto"]["seconds"] - p["auto"]["first"]) for p in rows
        ]
        rate = statistics.median(
            (p["plain"]["tokens"] - 1) / (p["plain"]["seconds"] - p["plain"]["first"]) for p in rows
        )
        low, high = interval(whole)
        print(
            f"{cell[0]:11}  {cell[1]:6}  {cell[2]:6}  {len(rows):5}  {statistics.median(whole):.2f} ({low:.2f} to "
            f"{high:.2f})  {statistics.median(decode):8.2f}  {rate:14.1f}  {sum(p['same'] for p in rows)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6, help="of each cell")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)))
    parser.add_argument("--answers", default=",".join(map(str, ANSWERS)))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop before this is over")
    parser.add_argument("--show", action="store_true", help="only print what FILE has")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"pairs": []}
    if options.show:
        print(kept["model"], kept["processor"], kept["threads"], "threads")
        show(kept["pairs"])
        return
    began = perf_counter()
    kept |= {"model": options.model, "processor": processor(), "threads": options.threads}
    torch.set_num_threads(options.threads)
    common: dict[str, Any] = {"max_model_len": 2048}
    llms = {"plain": LLM(options.model, speculative_config=None, **common), "auto": LLM(options.model, **common)}
    print(f"loaded in {perf_counter() - began:.1f} s; auto is {llms['auto'].speculative}")
    for llm in llms.values():  # what is made once is not measured
        answer(llm, [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    cells = [
        (float(t), int(p), int(a))
        for t in options.temperatures.split(",")
        for p in options.prompts.split(",")
        for a in options.answers.split(",")
    ]
    for number in range(options.pairs):
        random.Random(number).shuffle(cells)
        for cell in cells:
            temperature, length, tokens = cell
            key = {"temperature": temperature, "prompt": length, "answer": tokens, "number": number}
            if any(key.items() <= pair.items() for pair in kept["pairs"]):
                continue
            if perf_counter() - began > options.seconds:
                return
            prompts = texts(llms["plain"].get_tokenizer(), length, 1000 * length + tokens)
            prompt = [next(prompts) for _ in range(number + 1)][-1]
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=True)
            order = ["plain", "auto"] if number % 2 else ["auto", "plain"]
            results = {name: answer(llms[name], prompt, params) for name in order}
            same = results["plain"].pop("ids") == results["auto"].pop("ids")
            kept["pairs"].append(key | results | {"same": same})
            options.out.write_text(json.dumps(kept, indent=1))
    show(kept["pairs"])


if __name__ == "__main__":
    main()
