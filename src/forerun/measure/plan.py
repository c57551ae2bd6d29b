"""Measure a user's models on a user's prompts, then predict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import mean, median
from typing import Any

from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.engine.config import SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.measure.config import PlanConfig
from forerun.measure.methods import labels
from forerun.measure.planner import CostCurve, Estimate, estimate, predict, reach, recommend
from forerun.measure.rounds import PLAIN, EngineContender, Measured, Prompts, Turns, full, in_plain_forwards, seeded
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import DrafterConfig, drafters
from forerun.speculate.length.costs import ExpertReads
from forerun.theory import best_gamma

LENGTHS = (1, 3, 5, 7)
"""Drafted tokens at which acceptance and cost are measured; other lengths are predicted from these."""


def run_plan(
    llm: LLM,
    options: Sequence[Mapping[str, Any]],
    prompts: Prompts,
    config: PlanConfig,
    concurrency: int,
    step: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """``{"recommended": speculative_config, "predictions": [...], "estimates": [...], "verify_cost": {rows: price},
    "measured": [...], "usual": [...], "trees": [...], "reach": [...], "layers": [...], "experts": None | {...}}``.

    ``usual`` are methods that draft otherwise than at a fixed length where nothing asks for one: as they are then, by
    measurement. ``trees`` and ``layers`` are what ``config`` asks for of ``forerun_lab.plans.explore``, ``reach`` what
    chains cannot come to (``planner.reach``), ``experts`` what rounds of a mixture read (``ExpertReads.report``).
    ``concurrency`` requests are decoded together. Every method answers the prompts, so alpha is measured on text that
    the target generated (Leviathan et al. 2023, section 4.2); ``best_gamma`` of an estimate is for free verification
    (section 3.5). ``options`` are ``speculative_config`` mappings that pass ``check_options``. Raises ConfigError where
    trees or layers are asked for without forerun-lab.
    """
    plans = from_lab("plans", "plan with trees or layers") if config.trees or config.layer_trials else None
    longest = config.longest
    asked = {"temperature": config.temperature, "max_tokens": config.max_tokens, "ignore_eos": True}
    params = seeded(len(prompts), config.seed, **asked)
    named = dict(zip(labels(options, ()), options, strict=True))
    trial = Trial(llm, prompts, params, concurrency, step)
    trial.methods(named)
    usual = trial.usual(named)
    estimates = [e for name in named if (e := trial.estimate(name, trial.by_length[name])) is not None]
    every = [result for runs in trial.by_length.values() for result in runs.values()]
    trial.learn([trial.plain, *every])
    curve = trial.curve(trial.prices(every))
    predictions = [
        p
        for item in estimates
        for p in predict(item, curve, longest, concurrency, partial(most_nodes, named[item.method]))
    ]
    own = {name: own_options(item) for name, item in named.items()}
    shown = {item.method: named[item.method] for item in estimates}
    trees, layers, more = [], [], []
    if plans is not None:
        trees, layers, more = plans.explore(trial, named, shown, curve, config)
    return {
        "recommended": recommend(predictions, own, [*more, *((each["speedup"], each["config"]) for each in usual)]),
        "layers": layers,
        "temperature": config.temperature,
        "concurrency": concurrency,
        "plain_tokens_per_second": trial.plain.tokens_per_second,
        "estimates": [
            {**asdict(item), "best_gamma": best_gamma(item.match_rate, item.c, longest)} for item in estimates
        ],
        "silent": [method for method in named if method not in shown],
        "verify_cost": curve.points,
        "predictions": [asdict(p) for p in predictions],
        "measured": trial.measured(),
        "usual": usual,
        "trees": trees,
        "reach": [reach(item) for item in estimates],
        "experts": trial.experts(every),
    }


def check_options(options: Sequence[Mapping[str, Any]]) -> None:
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


def most_nodes(options: Mapping[str, Any], k: int) -> int:
    """Most tokens that a draft of depth k has."""
    return _parse(options, k).max_nodes()


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The method, and its options without those that hold anyhow."""
    usual = {"accept": SpeculativeConfig.accept, "length": SpeculativeConfig.length}
    own = {key: value for key, value in options.items() if key not in usual or value != usual[key]}
    return {"method": options["method"], **own}


