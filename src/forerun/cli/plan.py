"""``forerun plan``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.bench import MODEL_ONLY, USUAL, MoreOptions, shared_options, with_methods
from forerun.cli.console import check_file, print_json, print_table, progress, set_threads, write_file
from forerun.cli.options import ENGINE, AsJson, Flag, Flags, flags_of, takes
from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab, has_lab
from forerun.engine.config import NONE, EngineConfig
from forerun.measure.config import PlanConfig

if TYPE_CHECKING:
    from forerun.engine.llm import LLM


PLANNED = Flags("planned", flags_of(PlanConfig))
SEARCHED = ("temperature", "concurrency", "seed", "model", "quantization")
"""Options that ``--minutes`` takes."""
FLEETS, PLANS = "load", "plans"
"""Parts of forerun-lab: plans of replicas, and plans with trees, layers or a page."""


def _load_flags() -> Flags:
    """The options of ``plan --load``; without forerun-lab, two of them, which say that it is missing."""
    if has_lab(FLEETS):
        flags: Flags = from_lab(FLEETS, "plan --load").LOAD
        return flags
    return Flags(
        "load",
        [Flag(name, str, "Predict how many replicas a load needs. Needs forerun-lab.") for name in ("load", "rate")],
    )


LOAD = _load_flags()


@takes(ENGINE, MODEL_ONLY, PLANNED.showing(methods=USUAL), LOAD)
def plan(
    speculative_config: MoreOptions = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(help="Search for this long, as tune --draft does, but write nothing. Needs --spec-model."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with plots. Needs forerun-lab.")
    ] = None,
    as_json: AsJson = False,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    planned: Mapping[str, Any],
    load: Mapping[str, Any],
) -> None:
    """Measure acceptance and costs, predict the speed of every method and recommend one.

    With --load or --rate, predict how many replicas a load needs."""
    if page is not None:
        check_file(page)
    if "max_num_seqs" in engine and not load:
        raise ConfigError("plan does not support --max-num-seqs: use --concurrency")
    shared = shared_options(speculative_config, speculative)
    named = set(shared)
    config = PlanConfig(**with_methods(planned, engine, shared))
    for method in set(shared) - named:
        shared[method].pop("num_speculative_tokens", None)  # a plan finds that
    given = [*planned, *(["speculative_config"] if speculative_config else [])]
    if minutes is not None:
        for name in (*given, *load, *engine):
            if name not in SEARCHED:
                raise ConfigError(f"--{name.replace('_', '-')} has no effect with --minutes: remove one")
        workload = {"temperatures": (config.temperature,), "concurrency": config.concurrency, "seed": config.seed}
        draft = speculative.get("model") or shared.get("draft_model", {}).get("model")
        _search({**engine, **workload, "draft": draft, "minutes": minutes, "threads": threads}, page, as_json)
        return
    fleets = from_lab(FLEETS, "plan --load") if load else None
    targets = () if fleets is None else fleets.read_load(load, config, given)
    options = _candidates(config, shared)
    set_threads(threads)
    needs_lab = config.trees or config.layer_trials or page is not None
    plans = from_lab(PLANS, "plan with trees, layers or a page") if needs_lab else None
    if fleets is not None:
        given += [*(["threads"] if threads != 1 else []), *(["spec_model"] if speculative else [])]
        fleets.tell(fleets.plan_load(*targets, fleets.LoadSetting(engine, options, config, given)), page, as_json)
        return
    default = None
    if "methods" not in planned:
        from forerun.engine.auto import choose

        accept = {} if config.accept == PlanConfig.accept else {"accept": config.accept}
        default = choose(str(engine.get("model", EngineConfig.model)), accept, engine.get("lora"))
    result = _plans(engine, options, config, default)
    if page is not None and plans is not None:
        write_file(page, plans.report(result))
    (print_json if as_json else show)(result)


def _search(settings: dict[str, Any], page: Path | None, as_json: bool) -> None:
    """Prints what ``tune --draft`` would choose. Raises ConfigError."""
    from forerun.tune.config import PairConfig
    from forerun.tune.page import pair_page
    from forerun.tune.run import search, verdict

    if settings["draft"] is None:
        raise ConfigError("--minutes needs a draft model: add --spec-model")
    config = PairConfig(**{"model": EngineConfig.model, **settings, "progress": not as_json})
    set_threads(config.threads)
    result = search(config, (lambda line: None) if as_json else print)
    if page is not None:
        write_file(page, pair_page(config.model, result))
    if as_json:
        print_json(result)
    else:
        print(verdict(result))
        print(f"recommended: --speculative-config '{json.dumps(result['chosen'])}'")


def _plans(
    engine: Mapping[str, Any], options: list[dict[str, Any]], config: PlanConfig, default: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The plan for the first load, with summaries of all loads."""
    import torch

    from forerun.engine.llm import LLM
    from forerun.measure.plan import LENGTHS, run_plan
    from forerun.measure.prompts import prompts_of

    loads = config.concurrency
    with progress("loading", len(loads) * (len(LENGTHS) + config.layer_trials)) as step:
        llm = LLM(**engine, threads=torch.get_num_threads(), speculative_config=None)
        prompts = prompts_of(config, llm.tokenizer)
        plans = [run_plan(llm, options, prompts, config, count, step, default) for count in loads]
    result = plans[0] | {"loads": [_summary(one) for one in plans]}
    result["environment"] = _environment(llm, engine, options, prompts, loads[0])
    return result


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """A load's recommendation; ``best`` is the best predicted speed-up, 1 if that is plain decoding."""
    names = ("concurrency", "recommended", "plain_tokens_per_second")
    return {name: result[name] for name in names} | {"best": max(best_speed(result), 1.0)}


