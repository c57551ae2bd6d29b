"""A llama-server (llama.cpp's, or a fork's) with an unchanged GGUF file and the given options.

Times are the server's own, from the first token on. If it returns no ids, its tokenizer encodes its text again.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

LOAD_SECONDS = 600
FLAGS = re.compile(r"AVX\w* = \d.*\d \|")
UNCUT = {"top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False, "return_tokens": True}


class LlamaServer:
    """The server process, ready to answer."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            host, port = free.getsockname()
        self.root, self.opener = f"http://{host}:{port}", build_opener(ProxyHandler({}))
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as it runs
        command = [*command, "--host", host, "--port", str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.seen: set[tuple[int, ...]] = set()
        began = monotonic()
        while not self.ready():
            if self.process.poll() is not None or monotonic() > began + LOAD_SECONDS:
                self.end()
                words = self.printed().strip().splitlines()
                sys.exit(f"{command[0]} has not come up: {words[-1] if words else 'it printed nothing'}")
            sleep(0.05)

    def ready(self) -> bool:
        try:
            with self.opener.open(f"{self.root}/health"):
                return True
        except URLError:  # not listening yet, or 503: loading
            return False

    def printed(self) -> str:
        self.log.seek(0)
        text: str = self.log.read()
        return text

    def ask(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        request = Request(f"{self.root}{path}", json.dumps(question).encode(), {"Content-Type": "application/json"})
        try:
            with self.opener.open(request) as reply:
                result: dict[str, Any] = json.load(reply)
                return result
        except HTTPError as error:
            sys.exit(f"{path} answered {error.code}: {error.read().decode()}")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        (prompt,), (seed,), temperature = request["prompts"], request["seeds"], request["temperature"]
        self.seen.add(tuple(prompt))
        options = {
            "temperature": temperature,
            "seed": seed,
            "top_k": 0 if temperature else 1,
            "ignore_eos": not request["ends"],
        }
        result = self.ask("/completion", {"prompt": prompt, "n_predict": request["max_tokens"], **options, **UNCUT})
        tokens = result.get("tokens")
        if tokens is None:
            tokens = self.ask("/tokenize", {"content": result["content"]})["tokens"]
            tokens += request["ends"][:1] if result["stopped_eos"] else []
        count, seconds = result["timings"]["predicted_n"] - 1, result["timings"]["predicted_ms"] / 1000
        return {"answers": [tokens], "tokens": count, "seconds": seconds}

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def version(program: str) -> str:
    reported = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    result = re.search(r"version: (.+)", reported.stdout + reported.stderr)
    return result[1] if result else "unknown"


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    about = json.loads(sys.stdin.readline())
    program, *options = about["program"]
    result, model = shutil.which(program), os.path.abspath(about["model"])
    if result is None:
        sys.exit(f"there is no program {program!r} that can be run")
    program = os.path.abspath(result)
    threads = str(about["threads"])
    command = [program, "-m", model, "-c", str(about["context"]), "-np", "1", "-t", threads, "-tb", threads, *options]
    with tempfile.TemporaryDirectory(prefix="forerun-server-") as folder:
        os.chdir(folder)  # some write a log wherever they are
        server = LlamaServer(command)
        try:
            flags = FLAGS.search(server.printed())
            reported = " ".join(["llama-server", *options, f"[{flags[0] if flags else ''}]"])
            name = " ".join(["llama_server", *options])
            print(
                json.dumps({"version": version(program), "rows": [name], "about": reported}), file=replies, flush=True
            )
            for line in sys.stdin:
                request = json.loads(line)
                if tuple(request["prompts"][0]) in server.seen:  # some drafters would repeat its answer
                    server.end()
                    server = LlamaServer(command)
                print(json.dumps(server.answer(request)), file=replies, flush=True)
        finally:
            server.end()


main()
