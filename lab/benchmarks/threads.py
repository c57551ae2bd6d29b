"""Tokens/s and slow rounds with fixed numbers of threads and with ``threads="auto"``, beside busy programs.

python lab/benchmarks/threads.py MODEL --out FILE [--seconds 140] [--llama-server PROGRAM] [--show]

Each cell (busy programs, their priority, threads, plain or ``auto`` speculation) decodes the same answers. Cells take
turns, and FILE keeps what has been measured, so that a run may be ended and gone on with. llama.cpp decodes plainly,
with the same numbers of threads.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from auto import serve

from forerun import LLM, SamplingParams
from forerun.models.files.inventory import here

ANIMALS = ("fox", "heron", "mole", "pike", "crow", "hare", "newt", "swan")
"""One for each run, so that no drafter remembers the answer."""
NEIGHBOURS = "0/0,1/0,2/0,4/0,1/10,2/10,4/10"
"""Busy programs and their niceness."""


Run = dict[str, Any]
"""A rate in tokens per second, the seconds of ``rounds``, and token ``ids``."""
Decode = Callable[[int, int], Run]
"""By a run's number and how many tokens it takes."""


def prompt(run: int) -> str:
    return f"Write a short story about a {ANIMALS[run % len(ANIMALS)]} and a river."


def decode(llm: LLM, streams: int, run: int, tokens: int) -> Run:
    """Tokens per second of as many answers together, the first one's tokens, and the seconds of their rounds. With 0
    streams, of a prompt of so many tokens."""
    rounds: list[float] = []
    step = llm.engine.step

    def timed() -> object:
        began = time.perf_counter()
        updates = step()
        rounds.append(time.perf_counter() - began)
        return updates

    llm.engine.step = timed  # type: ignore[method-assign, assignment]
    params = SamplingParams(temperature=0.0, max_tokens=tokens if streams else 1, ignore_eos=True)
    ids = [llm.get_tokenizer().encode(f"{i}. {prompt(run)}") for i in range(streams or 1)]
    if not streams:
        ids = [(ids[0] * tokens)[:tokens]]
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    llm.engine.step = step  # type: ignore[method-assign]
    return {"rate": tokens * len(ids) / seconds, "rounds": rounds[1:] or rounds, "ids": outputs[0].outputs[0].token_ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", type=int, default=1, help="answers together; 0: a prompt of --tokens")
    parser.add_argument("--threads", default="1,2,4,auto")
    parser.add_argument("--methods", default="plain,auto")
    parser.add_argument("--neighbours", default=NEIGHBOURS, help="busy programs and their niceness, NUMBER/NICE,...")
    parser.add_argument("--llama-server", help="llama.cpp's program")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    done = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {}
    if not given.show:
        with ExitStack() as stack:
            measure(given, done, engines(given, stack))
    show(done)


def engines(given: argparse.Namespace, stack: ExitStack) -> dict[tuple[str, str], Decode]:
    """What decodes a run's answer, by name and number of threads."""
    made: dict[tuple[str, str], Decode] = {}
    for count in given.threads.split(","):
        for name in given.methods.split(","):
            llm = LLM(
                given.model,
                speculative_config=None if name == "plain" else name,
                threads=count if count == "auto" else int(count),
                max_model_len=2048,
                prefix_caching=None if given.streams else False,  # cells read the same prompts
            )
            made[name, count] = partial(decode, llm, given.streams)
        if given.llama_server and count != "auto":
            request = serve(stack, given.llama_server, here(given.model), 18090 + int(count), int(count))
            made["llama.cpp", count] = partial(outside, request, llm)
    return made


def outside(request: Callable[..., dict[str, Any]], llm: LLM, run: int, tokens: int) -> Run:
    """The same answer by llama.cpp's server, whose rounds are not seen."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    result = request([llm.get_tokenizer().encode(prompt(run))], params)
    return {"rate": result["tokens"] / result["seconds"], "rounds": [], "ids": []}


def measure(given: argparse.Namespace, done: dict[str, list[Run]], methods: dict[tuple[str, str], Decode]) -> None:
    end = time.monotonic() + given.seconds
    neighbours = [pair.split("/") for pair in given.neighbours.split(",")]
    cells = [(name, int(number), int(nice), threads) for name, threads in methods for number, nice in neighbours]
    while time.monotonic() < end:
        fewest = min(len(done.get(str(cell), [])) for cell in cells)
        number, nice = next(cell[1:3] for cell in cells if len(done.get(str(cell), [])) == fewest)
        spin = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(["nice", "-n", str(nice), *spin]) for _ in range(number)]
        try:
            for cell in cells:
                if cell[1:3] == (number, nice) and len(done.get(str(cell), [])) == fewest and time.monotonic() < end:
                    done.setdefault(str(cell), []).append(methods[cell[0], cell[3]](fewest, given.tokens))
        finally:
            for process in busy:
                process.kill()
                process.wait()
        given.out.write_text(json.dumps(done), "utf-8")


def show(done: dict[str, list[Run]]) -> None:
    print(
        "(speculation, busy programs, niceness, threads): tokens/s; 99th percentile, slowest of a round / median; runs"
    )
    for cell, runs in sorted(done.items(), key=lambda item: ast.literal_eval(item[0])):
        rounds = sorted(second for run in runs for second in run["rounds"])
        slow = [rounds[int(0.99 * (len(rounds) - 1))], rounds[-1]] if rounds else []
        tail = "".join(f" {second / statistics.median(rounds):6.1f}" for second in slow)
        print(f"{cell:34} {statistics.median(run['rate'] for run in runs):8.1f} {tail:14} {len(runs):4}")
    answers = {(index, str(run["ids"])) for runs in done.values() for index, run in enumerate(runs) if run["ids"]}
    print(
        f"{len(answers)} different answers to {len({index for index, _ in answers})} prompts; torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
