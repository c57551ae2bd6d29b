"""``python -m forerun_lab.bench.costs``: a forward's cost by its rows, prefill, and how a round's time is spent.

Formats and numbers of rows alternate in one process; a ratio compares neighbours of one repetition. Intervals are 95 %
confidence intervals of the median ratio, for any distribution.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from forerun import LLM, SamplingParams, kernels
from forerun.attention.base import Attention
from forerun.core.batch import Batch, Span
from forerun.core.errors import ForerunError
from forerun.measure.environment import processor, read_bandwidth
from forerun.measure.page import markdown
from forerun.models.load import load_model
from forerun.models.run.base import Model, new_attention
from forerun_lab.intervals import median_interval

CONTEXT = 256
PROMPT = 4
"""Tokens of a stream's prompt, whose prefill is part of the time."""
PACKED = "packed"
"""bfloat16 in oneDNN's own layout, which gives logits of other bits for other numbers of rows."""
WARM_UP = 2
"""Repetitions that are not counted: they compile, allocate and fill caches."""


@dataclass
class ForwardCost:
    """A forward of ``rows`` rows of one sequence; ``share`` is one row's fraction of the read bandwidth."""

    format: str
    rows: int
    milliseconds: float
    over_one: float
    interval: list[float] | None
    share: float | None


@dataclass
class CostStream:
    """Rounds of ``streams`` requests without drafts, as fractions of the engine's time."""

    format: str
    streams: int
    sampling: str
    tokens_per_second: float
    forward: float
    sampler: float
    rest: float


class Forwards:
    """A model and one cached sequence, which is fed repeatedly from the same position."""

    def __init__(self, name: str, model: Model, largest: int, tokens: Sequence[int]) -> None:
        self.name, self.model = name, model
        self.tokens = tokens
        self.attention: Attention = new_attention(model, max_seqs=1, max_len=CONTEXT + largest)
        self._feed(0, CONTEXT)

    def _feed(self, start: int, count: int) -> None:
        rows = list(range(count)) if start else [count - 1]
        span = Span(0, start, list(self.tokens[start : start + count]), logits=rows)
        self.model.forward(Batch([span], self.model.info.device), self.attention)

    def seconds(self, rows: int) -> float:
        began = perf_counter()
        self._feed(CONTEXT, rows)
        seconds = perf_counter() - began
        self.attention.pool.truncate(0, CONTEXT)
        return seconds


def costs(formats: Sequence[Forwards], counts: Sequence[int], turns: int) -> list[ForwardCost]:
    """A row for each format and number of rows; ``counts`` begin with 1."""
    bandwidth = read_bandwidth(torch.device("cpu"))
    result: dict[tuple[str, int], list[float]] = {}
    for repeat in range(WARM_UP + turns):
        for each in formats:
            for count in counts:
                seconds = each.seconds(count)
                if repeat >= WARM_UP:
                    result.setdefault((each.name, count), []).append(seconds)
    rows = []
    for each in formats:
        one = result[each.name, 1]
        for count in counts:
            own = result[each.name, count]
            ratios = [a / b for a, b in zip(own, one, strict=True)]
            fraction = each.model.info.token_bytes / median(one) / bandwidth if count == 1 else None
            rows.append(
                ForwardCost(each.name, count, median(own) * 1e3, median(ratios), median_interval(ratios), fraction)
            )
    return rows


@dataclass
class Prefill:
    """A prompt read in one forward; ``over_packed`` is its speed over oneDNN's packed bfloat16."""

    format: str
    tokens: int
    tokens_per_second: float
    over_packed: float
    interval: list[float] | None


def prefills(models: Mapping[str, Model], lengths: Sequence[int], turns: int, text: Sequence[int]) -> list[Prefill]:
    """A row for each model and length; ``PACKED`` is one of the models."""
    over = {name: new_attention(model, max_seqs=1, max_len=max(lengths)) for name, model in models.items()}
    result: dict[tuple[str, int], list[float]] = {}
    for repeat in range(WARM_UP + turns):
        for length in lengths:
            for name, model in models.items():
                span = Span(0, 0, list(text[:length]), logits=[length - 1])
                began = perf_counter()
                model.forward(Batch([span], model.info.device), over[name])
                seconds = perf_counter() - began
                over[name].pool.free(0)
                if repeat >= WARM_UP:
                    result.setdefault((name, length), []).append(seconds)
    rows = []
    for (name, length), own in result.items():
        ratios = [packed / seconds for seconds, packed in zip(own, result[PACKED, length], strict=True)]
        rows.append(Prefill(name, length, length / median(own), median(ratios), median_interval(ratios)))
    return rows


def prefill_table(rows: Sequence[Prefill]) -> str:
    """A Markdown table with a row for each format."""
    lengths = list(dict.fromkeys(row.tokens for row in rows))
    heads = ["weights", *(head for length in lengths for head in (f"{length} tokens", "over packed"))]
    lines = []
    for name in dict.fromkeys(row.format for row in rows):
        cells = [name]
        for row in rows:
            if row.format == name:
                ends = "" if row.interval is None else f" ({row.interval[0]:.2f} to {row.interval[1]:.2f})"
                cells += [f"{row.tokens_per_second:.0f} tokens/s", f"{row.over_packed:.2f}{ends}"]
        lines.append(cells)
    return markdown(heads, lines)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "T = 0": {"temperature": 0.0},
    "T = 1": {"temperature": 1.0},
    "T = 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
}


