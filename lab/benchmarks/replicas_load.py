"""A plan on paper beside two real replicas: tokens a second, and 50th and 95th percentiles.

    python lab/benchmarks/replicas_load.py [--model smollm2] [--rate 1.5] [--requests 120] [--out FILE.json]

Draws a load and writes it as a trace; measures a replica with ``forerun plan --load``, as many of these at a time as
replicas share this machine; asks ``forerun serve --replicas`` for the same requests at the same times over HTTP, and
puts what was seen beside what was said. What a request spends outside of an engine, and what it takes to tell tokens,
is measured before, by requests that are alone, and by requests that are alone with a replica while every replica has
one: front and client share the processors with all of them. A request of the load meets either, by how busy the plan
says that replicas are. Needs ``forerun[serve,ray]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from replicas import events

from forerun_lab.load.arrivals import Arrival, SyntheticLoad, Trace
from forerun_lab.load.fleet import Spread, affine, serve, simulate
from forerun_lab.load.run import read_costs

FORERUN = [sys.executable, "-u", "-m", "forerun"]
TIMES = ("ttft", "tpot", "latency")
ALONE = 8
"""Requests that are sent one by one before the load, and then to each replica while the others have theirs."""
VOCABULARY = range(300, 4000)
"""Ids that every model here has, for prompts that say nothing."""


@dataclass(frozen=True)
class Seen:
    """Of one request, seconds after it was sent."""

    first: float
    last: float
    ended: float
    """On the load's clock."""
    tokens: int


def prompt(number: int, one: Arrival, seed: int) -> list[int]:
    text, own = random.Random(f"{seed} text {one.prefix}"), random.Random(f"{seed} own {number}")
    shared = text.choices(VOCABULARY, k=one.shared)
    return shared + own.choices(VOCABULARY, k=one.prompt - one.shared)


async def ask(
    http: httpx2.AsyncClient, number: int, one: Arrival, seed: int, began: float, plainly: bool = False
) -> Seen:
    body = {"prompt": prompt(number, one, seed), "max_tokens": one.output, "ignore_eos": True, "temperature": 0}
    body |= {"speculative": {"method": "none"}} if plainly else {}
    sent, first, tokens = time.perf_counter(), 0.0, 0
    async for event in events(http, body):
        if event["choices"] and not first:
            first = time.perf_counter()
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    now = time.perf_counter()
    return Seen(first - sent, now - sent, now - began, tokens)


