"""``forerun bench`` and ``forerun check``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.console import print_json, print_markdown, print_table, progress, set_threads, warn
from forerun.cli.options import (
    ENGINE,
    SPECULATIVE,
    TUNED_HELP,
    AsJson,
    Flags,
    flags_of,
    parse_json,
    read_tuned,
    split,
    takes,
)
from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.engine.config import EngineConfig
from forerun.measure.config import HELD_OUT, QUICK, WRITTEN, BenchConfig, CheckConfig
from forerun.speculate.names import drafters

TableWriter = Callable[[Sequence[str], Sequence[Sequence[str]]], None]
"""Prints a table's heads and rows."""
MODEL_ONLY = Flags("speculative", [flag for flag in SPECULATIVE.flags if flag.name == "spec_model"])
COMPARED = Flags("speculative", [flag for flag in SPECULATIVE.flags if flag.name in ("spec_model", "synthetic")])
RATES = "synthetic_acceptance_rates"
USUAL = "the drafter that auto takes, suffix, ngram"
MEASURED = Flags(
    "measured",
    flags_of(
        BenchConfig,
        "Measurement",
        skip=("engine", "speculative"),
        defaults={"counts": "each method's", "temperatures": "0,1; of a written set 0"},
    ),
)
CHECKED = Flags("checked", flags_of(CheckConfig, skip=("engine", "speculative", "page_sizes", "rows")))
SETTINGS = {
    "method": "method",
    "accept": "accept",
    "length": "policy",
    "num_speculative_tokens": "k",
    "tree": "tree",
    "temperature": "T",
    "concurrency": "batch",
}
COLUMNS = {
    **SETTINGS,
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "speedup_error": "±",
    "predicted_speedup": "predicted",
    "speedup_over_fastest": "over fastest",
    "alpha": "alpha",
    "match_rate": "match",
    "cost_coefficient": "c",
    "verify_cost": "verify",
    "mean_acceptance_length": "length kept",
    "tokens_per_round": "tok/round",
    "over_chain": "over chain",
    "bandwidth_share": "bandwidth",
    "repetition_rate": "repeats",
    "identical": "identical",
}


WIDTH = 100
"""Columns of a terminal."""
MoreOptions = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="Further options for all methods that have them. {METHOD: {...}}: for one method; "
        "{METHOD: [{...}, ...]}: a row each.",
    ),
]
Plots = Annotated[
    Path | None,
    typer.Option("--plots", metavar="FOLDER", help="Plot the result to .svg files in this folder. Needs forerun-lab."),
]


@takes(ENGINE, COMPARED, MEASURED.showing(methods=USUAL))
def bench(
    speculative_config: MoreOptions = None,
    tuned: Annotated[str | None, typer.Option(metavar="FOLDER", help=TUNED_HELP)] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    plot_folder: Plots = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    measured: Mapping[str, Any],
) -> None:
    """Benchmark drafting methods against plain decoding.

    Runs are interleaved per prompt; figures are medians of decoding time (--whole adds prompts); ± is the standard
    error of the mean speed-up. Slower methods are listed too.
    """
    if "max_num_seqs" in engine:
        raise ConfigError("bench does not support --max-num-seqs: use --concurrency")
    shared = shared_options(speculative_config, speculative)
    options = with_methods(_measured(measured), engine, shared if tuned is None else dict(shared))
    if tuned is not None:
        options["methods"], shared = with_tuned(tuned, engine, options.get("methods", BenchConfig.methods), shared)
    config = BenchConfig(engine=dict(engine), speculative=shared, **options)
    plots = None
    if plot_folder is not None:
        plots = from_lab("plots", "bench with plots")
        plots.check_folder(plot_folder)
    from forerun.measure.bench import run_bench

    set_threads(threads)
    with progress("loading", len(config.concurrency) * len(config.temperatures)) as step:
        result = run_bench(config, step)
    if plots is not None:
        plots.plots(result, plot_folder)
    if as_json:
        print_json(result)
    else:
        show(result, print_markdown if as_markdown else print_table)


