"""``forerun check``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from forerun.cli.bench import MODEL_ONLY, MoreOptions, more_options, split
from forerun.cli.console import print_json, print_markdown, print_table, progress, set_threads
from forerun.cli.options import ENGINE, takes
from forerun.core.errors import ConfigError
from forerun.engine.config import NONE
from forerun.measure.config import HELD_OUT, SAMPLES, SETS
from forerun.speculate.names import drafters, rules

LAYOUTS = {"slotted": None, "paged": 16}


Methods = Annotated[str, typer.Option(help=f"who drafts, comma-separated, or all: {', '.join(drafters)}")]


@takes(ENGINE, MODEL_ONLY)
def check(
    methods: Methods = "ngram,draft_model",
    trees: Annotated[bool, typer.Option(help="check hand-made trees too")] = True,
    prompts: Annotated[int, typer.Option(help="prompts: sampling options and layouts take turns over them")] = 22,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of a prompt")] = 32,
    max_tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 24,
    temperature: Annotated[str, typer.Option(help="temperatures")] = "0,0.8",
    layout: Annotated[str, typer.Option(help="cache layouts")] = ",".join(LAYOUTS),
    accept: Annotated[str, typer.Option(help="lossless rules whose distribution is tested, or all")] = "coupled,token",
    samples: Annotated[
        int, typer.Option(help="answers per test of the output's distribution; 0: no such test")
    ] = SAMPLES,
    concurrency: Annotated[int, typer.Option(help="requests decoded together")] = 16,
    prompt_set: Annotated[str, typer.Option(help=f"prompts: {', '.join(SETS)}")] = HELD_OUT,
    speculative_config: MoreOptions = None,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    seed: Annotated[int, typer.Option(help="of prompts and sampling")] = 0,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print the table as markdown")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
) -> int:
    """Prove, on this machine and model, that speculation changes nothing.

    Same seed, same tokens as plain decoding; logits of a verification bit-equal to those of decoding; frequencies
    of sampled answers as the target's probabilities say. A check that found nothing to test (no draft, too few samples)
    is "not tested", with its reason, and has not passed. Exit status 0 if all were tested and hold, else 1.
    """
    if "max_num_seqs" in engine or "page_size" in engine:
        raise ConfigError("check chooses batches and layouts itself: use --concurrency and --layout")
    from forerun.measure.check import CheckConfig, run_checks, steps

    layouts = split("layout", layout, str)
    for name in layouts:
        if name not in LAYOUTS:
            raise ConfigError(f"unknown layout {name!r}: choose among {', '.join(LAYOUTS)}")
    config = CheckConfig(
        engine=dict(engine),
        speculative=more_options(speculative_config, speculative),
        methods=[method for method in split("methods", methods, str) if method != NONE],
        accepts=[name for name in rules if rules[name].lossless] if accept == "all" else split("accept", accept, str),
        trees=trees,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        temperatures=split("temperature", temperature, float),
        page_sizes=[LAYOUTS[name] for name in layouts],
        samples=samples,
        concurrency=concurrency,
        prompt_set=prompt_set,
        seed=seed,
    )
    set_threads(threads)
    with progress("loading", steps(config)) as step:
        result = run_checks(config, step)
    if as_json:
        print_json(result)
    else:
        show(result, print_markdown if as_markdown else print_table)
    return 0 if result["passed"] else 1


def show(
    result: Mapping[str, Any], write: Callable[[Sequence[str], Sequence[Sequence[str]]], None] = print_table
) -> None:
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
    mode = "invariant" if about["invariant"] else "not invariant"
    print(
        f"\n{about['model']} {about['dtype']}, {about['model_path']}, {mode}, {about['threads']} thread(s)\n"
        f"{outcome(result)}"
    )


def outcome(result: Mapping[str, Any]) -> str:
    """All of it in a line."""
    items, left_out = result["results"], len(result["left_out"])
    if result["passed"]:
        return f"lossless: everything tested holds, {left_out} left out" if left_out else "lossless: everything holds"
    idle = sum(not item["tested"] for item in items)
    failed = sum(not item["passed"] for item in items) - idle
    parts = [f"{failed} of {len(items)} checks FAILED"] if failed else []
    parts += [f"{idle} of {len(items)} checks found nothing to test: not passed"] if idle else []
    return ", ".join(parts)
