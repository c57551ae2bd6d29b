"""``python -m forerun_lab.bench.orderings``: orderings from the literature, tested by tokens per round.

Tokens per round need no quiet machine. Both sides answer the same prompts with the same seeds. An ordering is decided
if the mean difference over prompts is more than two standard errors from zero.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean, stdev
from typing import Any

import torch

from forerun.core.errors import ForerunError
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.config import HELD_OUT, SETS
from forerun.measure.page import markdown
from forerun.measure.prompts import make_prompts
from forerun.measure.rounds import engine_of, measure
from forerun.sampling.params import SamplingParams

DEPTH = 3
CHAIN = {"method": "draft_model", "num_speculative_tokens": 5}
TREE = {"method": "draft_model", "tree": [3, 2, 1]}
DECISIVE = 2.0
"""Standard errors from zero that decide an ordering."""
HELD, BROKEN, UNDECIDED = "held", "not held", "undecided"


@dataclass(frozen=True)
class Ordering:
    """``better`` should keep more tokens per round than ``worse``; both are ``speculative_config`` mappings."""

    claim: str
    source: str
    better: Mapping[str, Any]
    worse: Mapping[str, Any]
    temperatures: tuple[float, ...] = (1.0,)


def _heads(better: str, worse: str, source: str) -> Ordering:
    first, second = ({"method": name, "num_speculative_tokens": DEPTH} for name in (better, worse))
    return Ordering(f"{better} over {worse}, k = {DEPTH}", source, first, second, (0.0, 1.0))


ORDERINGS = (
    _heads("eagle", "medusa", "EAGLE, arXiv 2401.15077"),
    _heads("medusa", "blockwise", "Medusa, arXiv 2401.10774"),
    Ordering(
        "recursive: without replacement over with, tree 3x2x1",
        "Sequoia, arXiv 2402.12374",
        {**TREE, "accept": "recursive", "replacement": False},
        {**TREE, "accept": "recursive", "replacement": True},
    ),
    Ordering(
        "block over token, k = 5",
        "Sun et al., arXiv 2403.10444",
        {**CHAIN, "accept": "block"},
        {**CHAIN, "accept": "token"},
    ),
    Ordering(
        "traversal over recursive, tree 3x2x1",
        "Weng et al., arXiv 2505.12398",
        {**TREE, "accept": "traversal"},
        {**TREE, "accept": "recursive"},
    ),
)


@dataclass(frozen=True)
class OrderingComparison:
    """Tokens per round of both sides, the mean difference per prompt and its standard error, over ``prompts``."""

    claim: str
    source: str
    temperature: float
    better: float | None = None
    worse: float | None = None
    difference: float | None = None
    error: float | None = None
    prompts: int = 0
    verdict: str = UNDECIDED
    note: str = ""


def verdict(differences: Sequence[float]) -> tuple[float, float, str]:
    """Mean, standard error, and whether the mean is above, below or near zero. Two differences at least."""
    middle = mean(differences)
    error = stdev(differences) / len(differences) ** 0.5
    if abs(middle) <= DECISIVE * error:
        return middle, error, UNDECIDED
    return middle, error, HELD if middle > 0 else BROKEN


@dataclass
class OrderingBench:
    """Runs each configuration once per temperature."""

    llm: LLM
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    concurrency: int
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More options by method."""
    cached: dict[str, list[RequestMetrics]] = field(default_factory=dict)

    def run(self, config: Mapping[str, Any], temperature: float) -> list[RequestMetrics]:
        """Metrics of each prompt. Raises ForerunError for a missing drafter."""
        full = {**config, **self.options.get(config["method"], {})}
        key = json.dumps([full, temperature], sort_keys=True)
        if key not in self.cached:
            engine = engine_of(self.llm, full, max_num_seqs=self.concurrency)
            params = [
                SamplingParams(temperature=temperature, max_tokens=self.max_tokens, ignore_eos=True, seed=seed)
                for seed in range(len(self.prompts))
            ]
            self.cached[key] = measure(engine, self.prompts, params).metrics
        return self.cached[key]

    def compare(self, ordering: Ordering, temperature: float) -> OrderingComparison:
        empty = OrderingComparison(ordering.claim, ordering.source, temperature)
        try:
            sides = [self.run(side, temperature) for side in (ordering.better, ordering.worse)]
        except ForerunError as error:
            return replace(empty, verdict="left out", note=" ".join(str(error).split()))
        pairs = [(b.tokens_per_round, w.tokens_per_round) for b, w in zip(*sides)]
        middle, error_, result = verdict([b - w for b, w in pairs if b is not None and w is not None])
        totals = [RequestMetrics.merged(side).tokens_per_round for side in sides]
        return replace(
            empty,
            better=totals[0],
            worse=totals[1],
            difference=middle,
            error=error_,
            prompts=len(pairs),
            verdict=result,
        )


def compare_all(bench: OrderingBench, orderings: Sequence[Ordering] = ORDERINGS) -> list[OrderingComparison]:
    return [bench.compare(ordering, temperature) for ordering in orderings for temperature in ordering.temperatures]


def table(result: Sequence[OrderingComparison]) -> str:
    """In markdown."""
    heads = ["ordering", "T", "tokens per round", "the other's", "difference per prompt", "", "source"]
    rows = []
    for item in result:
        numbers = ["–", "–", item.note]
        if item.better is not None and item.worse is not None:
            numbers = [f"{item.better:.3f}", f"{item.worse:.3f}", f"{item.difference:+.3f} ± {item.error:.3f}"]
        rows.append([item.claim, f"{item.temperature:g}", *numbers, item.verdict, item.source])
    return markdown(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="forerun:target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--prompt-set", choices=SETS, default=HELD_OUT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--speculative-config", type=json.loads, default={}, help="{METHOD: {more options}}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(args.model, dtype=args.dtype, threads=torch.get_num_threads(), speculative_config=None)
    prompts = make_prompts(args.prompt_set, llm.tokenizer, count=args.prompts, length=args.prompt_tokens)
    result = compare_all(OrderingBench(llm, prompts, args.max_tokens, args.concurrency, args.speculative_config))
    print(json.dumps([asdict(item) for item in result], indent=1) if args.json else table(result))


if __name__ == "__main__":
    main()
