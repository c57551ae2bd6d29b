"""What the server costs beside the engine alone: ``python -m forerun.bench.overhead --help``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
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
    """The same requests through HTTP and on the engine alone; the client is another process."""

    concurrency: int
    alone: float
    """Tokens per second of the engine alone."""
    served: float
    """Tokens per second that the client received."""
    wall: float
    """Share of the served time that the engine alone does not need: 1 - served / alone."""
    processor: float
    """Share of the server's processor time, all its threads together, that the engine alone does not need."""
    of_round: float | None
    """Share of a served round, from one's end to the next one's, that drafting, verification and acceptance do not take
    on the engine alone: scheduler, text and server. Medians over rounds in which all streams decode and no prompt is
    read; None: there were none. The other shares hold the gaps between a client's requests too."""


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


def alone(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, speculate: bool) -> tuple[float, float]:
    """Seconds, and processor seconds, of all prompts on an idle engine."""
    began, spent = perf_counter(), process_time()
    for prompt in prompts:
        engine.add(prompt, params, speculate=speculate)
    while engine.busy:
        engine.step()
    return perf_counter() - began, process_time() - spent


def served(engine: Engine, bodies: Seq[dict], streams: int) -> tuple[float, float, int]:
    """The same through a server in this process and a client in another; and how many tokens came.

    Raises ForerunError if the client fails."""
    asynchronous = AsyncEngine(engine)
    app = create_app(asynchronous, ServerOptions())
    listener = open_socket("127.0.0.1", 0)
    server = DrainingServer(app, asynchronous, 5.0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    wish = json.dumps({"host": "127.0.0.1", "port": port, "bodies": list(bodies), "streams": streams})
    try:
        spent = process_time()
        done = subprocess.run(
            [sys.executable, "-I", str(CLIENT)], input=wish, capture_output=True, text=True, check=False
        )
        spent = process_time() - spent
    finally:
        server.should_exit = True
        thread.join()
    if done.returncode:
        raise ForerunError(f"the load client failed: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout)
    return found["seconds"], spent, found["tokens"]


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
        with lone_rounds:
            lone = alone(engine, prompts, params, speculate)
        _forget(engine)
        with served_rounds:
            through = served(engine, bodies, concurrency)
        if through[2] != requests * tokens:
            raise ForerunError(f"{through[2]} tokens came through the server instead of {requests * tokens}")
        turns.append((*lone, *through[:2]))
    turns = turns[1:]
    count = requests * tokens
    return Overhead(
        concurrency,
        alone=median(count / lone for lone, _, _, _ in turns),
        served=median(count / through for _, _, through, _ in turns),
        wall=median(1 - lone / through for lone, _, through, _ in turns),
        processor=median(1 - spent / total for _, spent, _, total in turns),
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
