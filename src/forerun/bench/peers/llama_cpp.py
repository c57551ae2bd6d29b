"""llama.cpp through llama-cpp-python: plain decoding of the same weights, of a GGUF file as it lies."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.bench.contenders import Contender
from forerun.bench.peers.gguf import write_gguf
from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM
from forerun.models.load import resolve
from forerun.plan.estimate import Measured
from forerun.sampling.params import SamplingParams


@dataclass
class LlamaCppContender:
    name: str
    model: Any
    version: str
    eos_ids: frozenset[int]
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)

    def facts(self) -> dict[str, Any]:
        return {
            "accept": None,
            "length": None,
            "num_speculative_tokens": None,
            "synthetic": False,
            "invariant": False,
            "model_path": f"llama.cpp (llama-cpp-python {self.version})",
        }

    def promises_identity(self, temperature: float) -> bool:
        return False

    def run(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> Measured:
        found = Measured()
        for prompt, options in zip(prompts, params, strict=True):
            self.model.reset()
            self.model.set_seed(options.seed or 0)
            stream = self.model.generate(
                list(prompt), temp=options.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
            )
            answer = [next(stream)]
            began = perf_counter()
            ends = frozenset() if options.ignore_eos else self.eos_ids
            while len(answer) < (options.max_tokens or 1) and answer[-1] not in ends:
                answer.append(next(stream))
            found.seconds += perf_counter() - began
            found.tokens += len(answer) - 1
            found.answers.append(answer)
        return found

    def close(self) -> None:
        self.model.close()
        self.folder.cleanup()


def llama_cpp_contender(llm: LLM) -> Contender:
    """Plain decoding on as many threads as torch has. Raises ConfigError where it is not installed."""
    try:
        import llama_cpp
    except ModuleNotFoundError:
        raise ConfigError("the llama-cpp peer needs llama-cpp-python: pip install 'forerun[llama-cpp]'") from None
    threads = torch.get_num_threads()
    folder = tempfile.TemporaryDirectory(prefix="forerun-gguf-")
    path = resolve(llm.config.model)
    if not path.is_file():
        path = write_gguf(path, Path(folder.name) / "model.gguf", llm.model.info.dtype)
    model = llama_cpp.Llama(
        str(path), n_ctx=llm.engine.max_model_len, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    return LlamaCppContender("llama_cpp", model, llama_cpp.__version__, llm.model.info.eos_ids, folder)
