"""``python -m forerun_lab.bench.overhead``: the server's overhead over the engine alone."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple

import torch

from forerun.core.errors import ForerunError
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.measure.config import HELD_OUT
from forerun.measure.prompts import make_prompts
from forerun.sampling.params import SamplingParams
from forerun.serve.app import create_app
from forerun.serve.options import ServerOptions
from forerun.serve.run import DrainingServer, open_socket
from forerun.speculate.round import Round

CLIENT = Path(__file__).with_name("load.py")


@dataclass(frozen=True)
class Overhead:
    """The same requests through HTTP, from a client process, and on the engine alone.

    A served stream is idle between one answer and its next request, so rounds hold fewer streams than if all requests
    wait in the engine's queue. Fractions therefore compare with ``alike``: the engine alone, with every request added
    after as many rounds as through the server, which makes the same rounds.
    """

    concurrency: int
    alone: float
    """Tokens per second of the engine alone with all requests in its queue."""
    alike: float
    """The same with the served requests' arrivals."""
    served: float
    """Tokens per second that the client received."""
    wall: float
    """Fraction of the served time that the engine alone does not need for these rounds, waits for requests included."""
    processor: float
    """Fraction of the server's processor time, over all threads, that the engine alone does not need."""
    of_round: float | None
    """Fraction of the served rounds' time, from end to end, that the engine's thread spends outside drafting,
    verification and acceptance, or waiting for the interpreter or a processor. Mean over repetitions, over rounds in
    which all streams decode without prefill; None if there were none."""
    error: float | None
    """Its standard error; None for fewer than two repetitions."""
    alone_of_round: float | None
    """The same on the engine alone."""


Arrivals = Sequence[tuple[int, Sequence[int]]]
"""For each request the number of rounds before its arrival, and its prompt."""


class ArrivalRecorder(AsyncEngine):
    """Records when requests reach the engine."""

    def __init__(self, engine: Engine) -> None:
        self.arrivals: list[tuple[int, Sequence[int]]] = []
        self.spent: list[float] = []
        """Processor time at each arrival."""
        super().__init__(engine)

    def _add(self, stream: Any, prompt: Sequence[int], params: Any, choices: Any) -> None:
        self.arrivals.append((self.engine.stats.rounds, prompt))
        self.spent.append(process_time())
        super()._add(stream, prompt, params, choices)


class RoundTimes:
    """Times consecutive rounds of an engine in which ``streams`` sequences decode without prefill, inside a ``with``.
    Sums seconds ``between`` the ends of two rounds, ``inside`` drafting, verification and acceptance of the second, and
    ``idle`` ones, in which its thread did not compute."""

    def __init__(self, engine: Engine, streams: int) -> None:
        self.engine = engine
        self.streams = streams
        self.between = self.inside = self.idle = 0.0
        self.rounds = 0
        self._latest: tuple[float, float] | None = None

    def __enter__(self) -> RoundTimes:
        self._latest = None
        self.engine.on_round = self.see
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.on_round = None

    def see(self, done: Round) -> None:
        now = perf_counter(), thread_time()
        alike = len(done.verdicts) == self.streams and all(verdict.fed == 1 for verdict in done.verdicts)
        if alike and self._latest is not None:
            seconds, (wall, spent) = done.seconds, self._latest
            self.rounds += 1
            self.between += now[0] - wall
            self.inside += seconds.draft + seconds.verify + seconds.accept
            self.idle += max(0.0, now[0] - wall - (now[1] - spent))
        self._latest = now if alike else None

    @property
    def share(self) -> float | None:
        """Upper bound of the fraction outside or idle (time that was both counts twice); None without such rounds."""
        return min(1.0, (self.between - self.inside + self.idle) / self.between) if self.rounds else None


def alone(engine: Engine, arrivals: Arrivals, params: SamplingParams, speculate: bool) -> tuple[float, float]:
    """Seconds, and processor seconds, of these requests on an idle engine."""
    todo, before = deque(arrivals), engine.stats.rounds
    with torch.inference_mode():
        began, spent = perf_counter(), process_time()
        while todo or engine.busy:
            while todo and (not engine.busy or todo[0][0] <= engine.stats.rounds - before):
                engine.add(todo.popleft()[1], params, speculate=speculate)
            engine.step()
        return perf_counter() - began, process_time() - spent


@dataclass(frozen=True)
class ServedRun:
    seconds: float
    processor: float
    tokens: int
    arrivals: Arrivals


