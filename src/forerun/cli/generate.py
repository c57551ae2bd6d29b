"""``forerun generate``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from forerun.bench.weights import megabytes
from forerun.cli import trace as tracing
from forerun.cli.console import out, print_json, set_threads, warn, write_file
from forerun.cli.options import ENGINE, SAMPLING, SPECULATIVE, speculative_config, takes
from forerun.core.errors import ConfigError, RequestError
from forerun.engine.llm import LLM, RequestOutput
from forerun.sampling.params import SamplingParams

DEFAULTS = {"temperature": 0.0, "max_tokens": 128, "seed": 0}
METRICS = (
    "tokens_per_second",
    "rounds",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "alpha",
    "acceptance_histogram",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
)


@takes(ENGINE, SPECULATIVE, SAMPLING)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="the text to continue; - reads it from standard input")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="show every round, its tokens by what became of them")] = False,
    trace_html: Annotated[Path | None, typer.Option(help="write the traced rounds to this page")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="torch's choice")] = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Continue a text.

    Without --model the bundled pair of Python-code models answers, its draft model speculating for it.
    """
    if as_json and trace:
        raise ConfigError("--json prints one object only: drop --trace, or use --trace-html")
    text = read_prompt(prompt)
    params = SamplingParams(**{**DEFAULTS, **sampling})
    set_threads(threads)
    llm = LLM(**{**engine, "speculative_config": speculative_config(speculative, engine), "trace": True})
    answer = llm.generate([text], params)[0]
    llm.close()
    output = answer.outputs[0]
    if output.finish_reason == "error":
        raise RequestError(f"the generation failed: {output.stop_reason}")
    if answer.metrics.draft_error is not None:
        warn(f"the drafter failed, decoding went on without it: {answer.metrics.draft_error}")
    if not (llm.engine.rule.identity or llm.engine.policy.reproducible or params.greedy):
        rule, policy = llm.speculative.accept, llm.speculative.length
        warn(
            f"rule {rule} with {policy} lengths, which follow the clock: the law is exact, but the seed repeats nothing"
        )
    if trace_html is not None:
        page = tracing.page(output.trace or [], llm.tokenizer, text, facts(llm, answer))
        write_file(trace_html, page)
    if as_json:
        print_json(as_object(answer))
    else:
        show(out(), llm, answer, trace=trace, echo=prompt != "-")


def read_prompt(prompt: str | None) -> str:
    """The prompt argument or, for ``-``, standard input. Raises RequestError where there is none."""
    if prompt is None:
        raise RequestError("give a prompt, or - to read it from standard input")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from None
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    return text


def as_object(answer: RequestOutput) -> dict[str, Any]:
    """What ``--json`` prints."""
    output, found = answer.outputs[0], answer.metrics.as_dict()
    metrics = {name: found[name] for name in METRICS}
    metrics |= {name: found[name] for name in ("draft_error", "synthetic") if found[name]}
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(answer.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "metrics": metrics,
    }


def facts(llm: LLM, answer: RequestOutput) -> dict[str, str]:
    """The figures below the text, by name."""
    metrics, count = answer.metrics, len(answer.outputs[0].token_ids)
    mode = "invariant" if llm.model.invariant else "not invariant"
    info = llm.model.info
    found = {"model": f"{info.name} ({info.path}, {mode}), {megabytes(info.weight_bytes)}"}
    rate = metrics.tokens_per_second
    found["speed"] = f"{count} tokens" + (f", {rate:.0f} tokens/s" if rate else "")
    if metrics.num_drafts:
        share, alpha = metrics.draft_acceptance_rate or 0.0, metrics.alpha
        found["speculation"] = (
            f"{llm.speculative.method}, {metrics.rounds} rounds, "
            f"mean acceptance length {metrics.mean_acceptance_length:.2f}"
        )
        if metrics.synthetic:
            found["synthetic"] = "drafts were accepted at given rates: this is not the model's text"
        found["acceptance"] = (
            f"{metrics.num_accepted_draft_tokens} of {metrics.num_draft_tokens} drafted tokens ({share:.0%})"
            + (f", alpha {alpha:.2f}" if alpha is not None else "")
        )
    return found


def show(console: Console, llm: LLM, answer: RequestOutput, *, trace: bool, echo: bool) -> None:
    """The text, the figures, and one round or all of them."""
    output = answer.outputs[0]
    rounds = output.trace or []
    plain = tracing.plain_terminal(console)
    if echo and answer.prompt is not None:
        console.file.write(answer.prompt if plain else f"\x1b[2m{answer.prompt}\x1b[0m")
    console.file.write(f"{output.text}\n\n")  # not through rich, which would expand tabs
    found = facts(llm, answer)
    width = max(map(len, found))
    for name, value in found.items():
        console.print(Text(f"{name:<{width}}  {value}"), soft_wrap=True)
    if trace:
        console.print()
        tracing.show(console, rounds, llm.tokenizer)
        return
    chosen = tracing.telling(rounds)
    if chosen is not None:
        head = f"{f'round {rounds.index(chosen) + 1}':<{width}}  "
        console.print(Text.assemble(head, tracing.line(chosen, llm.tokenizer, plain=plain)), soft_wrap=True)
        key = [tracing.marked(kind, kind, plain=plain) for kind in tracing.KINDS if kind != tracing.PLAIN]
        console.print(Text.assemble(" " * (width + 2), Text("  ").join(key), "  (all rounds: --trace)"), soft_wrap=True)
