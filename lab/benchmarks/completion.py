"""Latency of code completion while someone types: single lines and blocks after each of some edits of real files.

    FORERUN_CACHE=... forerun serve --model qwen2.5-coder-1.5b &
    python lab/benchmarks/completion.py forerun=http://localhost:8000 [llama=http://localhost:8012] --edits 200

Each edit types one to three letters of a line of the standard library, where they stand in the file. After each one the
server is asked by llama.cpp's ``/infill``, with the file around that line as prefix and suffix, and the line so far as
``prompt``. Servers are asked in turns. It prints the median and the 95th percentile of the seconds to the first
character and to the end of the answer, as JSON with ``--json``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

FILES = ("argparse.py", "textwrap.py", "shlex.py", "heapq.py", "fnmatch.py", "csv.py", "queue.py", "bisect.py")
BEFORE, AFTER = 60, 30
"""Lines of the file that are sent from before and after the cursor's."""
TYPED = 8
"""Edits in one place."""


@dataclass
class Times:
    """Seconds of one server in one mode."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    read: int = 0
    same: int = 0
    """Answers that are the file's own text."""

    def row(self) -> dict[str, Any]:
        seconds = {f"{name}_{label}": percentile(times, share)
                   for name, times in (("first", self.first), ("whole", self.whole))
                   for label, share in (("p50", 0.5), ("p95", 0.95))}  # fmt: skip
        count = max(1, len(self.whole))
        return {**seconds, "edits": len(self.whole), "empty": len(self.whole) - len(self.first),
                "tokens": self.tokens / count, "prompt_tokens_cached": self.cached / max(1, self.read),
                "as_written": self.same / count}  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def edits(count: int, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """Yields the text before a line, the line as far as it is typed, the rest of it, and the text after it."""
    choice = random.Random(seed)
    files = [(Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8").splitlines(True) for name in FILES]
    made = 0
    while made < count:
        lines = choice.choice(files)
        number = choice.randrange(BEFORE, len(lines) - 2)
        line = lines[number]
        indent = len(line) - len(line.lstrip())
        if len(line.strip()) < 16 or line.lstrip()[0] in "#\"'":
            continue
        before, after = lines[max(0, number - BEFORE) : number], lines[number + 1 : number + 1 + AFTER]
        typed = indent
        for _ in range(TYPED):
            typed = min(typed + choice.randint(1, 3), len(line) - 2)
            yield "".join(before), line[:typed], line[typed:].rstrip("\n"), "\n" + "".join(after)
            made += 1
            if made == count:
                return


def ask(url: str, body: dict[str, Any]) -> tuple[float | None, float, dict[str, Any], str]:
    """Returns the seconds to the first character and to the end, the last event, and the text."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "localhost", parts.port)
    text, first, last, begin = "", None, {}, perf_counter()
    connection.request("POST", "/infill", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{url}: {answer.status} {answer.read().decode()}")
    for line in answer:
        if line.startswith(b"data: {"):
            last = json.loads(line[6:])
            text += last["content"]
            if text and first is None:
                first = perf_counter() - begin
    whole = perf_counter() - begin
    connection.close()
    return first, whole, last, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--modes", default="line,block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop a mode after so many seconds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    servers = dict(server.split("=", 1) for server in given.servers)
    rows = []
    for mode in given.modes.split(","):
        times = {name: Times() for name in servers}
        begin = perf_counter()
        for number, (before, typed, rest, after) in enumerate(edits(given.edits, given.seed)):
            if perf_counter() - begin > given.seconds:
                break
            body = {"input_prefix": before, "input_suffix": after, "prompt": typed, "temperature": 0, "stream": True,
                    "cache_prompt": True}  # fmt: skip
            if mode == "line":
                body |= {"n_predict": 32, "stop": ["\n"]}
            else:
                body |= {"n_predict": 64, "n_indent": len(typed) - len(typed.lstrip()) + 1}
            names = list(servers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                first, whole, last, text = ask(servers[name], body)
                kept = times[name]
                kept.whole.append(whole)
                if first is not None:
                    kept.first.append(first)
                kept.tokens += last["tokens_predicted"]
                kept.read += last["tokens_evaluated"]
                kept.cached += last["tokens_evaluated"] - last["timings"]["prompt_n"]
                kept.same += text.partition("\n")[0].rstrip() == rest.rstrip()
        for name, kept in times.items():
            rows.append({"mode": mode, "server": name, **kept.row()})
            if not given.json:
                print(*(f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}"
                        for key, value in rows[-1].items()), flush=True)  # fmt: skip
    if given.json:
        print(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
