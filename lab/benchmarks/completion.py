"""Latency of code completion while someone types: single lines and blocks after each of some edits of real files.

    FORERUN_CACHE=... forerun serve --model qwen2.5-coder-1.5b &
    python lab/benchmarks/completion.py forerun=http://localhost:8000 [llama=http://localhost:8012] --kept FILE

Each edit types one to three letters of a line of the standard library, where they stand in the file. After each one the
server is asked by llama.cpp's ``/infill``, with the file around that line as prefix and suffix, and the line so far as
``prompt``. Servers are asked in turns, places in the files are lines and blocks in turns. It prints medians and 95th
percentiles of the seconds to the first character and to the end of the answer, and how many times longer the other
servers take than the first, edit by edit, with intervals (95 %). What was measured stays in ``--kept``, and the next
call goes on from there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from forerun_lab.intervals import quantile_interval, shown

FILES = ("argparse.py", "textwrap.py", "shlex.py", "heapq.py", "fnmatch.py", "csv.py", "queue.py", "bisect.py")
TYPED = 8
"""Edits in one place."""


Sample = dict[str, Any]


def rows(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """A row for each mode and server, and one for each other server's edits beside the first one's."""
    for mode, first in {sample["mode"]: sample["server"] for sample in reversed(samples)}.items():
        of = {(sample["server"], sample["edit"]): sample for sample in samples if sample["mode"] == mode}
        for server in dict.fromkeys(sample["server"] for sample in samples):
            own = [sample for sample in of.values() if sample["server"] == server]
            means = {name: sum(sample[name] for sample in own) / len(own) for name in ("read", "tokens", "same")}
            times = {f"{name}_{label}": at(values, share) for name in ("first", "whole") if (values := given(own, name))
                     for label, share in (("p50", 0.5), ("p95", 0.95))}  # fmt: skip
            yield {"mode": mode, "server": server, "edits": len(own), "empty": len(own) - len(given(own, "first")),
                   **times, **means}  # fmt: skip
            for name in ("first", "whole") if server != first else ():
                pairs = [(sample[name], of[first, sample["edit"]][name]) for sample in own]
                ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
                yield {"mode": mode, f"{name}: {server} over {first}": shown(ratios), "pairs": len(ratios),
                       "below 1": sum(ratio < 1 for ratio in ratios)}  # fmt: skip


def given(samples: Sequence[Sample], name: str) -> list[float]:
    return [sample[name] for sample in samples if sample[name] is not None]


def at(values: Sequence[float], share: float) -> str:
    low, high = quantile_interval(values, share) or (min(values), max(values))
    return f"{sorted(values)[int(share * len(values))]:.2f} ({low:.2f} to {high:.2f})"


def edits(seed: int, most_before: int, most_after: int) -> Iterator[tuple[str, str, str, str]]:
    """Yields the text before a line, the line as far as it is typed, the rest of it, and the text after it; TYPED times
    for each place."""
    choice = random.Random(seed)
    files = [(Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8").splitlines(True) for name in FILES]
    while True:
        lines = choice.choice(files)
        number = choice.randrange(most_before, len(lines) - 2)
        line = lines[number]
        indent = len(line) - len(line.lstrip())
        if len(line.strip()) < 16 or line.lstrip()[0] in "#\"'":
            continue
        before, after = lines[number - most_before : number], lines[number + 1 : number + 1 + most_after]
        typed = indent
        for _ in range(TYPED):
            typed = min(typed + choice.randint(1, 3), len(line) - 2)
            yield "".join(before), line[:typed], line[typed:].rstrip("\n"), "\n" + "".join(after)


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


def body_for(mode: str, before: str, typed: str, after: str) -> dict[str, Any]:
    body = {"input_prefix": before, "input_suffix": after, "prompt": typed, "temperature": 0, "stream": True,
            "cache_prompt": True}  # fmt: skip
    if mode == "line":
        return body | {"n_predict": 32, "stop": ["\n"]}
    return body | {"n_predict": 64, "n_indent": len(typed) - len(typed.lstrip()) + 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--edits", type=int, default=200, help="of each mode")
    parser.add_argument("--before", type=int, default=60, help="lines of the file that are sent from before the cursor")
    parser.add_argument("--after", type=int, default=30, help="and from after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other edit after so many seconds")
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="a line of JSON for each answer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    servers = dict(server.split("=", 1) for server in options.servers)
    lines = options.kept.read_text(encoding="utf-8").splitlines() if options.kept.exists() else []
    samples: list[Sample] = [json.loads(line) for line in lines]
    done = {sample["edit"] for sample in samples}
    begin = perf_counter()
    all_edits = edits(options.seed, options.before, options.after)
    for number, (before, typed, rest, after) in enumerate(islice(all_edits, 2 * options.edits)):
        if number in done:
            continue
        if perf_counter() - begin > options.seconds:
            break
        mode = ("line", "block")[number // TYPED % 2]
        names = list(servers)
        answers = []
        for name in names[number % len(names) :] + names[: number % len(names)]:
            first, whole, last, text = ask(servers[name], body_for(mode, before, typed, after))
            answers.append({
                "edit": number, "mode": mode, "server": name, "first": first, "whole": whole,
                "tokens": last["tokens_predicted"], "read": last["timings"]["prompt_n"],
                "text": text, "same": text.partition("\n")[0].rstrip() == rest.rstrip(),
            })  # fmt: skip
        samples += sorted(answers, key=lambda answer: names.index(answer["server"]))
        with options.kept.open("a", encoding="utf-8") as file:  # all servers' answers to an edit, or none
            file.writelines(json.dumps(answer) + "\n" for answer in samples[-len(names) :])
    for row in rows(samples):
        print(json.dumps(row) if options.json else "  ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
        ))  # fmt: skip


if __name__ == "__main__":
    main()
