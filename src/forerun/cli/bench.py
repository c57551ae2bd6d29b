"""``forerun bench``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from forerun.bench.peers import PEERS
from forerun.bench.plot import check_plot, plot
from forerun.bench.prompts import HELD_OUT, SETS
from forerun.bench.run import BenchConfig, run_bench
from forerun.bench.shapes import SIZES
from forerun.cli.console import print_json, print_table, progress, set_threads, warn
from forerun.cli.options import ENGINE, SPECULATIVE, Flags, parse_json, takes
from forerun.core.errors import ConfigError
from forerun.engine.config import NONE
from forerun.speculate.accept import rules
from forerun.speculate.draft import drafters
from forerun.speculate.length import policies

T = TypeVar("T")
MODEL_ONLY = Flags("speculative", [flag for flag in SPECULATIVE.flags if flag.name == "spec_model"])
COLUMNS = {
    "method": "method",
    "accept": "accept",
    "length": "length",
    "num_speculative_tokens": "k",
    "temperature": "T",
    "concurrency": "batch",
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "predicted_speedup": "predicted",
    "speedup_over_fastest": "over fastest",
    "alpha": "alpha",
    "match_rate": "match",
    "cost_coefficient": "c",
    "verify_cost": "verify",
    "tokens_per_round": "tok/round",
    "bandwidth_share": "bandwidth",
    "repetition_rate": "repeats",
    "identical": "identical",
}


def split(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """A comma-separated option. Raises ConfigError."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--{name} must be a comma-separated list of {kind.__name__} values, not {text!r}") from None


Methods = Annotated[str, typer.Option(help=f"who drafts, comma-separated: {', '.join([NONE, *drafters])}")]
MoreOptions = Annotated[str | None, typer.Option(metavar="JSON", help="more options, for the methods that know them")]
RandomShape = Annotated[
    str | None, typer.Option(help=f"measure random weights of this shape instead of a model: {', '.join(SIZES)}")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="draw the result: .png, .svg or .pdf, with forerun[bench]")
]


@takes(ENGINE, MODEL_ONLY)
def bench(
    methods: Methods = "none,draft_model,ngram",
    accept: Annotated[str, typer.Option(help=f"acceptance rules: {', '.join(rules)}")] = "coupled",
    length: Annotated[str, typer.Option(help=f"length policies: {', '.join(policies)}")] = "fixed",
    spec_tokens: Annotated[str, typer.Option(help="numbers of drafted tokens", show_default="each method's")] = "",
    speculative_config: MoreOptions = None,
    concurrency: Annotated[str, typer.Option(help="requests decoded together")] = "1",
    temperature: Annotated[str, typer.Option(help="temperatures")] = "0,1",
    peers: Annotated[str, typer.Option(help=f"other implementations to run: {', '.join(PEERS)}")] = "",
    prompts: Annotated[int, typer.Option(help="how many prompts")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of a prompt")] = 64,
    max_tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 64,
    repeats: Annotated[int, typer.Option(help="runs of everything; medians are reported")] = 3,
    prompt_set: Annotated[str, typer.Option(help=f"prompts: {', '.join(SETS)}")] = HELD_OUT,
    prompts_file: Annotated[Path | None, typer.Option(help="take prompts from this file, one per line")] = None,
    random_shape: RandomShape = None,
    random_draft_shape: Annotated[str | None, typer.Option(help="and a draft model of this shape")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    seed: Annotated[int, typer.Option(help="of prompts and sampling")] = 0,
    fastest: Annotated[bool, typer.Option(help="measure plain decoding without bit-equal logits too")] = True,
    plot_file: PlotFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
) -> None:
    """Measure methods against plain decoding, predicted beside measured.

    Contenders take turns on every prompt; figures are medians, decoding only. Every losing row stays.
    """
    refuse_batch_size(engine)
    config = BenchConfig(
        engine=dict(engine),
        speculative=more_options(speculative_config, speculative),
        methods=split("methods", methods, str),
        accepts=split("accept", accept, str),
        lengths=split("length", length, str),
        counts=split("spec-tokens", spec_tokens, int),
        concurrency=split("concurrency", concurrency, int),
        temperatures=split("temperature", temperature, float),
        peers=split("peers", peers, str),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
        prompt_set=prompt_set,
        prompts_file=prompts_file,
        seed=seed,
        random_shape=random_shape,
        random_draft_shape=random_draft_shape,
        fastest=fastest,
    )
    if plot_file is not None:
        check_plot(plot_file)
    set_threads(threads)
    with progress("loading", len(config.concurrency) * len(config.temperatures)) as step:
        result = run_bench(config, step)
    report(result, plot_file, as_json)


def report(result: Mapping[str, Any], plot_file: Path | None, as_json: bool) -> None:
    if plot_file is not None:
        plot(result, plot_file)
    if as_json:
        print_json(result)
    else:
        show(result)


def refuse_batch_size(engine: Mapping[str, Any]) -> None:
    if "max_num_seqs" in engine:
        raise ConfigError("bench decodes --concurrency requests together: use that instead of --max-num-seqs")


def more_options(speculative_config: str | None, speculative: Mapping[str, Any]) -> dict[str, Any]:
    """Options of speculation that all methods of a run share."""
    shared = parse_json("speculative_config", speculative_config) if speculative_config else {}
    if "spec_model" in speculative:
        shared["model"] = speculative["spec_model"]
    return shared


def show(result: Mapping[str, Any]) -> None:
    about, rows = result["environment"], result["rows"]
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = []
    for row in rows:
        mark = " (synthetic)" if row["synthetic"] else ""
        lines.append([cell(key, row.get(key)) + (mark if key == "method" else "") for key in shown])
    print_table([COLUMNS[key] for key in shown], lines)
    for row in rows:
        if row["draft_error"] is not None:
            warn(f"{row['method']} lost its drafter and went on as plain decoding: {row['draft_error']}")
    mode = "invariant" if about["invariant"] else "not invariant"
    print(
        f"\n{about['model']} {about['dtype']}, {about['model_path']}, {mode}, {about['threads']} thread(s), "
        f"{about['processor']}\n{about['prompts']} {about['prompt_set']} prompts of {about['prompt_tokens']} tokens, "
        f"{about['max_tokens']} new tokens each, medians of {about['repeats']} interleaved runs"
    )


def cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return (
            f"{value:.0f}" if key == "tokens_per_second" else f"{value:g}" if key == "temperature" else f"{value:.2f}"
        )
    return str(value)