def _measured(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of BenchConfig, with the defaults of a set of written prompts. Raises ConfigError."""
    defaults = WRITTEN.get(given.get("prompt_set", HELD_OUT))
    if defaults is not None and "prompt_tokens" in given:
        raise ConfigError(f"prompts of {given['prompt_set']} have their own lengths: remove --prompt-tokens")
    return {**(defaults or {}), **given}


def with_methods(given: Mapping[str, Any], engine: Mapping[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Adds default methods for a model of the user's to ``given``: look-ups, and the head or draft that ``auto`` takes.
    Its options are put into ``shared``, also where the user named its method, or ``auto``."""
    model = str(engine.get("model", EngineConfig.model))
    if (model.startswith("forerun:") and "methods" not in given) or {"model", *drafters} & set(shared):
        return dict(given)
    from forerun.engine.auto import AUTO, known_drafter

    options = known_drafter(model, heads=not engine.get("lora")) or {"method": "suffix"}
    method = options.pop("method")
    options.pop("length", None)
    usual = list(dict.fromkeys([method, "suffix", "ngram"]))
    methods = [method if each == AUTO else each for each in given.get("methods", usual)]
    if options and method in methods:
        shared[method] = options
    return {**given, "methods": methods}


def with_tuned(
    tuned: str, engine: Mapping[str, Any], methods: Sequence[str], options: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Adds the method of a tuned folder to ``methods``, and its options to ``options``. Raises ConfigError for a folder
    that was made for other weights, and if ``options`` has that method already."""
    result = read_tuned(tuned, engine)
    method = result.pop("method")
    own = {key: value for key, value in result.items() if key not in ("accept", "length")}
    if method in options:
        raise ConfigError(f"--speculative-config conflicts with the tuned folder over {method!r}: remove one")
    return [*methods, *([] if method in methods else [method])], {**options, **({method: own} if own else {})}


def shared_options(speculative_config: str | None, speculative: Mapping[str, Any]) -> dict[str, Any]:
    """Options of speculation for all methods of a run that know them."""
    shared = parse_json("speculative_config", speculative_config) if speculative_config else {}
    if RATES in shared and RATES in speculative:
        raise ConfigError(f"{RATES} is in --speculative-config and in --synthetic: remove one")
    return {**shared, **speculative}


def show(result: Mapping[str, Any], write: TableWriter = print_table) -> None:
    """Prints a bench's table, what it was measured on, and warnings."""
    from forerun.measure.environment import TARGET, line

    about, rows = result["environment"], result["rows"]
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    cells = [{key: cell(key, row.get(key)) for key in shown} for row in rows]
    for row, texts in zip(rows, cells):
        texts["method"] += " (synthetic)" if row["synthetic"] else ""
    drafted = [texts for row, texts in zip(rows, cells) if row["accept"] is not None]  # plain rows have none
    values = {key: {texts[key] for texts in drafted} for key in shown if key in SETTINGS and key != "method"}
    same = {key: "".join(texts) for key, texts in values.items() if len(texts) == 1}
    for index, part in enumerate(fitting(shown, same, cells) if write is print_table else [shown]):
        if index:
            print()
        write([COLUMNS[key] for key in part], [[texts[key] for key in part] for texts in cells])
    if write is print_table and same:
        print("\nall methods: " + ", ".join(f"{COLUMNS[key]} {text}" for key, text in same.items()))
    if result["categories"]:
        from_lab("written", "bench by category").show(result["categories"], write)
    for row in rows:
        if row["draft_error"] is not None:
            warn(f"{row['method']}: drafter failed, decoding continued without it: {row['draft_error']}")
    for rule in dict.fromkeys([row["accept"] for row in rows if row.get("lossless") is False]):
        warn(f"rule {rule} is not lossless: drafts may change what the model says")
    repeated = about["prompt_repetition_rate"]
    options = "".join(f", {name} {value}" for name, value in about["sampling"].items())
    print()
    for text in (
        f"{_ran(about)}, {about['processor']}",
        f"{about['prompts']} {about['prompt_set']} prompts of {_lengths(about)} tokens "
        f"(repeats {'-' if repeated is None else f'{repeated:.2f}'}), {about['max_tokens']} new tokens each{options}, "
        f"medians of {about['repeats']} interleaved runs{', prompts included' if about['whole'] else ''}, "
        f"seed {about['seed']}",
        *map(line, about["weights"]),
    ):
        print(textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False))
    target = next(item for item in about["weights"] if item["role"] == TARGET)
    if target["quantization"] is not None and about["peers"]:
        warn(f"peers ({', '.join(about['peers'])}) run {about['dtype']} weights, not {target['quantization']}")
    if about["prompts_left_out"]:
        warn(f"{about['prompts_left_out']} prompts skipped: with their answers they exceed the context")
    if about["real_time_stop"]:
        warn(
            f"Linux stops a real-time process for {1000 * about['real_time_stop']:.0f} ms in every second, and times"
            " jump by as much: use nice in the place of chrt"
        )
    if about["synthetic"] is not None:
        warn(f"synthetic acceptance ({about['synthetic']}): the text is meaningless")
    if about["offline"] is False:
        warn("network access of the other engines could not be disabled on this system")
    if result["left_out"]:
        write(["left out", "because"], list(result["left_out"].items()))


def fitting(shown: Sequence[str], same: Container[str], cells: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """The columns of tables that fit a terminal: each has the settings that differ, and as many figures as fit."""
    sizes = {key: 2 + max(len(COLUMNS[key]), *(len(texts[key]) for texts in cells)) for key in shown}
    settings = [key for key in shown if key in SETTINGS and key not in same]
    parts = [settings]
    for key in shown:
        if key not in SETTINGS:
            if sum(sizes[each] for each in [*parts[-1], key]) > WIDTH + 2 and parts[-1] != settings:
                parts.append(settings)
            parts[-1] = [*parts[-1], key]
    return parts


def _ran(about: Mapping[str, Any]) -> str:
    """The model and how it ran."""
    mode = "invariant" if about["invariant"] else "not invariant"
    return f"{about['model']} {about['dtype']}, {about['model_path']}, {mode}, {about['threads']} thread(s)"


def _lengths(about: Mapping[str, Any]) -> str:
    if about["prompt_tokens"] is not None:
        return str(about["prompt_tokens"])
    shortest, middle, longest = about["prompt_lengths"]
    return f"{shortest} to {longest} (median {middle})"


def cell(key: str, value: Any) -> str:
    """A table cell for ``value`` in the column ``key``."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return " ".join(f"{item:.2f}" for item in value) or "-"
    if isinstance(value, float):
        return format(value, {"tokens_per_second": ".0f", "temperature": "g"}.get(key, ".2f"))
    return str(value)


LAYOUTS = {"slotted": None, "paged": 16}


@takes(ENGINE, MODEL_ONLY, CHECKED.showing(methods=USUAL))
def check(
    layout: Annotated[str, typer.Option(help="Cache layouts, comma-separated.")] = ",".join(LAYOUTS),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer prompts and samples, in a fraction of the time.")
    ] = False,
    speculative_config: MoreOptions = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    checked: Mapping[str, Any],
) -> int:
    """Verify that speculation is lossless on this machine and model.

    Compares tokens with plain decoding for the same seeds, logits of verification with those of decoding bit by bit,
    and the distribution of sampled answers with the target's. A check without anything to test (no drafts, too few
    samples) is reported as not tested and does not pass. Exit status 0 if every check passes, else 1. An estimate of
    the time is printed first; it may be minutes for a small model.
    """
    if "max_num_seqs" in engine or "page_size" in engine:
        raise ConfigError("check does not support --max-num-seqs and --page-size: use --concurrency and --layout")
    from forerun.measure.check import run_checks, steps

    layouts = split("layout", layout, str)
    for name in layouts:
        if name not in LAYOUTS:
            raise ConfigError(f"unknown layout {name!r}: choose among {', '.join(LAYOUTS)}")
    shared = shared_options(speculative_config, speculative)
    given = with_methods({**(QUICK if quick else {}), **checked}, engine, shared)
    page_sizes = [LAYOUTS[name] for name in layouts]
    config = CheckConfig(engine=dict(engine), speculative=shared, page_sizes=page_sizes, **given)
    set_threads(threads)
    with progress("loading", steps(config)) as step:
        result = run_checks(config, step, lambda seconds: announce(seconds, quick=quick))
    if as_json:
        print_json(result)
    else:
        show_checks(result, print_markdown if as_markdown else print_table)
    return 0 if result["passed"] else 1


def announce(seconds: float, *, quick: bool) -> None:
    """Says on standard error how long the checks take."""
    from tqdm import tqdm

    length = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    tqdm.write(f"this takes about {length}" + ("" if quick else "; --quick takes less"), file=sys.stderr)


def show_checks(result: Mapping[str, Any], write: TableWriter = print_table) -> None:
    about = result["environment"]
    rows = []
    for item in result["results"]:
        temperature = "-" if item["temperature"] is None else f"{item['temperature']:g}"
        count = f"{item['good']}/{item['total']} {item['unit']}"
        verdict = "ok" if item["passed"] else "FAILED" if item["tested"] else "not tested"
        rows.append([verdict, item["check"], item["what"], item["layout"], temperature, count, item["detail"]])
    write(["", "check", "of", "layout", "T", "good", "detail"], rows)
    if result["left_out"]:
        print()
        write(["left out", "because"], list(result["left_out"].items()))
    print(f"\n{_ran(about)}\n{outcome(result)}")


def outcome(result: Mapping[str, Any]) -> str:
    """The outcome of all checks in a line."""
    items, left_out = result["results"], len(result["left_out"])
    if result["passed"]:
        return f"lossless: everything tested holds, {left_out} left out" if left_out else "lossless: everything holds"
    untested = sum(not item["tested"] for item in items)
    failed = sum(not item["passed"] for item in items) - untested
    parts = [f"{failed} of {len(items)} checks FAILED"] if failed else []
    parts += [f"{untested} of {len(items)} checks found nothing to test: not passed"] if untested else []
    return ", ".join(parts)
