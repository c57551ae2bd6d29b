"""``forerun plan``: measures methods on a user's model and prompts, then predicts other draft lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import mean
from typing import Any

from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.engine.config import SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.measure.config import PlanConfig
from forerun.measure.methods import labels
from forerun.measure.planner import Estimate, cost_curve, estimate, predict, reach, recommend
from forerun.measure.rounds import (
    PLAIN,
    EngineContender,
    Interleaved,
    Measured,
    Prompts,
    costs_by_rows,
    full_rounds,
    in_plain_forwards,
    seeded_params,
)
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import DrafterConfig, drafters
from forerun.speculate.length.prices import Curve
from forerun.theory import best_gamma

LENGTHS = (1, 3, 5, 7)
"""Measured draft lengths; other lengths are predicted from them."""


def run_plan(
    llm: LLM,
    options: Sequence[Mapping[str, Any]],
    prompts: Prompts,
    config: PlanConfig,
    concurrency: int,
    step: Callable[[str], None] = lambda note: None,
    default: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the methods of ``options``, ``concurrency`` requests at a time, and recommend a ``speculative_config``.

    Every method answers the prompts: alpha is measured on the target's own text (Leviathan et al. 2023, section 4.2).
    ``options`` are ``speculative_config`` mappings that pass ``check_options``. ``default`` is measured as it is.

    Returns:
        ``{"recommended": speculative_config, "predictions": [...], "estimates": [...], "verify_cost": {rows: cost},
        "measured": [...], "usual": [...], "trees": [...], "reach": [...], "layers": [...], "experts": None | {...}}``.
        ``best_gamma`` of an estimate is for free verification (section 3.5). ``usual`` has methods whose default is no
        fixed length, measured as they are by default, and ``default`` as ``auto``. ``trees`` and ``layers`` come from
        ``forerun_lab.plans.explore``, ``reach`` from ``planner.reach``, ``experts``, for a mixture, from
        ``Trial.experts``.

    Raises:
        ConfigError: if trees or layers are requested without forerun-lab.
    """
    plans = from_lab("plans", "plan with trees or layers") if config.trees or config.layer_trials else None
    longest = config.longest
    sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens, "ignore_eos": True}
    params = seeded_params(len(prompts), config.seed, **sampling)
    named = dict(zip(labels(options, ()), options, strict=True))
    trial = Trial(llm, prompts, params, concurrency, step)
    trial.methods(named)
    usual = trial.usual(named, default)
    estimates = [e for name in named if (e := trial.estimate(name, trial.by_length[name])) is not None]
    runs = [run for by_length in trial.by_length.values() for run in by_length.values()]
    curve = trial.curve(trial.verify_costs(runs))
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
        "experts": trial.experts(runs),
    }


