"""Replicas under load, killed: is every answer there, once, and right?

    python lab/benchmarks/replicas.py [--answers 500] [--kills 5] [--out FILE.json]

Starts ``forerun serve --replicas 2`` on the bundled pair, asks for seeded and unseeded answers, streamed and whole, and
kills replicas (SIGKILL) while they come. Seeded answers are compared with those of one engine in this process, unseeded
ones for their length. Needs ``forerun[serve,ray]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2

from forerun import LLM, SamplingParams

TOKENS = 96
PROMPTS = [
    "import os\n",
    "def read(path):\n",
    "class Node:\n    ",
    "for line in lines:\n",
    "try:\n    import ",
    "x = [",
]


def body(number: int) -> dict[str, Any]:
    """Three in four have a seed."""
    given = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS, "temperature": 0.8, "ignore_eos": True}
    return given if number % 4 == 3 else {**given, "seed": number}


def expected(answers: int) -> dict[int, str]:
    seeded = [number for number in range(answers) if "seed" in body(number)]
    params = [SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=number, ignore_eos=True) for number in seeded]
    prompts = [body(number)["prompt"] for number in seeded]
    outputs = LLM(max_num_seqs=16).generate(prompts, params, use_tqdm=False)
    return {number: output.outputs[0].text for number, output in zip(seeded, outputs)}


def replicas(server: int) -> list[int]:
    """The processes of the replicas: Ray names them after their class."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in lines}

    def below(pid: int) -> bool:
        while pid > 1:
            if pid == server:
                return True
            pid = parents.get(pid, 0)
        return False

    result = [int(pid) for pid, _, args in lines if "ray::" in args and "engine" in args]
    return [pid for pid in result if below(pid)]


async def events(http: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """What a completion's stream says. Raises RuntimeError for an error in it."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event


async def ask(http: httpx2.AsyncClient, number: int) -> tuple[str, int]:
    """An answer's text, and how many tokens it says it has."""
    if number % 2:
        answer = (await http.post("/v1/completions", json=body(number))).json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    text, tokens = "", 0
    async for event in events(http, body(number)):
        text += "".join(choice["text"] for choice in event["choices"])
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return text, tokens


async def load(url: str, server: int, answers: int, kills: int, together: int) -> dict[str, Any]:
    got: dict[int, tuple[str, int]] = {}
    failed: Counter[str] = Counter()
    slots = asyncio.Semaphore(together)
    draw = random.Random(0)
    killed = 0
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:

        async def one(number: int) -> None:
            async with slots:
                try:
                    got[number] = await ask(http, number)
                except (RuntimeError, KeyError, httpx2.HTTPError) as error:
                    failed[f"{type(error).__name__}: {error}"] += 1

        async def kill() -> None:
            nonlocal killed
            for fraction in range(1, kills + 1):
                while len(got) + failed.total() < fraction * answers / (kills + 1):
                    await asyncio.sleep(0.02)
                alive = replicas(server)
                if alive:
                    os.kill(draw.choice(alive), signal.SIGKILL)
                    killed += 1

        began = time.perf_counter()
        await asyncio.gather(kill(), *[one(number) for number in range(answers)])
    return {"got": got, "failed": dict(failed), "killed": killed, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    right = expected(given.answers)
    command = [sys.executable, "-u", "-m", "forerun", "serve", "--replicas", "2", "--threads", "1", "--port", "0"]
    log = open(os.devnull, "w") if given.out is None else given.out.with_suffix(".log").open("w")  # noqa: SIM115
    with subprocess.Popen([*command, "--no-request-log"], stdout=subprocess.PIPE, stderr=log, text=True) as server:
        assert server.stdout is not None
        url = ""
        while not url:
            line = server.stdout.readline()
            assert line, "the server did not start"
            url = line.split()[-1] if line.startswith("listening on") else ""
        results = asyncio.run(load(url, server.pid, given.answers, given.kills, given.together))
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    log.close()
    got = results.pop("got")
    wrong = [number for number, text in right.items() if number in got and got[number][0] != text]
    short = [number for number, (_, tokens) in got.items() if tokens != TOKENS]
    result = {
        "answers": given.answers, "seeded": len(right), "tokens_each": TOKENS, "together": given.together,
        "wrong": len(wrong), "lost": given.answers - len(got), "of_another_length": len(short), **results,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
