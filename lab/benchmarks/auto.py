"""Whole requests by ``auto`` beside plain decoding, first token included, by length of prompt and of answer.

``python benchmarks/auto.py MODEL --out FILE.json``: both engines are in one process and answer every prompt in turns.
FILE keeps each pair as soon as it is measured, and the same command goes on where it stopped; ``--seconds`` ends it
early. ``--show`` prints the table; ``table.py`` writes README's. Prompts are pieces of Python's standard library and of
its prose (licence texts, docstrings), a new one for each pair, so that nothing is in the prefix cache. ``--set`` takes
prompt sets of the bench instead, as chats, with answers that end where the model ends them. ``--llama-server PROGRAM``
answers the same prompts by llama.cpp, plain and, with ``--draft FILE``, with that draft.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pydoc_data.topics
import random
import shlex
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from functools import partial
from itertools import zip_longest
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from table import rate

from forerun import LLM, SamplingParams
from forerun.engine.jobs import Update
from forerun.measure.config import CATEGORIES, CATEGORIES_SMALL, HUMANEVAL
from forerun.measure.environment import processor
from forerun.models.files.inventory import here
from forerun_lab.intervals import shown
from forerun_lab.written import read_set

PROMPTS, ANSWERS = (50, 300, 1500), (8, 32, 128)
EACH = 8
"""Requests of each of several clients."""
MODULES = [
    "argparse",
    "ast",
    "calendar",
    "cmd",
    "csv",
    "difflib",
    "doctest",
    "heapq",
    "imaplib",
    "json",
    "mailbox",
    "nntplib",
    "pdb",
    "tarfile",
    "zipfile",
]


def texts(tokenizer: Any, length: int, seed: int) -> Iterator[list[int]]:
    """Prompts of ``length`` tokens: code and prose in turns."""
    source = random.Random(seed)
    code = [inspect.getsource(__import__(name)) for name in MODULES if name in sys.stdlib_module_names]
    prose = "\n\n".join(pydoc_data.topics.topics.values())
    while True:
        long = [text for text in code if len(text) > 8 * length] or ["".join(source.sample(code, len(code)))]
        for text in (source.choice(long), prose):
            ids: list[int] = []
            while len(ids) < length:
                start = source.randrange(max(1, len(text) - 8 * length))
                ids = tokenizer.encode(text[start : start + 8 * length])
            yield ids[:length]


def answer(llm: LLM, streams: int, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Requests of so many clients, each of which asks when its last one is answered: seconds until one has nothing more
    to ask, and until the first token of any; tokens of all until then."""
    seen: list[tuple[float, int]] = []
    tokens = ended = 0

    def observe(update: Update) -> None:
        nonlocal tokens, ended
        tokens, ended = tokens + len(update.tokens), ended + (update.finish is not None)
        if ended <= len(prompts) - streams + 1:
            seen.append((perf_counter() - began, tokens))

    began = perf_counter()
    # First answers end one after the other, so that at the end as much is half done in each engine.
    most, first = params.max_tokens or 16, range(1, streams * (streams > 1) + 1)
    each = [params.clone(max_tokens=max(1, most * number // streams)) for number in first]
    each += [params] * (len(prompts) - len(each))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], each, on_update=observe)
    seconds, busy = seen[-1]
    ids = [output.outputs[0].token_ids for output in outputs]
    return {"seconds": seconds, "first": seen[0][0], "tokens": busy, "ids": ids}


def serve(stack: ExitStack, program: str, model: Path, port: int, threads: int, *flags: str) -> Callable[..., Any]:
    """llama.cpp's server for ``model``, until ``stack`` ends; what answers one request with it."""
    command = [program, "-m", str(model), "-t", str(threads), "-c", "2048", "-np", "1", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.kill)
    base = f"http://127.0.0.1:{port}"
    while True:
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
        try:
            urllib.request.urlopen(f"{base}/health").close()
            break
        except OSError:  # it loads the model
            sleep(0.1)

    def request(prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
        (prompt,) = prompts
        body: dict[str, Any] = {"prompt": prompt, "n_predict": params.max_tokens, "temperature": params.temperature}
        body |= {"seed": params.seed, "ignore_eos": params.ignore_eos, "cache_prompt": False}
        if params.temperature:
            body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"]}
        began = perf_counter()
        with urllib.request.urlopen(f"{base}/completion", json.dumps(body).encode()) as reply:
            timings = json.load(reply)["timings"]
        seconds = perf_counter() - began
        first = seconds - 1e-3 * timings["predicted_ms"]
        return {"seconds": seconds, "first": first, "tokens": timings["predicted_n"], "ids": []}

    return request


def requests(options: argparse.Namespace, llm: LLM) -> Iterator[tuple[dict[str, Any], list[list[int]], SamplingParams]]:
    """What is measured, in order: what names it, the prompts, and how they are answered."""
    temperatures = [float(t) for t in options.temperatures.split(",")]
    if options.set:
        files = {HUMANEVAL: options.prompts_file}
        sets = [[(name, chat) for chat in read_set(name, files.get(name))] for name in options.set]
        for number, chats in enumerate(zip_longest(*sets)):
            for name, chat in filter(None, chats):
                message = [{"role": "user", "content": chat.turns[0]}]
                prompt = llm.get_tokenizer().apply_chat_template(message, add_generation_prompt=True, return_dict=False)
                for t in temperatures:
                    key = {"temperature": t, "prompt": name, "answer": int(options.answers), "number": number}
                    yield key, [prompt], SamplingParams(temperature=t, seed=number, max_tokens=int(options.answers))
        return
    cells = [
        (t, int(p), int(a))
        for t in temperatures
        for p in options.prompts.split(",")
        for a in options.answers.split(",")
    ]
    for number in range(options.pairs):
        random.Random(number).shuffle(cells)
        for temperature, length, tokens in cells:
            prompts = texts(llm.get_tokenizer(), length, 1000 * length + tokens)
            count = options.streams * (EACH if options.streams > 1 else 1)
            chosen = [next(prompts) for _ in range((number + 1) * count)][-count:]
            key = {"temperature": temperature, "prompt": length, "answer": tokens, "number": number}
            key |= {"streams": options.streams} if options.streams > 1 else {}
            yield key, chosen, SamplingParams(temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=True)


def show(pairs: list[dict[str, Any]]) -> None:
    def of(pair: dict[str, Any]) -> tuple[Any, ...]:
        return pair["temperature"], pair["prompt"], pair["answer"], pair.get("streams", 1)

    for cell in sorted({of(pair) for pair in pairs}):
        rows = [pair for pair in pairs if of(pair) == cell and pair["plain"]["tokens"] > 1]
        same = f"{sum(p['same'] for p in rows)} of {len(rows)} the same tokens"
        print(f"T {cell[0]}, prompts {cell[1]}, answers {cell[2]}, streams {cell[3]}: {same}")
        for name in [name for name in rows[0] if isinstance(rows[0][name], dict)]:
            there = [p for p in rows if name in p]
            plain = [p["plain"]["seconds"] for p in there]
            own = [p[name]["seconds"] * p["plain"]["tokens"] / p[name]["tokens"] for p in there]
            whole = [before / after for before, after in zip(plain, own)]
            decoding = [rate(p[name]) / rate(p["plain"]) for p in there]
            speed, first = (statistics.median(f(p[name]) for p in there) for f in (rate, lambda r: r["first"]))
            slow = f"{sum(each < 0.95 for each in whole)} below 0.95, least {min(whole):.2f}"
            slow = f"{slow}, all together {sum(plain) / sum(own):.2f}"
            over = f"over plain {shown(whole)} ({slow}), decoding {shown(decoding)}"
            print(f"  {name:12} {speed:6.1f} tokens/s, first {first:.2f} s, {over}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6, help="of each cell")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--streams", type=int, default=1, help="clients that ask at the same time; not with --set")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)))
    parser.add_argument("--answers", default=",".join(map(str, ANSWERS)))
    parser.add_argument(
        "--set",
        action="append",
        choices=(CATEGORIES, CATEGORIES_SMALL, HUMANEVAL),
        help="prompts of the bench instead, of several sets in turns; --answers is then one length",
    )
    parser.add_argument("--prompts-file", type=Path, help="for --set humaneval: its wheel")
    parser.add_argument("--line", action="append", default=[], help="NAME=JSON: a speculative_config beside auto")
    parser.add_argument("--llama-server", help="llama.cpp's program")
    parser.add_argument("--draft", type=Path, help="a GGUF file that drafts for llama.cpp")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop before this is over")
    parser.add_argument("--show", action="store_true", help="only print what FILE has")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"pairs": []}
    if options.show:
        print(kept["model"], kept["processor"], kept["threads"], "threads")
        show(kept["pairs"])
        return
    began = perf_counter()
    kept |= {"command": shlex.join(["python", *sys.argv]), "date": date.today().isoformat()}
    kept |= {"model": options.model, "processor": processor(), "threads": options.threads}
    torch.set_num_threads(options.threads)
    longest = 16 + max(map(int, options.prompts.split(","))) + max(map(int, options.answers.split(",")))
    common: dict[str, Any] = {"max_model_len": max(2048, longest)}
    common["max_num_seqs"] = options.streams if options.streams > 1 else 8
    llms = {"plain": LLM(options.model, speculative_config=None, **common), "auto": LLM(options.model, **common)}
    for line in options.line:
        name, _, config = line.partition("=")
        llms[name] = LLM(options.model, speculative_config=json.loads(config), **common)
    answers: dict[str, Callable[..., Any]] = {name: partial(answer, llm, options.streams) for name, llm in llms.items()}
    with ExitStack() as stack:
        if options.llama_server:
            file = here(options.model)
            start = partial(serve, stack, options.llama_server, file)
            answers["llama"] = start(18081, options.threads)
            if options.draft:
                flags = ["-md", str(options.draft), "--spec-type", "draft-simple"]
                answers["llama draft"] = start(18082, options.threads, *flags)
        print(f"loaded in {perf_counter() - began:.1f} s; auto is {llms['auto'].speculative}")
        for each in answers.values():  # what is made once is not measured
            each([[1, 2, 3]] * options.streams, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        for key, prompts, params in requests(options, llms["plain"]):
            if any(key.items() <= pair.items() for pair in kept["pairs"]):
                continue
            if perf_counter() - began > options.seconds:
                break
            order = list(answers)[:: 1 if key["number"] % 2 else -1]
            results = {name: answers[name](prompts, params) for name in order}
            ids = {name: results[name].pop("ids") for name in order}
            kept["pairs"].append(key | results | {"same": all(ids["plain"] == ids[name] for name in llms)})
            options.out.write_text(json.dumps(kept, indent=1))
    show(kept["pairs"])


if __name__ == "__main__":
    main()
