"""Measure a user's models on a user's prompts, then predict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from forerun.core.errors import ConfigError
from forerun.engine.config import NONE, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.plan.estimate import Costs, Measured, measure
from forerun.plan.layers import Subset, choose_layers
from forerun.plan.planner import (
    LAYERSKIP,
    CostCurve,
    Estimate,
    estimate,
    predict,
    reach,
    recommend,
    theory_row,
    with_layers,
)  # fmt: skip
from forerun.plan.trees import plan_trees
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import DrafterConfig

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
    tree_nodes: int = 0,
    accept: str = SpeculativeConfig.accept,
    step: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """``{"recommended": speculative_config, "predictions": [...], "estimates": [...], "verify_cost": {rows: price},
    "measured": [...], "trees": [...], "reach": [...], "layers": [...]}``.

    ``trees`` has up to ``tree_nodes`` tokens for drafters that branch (``plan/trees.py``), ``reach`` what chains cannot
    come to (``planner.reach``), ``layers`` the ``layer_trials`` subsets measured for ``layerskip``, the best first.
    Every method answers the prompts, so alpha is measured on text that the target generated (Leviathan et al. 2023,
    section 4.2). ``options`` are ``speculative_config`` mappings that pass ``check_options``; ``accept`` is their rule,
    and that of ``layer_trials``.
    """
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed + i)
        for i in range(len(prompts))
    ]
    by_method = {LAYERSKIP: {"method": LAYERSKIP, "accept": accept}, **{item["method"]: item for item in options}}
    trial = _Trial(llm, prompts, params, concurrency, step)
    found = trial.methods(options)
    estimates = [item for method, measured in found.items() if (item := trial.estimate(method, measured)) is not None]
    curve = trial.common_curve(found.values())
    predictions = [
        p
        for item in estimates
        for p in predict(item, curve, longest, concurrency, partial(_nodes, by_method[item.method]))
    ]
    shown = {item.method: item for item in estimates}
    trees = plan_trees([o for o in options if o["method"] in shown], tree_nodes, longest, trial, shown, curve)
    subsets = choose_layers(
        lambda layers: trial.layers(by_method[LAYERSKIP], layers, curve, longest),
        llm.model.info.num_layers,
        layer_trials,
    )
    return {
        "recommended": recommend(predictions, subsets, {name: _own(item) for name, item in by_method.items()}),
        "layers": [asdict(subset) for subset in subsets],
        "temperature": temperature,
        "concurrency": concurrency,
        "plain_tokens_per_second": trial.plain.tokens_per_second,
        "estimates": [theory_row(item, longest) for item in estimates],
        "silent": [method for method in found if method not in shown],
        "verify_cost": curve.points,
        "predictions": [asdict(p) for p in predictions],
        "measured": trial.measured(),
        "trees": trees,
        "reach": [reach(item) for item in estimates],
    }


def check_options(options: Seq[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a configuration that fixes how far it drafts: a plan is to find that."""
    for item in options:
        for key in ("num_speculative_tokens", "tree"):
            if key in item:
                raise ConfigError(f"plan finds out how many tokens to draft: leave {key!r} out")
        if _parse(item, 1).num_speculative_tokens != 1:
            raise ConfigError(
                f"plan finds out how many tokens to draft: the drafters of {item['method']!r} must not have "
                "'num_speculative_tokens' or 'tree' of their own"
            )


def _parse(options: Mapping[str, Any], k: int) -> DrafterConfig:
    drafter = SpeculativeConfig.parse({**options, "num_speculative_tokens": k}).drafter
    assert drafter is not None
    return drafter