async def load(
    url: str, arrivals: list[Arrival], alone: Arrival, seed: int, replicas: int
) -> tuple[list[list[Seen]], list[Seen]]:
    """What requests see that are alone, and alone with a replica, and then the load's."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def interleaved(number: int) -> list[Seen]:
            # Without drafts, so that how well they are guessed does not count.
            numbers = range(ALONE * number, ALONE * (number + 1))
            return [await ask(http, -1 - n, alone, seed, 0.0, plainly=True) for n in numbers]

        single = [await interleaved(replicas)]
        single.append([seen for turn in await asyncio.gather(*map(interleaved, range(replicas))) for seen in turn])
        began = time.perf_counter()

        async def one(number: int, arrival: Arrival) -> Seen:
            await asyncio.sleep(arrival.at - (time.perf_counter() - began))
            return await ask(http, number, arrival, seed, began)

        return single, await asyncio.gather(*[one(number, arrival) for number, arrival in enumerate(arrivals)])


def served(model: str, replicas: int, options: list[str], arrivals: list[Arrival], alone: Arrival, seed: int):
    command = [*FORERUN, "serve", "--model", model, "--replicas", str(replicas), "--threads", "1", "--port", "0"]
    with subprocess.Popen([*command, *options, "--no-request-log"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("listening on"):
                break
        else:
            sys.exit("the server did not start")
        result = asyncio.run(load(line.split()[-1], arrivals, alone, seed, replicas))
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    return result


def planned(model: str, replicas: int, options: list[str], methods: str, trace: Path) -> None:
    """Measure with ``forerun plan``, by as many processes as there are replicas: what one sees while all work."""
    command = [*FORERUN, "plan", "--model", model, "--load", str(trace), "--replicas", str(replicas), "--json"]
    command += ["--methods", methods, "--prompt-set", "random", "--threads", "1", *options]
    running = []
    for number in range(replicas):
        with trace.with_name(f"plan{number}.json").open("w") as out:
            running.append(subprocess.Popen(command, stdout=out))
    if any(process.wait() for process in running):
        sys.exit("forerun plan failed")


def compare(trace: Trace, costs: Path, replicas: int, single: list[list[Seen]], seen: list[Seen], alone: Arrival):
    """Said, seen, and the one over the other."""
    price, limits, _ = read_costs(costs)
    idle = serve(replace(price, ways=price.ways[:1]), limits, Trace([alone]), 1)
    busy = serve(price, limits, trace, replicas).utilisation
    outside = [max(0.0, median(one.first for one in result) - idle.ttft.p50) for result in single]
    each = [median((one.last - one.first) / (alone.output - 1) for one in result) for result in single]
    telling = [max(0.0, took - idle.tpot.p50) for took in each]
    played = [
        simulate(replace(price, telling=more), limits, trace.arrivals, replicas, affine(limits.page))[0]
        for more in telling
    ]
    draw, said = random.Random(0), []
    for both in zip(*played):
        which = int(draw.random() < busy)
        job, out = both[which], outside[which]
        said.append((job.first - job.arrival.at + out, job.done - job.arrival.at + out))
    reported = serve(replace(price, telling=telling[0]), limits, trace, replicas)
    speed = sum(one.tokens for one in seen) / (max(one.ended for one in seen) - trace.arrivals[0].at)
    figures = {"tokens_per_second": (reported.tokens_per_second, speed)}
    for name, one, other in zip(TIMES, times(said, trace), times([(s.first, s.last) for s in seen], trace)):
        for part in ("p50", "p95"):
            figures[f"{name}_{part}"] = (getattr(one, part), getattr(other, part))
    rows = {name: {"said": one, "seen": other, "ratio": one / other} for name, (one, other) in figures.items()}
    return {"outside": outside, "telling": telling, "utilisation_said": busy, "figures": rows}


def times(pairs: Sequence[tuple[float, float]], trace: Trace) -> list[Spread]:
    """``TIMES``, of requests' seconds to the first token and to the last."""
    firsts, lasts = zip(*pairs)
    further = [(b - a) / (n - 1) for (a, b), asked in zip(pairs, trace.arrivals) if (n := asked.output) > 1]
    return [Spread.of(values) for values in (firsts, further, lasts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--shared-prefix", type=float, default=0.5)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--method", default="ngram", help="who drafts; none: plain decoding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    drawn = SyntheticLoad(
        given.rate, given.prompt_tokens, given.max_tokens, 0.5, given.shared_prefix, given.prefixes, 2048, given.seed
    )
    arrivals = list(drawn.part(1).arrivals[: given.requests])
    alone = Arrival(0.0, given.prompt_tokens, given.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("".join(json.dumps(line(one)) + "\n" for one in arrivals))
        planned(given.model, given.replicas, [], given.method, trace)
        options = ["--spec-method", given.method]
        single, seen = served(given.model, given.replicas, options, arrivals, alone, given.seed)
        results = compare(Trace(arrivals), trace.with_name("plan0.json"), given.replicas, single, seen, alone)
        costs = json.loads(trace.with_name("plan0.json").read_text())
    settings = {key: value for key, value in vars(given).items() if key != "out"}
    result = {"settings": settings, **results, "costs": costs["costs"], "environment": costs["environment"]}
    for name, row in results["figures"].items():
        print(f"{name:20} said {row['said']:8.4g}  seen {row['seen']:8.4g}  {row['ratio']:.2f}")
    both = zip(results["outside"], results["telling"])
    reported = ", ".join(f"outside {1000 * out:.1f} ms, telling {1000 * more:.2f} ms" for out, more in both)
    print(f"alone, and while all have one: {reported}; busy {results['utilisation_said']:.0%}")
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


def line(one: Arrival) -> dict[str, Any]:
    reported: dict[str, Any] = {"arrival": one.at, "prompt_tokens": one.prompt, "output_tokens": one.output}
    return reported if one.prefix is None else reported | {"prefix": one.prefix, "prefix_tokens": one.shared}


if __name__ == "__main__":
    main()
