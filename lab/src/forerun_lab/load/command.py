"""``forerun plan`` with a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.console import print_json, print_table, progress, write_file
from forerun.cli.options import Flags, flags_of
from forerun.core.errors import ConfigError
from forerun.measure.config import PlanConfig
from forerun.measure.page import html, table
from forerun_lab.charts import chart
from forerun_lab.load.arrivals import Load
from forerun_lab.load.options import MOST, LoadOptions

if TYPE_CHECKING:
    from forerun_lab.load.costs import LoadCosts
    from forerun_lab.load.replica import Limits

LOAD = Flags("load", flags_of(LoadOptions, "Load and replicas"))
WITHOUT_LOAD = ("concurrency", "longest", "layer_trials", "trees", "prompts")
LOADED = ("prompt_tokens", "max_tokens", "seed")
"""Options of a plan that say what a random load is."""
FIGURES = {
    "replicas": "replicas", "tokens_per_second": "tokens/s", "ttft": "first token p50 p95",
    "tpot": "each further p50 p95", "latency": "whole p50 p95", "utilisation": "busy", "streams": "together",
    "hit_rate": "cached",
}  # fmt: skip


@dataclass(frozen=True)
class LoadSetting:
    """The engine, drafters and options with which a plan is measured."""

    engine: Mapping[str, Any]
    drafters: Sequence[Mapping[str, Any]]
    config: PlanConfig
    set_options: Sequence[str] = ()
    """Names of the options on the command line, in addition to ``engine``."""


def read_load(given: Mapping[str, Any], config: PlanConfig, set_options: Sequence[str]) -> tuple[LoadOptions, Load]:
    """The options and their load. Raises ConfigError, before anything is loaded, also if an option in ``set_options``
    belongs to a plan without a load."""
    for name in set_options:
        if name in WITHOUT_LOAD:
            raise ConfigError(f"--{name.replace('_', '-')} is for a plan without a load")
    options = LoadOptions(**given)
    return options, options.made(config.prompt_tokens, config.max_tokens, config.seed)


def plan_load(options: LoadOptions, load: Load, setting: LoadSetting) -> dict[str, Any]:
    """Measure a replica, unless costs are given, and simulate the load on as many as it takes."""
    from forerun_lab.load.run import Targets, read_costs
    from forerun_lab.load.run import plan_load as run

    measuring = [*setting.engine, *(name for name in setting.set_options if name not in LOADED)]
    for name in measuring if options.costs is not None else ():
        raise ConfigError(f"--costs conflicts with --{name.replace('_', '-')}: remove one")
    costs, limits, about = _measure(load, setting) if options.costs is None else read_costs(options.costs)
    added = {name: getattr(options, name) for name in ("outside", "request_overhead")}
    costs = replace(costs, **{name: value for name, value in added.items() if value is not None})
    targets = Targets(options.ttft_p95, options.tpot_p95, options.latency_p95)
    result = run(costs, limits, load.within(limits.positions), targets, options.replicas, options.router)
    return result | {"environment": about}


def _measure(load: Load, setting: LoadSetting) -> tuple[LoadCosts, Limits, dict[str, Any]]:
    import torch

    from forerun.cli.serve import PAGE_SIZE
    from forerun.engine.llm import LLM
    from forerun.measure.environment import environment
    from forerun.measure.prompts import make_prompts
    from forerun_lab.load.measured import LoadBench, limits_of, steps

    engine, config = {"page_size": PAGE_SIZE, **setting.engine}, setting.config
    with progress("loading", steps(engine.get("max_num_seqs"), len(setting.drafters))) as step:
        llm = LLM(**engine, threads=torch.get_num_threads(), speculative_config=None)
        load = load.within(llm.engine.max_model_len)

        def prompts(count: int, length: int) -> list[list[int]]:
            kind, file = config.prompt_set, config.prompts_file
            return make_prompts(kind, llm.tokenizer, count=count, length=length, seed=config.seed, file=file)

        bench = LoadBench(llm, load.typical(), load.longest(), prompts, config.temperature, config.seed, step)
        return bench.costs(setting.drafters), limits_of(llm), environment(llm, engine)


def show(result: Mapping[str, Any]) -> None:
    rows = [[_cell(one[key]) for key in FIGURES] for one in result["fleets"]]
    print_table(list(FIGURES.values()), rows)
    ways = ", ".join(f"{count}: {way}" for count, way in result["costs"]["switched"].items())
    print(f"\ndrafted, by requests that decode together: {ways}")
    wanting = ", ".join(f"{name} takes {ratio:.2f} times as long" for name, ratio in result["misses"].items())
    if result["replicas"] is None:
        print(f"not even {MOST} replicas keep this: {wanting}")
    elif wanting:
        print(f"{result['replicas']} replicas do not keep this: {wanting}")
    else:
        print(f"replicas: {result['replicas']}")


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['p50']:.3g} {value['p95']:.3g}"
    return f"{value:.2f}" if isinstance(value, float) and value < 10 else f"{value:.0f}"


def tell(result: Mapping[str, Any], page: Path | None, as_json: bool) -> None:
    """Print it, and write it as a page."""
    if page is not None:
        write_file(page, report(result))
    (print_json if as_json else show)(result)


TIMES = {"ttft": "to the first token", "tpot": "each further token", "latency": "to the last token"}


def report(result: Mapping[str, Any]) -> str:
    """HTML of what ``plan_load`` returned, with ``environment``."""
    about, load = result["environment"], result["load"]
    rate = "" if load["rate"] is None else f"{load['rate']:.3g} requests a second, "
    fleets = result["fleets"]
    rows = [
        [str(one["replicas"]), f"{one['tokens_per_second']:.0f}"]
        + [f"{one[name][part]:.3g}" for name in TIMES for part in ("p50", "p95")]
        + [f"{one['utilisation']:.0%}", f"{one['hit_rate']:.0%}"]
        for one in fleets
    ]
    heads = ["replicas", "tokens/s", *(f"{reported}, {part}" for reported in TIMES.values() for part in ("p50", "p95"))]
    lines = {
        reported: [(float(one["replicas"]), one[name]["p95"]) for one in fleets] for name, reported in TIMES.items()
    }
    answer = "none" if result["replicas"] is None else str(result["replicas"])
    costs = {
        f"{way['method']} {way['k']}": [(float(count), 1000 * value) for count, value in way["seconds"].items()]
        for way in result["costs"]["ways"]
    }
    parts = [
        f"<h1>Replicas for {escape(str(about['model']))}</h1>",
        f"<p>{escape(about['processor'])}, {about['threads']} threads. {rate}prompts of {load['prompt_tokens']} "
        f"tokens, {load['shared_tokens']} of them shared, answers of {load['output_tokens']}, at the mean; "
        f"router: {escape(result['router'])}.</p>",
        f"<p>Replicas: <b>{answer}</b></p>",
        table([*heads, "busy", "cached"], rows),
        "<h2>95th percentiles by replicas, seconds</h2>",
        chart(lines, lines, "replicas", "seconds"),
        "<h2>A round by requests that decode together</h2>",
        chart(costs, costs, "requests", "milliseconds"),
    ]
    return html(f"Replicas for {about['model']}", parts)