def _environment(
    llm: LLM, engine: Mapping[str, Any], options: list[dict[str, Any]], prompts: list[list[int]], concurrency: int
) -> dict[str, Any]:
    """The machine, the model and the weights that were measured."""
    from forerun.measure.environment import environment, read_bandwidth, weights
    from forerun.measure.rounds import engine_of

    engines = [llm.engine, *(engine_of(llm, item, max_num_seqs=concurrency) for item in options)]
    about = environment(llm, engine) | {"weights": weights(engines, prompts)}
    return about | {"read_bandwidth": read_bandwidth(llm.model.info.device)}


def _candidates(config: PlanConfig, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """The ``speculative_config`` of each drafting method, with those of the ``shared`` options that it knows."""
    from forerun.measure.methods import method_configs
    from forerun.measure.plan import check_options

    configs = method_configs(config.methods, [config.accept], ["fixed"], (), shared)
    options = [c for index, c in enumerate(configs) if c["method"] != NONE and c not in configs[:index]]
    check_options(options)
    return options


def show(result: Mapping[str, Any]) -> None:
    """Prints a plan."""
    from forerun.measure.environment import line

    lengths = sorted({p["k"] for p in result["predictions"]})
    rows = []
    for item in result["estimates"]:
        speeds = [f"{p['speedup']:.2f}" for p in result["predictions"] if p["method"] == item["method"]]
        figures = [f"{item[key]:.2f}" for key in ("alpha", "match_rate", "coverage", "c")]
        rows.append([item["method"], *figures, *speeds])
    if rows:
        print_table(["method", "alpha", "match", "drafts in", "c", *[f"k={k}" for k in lengths]], rows)
    if result["layers"] or result["trees"]:
        from_lab(PLANS, "plan with trees, layers or a page").show(result)
    for item in result["usual"]:
        how = "the default" if item["method"] == "auto" else "without a length"
        print(f"{item['method']}, {how}: {item['speedup']:.2f}x, measured")
    for item in result["reach"]:
        print(_reach(item))
    for method in result["silent"]:
        print(f"{method}: drafted nothing on these prompts")
    print()
    print("; ".join(map(line, result["environment"]["weights"])))
    prices = ", ".join(f"{rows} rows {price:.2f}" for rows, price in result["verify_cost"].items())
    print(f"verification, in plain forwards: {prices}")
    if result["experts"] is not None:
        read = ", ".join(f"{rows} rows {times:.2f}" for rows, times in result["experts"]["read"].items())
        print(f"experts read, in those of one row: {read}")
    print(f"plain decoding: {result['plain_tokens_per_second']:.0f} tokens/s at temperature {result['temperature']:g}")
    for load in result["loads"] if len(result["loads"]) > 1 else ():
        print(f"{load['concurrency']} at a time: {json.dumps(load['recommended'])}, {load['best']:.2f} predicted")
    print(f"recommended: --speculative-config '{json.dumps(result['recommended'])}'")
    print(conclusion(result))


def conclusion(result: Mapping[str, Any]) -> str:
    """What to do, in one sentence."""
    recommended, speed = result["recommended"], f"{best_speed(result):.2f} times the speed of plain decoding"
    if not best_speed(result):
        return "Do without drafts (--spec-method none): nothing was drafted on these prompts."
    if recommended["method"] == NONE:
        return f"Do without drafts (--spec-method none): the best drafter reaches {speed} on these prompts."
    if recommended in [item["config"] for item in result["usual"] if item["method"] == "auto"]:
        return f"Leave the default as it is: it reaches {speed} on these prompts, and nothing else was faster."
    count = recommended.get("num_speculative_tokens")
    much = "" if count is None else f" and {count} drafted token{'s'[: count > 1]}"
    return f"Use {recommended['method']}{much}: it should reach {speed} on prompts like these."


def best_speed(result: Mapping[str, Any]) -> float:
    """The best speed-up of a plan, predicted or measured; 0 if nothing was drafted."""
    ways = (*result["predictions"], *result["usual"], *result["layers"])
    trees = (shape for item in result["trees"] for shape in item["fixed"])
    return max((each["speedup"] for each in (*ways, *trees)), default=0.0)


def _reach(item: Mapping[str, Any]) -> str:
    """The limit of this drafter's chains, and what the next higher speed-up would need."""
    limit = f"{item['method']}: chains come to {item['limit']:.2f}x at most"
    need = next((need for need in item["needs"] if need["speedup"] > item["limit"]), None)
    if need is None:
        return limit
    rate = "no acceptance" if need["rate"] is None else f"acceptance of {need['rate']:.2f}"
    step = "no cheaper step" if need["c"] is None else f"a step at {need['c']:.3f} of a plain forward"
    return f"{limit}; {need['speedup']:g}x takes {rate}, or {step}"
