"""Peers that run in a process of their own, and possibly in a Python environment of their own.

A worker (``workers/``) is a script that imports nothing of Forerun's. It answers each line of JSON with one. First
comes ``{"model", "threads", "context", "sequences"}``, answered by ``{"version", "rows", "about"}``. Then come requests
``{"row", "prompts", "max_tokens", "temperature", "seeds", "ends"}``, at most ``sequences`` prompts that are decoded
together, answered by ``{"answers", "tokens", "seconds"}``: the seconds after every prompt's first token, and the tokens
of that time; ``ends`` are the ids that end an answer. llama.cpp's worker, if ``"scores": true`` comes with the model,
takes ``{"score"}``, token ids, and returns ``{"logprobs", "choices"}``. CTranslate2's searches beams: ``{"source",
"width", "max_tokens", "length_penalty"}``, answered by ``{"beams", "scores", "seconds"}``. A program's worker gets its
command with the model, as ``"program"``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM
from forerun.measure.rounds import Contender, Measured
from forerun.models.files.open import Checkpoint, resolve
from forerun.models.run.hf import read_module
from forerun.sampling.params import SamplingParams
from forerun_lab.peers.gguf import write_gguf

WORKERS = Path(__file__).parent / "workers"
PACKAGES = {"llama-cpp": "llama_cpp", "openvino": "openvino_genai", "vllm": "vllm", "ctranslate2": "ctranslate2"}
PACKAGES |= {"llama-server": "llama_server", "mistralrs": "mistralrs"}
NEEDS_GGUF = ("llama-cpp", "openvino", "llama-server", "mistralrs")
PROGRAMS = ("llama-server",)
"""Programs that this interpreter's worker starts and asks."""
PRINTED = "printed.log"


def peer_facts(about: str) -> dict[str, Any]:
    """What a row says of another implementation: nothing of ours."""
    ours = dict.fromkeys(("accept", "length", "num_speculative_tokens"))
    return {**ours, "synthetic": False, "invariant": False, "model_path": about}


@dataclass
class Worker:
    """A peer's process. Raises ConfigError, with the end of what it printed, where it ends."""

    name: str
    process: subprocess.Popen[str]
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)
    rows: int = 0
    """Contenders that have not been closed."""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            raise ConfigError(f"the {self.name} peer ended with status {self.process.returncode}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = (Path(self.folder.name) / PRINTED).read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def leave(self) -> None:
        """One contender less; the last one ends the process."""
        self.rows -= 1
        if self.rows <= 0:
            self.end()

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()


@dataclass
class OutsideContender:
    name: str
    worker: Worker
    about: str
    eos_ids: frozenset[int]
    sequences: int

    def facts(self) -> dict[str, Any]:
        return peer_facts(self.about)

    def promises_identity(self, temperature: float) -> bool:
        return False

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        """Answer the prompts, as many at a time as the worker batches. The first one's parameters, except for the seed,
        apply to all."""
        result, options = Measured(), params[0]
        for first in range(0, len(prompts), self.sequences):
            answer = self.worker.ask(
                {
                    "row": self.name,
                    "prompts": [list(prompt) for prompt in prompts[first : first + self.sequences]],
                    "max_tokens": options.max_tokens or 1,
                    "temperature": options.temperature,
                    "seeds": [each.seed or 0 for each in params[first : first + self.sequences]],
                    "ends": [] if options.ignore_eos else sorted(self.eos_ids),
                }
            )
            result.answers += answer["answers"]
            result.tokens += answer["tokens"]
            result.seconds += answer["seconds"]
        return result

    def close(self) -> None:
        self.worker.leave()


def outside_contenders(peer: str, runs: str | None, llm: LLM, sequences: int, context: int) -> list[Contender]:
    """The rows of a peer that the interpreter ``runs`` runs; None: this one; of a program, its command. As many threads
    as torch has here, and ``sequences`` of at most ``context`` tokens together. What reads no GGUF gets its weights as
    bfloat16. Raises ConfigError where the package is not installed there or cannot run the model."""
    reported, runs = ({"program": _command(peer, runs)}, None) if peer in PROGRAMS else ({}, runs)
    path = resolve(llm.config.model)
    folder = tempfile.TemporaryDirectory(prefix="forerun-peer-")
    if path.is_file() and peer not in NEEDS_GGUF:
        module = read_module(Checkpoint.at(path), torch.bfloat16, attention=None)
        module.save_pretrained(folder.name)
        path = Path(folder.name)
    elif not path.is_file() and peer in NEEDS_GGUF:
        path = write_gguf(path, Path(folder.name) / "model.gguf", llm.model.info.dtype)
    threads = torch.get_num_threads()
    worker = started(peer, runs or sys.executable, threads, folder)
    try:
        about = worker.ask(
            {"model": str(path), "threads": threads, "context": context, "sequences": sequences, **reported}
        )
    except ConfigError as error:
        worker.end()
        raise ConfigError(f"{error}; see docs/bench.md for an environment of its own") from None
    worker.rows = len(about["rows"])
    facts = f"{about['about']} ({PACKAGES[peer]} {about['version']})"
    return [OutsideContender(row, worker, facts, llm.model.info.eos_ids, sequences) for row in about["rows"]]


def _command(peer: str, text: str | None) -> list[str]:
    """The program, by default the one that is called like its peer, and its options. Raises ConfigError."""
    try:
        return shlex.split(text or peer)
    except ValueError as error:
        raise ConfigError(f"the {peer} peer's command {text!r} cannot be read: {error}") from None


@contextmanager
def scorer(python: str, model: str, context: int, threads: int) -> Iterator[Callable[[Sequence[int]], dict[str, Any]]]:
    """llama.cpp's scores of token ids, under the interpreter ``python``: ``logprobs`` of all but the first, and each
    one's likeliest next token as ``choices``. Takes GGUF files. Raises ConfigError."""
    path = resolve(model)
    if not path.is_file():
        raise ConfigError(f"{model} is no GGUF file, which llama.cpp needs")
    worker = started("llama-cpp", python, threads, tempfile.TemporaryDirectory(prefix="forerun-peer-"))
    try:
        worker.ask({"model": str(path), "threads": threads, "context": context, "sequences": 1, "scores": True})
        yield lambda ids: worker.ask({"score": list(ids)})
    finally:
        worker.end()


def started(peer: str, python: str, threads: int, folder: tempfile.TemporaryDirectory[str]) -> Worker:
    """The process of a peer's worker, which ``folder`` belongs to. Raises ConfigError where it cannot be started."""
    with (Path(folder.name) / PRINTED).open("w") as printed:
        try:
            process = subprocess.Popen(
                [python, str(WORKERS / f"{PACKAGES[peer]}_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(threads)},
            )
        except OSError as error:
            folder.cleanup()
            raise ConfigError(f"the {peer} peer's Python cannot be started: {error}") from None
    return Worker(peer, process, folder)