def check_options(options: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a configuration with a draft length: a plan finds that."""
    for item in options:
        for key in ("num_speculative_tokens", "tree"):
            if key in item:
                raise ConfigError(f"plan chooses the number of draft tokens: remove {key!r}")
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
    """Largest number of tokens of a draft of depth k."""
    return _parse(options, k).max_nodes()


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The method and its options, without the default rule and length policy."""
    defaults = {"accept": SpeculativeConfig.accept, "length": SpeculativeConfig.length}
    own = {key: value for key, value in options.items() if key not in defaults or value != defaults[key]}
    return {"method": options["method"], **own}


@dataclass
class Trial:
    """Runs of the same prompts under many configurations, each interleaved with plain decoding. Times of rounds are in
    forwards of those plain rounds."""

    llm: LLM
    prompts: Prompts
    params: list[SamplingParams]
    concurrency: int
    step: Callable[[str], None]
    plain: Measured = field(default_factory=Measured)
    by_length: dict[str, dict[int, Measured]] = field(default_factory=dict)
    speedups: dict[tuple[str, int], float] = field(default_factory=dict)

    def experts(self, runs: Iterable[Measured]) -> dict[str, Any] | None:
        """Of a mixture, what forwards read: by rows, the mean number of experts over that of one row. ``again``: the
        fraction that a second row of the same text shares."""
        mixture = self.llm.model.info.mixture
        if mixture is None:
            return None
        by_rows: dict[int, list[int]] = defaultdict(list)
        for run in runs:
            for sample in full_rounds(run.rounds, self.concurrency):
                by_rows[sample.rows].append(sample.experts)
        one = mixture.layers * mixture.chosen
        read = {rows: mean(values) / one for rows, values in sorted(by_rows.items())}
        again = 2.0 - read[2] if 2 in read and self.concurrency == 1 else None
        return {
            "count": mixture.count, "chosen": mixture.chosen, "share": mixture.share, "again": again, "read": read,
        }  # fmt: skip

    def run(self, configs: Sequence[Mapping[str, Any]]) -> list[Measured]:
        """Results of plain decoding and of each configuration, interleaved. Their engines exist at the same time, so
        each has cache for these answers alone."""
        longest = max(len(prompt) + (p.max_tokens or 0) for prompt, p in zip(self.prompts, self.params))
        limits: dict[str, Any] = {
            "max_model_len": min(self.llm.engine.max_model_len, longest),
            "max_num_seqs": self.concurrency,
        }
        interleaved = Interleaved([EngineContender(self.llm, config, **limits) for config in (PLAIN, *configs)])
        interleaved.warm_up(self.prompts[: self.concurrency], self.params[: self.concurrency])
        result = interleaved.side_by_side(self.prompts, self.params)
        in_plain_forwards(result, self.concurrency)
        self.plain.extend(result[0])
        return result

    def methods(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Measure every method at every length of ``LENGTHS``."""
        for length in LENGTHS:
            self.step(f"{length} drafted tokens")
            plain, *result = self.run([{**item, "num_speculative_tokens": length} for item in options.values()])
            for method, run in zip(options, result):
                self.by_length.setdefault(method, {})[length] = run
                self.speedups[method, length] = run.tokens_per_second / plain.tokens_per_second

    def usual(
        self, options: Mapping[str, Mapping[str, Any]], default: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Speed over plain decoding of the methods whose default is no fixed length, and of ``default``."""
        open_ended = [{key: value for key, value in item.items() if key != "length"} for item in options.values()]
        own = [item for item in open_ended if drafters[item["method"]].config_class.with_defaults(item) != item]
        ways = [(item["method"], item, own_options(item)) for item in own]
        ways += [] if default is None else [("auto", dict(default), dict(default))]
        plain, *result = self.run([config for _, config, _ in ways]) if ways else (self.plain,)
        return [
            {"method": name, "speedup": run.tokens_per_second / plain.tokens_per_second, "config": shown}
            for (name, _, shown), run in zip(ways, result)
        ]

    def measured(self) -> list[dict[str, Any]]:
        """Speed over plain decoding, and the number of drafts with more than 0, 1, ... accepted tokens."""
        rows = []
        for (method, k), speed in self.speedups.items():
            kept = self.by_length[method][k].total.acceptance_histogram
            counts = [sum(kept[j + 1 :]) for j in range(len(kept) - 1)]
            rows.append({"method": method, "k": k, "speedup": speed, "drafts": sum(kept), "kept": counts})
        return rows

    def estimate(self, method: str, by_length: Mapping[int, Measured]) -> Estimate | None:
        return estimate(method, by_length, self.plain, self.concurrency)

    def verify_costs(self, runs: Iterable[Measured]) -> dict[int, float]:
        """Median cost of a verification by its rows, in plain forwards, over the runs with drafts."""
        drafted = [run.rounds for run in runs if any(r.depth for r in run.rounds)]
        return costs_by_rows(r for rounds in drafted for r in full_rounds(rounds, self.concurrency))

    def curve(self, points: Mapping[int, float]) -> Curve:
        return cost_curve(points, self.concurrency, self.llm.model.row_multiple)
