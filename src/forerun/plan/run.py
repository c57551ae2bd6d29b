"""Measure a user's models on a user's prompts, then predict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from forerun.engine.config import NONE, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.plan.estimate import Costs, Measured, measure
from forerun.plan.layers import Subset, choose_layers
from forerun.plan.planner import CostCurve, estimate, predict, recommend, theory_row
from forerun.sampling.params import SamplingParams

LAYERSKIP = "layerskip"
LENGTHS = (1, 3, 5, 7)
"""Drafted tokens at which acceptance and cost are measured; other lengths are predicted from these."""


def run_plan(
    llm: LLM,
    options: Seq[Mapping[str, Any]],
    prompts: Seq[Seq[int]],
    *,
    temperature: float,
    max_tokens: int,
    concurrency: int,
    longest: int,
    seed: int,
    layer_trials: int = 0,
    step: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """``{"recommended": speculative_config, "predictions": [...], "estimates": [...], "verify_cost": {rows: price}}``,
    and as ``layers`` the ``layer_trials`` subsets of layers that were measured for ``layerskip``, the best first.

    Every method answers the prompts, so alpha is measured on text that the target generated (Leviathan et al. 2023,
    section 4.2). ``options`` are ``speculative_config`` mappings without a draft length.
    """
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed + i)
        for i in range(len(prompts))
    ]

    def run(config: Mapping[str, Any]) -> Measured:
        engine_config = replace(llm.config, max_num_seqs=concurrency)
        engine = Engine(llm.model, llm.tokenizer, engine_config, SpeculativeConfig.parse(config))
        measure(engine, prompts[:concurrency], [replace(p, max_tokens=4) for p in params[:concurrency]])
        return measure(engine, prompts, params)

    plain = Measured()
    found: dict[str, Measured] = {item["method"]: Measured() for item in options}
    for length in LENGTHS:
        step("plain decoding")
        plain.extend(run({"method": NONE}))
        for item in options:
            step(f"{item['method']}, {length} drafted tokens")
            found[item["method"]].extend(run({**item, "num_speculative_tokens": length}))
    prices: dict[int, list[float]] = defaultdict(list)
    estimates, silent = [], []
    for method, measured in found.items():
        costs, total = Costs.of(measured.rounds, plain.rounds, concurrency), measured.total
        if costs is None or costs.c is None or total.alpha is None or total.match_rate is None:
            silent.append(method)
            continue
        for rows, price in costs.verify.items():
            prices[rows].append(price)
        estimates.append(estimate(method, total.alpha, total.match_rate, measured.rounds, costs))
    curve = CostCurve({rows: median(values) for rows, values in prices.items()}, concurrency, llm.model.row_multiple)
    predictions = [p for item in estimates for p in predict(item, curve, longest, concurrency)]

    def measure_layers(layers: tuple[int, ...]) -> Subset | None:
        step(f"layers {', '.join(map(str, layers))}")
        measured = run({"method": LAYERSKIP, "layers": list(layers), "num_speculative_tokens": LENGTHS[1]})
        costs, total = Costs.of(measured.rounds, plain.rounds, concurrency), measured.total
        if costs is None or costs.c is None or total.alpha is None or total.match_rate is None:
            return None
        item = estimate(LAYERSKIP, total.alpha, total.match_rate, measured.rounds, costs)
        own = CostCurve({**curve.points, **costs.verify}, concurrency, llm.model.row_multiple)
        best = max(predict(item, own, longest, concurrency), key=lambda p: p.speedup)
        return Subset(layers, item.alpha, item.match_rate, item.c, best.k, best.speedup)

    subsets = choose_layers(measure_layers, llm.model.info.num_layers, layer_trials)
    return {
        "recommended": recommend(predictions, subsets),
        "layers": [asdict(subset) for subset in subsets],
        "temperature": temperature,
        "concurrency": concurrency,
        "plain_tokens_per_second": plain.tokens_per_second,
        "estimates": [theory_row(item, longest) for item in estimates],
        "silent": silent,
        "verify_cost": curve.points,
        "predictions": [asdict(p) for p in predictions],
    }
