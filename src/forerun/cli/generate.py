"""``forerun generate``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli import logprobs
from forerun.cli import trace as tracing
from forerun.cli.console import check_file, out, print_json, set_threads, warn, write_file
from forerun.cli.options import ENGINE, SAMPLING, SPECULATIVE, speculative_config, takes
from forerun.core.errors import ConfigError, RequestError
from forerun.engine.memory import megabytes
from forerun.sampling.params import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM, CompletionOutput, RequestOutput
    from forerun.engine.logprobs import TokenLogprobs

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
    params = SamplingParams(**{**DEFAULTS, **sampling})
    if trace_html is not None and params.n > 1:
        raise ConfigError("--trace-html shows one answer: leave --n out")
    if "logprobs_mode" in engine and params.logprobs is None:
        raise ConfigError("--logprobs-mode says which log-probabilities --logprobs shows: add that")
    if as_json and trace:
        raise ConfigError("--json prints one object only: drop --trace, or use --trace-html")
    if trace_html is not None:
        check_file(trace_html)
    text = read_prompt(prompt)
    from forerun.engine.llm import LLM

    set_threads(threads)
    llm = LLM(**{**engine, "speculative_config": speculative_config(speculative, engine), "trace": True})
    answer = llm.generate([text], params, use_tqdm=False)[0]
    llm.close()
    for output in answer.outputs:
        if output.finish_reason == "error":
            raise RequestError(f"the generation failed: {output.stop_reason}")
    if answer.metrics.draft_error is not None:
        warn(f"the drafter failed, decoding went on without it: {answer.metrics.draft_error}")
    if llm.engine.rule.lossless is False and llm.speculative.drafter is not None and llm.speculative.synthetic is None:
        warn(f"rule {llm.speculative.accept} is not lossless: drafts may change what the model says")
    elif not (llm.engine.rule.identity or llm.engine.policy.reproducible or params.greedy):
        rule, policy = llm.speculative.accept, llm.speculative.length
        warn(
            f"rule {rule} with {policy} lengths, which follow the clock: the law is exact, but the seed repeats nothing"
        )
    if trace_html is not None:
        page = tracing.page(answer.outputs[0].trace or [], llm.tokenizer, text, facts(llm, answer))
        write_file(trace_html, page)
    if as_json:
        print_json(as_object(answer, llm.tokenizer))
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


def as_object(answer: RequestOutput, tokenizer: Any) -> dict[str, Any]:
    """What ``--json`` prints: the first answer's fields, and all answers as ``outputs`` where there are several."""
    found = answer.metrics.as_dict()
    metrics = {name: found[name] for name in METRICS}
    metrics |= {name: found[name] for name in ("draft_error", "synthetic") if found[name]}

    def one(output: CompletionOutput) -> dict[str, Any]:
        given: dict[str, Any] = {"text": output.text, "token_ids": output.token_ids}
        if output.logprobs is not None:
            given["logprobs"] = logprobs.as_objects(output.logprobs, tokenizer)
        return given | {"finish_reason": output.finish_reason}

    shown = one(answer.outputs[0]) | {
        "prompt_tokens": len(answer.prompt_token_ids),
        "completion_tokens": sum(len(output.token_ids) for output in answer.outputs),
        "metrics": metrics,
    }
    if len(answer.outputs) > 1:
        shown["outputs"] = [one(output) for output in answer.outputs]
    if answer.prompt_logprobs is not None:
        shown["prompt_logprobs"] = logprobs.as_objects(answer.prompt_logprobs, tokenizer)
    return shown


def facts(llm: LLM, answer: RequestOutput) -> dict[str, str]:
    """The figures below the text, by name."""
    metrics, count = answer.metrics, sum(len(output.token_ids) for output in answer.outputs)
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
    """The texts, the figures, and one round or all of them."""
    rounds = answer.outputs[0].trace or []
    plain = tracing.plain_terminal(console)
    several = len(answer.outputs) > 1
    for output in answer.outputs:
        if several:
            console.file.write(f"--- {output.index + 1} of {len(answer.outputs)}\n")
        if echo and answer.prompt is not None:
            console.file.write(answer.prompt if plain else f"\x1b[2m{answer.prompt}\x1b[0m")
        console.file.write(f"{output.text}\n\n")  # not through rich, which would expand tabs
    show_logprobs(console, llm.tokenizer, answer)
    found = facts(llm, answer)
    width = max(map(len, found))
    for name, value in found.items():
        console.print(Text(f"{name:<{width}}  {value}"), soft_wrap=True)
    if trace:
        for output in answer.outputs:
            console.print()
            tracing.show(console, output.trace or [], llm.tokenizer)
        return
    chosen = tracing.telling(rounds)
    if chosen is not None:
        head = f"{f'round {rounds.index(chosen) + 1}':<{width}}  "
        console.print(Text.assemble(head, tracing.line(chosen, llm.tokenizer, plain=plain)), soft_wrap=True)
        key = [tracing.marked(kind, kind, plain=plain) for kind in tracing.KINDS if kind != tracing.PLAIN]
        console.print(Text.assemble(" " * (width + 2), Text("  ").join(key), "  (all rounds: --trace)"), soft_wrap=True)


def show_logprobs(console: Console, tokenizer: Any, answer: RequestOutput) -> None:
    """The prompt's and the answers', as far as they were asked for."""
    tables: list[tuple[str, Seq[int], Seq[TokenLogprobs | None] | None]]
    tables = [("prompt", answer.prompt_token_ids, answer.prompt_logprobs)]
    for output in answer.outputs:
        name = "answer" if len(answer.outputs) == 1 else f"answer {output.index + 1}"
        tables.append((name, output.token_ids, output.logprobs))
    for name, tokens, found in tables:
        if found is not None:
            text = "\n".join(logprobs.lines(tokens, found, tokenizer))
            console.file.write(f"log-probabilities, {name}\n{text}\n\n")
