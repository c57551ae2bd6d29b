"""``python -m forerun_lab.bench.replicas``: two replicas of one thread compared with one process of two threads, and
routing by cached prefixes compared with random routing.

Contenders alternate on the same requests, through the API in this process, without sockets. Ratios are medians over
pairs, with 95 % confidence intervals of the median. Losing rows are kept. Needs ``forerun[ray]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

import forerun
from forerun.core.errors import ForerunError
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.llm import LLM
from forerun.measure.config import HELD_OUT, RANDOM
from forerun.measure.environment import processor
from forerun.measure.page import markdown
from forerun.measure.prompts import make_prompts
from forerun.sampling.params import SamplingParams
from forerun_lab.intervals import median_interval

if TYPE_CHECKING:
    from forerun.engine.client import EngineClient
    from forerun.scale.pool import ReplicaPool
    from forerun.serve.batch import Ask

PAGE_SIZE = 64
NUMBER = 2
"""Number of replicas, each with one thread."""
NO_LIMIT = 10.0**9


@dataclass(frozen=True)
class ReplicaLoad:
    """One contender's answers to one repetition's requests."""

    seconds: float
    tokens: int
    texts: list[str]


@dataclass(frozen=True)
class FirstToken:
    """A request's seconds to its first token, its prompt tokens, and how many of them were cached."""

    seconds: float
    prompt: int
    cached: int


async def load(ask: Ask, bodies: Sequence[dict[str, Any]], streams: int) -> ReplicaLoad:
    """Send every body, ``streams`` at a time. Raises ForerunError for one that is refused."""
    slots = asyncio.Semaphore(streams)

    async def one(body: dict[str, Any]) -> tuple[str, int]:
        async with slots:
            status, answer = await ask("/v1/completions", body)
        if status != 200:
            raise ForerunError(answer["error"]["message"])
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    began = perf_counter()
    answers = await asyncio.gather(*map(one, bodies))
    return ReplicaLoad(perf_counter() - began, sum(tokens for _, tokens in answers), [text for text, _ in answers])


async def first_tokens(
    pool: EngineClient, prompts: Sequence[Sequence[int]], params: SamplingParams, streams: int
) -> list[FirstToken]:
    """Send every prompt, ``streams`` at a time."""
    slots = asyncio.Semaphore(streams)

    async def one(prompt: Sequence[int]) -> FirstToken:
        async with slots:
            began = perf_counter()
            stream = await pool.submit(prompt, params)
            await stream.read()
            waited = perf_counter() - began
            async for _ in stream:
                pass
            return FirstToken(waited, len(prompt), stream.jobs[0].metrics.num_cached_tokens)

    return list(await asyncio.gather(*map(one, prompts)))


