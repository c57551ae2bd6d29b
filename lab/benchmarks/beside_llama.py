"""Decoding, several rows and prefill of GGUF files beside llama.cpp's, in turns.

python lab/benchmarks/beside_llama.py FILE... --llama-bench PROGRAM [--threads 1 2] [--turns 3] [--tokens 64]
    [--prompts 512 2000] [--rows 5 8 16]

Decoding: seconds of a token behind an empty prompt, ours with sampling at T = 0, llama.cpp's without; its share of the
read bandwidth counts the bytes of weights alone. Prefill: tokens per second of a prompt, ours until its first token is
there. Rows: forwards of several rows over one row's. Ratios are of neighbours in one turn. Intervals: 95 %
of the median, or the least and the most of up to five turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.measure.environment import processor, read_bandwidth
from forerun.models.run.base import new_attention
from forerun_lab.intervals import shown
from hybrids import rounds

CONTEXT = 4096


def llama(program: str, file: Path, threads: int, *options: str) -> list[float]:
    """Tokens per second of each test."""
    command = [program, "-m", str(file), "-t", str(threads), "-o", "json", *options]
    made: list[dict[str, Any]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return [test["avg_ts"] for test in made]


def decode(llm: LLM, tokens: int) -> float:
    """Tokens per second behind the first one."""
    seen: list[float] = []
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5]}, params, on_update=lambda update: seen.append(perf_counter()))
    return tokens / (seen[-1] - seen[0])


def prefill(llm: LLM, count: int) -> float:
    """Prompt tokens per second, the first new token included."""
    prompt = torch.randint(5, 1000, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    began = perf_counter()
    llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return count / (perf_counter() - began)


def rows(llm: LLM, given: argparse.Namespace, file: Path, threads: int) -> dict[str, list[float]]:
    """Forwards of several rows over one row's, ours and llama.cpp's: a ratio of medians for each turn."""
    counts = [1, *given.rows]
    every = {count: rounds(llm.model, new_attention(llm.model, max_seqs=1, max_len=512), count) for count in counts}
    result: dict[str, list[float]] = {}
    listed = ",".join(map(str, counts))
    for _ in range(given.turns):
        times = {count: median(islice(every[count], 1, 12)) for count in counts}
        speeds = llama(given.llama_bench, file, threads, "-p", listed, "-n", "0", "-r", "11")
        for count, speed in zip(counts, speeds, strict=True):
            result.setdefault(f"{count} rows", []).append(times[count] / times[1])
            result.setdefault(f"llama.cpp's {count}", []).append(count / speed * speeds[0])
    return {name: ratios for name, ratios in result.items() if name not in ("1 rows", "llama.cpp's 1")}


def measure(file: Path, threads: int, given: argparse.Namespace) -> None:
    llm = LLM(str(file), speculative_config=None, threads=threads, max_model_len=CONTEXT, enable_prefix_caching=False)
    torch.set_num_threads(threads)
    decode(llm, 4)
    tests: list[tuple[str, Callable[[], float], tuple[str, ...]]] = []
    if given.tokens:
        tests.append(("decode", lambda: decode(llm, given.tokens), ("-p", "0", "-n", str(given.tokens))))
    for count in given.prompts:
        test = ("-p", str(count), "-n", "0")
        tests.append((f"prefill {count}", lambda count=count: prefill(llm, count), test))  # type: ignore[misc]
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    shares, read = [], llm.model.info.token_bytes
    for _ in range(given.turns):
        for name, run, options in tests:
            ours.setdefault(name, []).append(run())
            theirs.setdefault(name, []).append(llama(given.llama_bench, file, threads, "-r", "1", *options)[0])
        if given.tokens:
            shares.append(read * ours["decode"][-1] / read_bandwidth(torch.device("cpu")))
    cells = [f"{file.stem}, {threads} thread(s)"]
    for name, values in ours.items():
        over = shown([mine / other for mine, other in zip(values, theirs[name], strict=True)])
        cells.append(f"{name} {median(values):.1f}, {over} of {median(theirs[name]):.1f}")
    if given.tokens:
        cells.append(f"share {shown(shares)}")
    if given.rows:
        cells += [f"{name} {shown(ratios)}" for name, ratios in rows(llm, given, file, threads).items()]
    print("; ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="decoded tokens; 0: no decoding")
    parser.add_argument("--prompts", nargs="*", type=int, default=[])
    parser.add_argument("--rows", nargs="*", type=int, default=[])
    given = parser.parse_args()
    print(processor(), flush=True)
    for file in given.files:
        for threads in given.threads:
            measure(file, threads, given)


if __name__ == "__main__":
    main()