def served(engine: Engine, bodies: Sequence[dict[str, Any]], streams: int) -> ServedRun:
    """The same through a server in this process and a client in another. Raises ForerunError if the client fails."""
    asynchronous = ArrivalRecorder(engine)
    app = create_app(asynchronous, ServerOptions())
    listener = open_socket("127.0.0.1", 0)
    server = DrainingServer(app, asynchronous, 5.0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    first = {**bodies[0], "prompt": [0], "max_tokens": 1}
    request = {"host": "127.0.0.1", "port": listener.getsockname()[1], "first": first, "bodies": bodies}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(CLIENT)],
            input=json.dumps({**request, "streams": streams}),
            capture_output=True,
            text=True,
            check=False,
        )
        spent = process_time()
    finally:
        server.should_exit = True
        thread.join()
    if done.returncode:
        raise ForerunError(f"the load client failed: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout)
    came = asynchronous.arrivals[1:]
    arrivals = [(rounds - came[0][0], prompt) for rounds, prompt in came]
    return ServedRun(result["seconds"], spent - asynchronous.spent[1], result["tokens"], arrivals)


def measure(
    llm: LLM, concurrency: int, *, requests: int, tokens: int, temperature: float, stream: bool, repeats: int
) -> Overhead:
    """Medians, or means, over ``repeats`` in which engine and server alternate, after one that is not counted. As in a
    server, earlier objects are frozen for the garbage collector. The engine's ``max_num_seqs`` should be
    ``concurrency``, so that both have as many requests in flight."""
    prompts = make_prompts(HELD_OUT, llm.tokenizer, count=requests, length=64)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=tokens, ignore_eos=True)
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 0, "max_tokens": tokens, "ignore_eos": True}
    if stream:
        sampling |= {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"prompt": prompt, **sampling} for prompt in prompts]
    gc.collect()
    gc.freeze()
    try:
        turns = [_turn(llm.engine, concurrency, bodies, prompts, params) for _ in range(repeats + 1)][1:]
    finally:
        gc.unfreeze()
    count = requests * tokens
    fractions = [turn.of_round for turn in turns if turn.of_round is not None]
    lone = [turn.alone_of_round for turn in turns if turn.alone_of_round is not None]
    return Overhead(
        concurrency,
        alone=median(count / turn.queued for turn in turns),
        alike=median(count / turn.alike[0] for turn in turns),
        served=median(count / turn.served.seconds for turn in turns),
        wall=median(1 - turn.alike[0] / turn.served.seconds for turn in turns),
        processor=median(1 - turn.alike[1] / turn.served.processor for turn in turns),
        of_round=mean(fractions) if fractions else None,
        error=stdev(fractions) / len(fractions) ** 0.5 if len(fractions) > 1 else None,
        alone_of_round=mean(lone) if lone else None,
    )


class Turn(NamedTuple):
    """The same requests three times."""

    queued: float
    """Seconds."""
    alike: tuple[float, float]
    """Seconds, and processor seconds."""
    served: ServedRun
    of_round: float | None
    alone_of_round: float | None


def _turn(
    engine: Engine,
    streams: int,
    bodies: Sequence[dict[str, Any]],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> Turn:
    speculate = bool(engine.router.drafters)
    _forget(engine)
    queued, _ = alone(engine, [(0, prompt) for prompt in prompts], params, speculate)
    _forget(engine)
    with RoundTimes(engine, streams) as beats:
        through = served(engine, bodies, streams)
    requested = sum(body["max_tokens"] for body in bodies)
    if through.tokens != requested:
        raise ForerunError(f"{through.tokens} tokens came through the server instead of {requested}")
    _forget(engine)
    with RoundTimes(engine, streams) as lone:
        alike = alone(engine, through.arrivals, params, speculate)
    return Turn(queued, alike, through, beats.share, lone.share)


def _forget(engine: Engine) -> None:
    """Clear the prefix cache, so that no repetition profits from an earlier one."""
    if engine.scheduler.tree is not None:
        engine.scheduler.tree.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="forerun:target")
    parser.add_argument("--spec-method", default=None)
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for concurrency in map(int, args.concurrency.split(",")):
        llm = LLM(
            args.model,
            speculative_config={"method": args.spec_method} if args.spec_method else None,
            max_num_seqs=concurrency,
        )
        result = measure(
            llm,
            concurrency,
            requests=args.requests,
            tokens=args.max_tokens,
            temperature=args.temperature,
            stream=not args.no_stream,
            repeats=args.repeats,
        )
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
