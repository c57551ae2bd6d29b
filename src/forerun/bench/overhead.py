"""What the server costs beside the engine alone: ``python -m forerun.bench.overhead --help``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from forerun.bench.prompts import HELD_OUT, make_prompts
from forerun.core.errors import ForerunError
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.sampling.params import SamplingParams
from forerun.serve.app import ServerOptions, create_app
from forerun.serve.run import DrainingServer, open_socket
from forerun.speculate.round import Round

CLIENT = Path(__file__).with_name("load.py")


@dataclass(frozen=True)
class Overhead:
    """The same requests through HTTP and on the engine alone; the client is another process.

    A served stream is empty between one answer and its next request, so that rounds hold fewer streams than where all
    requests wait in the engine's queue. ``alike`` is therefore what the shares compare with: the engine alone takes
    every request after as many rounds as it came through the server, which makes the same rounds, one after another.
    """

    concurrency: int
    alone: float
    """Tokens per second of the engine alone with all requests in its queue."""
    alike: float
    """The same with the served requests' arrivals."""
    served: float
    """Tokens per second that the client received."""
    wall: float
    """Share of the served time that the engine alone does not need for these rounds; what the engine waits for a
    request is in it."""
    processor: float
    """Share of the server's processor time, all its threads together, that the engine alone does not need."""
    of_round: float | None
    """Share of a served round, from one's end to the next one's, that drafting, verification and acceptance do not take
    on the engine alone: scheduler, text and server. Medians over rounds in which all streams decode and no prompt is
    read; None: there were none."""


Arrivals = Seq[tuple[int, Seq[int]]]
"""For each request the rounds that had ended when it came, and its prompt."""


class Noting(AsyncEngine):
    """Notes when requests reach the engine."""

    def __init__(self, engine: Engine) -> None:
        self.arrivals: list[tuple[int, Seq[int]]] = []
        self.spent: list[float] = []
        """The process's time at each arrival."""
        super().__init__(engine)

    def _add(self, stream: Any, added: Any, prompt: Seq[int], params: SamplingParams, choices: dict) -> None:
        self.arrivals.append((self.engine.stats.rounds, prompt))
        self.spent.append(process_time())
        super()._add(stream, added, prompt, params, choices)


class Beats:
    """Sees an engine's rounds while it is entered: seconds between the ends of two rounds in a row in which ``streams``
    sequences decode and nothing else happens, and of drafting, verification and acceptance in the second."""

    def __init__(self, engine: Engine, streams: int) -> None:
        self.engine = engine
        self.streams = streams
        self.between: list[float] = []
        self.inside: list[float] = []
        self._latest: float | None = None

    def __enter__(self) -> Beats:
        self._latest = None
        self.engine.on_round = self.see
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.on_round = None

    def see(self, done: Round) -> None:
        now = perf_counter()
        alike = len(done.verdicts) == self.streams and all(verdict.fed == 1 for verdict in done.verdicts)
        if alike and self._latest is not None:
            seconds = done.seconds
            self.between.append(now - self._latest)
            self.inside.append(seconds.draft + seconds.verify + seconds.accept)
        self._latest = now if alike else None


def alone(engine: Engine, arrivals: Arrivals, params: SamplingParams, speculate: bool) -> tuple[float, float]:
    """Seconds, and processor seconds, of these requests on an idle engine."""
    todo, before = deque(arrivals), engine.stats.rounds
    began, spent = perf_counter(), process_time()
    while todo or engine.busy:
        while todo and (not engine.busy or todo[0][0] <= engine.stats.rounds - before):
            engine.add(todo.popleft()[1], params, speculate=speculate)
        engine.step()
    return perf_counter() - began, process_time() - spent


@dataclass(frozen=True)
class Served:
    seconds: float
    processor: float
    tokens: int
    arrivals: Arrivals


def served(engine: Engine, bodies: Seq[dict], streams: int) -> Served:
    """The same through a server in this process and a client in another. Raises ForerunError if the client fails."""
    asynchronous = Noting(engine)
    app = create_app(asynchronous, ServerOptions())
    listener = open_socket("127.0.0.1", 0)
    server = DrainingServer(app, asynchronous, 5.0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    first = {**bodies[0], "prompt": [0], "max_tokens": 1}
    wish = {"host": "127.0.0.1", "port": listener.getsockname()[1], "first": first, "bodies": bodies}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(CLIENT)],
            input=json.dumps({**wish, "streams": streams}),
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
    found = json.loads(done.stdout)
    came = asynchronous.arrivals[1:]
    arrivals = [(rounds - came[0][0], prompt) for rounds, prompt in came]
    return Served(found["seconds"], spent - asynchronous.spent[1], found["tokens"], arrivals)


def measure(
    llm: LLM, concurrency: int, *, requests: int, tokens: int, temperature: float, stream: bool, repeats: int
) -> Overhead:
    """Medians over ``repeats`` in which engine and server take turns, after a turn that is not counted.

    The engine's ``max_num_seqs`` should be ``concurrency``, so that both have as many requests in flight."""
    prompts = make_prompts(HELD_OUT, llm.tokenizer, count=requests, length=64)
    speculate = bool(llm.engine.router.drafters)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=tokens, ignore_eos=True)
    asked: dict[str, Any] = {"temperature": temperature, "seed": 0, "max_tokens": tokens, "ignore_eos": True}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"prompt": prompt, **asked} for prompt in prompts]
    engine, turns = llm.engine, []
    lone_rounds, served_rounds = Beats(engine, concurrency), Beats(engine, concurrency)
    for _ in range(repeats + 1):
        _forget(engine)
        queued = alone(engine, [(0, prompt) for prompt in prompts], params, speculate)
        _forget(engine)
        with served_rounds:
            through = served(engine, bodies, concurrency)
        if through.tokens != requests * tokens:
            raise ForerunError(f"{through.tokens} tokens came through the server instead of {requests * tokens}")
        _forget(engine)
        with lone_rounds:
            lone = alone(engine, through.arrivals, params, speculate)
        turns.append((queued, lone, (through.seconds, through.processor)))
    turns = turns[1:]
    count = requests * tokens
    return Overhead(
        concurrency,
        alone=median(count / queued for (queued, _), _, _ in turns),
        alike=median(count / lone for _, (lone, _), _ in turns),
        served=median(count / through for _, _, (through, _) in turns),
        wall=median(1 - lone / through for _, (lone, _), (through, _) in turns),
        processor=median(1 - lone / through for _, (_, lone), (_, through) in turns),
        of_round=_share(lone_rounds, served_rounds),
    )


def _share(lone: Beats, served: Beats) -> float | None:
    return 1 - median(lone.inside) / median(served.between) if lone.inside and served.between else None


def _forget(engine: Engine) -> None:
    """Drop cached prefixes, so that no turn profits from the one before."""
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
    given = parser.parse_args()
    torch.set_num_threads(1)
    for concurrency in map(int, given.concurrency.split(",")):
        llm = LLM(
            given.model,
            speculative_config={"method": given.spec_method} if given.spec_method else None,
            max_num_seqs=concurrency,
        )
        found = measure(
            llm,
            concurrency,
            requests=given.requests,
            tokens=given.max_tokens,
            temperature=given.temperature,
            stream=not given.no_stream,
            repeats=given.repeats,
        )
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