def _nodes(options: Mapping[str, Any], k: int) -> int:
    """Most tokens that a draft of depth k has."""
    return _parse(options, k).max_nodes()


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that hold anyhow."""
    usual = {"accept": SpeculativeConfig.accept, "length": SpeculativeConfig.length}
    return {key: value for key, value in options.items() if key not in usual or value != usual[key]}


@dataclass
class _Trial:
    """Runs of the same prompts under many configurations, with plain decoding among them."""

    llm: LLM
    prompts: Seq[Seq[int]]
    params: list[SamplingParams]
    concurrency: int
    step: Callable[[str], None]
    plain: Measured = field(default_factory=Measured)
    by_length: dict[tuple[str, int], Measured] = field(default_factory=dict)

    def run(self, config: Mapping[str, Any]) -> Measured:
        engine_config = replace(self.llm.config, max_num_seqs=self.concurrency)
        engine = Engine(self.llm.model, self.llm.tokenizer, engine_config, SpeculativeConfig.parse(config))
        first = [replace(p, max_tokens=4) for p in self.params[: self.concurrency]]
        measure(engine, self.prompts[: self.concurrency], first)
        return measure(engine, self.prompts, self.params)

    def methods(self, options: Seq[Mapping[str, Any]]) -> dict[str, Measured]:
        """Every method at every length of ``LENGTHS``."""
        found: dict[str, Measured] = {item["method"]: Measured() for item in options}
        for length in LENGTHS:
            self.step("plain decoding")
            self.plain.extend(self.run({"method": NONE}))
            self.plain.check()
            for item in options:
                self.step(f"{item['method']}, {length} drafted tokens")
                here = self.run({**item, "num_speculative_tokens": length})
                self.by_length[item["method"], length] = here
                found[item["method"]].extend(here)
        return found

    def measured(self) -> list[dict[str, Any]]:
        """Speed over plain decoding, and how many of the drafts had more than 0, 1, ... tokens accepted."""
        rows = []
        for (method, k), found in self.by_length.items():
            kept, speed = found.total.acceptance_histogram, found.tokens_per_second / self.plain.tokens_per_second
            counts = [sum(kept[j + 1 :]) for j in range(len(kept) - 1)]
            rows.append({"method": method, "k": k, "speedup": speed, "drafts": sum(kept), "kept": counts})
        return rows

    def layers(
        self, options: Mapping[str, Any], layers: tuple[int, ...], curve: CostCurve, longest: int
    ) -> Subset | None:
        """``layerskip`` with these layers; None where it drafted nothing."""
        self.step(f"layers {', '.join(map(str, layers))}")
        config = with_layers(options, layers)
        measured = self.run({**config, "num_speculative_tokens": LENGTHS[1]})
        item = self.estimate(LAYERSKIP, measured)
        if item is None:
            return None
        own = self.curve({**curve.points, **self.prices(measured)})
        predictions = predict(item, own, longest, self.concurrency, partial(_nodes, config))
        best = max(predictions, key=lambda p: p.speedup)
        return Subset(layers, item.alpha, item.match_rate, item.c, best.k, best.speedup)

    def estimate(self, method: str, measured: Measured) -> Estimate | None:
        costs, total = Costs.of(measured.rounds, self.plain.rounds, self.concurrency), measured.total
        if costs is None or costs.c is None or total.alpha is None or total.match_rate is None:
            return None
        return estimate(method, total.alpha, total.match_rate, measured.rounds, costs)

    def prices(self, measured: Measured) -> dict[int, float]:
        """Verification by rows, in plain forwards; empty where nothing was drafted."""
        costs = Costs.of(measured.rounds, self.plain.rounds, self.concurrency)
        return {} if costs is None or costs.c is None else dict(costs.verify)

    def common_curve(self, found: Iterable[Measured]) -> CostCurve:
        """From all methods' rounds: of each number of rows the median of their prices."""
        prices = defaultdict(list)
        for measured in found:
            for rows, price in self.prices(measured).items():
                prices[rows].append(price)
        return self.curve({rows: median(values) for rows, values in prices.items()})

    def curve(self, points: Mapping[int, float]) -> CostCurve:
        return CostCurve(points, self.concurrency, self.llm.model.row_multiple)