async def interleaved(contenders: dict[str, Callable[[int], Awaitable[Any]]], turns: int) -> dict[str, list[Any]]:
    """Each contender's results of every repetition after an uncounted one; the order alternates."""
    result: dict[str, list[Any]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        names = list(contenders) if turn % 2 else list(contenders)[::-1]
        for name in names:
            result[name].append(await contenders[name](turn))
    return {name: kept[1:] for name, kept in result.items()}


def throughput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of one process with ``NUMBER`` threads, and of ``NUMBER`` replicas."""
    from forerun.scale.cluster import Cluster, Replicas, cluster
    from forerun.serve.app import create_app
    from forerun.serve.batch import in_process
    from forerun.serve.options import ServerOptions

    torch.set_num_threads(NUMBER)
    drafters = json.loads(args.speculative_config)
    engine = {"model": args.model, "page_size": PAGE_SIZE, "max_num_seqs": max(16, args.streams)}
    llm = LLM(**engine, speculative_config=drafters)
    options = ServerOptions(request_timeout=NO_LIMIT)
    prompts = make_prompts(HELD_OUT, llm.tokenizer, count=args.requests * (args.turns + 1), length=args.prompt_tokens)
    one = AsyncEngine(llm.engine)

    def bodies(turn: int) -> list[dict[str, Any]]:
        given = {"max_tokens": args.tokens, "temperature": args.temperature, "ignore_eos": True}
        chosen = prompts[turn * args.requests : (turn + 1) * args.requests]
        return [{"prompt": prompt, "seed": seed, **given} for seed, prompt in enumerate(chosen)]

    async def measure(handle: Any) -> dict[str, list[ReplicaLoad]]:
        pool = await Cluster(handle).pool(4 * args.requests)
        asks = {
            f"one process, {NUMBER} threads": in_process(create_app(one, options)),
            f"{NUMBER} replicas, 1 thread each": in_process(create_app(pool, options)),
        }

        def contender(ask: Ask) -> Callable[[int], Awaitable[ReplicaLoad]]:
            return lambda turn: load(ask, bodies(turn), args.streams)

        return await interleaved({name: contender(ask) for name, ask in asks.items()}, args.turns)

    try:
        with cluster(Replicas(engine=engine, speculative=drafters, num_replicas=NUMBER)) as (handle,):
            result = asyncio.run(measure(handle))
    finally:
        one.close()
    base = next(iter(result.values()))
    return [_of_load(name, loads, base) for name, loads in result.items()]


def _of_load(name: str, loads: Sequence[ReplicaLoad], base: Sequence[ReplicaLoad]) -> dict[str, Any]:
    speeds = [each.tokens / each.seconds for each in loads]
    ratios = [before.seconds / own.seconds for before, own in zip(base, loads)]
    pairs = [pair for before, own in zip(base, loads) for pair in zip(before.texts, own.texts)]
    return {
        "contender": name,
        "tokens_per_second": median(speeds),
        "speedup": median(ratios),
        "speedup_interval": median_interval(ratios),
        "same": mean(before == own for before, own in pairs),
    }


def routing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times to first token and hit rates of affine and of random routing, over prompts with shared prefixes. Each
    replica's cache holds a fraction ``args.room`` of the prefixes, its answers included."""
    from forerun.scale.cluster import Cluster, Replicas, cluster

    drafters = json.loads(args.speculative_config)
    whole = -(-(args.prefix_tokens + args.tail_tokens + args.first_tokens) // PAGE_SIZE)
    kept = int(args.room * args.prefixes * (args.prefix_tokens // PAGE_SIZE))
    engine = {
        "model": args.model, "page_size": PAGE_SIZE, "max_num_seqs": max(4, args.clients),
        "num_pages": max(kept, args.clients * whole),
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=args.first_tokens, ignore_eos=True)
    names = {"affine": True, "by chance": False}

    async def measure(handles: Sequence[Any]) -> dict[str, list[list[FirstToken]]]:
        pools = [await Cluster(handle).pool(1024) for handle in handles]
        tokenizer = pools[0].tokenizer
        prefixes = make_prompts(HELD_OUT, tokenizer, count=args.prefixes, length=args.prefix_tokens)
        count = args.prefixes * args.visits * (args.turns + 1)
        tails = make_prompts(RANDOM, tokenizer, count=count, length=args.tail_tokens)

        def prompts(turn: int) -> list[list[int]]:
            order = list(range(args.prefixes)) * args.visits
            random.Random(turn).shuffle(order)
            return [prefixes[each] + tails[turn * len(order) + index] for index, each in enumerate(order)]

        def contender(pool: ReplicaPool) -> Callable[[int], Awaitable[list[FirstToken]]]:
            return lambda turn: first_tokens(pool, prompts(turn), params, args.clients)

        return await interleaved({name: contender(pool) for name, pool in zip(names, pools)}, args.turns)

    replicas = [
        Replicas(engine=engine, speculative=drafters, num_replicas=NUMBER, affine=affine) for affine in names.values()
    ]
    with cluster(*replicas) as handles:
        result = asyncio.run(measure(handles))
    base = result["by chance"]
    return [_of_first(name, turns, base) for name, turns in result.items()]


def _of_first(name: str, turns: Sequence[Sequence[FirstToken]], base: Sequence[Sequence[FirstToken]]) -> dict[str, Any]:
    every = [each for turn in turns for each in turn]
    waited = sorted(each.seconds for each in every)
    ratios = [mean(e.seconds for e in own) / mean(e.seconds for e in before) for before, own in zip(base, turns)]
    return {
        "routing": name,
        "hit_rate": sum(each.cached for each in every) / sum(each.prompt for each in every),
        "first_token_mean": mean(waited),
        "first_token_p50": median(waited),
        "first_token_p95": waited[ceil(0.95 * len(waited)) - 1],
        "ratio": median(ratios),
        "ratio_interval": median_interval(ratios),
    }


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """Versions, machine and settings. Raises ModuleNotFoundError without Ray."""
    return {
        "forerun": forerun.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": version("ray"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "settings": {name: value for name, value in vars(args).items() if name not in ("json", "table")},
    }


def tables(result: dict[str, Any]) -> str:
    """Both tables, as Markdown."""
    throughput = [
        [row["contender"], f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}",
         _between(row["speedup_interval"]), f"{row['same']:.0%}"]
        for row in result["throughput"]
    ]  # fmt: skip
    routing = [
        [row["routing"], f"{row['hit_rate']:.0%}",
         *(f"{1000 * row[f'first_token_{name}']:.1f} ms" for name in ("mean", "p50", "p95")),
         f"{row['ratio']:.2f}", _between(row["ratio_interval"])]
        for row in result["routing"]
    ]  # fmt: skip
    first = markdown(["", "tokens/s", "speed-up", "95 %", "same answers"], throughput)
    return first + "\n\n" + markdown(["routing", "cached", "first token, mean", "p50", "p95", "ratio", "95 %"], routing)


def _between(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun_lab.bench.replicas", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="forerun:target")
    default = {"method": "draft_model", "model": "forerun:draft", "num_speculative_tokens": 3, "length": "adaptive"}
    parser.add_argument("--speculative-config", default=json.dumps(default))
    parser.add_argument("--turns", type=int, default=30, help="pairs, beside one that is not counted")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64, help="of each turn")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--prefixes", type=int, default=12)
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--tail-tokens", type=int, default=32, help="that no other prompt has")
    parser.add_argument("--visits", type=int, default=4, help="of each prefix in a turn")
    parser.add_argument("--first-tokens", type=int, default=8, help="of each answer to them")
    parser.add_argument("--clients", type=int, default=4, help="prompts at a time")
    parser.add_argument("--room", type=float, default=0.67, help="share of the prefixes that one replica can hold")
    parser.add_argument("--json", action="store_true", help="print one object instead of tables")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print such an object's tables, and end")
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    try:
        about = environment(args)
        result = {"environment": about, "throughput": throughput(args), "routing": routing(args)}
    except ModuleNotFoundError as error:
        sys.exit(f"error: this needs {error.name}: pip install 'forerun[ray]'")
    except ForerunError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result, indent=1) if args.json else tables(result))


if __name__ == "__main__":
    main()
