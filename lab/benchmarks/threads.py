"""Tokens/s and slow rounds with fixed numbers of threads and with ``threads="auto"``, beside busy programs.

python lab/benchmarks/threads.py MODEL --out FILE [--seconds 140] [--show]

Each cell (busy programs, their priority, threads, plain or ``auto`` speculation) decodes the same answers. Cells take
turns, and FILE keeps what has been measured, so that a run may be ended and gone on with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from forerun import LLM, SamplingParams

ANIMALS = ("fox", "heron", "mole", "pike", "crow", "hare", "newt", "swan")
"""One for each run, so that no drafter remembers the answer."""
NEIGHBOURS = ((0, 0), (1, 0), (2, 0), (4, 0), (2, 10), (4, 10))
"""Busy programs and their niceness."""


def decode(llm: LLM, run: int, tokens: int) -> dict[str, object]:
    """One answer's tokens per second, tokens, and the seconds of its rounds."""
    rounds: list[float] = []
    step = llm.engine.step

    def timed() -> object:
        began = time.perf_counter()
        updates = step()
        rounds.append(time.perf_counter() - began)
        return updates

    llm.engine.step = timed  # type: ignore[method-assign, assignment]
    prompt = f"Write a short story about a {ANIMALS[run % len(ANIMALS)]} and a river."
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([prompt], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    llm.engine.step = step  # type: ignore[method-assign]
    return {"rate": tokens / seconds, "rounds": rounds[1:], "ids": outputs[0].outputs[0].token_ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    done = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {}
    if not given.show:
        measure(given, done)
    show(done)


def measure(given: argparse.Namespace, done: dict[str, list[dict[str, object]]]) -> None:
    end = time.monotonic() + given.seconds
    methods = {
        (name, threads): LLM(given.model, speculative_config=config, threads=threads)
        for name, config in (("plain", None), ("auto", "auto"))
        for threads in (1, 2, "auto")
    }
    cells = [(name, busy, threads) for name, threads in methods for busy in NEIGHBOURS]
    while time.monotonic() < end:
        fewest = min(len(done.get(str(cell), [])) for cell in cells)
        number, nice = next(cell[1] for cell in cells if len(done.get(str(cell), [])) == fewest)
        spin = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(["nice", "-n", str(nice), *spin]) for _ in range(number)]
        try:
            for cell in cells:
                if cell[1] == (number, nice) and len(done.get(str(cell), [])) == fewest and time.monotonic() < end:
                    done.setdefault(str(cell), []).append(decode(methods[cell[0], cell[2]], fewest, given.tokens))
        finally:
            for process in busy:
                process.kill()
                process.wait()
        given.out.write_text(json.dumps(done), "utf-8")


def show(done: dict[str, list[dict[str, object]]]) -> None:
    print(f"{'speculation, (busy, nice), threads':44} tokens/s  p99 of a round / median   runs")
    for cell, runs in done.items():
        rounds = sorted(second for run in runs for second in run["rounds"])  # type: ignore[attr-defined]
        tail = rounds[int(0.99 * (len(rounds) - 1))] / statistics.median(rounds)
        print(f"{cell:44} {statistics.median(run['rate'] for run in runs):8.1f}  {tail:12.1f} {len(runs):17}")  # type: ignore
    answers = {(index, str(run["ids"])) for runs in done.values() for index, run in enumerate(runs)}
    print(
        f"{len(answers)} different answers to {len({index for index, _ in answers})} prompts; torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
