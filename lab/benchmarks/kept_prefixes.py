"""Time to the first token behind a shared prompt of 2,000 tokens, and memory per sequence, in models with state.

python lab/benchmarks/kept_prefixes.py [lfm2 qwen3_5 granite-h] [--folder DIR] [--quantization q8_0] [--repeats 2]

Known models' shapes with random weights. Each request has 100 tokens of its own behind the shared ones. ``cold``: all
is new. ``second``: the first that shares the prompt with an earlier one. ``later``: the next. ``same``: that again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.models.load import load_model
from forerun.sampling.params import SamplingParams
from hybrids import SHAPES, save

SHARED, OWN, CONTEXT, DRAFT = 2000, 100, 2048, 8
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and tokens that were not read."""
    began = time.perf_counter()
    (job,) = engine.add(prompt, ONE, speculate=False)
    while engine.busy:
        engine.step()
    return time.perf_counter() - began, job.metrics.num_cached_tokens


def measure(engine: Engine, repeats: int) -> dict[str, tuple[float, int]]:
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, engine.model.info.vocab_size, (count,), generator=draw).tolist()

    taken: dict[str, list[tuple[float, int]]] = {}
    first_token(engine, tokens(OWN))
    for _ in range(repeats):
        shared = tokens(SHARED)
        for name in ("cold", "second", "later"):
            prompt = shared + tokens(OWN)
            taken.setdefault(name, []).append(first_token(engine, prompt))
        taken.setdefault("same", []).append(first_token(engine, prompt))
    return {name: (median(each for each, _ in runs), runs[0][1]) for name, runs in taken.items()}


def sequence_bytes(engine: Engine) -> int:
    """The target's, at ``CONTEXT`` tokens."""
    pool = engine.target.attention.pool
    states = 0 if pool.states is None else pool.states.bytes_per_sequence
    return states + pool.pages_for(CONTEXT) * pool.page_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--quantization", default="q8_0")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the random checkpoints are, or will be")
    args = parser.parse_args()
    with TemporaryDirectory() as temporary:
        for shape in args.shapes:
            folder = (args.folder or Path(temporary)) / shape
            if not folder.exists():
                save(shape, folder)
            model = load_model(folder, dtype="bfloat16", quantization=args.quantization)
            config = EngineConfig(page_size=64, max_model_len=4096, max_num_seqs=4, threads=args.threads)
            engine = Engine(model, None, config)
            drafting = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": DRAFT})
            sizes = [sequence_bytes(engine), sequence_bytes(Engine(model, None, config, drafting))]
            plain, drafted = (size / 1e6 for size in sizes)
            print(
                f"{shape} {args.quantization}, {args.threads} thread(s), a sequence of {CONTEXT} tokens: {plain:.1f} MB"
            )
            print(f"  with {DRAFT} drafted tokens: {drafted:.1f} MB, {drafted / plain:.3f} of that")
            times = measure(engine, args.repeats)
            for name, (seconds, cached) in times.items():
                share = seconds / times["cold"][0]
                print(f"  {name}: {seconds:.2f} s, {share:.3f} of cold, {cached} tokens not read", flush=True)


if __name__ == "__main__":
    main()
