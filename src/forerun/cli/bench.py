"""``forerun bench``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from forerun.bench.config import ALL, PEERS, BenchConfig
from forerun.bench.plots import check_folder, plots
from forerun.cli.console import print_json, print_markdown, print_table, progress, set_threads, warn
from forerun.cli.options import ENGINE, SPECULATIVE, Flags, flags_of, parse_json, takes
from forerun.core.errors import ConfigError
from forerun.engine.config import NONE
from forerun.speculate.names import drafters, policies, rules

T = TypeVar("T")
MODEL_ONLY = Flags("speculative", [flag for flag in SPECULATIVE.flags if flag.name == "spec_model"])
LISTS = ("methods", "accepts", "lengths", "counts", "concurrency", "temperatures", "peers")
MAPPINGS = ("engine", "speculative", "sampling")
MEASURED = Flags("measured", flags_of(BenchConfig, "Measurement", skip=(*LISTS, *MAPPINGS)))
COLUMNS = {
    "method": "method",
    "accept": "accept",
    "length": "policy",
    "num_speculative_tokens": "k",
    "tree": "tree",
    "temperature": "T",
    "concurrency": "batch",
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


def split(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """A comma-separated option. Raises ConfigError."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--{name} must be a comma-separated list of {kind.__name__} values, not {text!r}") from None


Methods = Annotated[
    str,
    typer.Option(
        help=f"who drafts, comma-separated, or {ALL} (none twice: how noisy it is): {', '.join([NONE, *drafters])}",
        show_default=True,
    ),
]
MoreOptions = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="more options, for the methods that know them; {METHOD: {...}}: for that one"),
]
Plots = Annotated[
    Path | None, typer.Option("--plots", metavar="FOLDER", help="draw the result as .svg files, with forerun[plots]")
]


@takes(ENGINE, MODEL_ONLY, MEASURED)
def bench(
    methods: Methods = "none,draft_model,ngram",
    accept: Annotated[str, typer.Option(help=f"acceptance rules: {', '.join(rules)}")] = "coupled",
    length: Annotated[str, typer.Option(help=f"length policies: {', '.join(policies)}")] = "fixed",
    spec_tokens: Annotated[str, typer.Option(help="numbers of drafted tokens", show_default="each method's")] = "",
    speculative_config: MoreOptions = None,
    concurrency: Annotated[str, typer.Option(help="requests decoded together")] = "1",
    temperature: Annotated[str, typer.Option(help="temperatures")] = "0,1",
    peers: Annotated[str, typer.Option(help=f"other implementations to run: {', '.join(PEERS)}")] = "",
    sampling: Annotated[str | None, typer.Option(metavar="JSON", help="sampling options of every request")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    plot_folder: Plots = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print the table as markdown")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    measured: Mapping[str, Any],
) -> None:
    """Measure methods against plain decoding, predicted beside measured.

    Contenders take turns on every prompt; figures are medians, decoding only unless --whole; ± is the standard error of
    the mean speed-up. Every losing row stays.
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
        sampling=parse_json("sampling", sampling) if sampling else {},
        **measured,
    )
    if plot_folder is not None:
        check_folder(plot_folder)
    from forerun.bench.run import run_bench

    set_threads(threads)
    with progress("loading", len(config.concurrency) * len(config.temperatures)) as step:
        result = run_bench(config, step)
    if plot_folder is not None:
        plots(result, plot_folder)
    if as_json:
        print_json(result)
    else:
        show(result, print_markdown if as_markdown else print_table)


def refuse_batch_size(engine: Mapping[str, Any]) -> None:
    if "max_num_seqs" in engine:
        raise ConfigError("bench decodes --concurrency requests together: use that instead of --max-num-seqs")


def more_options(speculative_config: str | None, speculative: Mapping[str, Any]) -> dict[str, Any]:
    """Options of speculation that all methods of a run share."""
    shared = parse_json("speculative_config", speculative_config) if speculative_config else {}
    if "spec_model" in speculative:
        shared["model"] = speculative["spec_model"]
    return shared


def show(result: Mapping[str, Any], write: Callable[[Seq[str], Seq[Seq[str]]], None] = print_table) -> None:
    from forerun.bench.weights import TARGET, line

    about, rows = result["environment"], result["rows"]
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = []
    for row in rows:
        mark = " (synthetic)" if row["synthetic"] else ""
        lines.append([cell(key, row.get(key)) + (mark if key == "method" else "") for key in shown])
    write([COLUMNS[key] for key in shown], lines)
    for row in rows:
        if row["draft_error"] is not None:
            warn(f"{row['method']} lost its drafter and went on as plain decoding: {row['draft_error']}")
    mode = "invariant" if about["invariant"] else "not invariant"
    repeated = about["prompt_repetition_rate"]
    options = "".join(f", {name} {value}" for name, value in about["sampling"].items())
    print(
        f"\n{about['model']} {about['dtype']}, {about['model_path']}, {mode}, {about['threads']} thread(s), "
        f"{about['processor']}\n{about['prompts']} {about['prompt_set']} prompts of {about['prompt_tokens']} tokens "
        f"(repeats {'-' if repeated is None else f'{repeated:.2f}'}), {about['max_tokens']} new tokens each{options}, "
        f"medians of {about['repeats']} interleaved runs{', prompts included' if about['whole'] else ''}\n"
        + "; ".join(map(line, about["weights"]))
    )
    target = next(item for item in about["weights"] if item["role"] == TARGET)
    if target["quantization"] is not None and about["peers"]:
        warn(f"the peers ({', '.join(about['peers'])}) run {about['dtype']} weights, not {target['quantization']}")
    if result["left_out"]:
        write(["left out", "because"], list(result["left_out"].items()))


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