def streams(
    model: str, name: str, counts: Sequence[int], tokens: int, prompts: Sequence[Sequence[int]]
) -> list[CostStream]:
    longest = max(map(len, prompts)) + tokens
    llm = LLM(
        model,
        quantization=name,
        threads=torch.get_num_threads(),
        max_num_seqs=max(counts),
        max_model_len=longest,
        speculative_config=None,
    )
    rows = []
    for count in counts:
        requests = [{"prompt_token_ids": list(prompts[i % len(prompts)])} for i in range(count)]
        for sampling, options in SAMPLINGS.items():
            params = [SamplingParams(seed=i, max_tokens=tokens, ignore_eos=True, **options) for i in range(count)]
            llm.generate(requests, params, use_tqdm=False)
            stats = llm.engine.stats
            before = stats.verify_seconds, stats.accept_seconds, stats.host_seconds + stats.draft_seconds
            llm.generate(requests, params, use_tqdm=False)
            after = stats.verify_seconds, stats.accept_seconds, stats.host_seconds + stats.draft_seconds
            forward, sampler, rest = (b - a for a, b in zip(before, after))
            whole = forward + sampler + rest
            rows.append(
                CostStream(
                    name, count, sampling, count * tokens / whole, forward / whole, sampler / whole, rest / whole
                )
            )
    return rows


def table(rows: Sequence[ForwardCost]) -> str:
    """A Markdown table with a row for each format."""
    counts = list(dict.fromkeys(row.rows for row in rows))
    lines = []
    for name in dict.fromkeys(row.format for row in rows):
        own = [row for row in rows if row.format == name]
        cells = [name, f"{own[0].milliseconds:.2f} ms", f"{own[0].share:.2f}"]
        for row in own[1:]:
            ends = "" if row.interval is None else f" ({row.interval[0]:.2f} to {row.interval[1]:.2f})"
            cells.append(f"{row.over_one:.2f}{ends}")
        lines.append(cells)
    return markdown(["weights", "one row", "of the bandwidth", *map(str, counts[1:])], lines)


def streams_table(rows: Sequence[CostStream]) -> str:
    """A Markdown table."""
    heads = ["weights", "streams", "sampling", "tokens/s", "forward", "sampling's share", "the rest"]
    lines = [
        [row.format, row.streams, row.sampling, f"{row.tokens_per_second:.0f}",
         *(f"{share:.0%}" for share in (row.forward, row.sampler, row.rest))]
        for row in rows
    ]  # fmt: skip
    return markdown(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun_lab.bench.costs", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="as everywhere")
    parser.add_argument("--formats", default="none,bfloat16,int8_rows", help="as --quantization")
    parser.add_argument("--rows", default="1,2,4,5,8,16,32,64", help="of one forward")
    parser.add_argument("--prefill", default="", help="such as 512,2000: prompts beside oneDNN's packed bfloat16")
    parser.add_argument("--streams", default="", help="such as 1,4,16,64: whole rounds")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream's answer")
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--both", action="store_true", help="with the matrix unit, then again without it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = kernels.library()
    print(f"{processor()}; matrix unit: {'yes' if library is not None and library.tiles else 'no'}\n", flush=True)
    counts = sorted({1, *map(int, args.rows.split(","))})
    names = args.formats.split(",")
    generator = torch.Generator().manual_seed(0)
    try:
        models = {name: load_model(args.model, quantization=name, invariant=True) for name in args.formats.split(",")}
        size = min(model.info.vocab_size for model in models.values())
        text = torch.randint(size, (CONTEXT + counts[-1],), generator=generator).tolist()
        measured = costs([Forwards(n, m, counts[-1], text) for n, m in models.items()], counts, args.turns)
        print(table(measured))
        read: list[Prefill] = []
        if args.prefill:
            lengths = list(map(int, args.prefill.split(",")))
            packed = load_model(args.model, quantization="bfloat16", weights=PACKED, invariant=False)
            longest = torch.randint(size, (max(lengths),), generator=generator).tolist()
            read = prefills({**models, PACKED: packed}, lengths, args.turns, longest)
            print("\n" + prefill_table(read))
            del packed
        rounds: list[CostStream] = []
        if args.streams:
            models = {}
            prompts = torch.randint(size, (16, PROMPT), generator=generator).tolist()
            for name in names:
                rounds += streams(args.model, name, list(map(int, args.streams.split(","))), args.tokens, prompts)
            print("\n" + streams_table(rounds))
    except ForerunError as error:
        sys.exit(f"error: {error}")
    if args.out:
        about = {"processor": processor(), "arguments": {k: str(v) for k, v in vars(args).items()}}
        groups: dict[str, Sequence[Any]] = {"rows": measured, "prefill": read, "streams": rounds}
        rows = {name: [asdict(row) for row in group] for name, group in groups.items()}
        args.out.write_text(json.dumps({"environment": about, **rows}, indent=1))
    if args.both:
        again = [argument for argument in sys.argv[1:] if argument != "--both"]
        if args.out:
            again += ["--out", str(args.out.with_suffix(".lanes.json"))]
        print(flush=True)
        around = {**os.environ, "FORERUN_TILES": "0"}
        sys.exit(subprocess.run([sys.executable, "-m", "forerun_lab.bench.costs", *again], env=around).returncode)


if __name__ == "__main__":
    main()