@dataclass
class Trial:
    """Runs of the same prompts under many configurations, in turns with plain decoding. Times of rounds are in forwards
    of the plain rounds beside them."""

    llm: LLM
    prompts: Prompts
    params: list[SamplingParams]
    concurrency: int
    step: Callable[[str], None]
    plain: Measured = field(default_factory=Measured)
    by_length: dict[str, dict[int, Measured]] = field(default_factory=dict)
    speedups: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mixture = self.llm.model.info.mixture
        self.reads = None if mixture is None else ExpertReads(mixture)

    def learn(self, result: Iterable[Measured]) -> None:
        """How many experts rounds read."""
        if self.reads is None:
            return
        for each in (each for measured in result for each in measured.rounds):
            self.reads.learn(each.rows, len(each.depths), each.experts)

    def experts(self, result: Iterable[Measured]) -> dict[str, Any] | None:
        """``ExpertReads.report`` of the experts that forwards read by their rows: means."""
        if self.reads is None:
            return None
        by_rows: dict[int, list[int]] = defaultdict(list)
        for measured in result:
            for each in full(measured.rounds, self.concurrency):
                by_rows[each.rows].append(each.experts)
        return self.reads.report({rows: mean(values) for rows, values in sorted(by_rows.items())})

    def run(self, configs: Sequence[Mapping[str, Any]]) -> list[Measured]:
        """What each configuration did, after plain decoding, which all take turns with. Several engines are here at
        once: they have room for these answers alone."""
        longest = max(len(prompt) + (p.max_tokens or 0) for prompt, p in zip(self.prompts, self.params))
        room: dict[str, Any] = {"max_model_len": min(self.llm.engine.max_model_len, longest)}
        room["max_num_seqs"] = self.concurrency
        turns = Turns([EngineContender(self.llm, config, **room) for config in (PLAIN, *configs)])
        turns.warm_up(self.prompts[: self.concurrency], self.params[: self.concurrency])
        result = turns.side_by_side(self.prompts, self.params)
        in_plain_forwards(result, self.concurrency)
        self.plain.extend(result[0])
        return result

    def methods(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Measure every method at every length of ``LENGTHS``."""
        for length in LENGTHS:
            self.step(f"{length} drafted tokens")
            plain, *result = self.run([{**item, "num_speculative_tokens": length} for item in options.values()])
            for method, here in zip(options, result):
                self.by_length.setdefault(method, {})[length] = here
                self.speedups[method, length] = here.tokens_per_second / plain.tokens_per_second

    def usual(self, options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Speed over plain decoding of methods that have a way of their own where no length is asked for."""
        open_ended = [{key: value for key, value in item.items() if key != "length"} for item in options.values()]
        own = [item for item in open_ended if drafters[item["method"]].config_class.with_defaults(item) != item]
        plain, *result = self.run(own) if own else (self.plain,)
        speeds = [here.tokens_per_second / plain.tokens_per_second for here in result]
        return [
            {"method": item["method"], "speedup": speed, "config": own_options(item)}
            for item, speed in zip(own, speeds)
        ]

    def measured(self) -> list[dict[str, Any]]:
        """Speed over plain decoding, and how many of the drafts had more than 0, 1, ... tokens accepted."""
        rows = []
        for (method, k), speed in self.speedups.items():
            kept = self.by_length[method][k].total.acceptance_histogram
            counts = [sum(kept[j + 1 :]) for j in range(len(kept) - 1)]
            rows.append({"method": method, "k": k, "speedup": speed, "drafts": sum(kept), "kept": counts})
        return rows

    def estimate(self, method: str, by_length: Mapping[int, Measured]) -> Estimate | None:
        return estimate(method, by_length, self.plain, self.concurrency)

    def prices(self, result: Iterable[Measured]) -> dict[int, float]:
        """Of a verification by its rows, in plain forwards, over the runs in which something was drafted."""
        by_rows: dict[int, list[float]] = defaultdict(list)
        for measured in result:
            if any(r.depth for r in measured.rounds):
                for r in full(measured.rounds, self.concurrency):
                    by_rows[r.rows].append(r.verify)
        return {rows: median(values) for rows, values in sorted(by_rows.items())}

    def curve(self, points: Mapping[int, float]) -> CostCurve:
        reads, count = self.reads, self.concurrency
        multiple = self.llm.model.row_multiple
        if reads is None:
            return CostCurve(points, count, multiple)
        return CostCurve(points, count, multiple, reads.fitted(points, count))
