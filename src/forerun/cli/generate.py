"""``forerun generate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli import trace as tracing
from forerun.cli.console import check_file, model_line, out, print_json, read_input, set_threads, warn, write_file
from forerun.cli.options import (
    ANSWERING,
    GREEDY,
    SAMPLING,
    SPECULATIVE,
    AsJson,
    Threads,
    names_method,
    speculative_config,
    takes,
)
from forerun.core.errors import ConfigError, RequestError, check_text
from forerun.core.registry import from_lab
from forerun.engine.metrics import PLAIN
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams

if TYPE_CHECKING:
    from forerun.engine.jobs import Logprob
    from forerun.engine.llm import LLM
    from forerun.engine.outputs import CompletionOutput, RequestOutput


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


@takes(ANSWERING, SPECULATIVE, SAMPLING)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue. - reads standard input.")] = None,
    as_json: AsJson = False,
    trace: Annotated[bool, typer.Option("--trace", help="Show every round and the outcome of its tokens.")] = False,
    trace_html: Annotated[
        Path | None, typer.Option(help="Write the rounds to this HTML file. Needs forerun-lab.")
    ] = None,
    beams: Annotated[int | None, typer.Option(help="Beam search with this many beams instead of sampling.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="With --beams: above 0 favours long answers.", show_default="1.0")
    ] = None,
    early_stopping: Annotated[
        str | None, typer.Option(help="With --beams, as in transformers: true, false or never.", show_default="false")
    ] = None,
    threads: Threads = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Continue a text.

    Without --model, the bundled model for Python code is used, with its draft model.
    """
    params = request_params(beams, length_penalty, early_stopping, sampling)
    if beams is not None:
        if trace or trace_html is not None:
            raise ConfigError("beam search has no trace: remove --trace and --trace-html, or --beams")
        engine = {"page_size": PAGE_SIZE, "max_num_seqs": max(8, beams), **engine}  # beams run together and share pages
    if trace_html is not None and params.n > 1:
        raise ConfigError("--trace-html shows one answer: remove --n")
    if "logprobs_mode" in engine and sampling.get("logprobs") is None:
        raise ConfigError("--logprobs-mode has no effect without --logprobs: add that")
    if as_json and trace:
        raise ConfigError("--json conflicts with --trace: remove one, or use --trace-html")
    traces = None
    if trace_html is not None:
        check_file(trace_html)
        traces = from_lab("traces", "generate --trace-html")
    text = read_prompt(prompt)
    from forerun.engine.llm import LLM

    named = "model" not in engine or names_method(speculative)
    engine = {**engine, "threads": set_threads(threads)}
    with LLM(**{**engine, "speculative_config": speculative_config(speculative, engine), "trace": True}) as llm:
        answer = llm.generate([text], params, use_tqdm=False)[0]
        for output in answer.outputs:
            if output.finish_reason == "error":
                raise RequestError(f"generation failed: {output.stop_reason}")
        for message in remarks(llm, answer, params):
            warn(message)
        if trace_html is not None and traces is not None:
            page = traces.page(answer.outputs[0].trace or [], llm.tokenizer, text, facts(llm, answer, named=named))
            write_file(trace_html, page)
        if as_json:
            print_json(as_object(answer, params))
        else:
            # An encoder's source is not the beginning of the answer.
            echo = prompt != "-" and llm.model.info.encoder is None
            show(out(), llm, answer, params, trace=trace, echo=echo, named=named)


def request_params(
    beams: int | None, length_penalty: float | None, early_stopping: str | None, sampling: Mapping[str, Any]
) -> Params:
    """The options of the request. Raises ConfigError for those that exclude each other."""
    if beams is not None:
        return search_params(beams, length_penalty, early_stopping, sampling)
    if length_penalty is not None or early_stopping is not None:
        raise ConfigError("--length-penalty and --early-stopping need --beams")
    return SamplingParams(**{**GREEDY, **sampling})


def remarks(llm: LLM, answer: RequestOutput, params: Params) -> Iterator[str]:
    """Yields warnings about the answer."""
    metrics, config = answer.metrics, llm.speculative
    if metrics.draft_error is not None:
        yield f"drafter failed, decoding continued without it: {metrics.draft_error}"
    if isinstance(params, SamplingParams):  # beams are decided by no rule
        if llm.engine.rule.lossless is False and config.drafter is not None and config.synthetic is None:
            yield f"rule {config.accept} is not lossless: drafts may change what the model says"
        elif not (llm.engine.rule.identity or llm.engine.policy.reproducible or params.greedy):
            yield (
                f"rule {config.accept} with {config.length} lengths, which follow the clock: the distribution is "
                "exact, but the seed repeats nothing"
            )
    from forerun.engine.stop import LENGTH

    cut = [len(output.token_ids) for output in answer.outputs if output.finish_reason == LENGTH]
    if cut and params.max_tokens is not None and min(cut) < params.max_tokens:
        yield (
            f"the answer ended after {min(cut)} tokens, before max_tokens {params.max_tokens}: prompt and answer have "
            f"room for {llm.engine.max_model_len} tokens"
        )


def read_prompt(prompt: str | None) -> str:
    """The prompt argument or, for ``-``, standard input. Raises RequestError where there is none."""
    if prompt is None:
        raise RequestError("no prompt: add one, or - to read standard input")
    text = read_input() if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty")
    check_text(text)
    return text


def as_object(answer: RequestOutput, params: Params) -> dict[str, Any]:
    """The object of ``--json``: the first answer's fields, and all answers as ``outputs`` where there are several."""
    counts = answer.metrics.as_dict()
    metrics = {name: counts[name] for name in METRICS}
    metrics |= {name: counts[name] for name in ("draft_error", "synthetic") if counts[name]}

    def one(output: CompletionOutput) -> dict[str, Any]:
        result: dict[str, Any] = {"text": output.text, "token_ids": output.token_ids}
        if output.logprobs is not None:
            assert isinstance(params, SamplingParams)
            result["logprobs"] = as_objects(output.token_ids, output.logprobs, params.logprobs or 0)
        elif output.cumulative_logprob is not None:
            result["cumulative_logprob"] = output.cumulative_logprob
        return result | {"finish_reason": output.finish_reason}

    shown = one(answer.outputs[0]) | {
        "prompt_tokens": len(answer.prompt_token_ids),
        "completion_tokens": sum(len(output.token_ids) for output in answer.outputs),
        "metrics": metrics,
    }
    if len(answer.outputs) > 1:
        shown["outputs"] = [one(output) for output in answer.outputs]
    if answer.prompt_logprobs is not None and isinstance(params, SamplingParams):
        ids, count = answer.prompt_token_ids, params.prompt_logprobs or 0
        shown["prompt_logprobs"] = as_objects(ids, answer.prompt_logprobs, count)
    return shown


def facts(llm: LLM, answer: RequestOutput, *, named: bool = True) -> dict[str, str]:
    """The figures below the text, by name. ``named``: the user chose the drafter, or runs the bundled pair."""
    metrics, count = answer.metrics, sum(len(output.token_ids) for output in answer.outputs)
    result = {"model": model_line(llm)}
    rate = metrics.tokens_per_second
    result["speed"] = f"{count} tokens" + (f", {rate:.0f} tokens/s" if rate else "")
    method = llm.speculative.method + ("" if named else ", as no --spec-method was given")
    if llm.speculative.drafter is not None and not metrics.num_drafts:
        result["speculation"] = f"{method}: nothing was drafted in {metrics.rounds} rounds"
    if metrics.num_drafts:
        rate, alpha = metrics.draft_acceptance_rate or 0.0, metrics.alpha
        result["speculation"] = (
            f"{method}, {metrics.rounds} rounds, {metrics.num_drafts} with drafts, "
            f"mean acceptance length {metrics.mean_acceptance_length:.2f}"
        )
        if metrics.synthetic:
            result["synthetic"] = "drafts were accepted at given rates: this is not the model's text"
        result["acceptance"] = (
            f"{metrics.num_accepted_draft_tokens} of {metrics.num_draft_tokens} drafted tokens ({rate:.0%})"
            + (f", alpha {alpha:.2f}" if alpha is not None else "")
        )
    return result


def show(
    console: Console, llm: LLM, answer: RequestOutput, params: Params, *, trace: bool, echo: bool, named: bool
) -> None:
    """Prints the texts, the figures, and one round or, with ``trace``, all of them."""
    rounds = answer.outputs[0].trace or []
    plain = tracing.plain_terminal(console)
    several, beams = len(answer.outputs) > 1, isinstance(params, BeamSearchParams)
    for output in answer.outputs:
        if several:
            logprob = "" if not beams else f", log-probability {output.cumulative_logprob:.3f}"
            console.file.write(f"--- {output.index + 1} of {len(answer.outputs)}{logprob}\n")
        if echo and answer.prompt is not None:
            console.file.write(answer.prompt if plain else f"\x1b[2m{answer.prompt}\x1b[0m")
        console.file.write(f"{output.text}\n\n")  # not through rich, which would expand tabs
    result = facts(llm, answer, named=named)
    if isinstance(params, SamplingParams):
        show_logprobs(console, llm.tokenizer, answer, params)
    else:
        result |= search_facts(llm, answer)
        result.pop("acceptance", None)
    width = max(map(len, result))
    for name, value in result.items():
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
        key = [tracing.marked(kind, kind, plain=plain) for kind in tracing.KINDS if kind != PLAIN]
        console.print(Text.assemble(" " * (width + 2), Text("  ").join(key), "  (all rounds: --trace)"), soft_wrap=True)


def show_logprobs(console: Console, tokenizer: Any, answer: RequestOutput, params: SamplingParams) -> None:
    """Prints the log-probabilities of the prompt and the answers, if they were requested."""
    tables: list[tuple[str, Sequence[int], Sequence[Position | None] | None, int | None]]
    tables = [("prompt", answer.prompt_token_ids, answer.prompt_logprobs, params.prompt_logprobs)]
    for output in answer.outputs:
        name = "answer" if len(answer.outputs) == 1 else f"answer {output.index + 1}"
        tables.append((name, output.token_ids, output.logprobs, params.logprobs))
    for name, tokens, result, count in tables:
        if result is not None:
            text = "\n".join(lines(tokens, result, count or 0, tokenizer))
            console.file.write(f"log-probabilities, {name}\n{text}\n\n")


BEAM_OPTIONS = ("max_tokens", "ignore_eos", "include_stop_str_in_output", "temperature")
"""Sampling options that apply to beams, too."""
EARLY: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
PAGE_SIZE = 16


def search_params(
    beams: int, length_penalty: float | None, early_stopping: str | None, sampling: Mapping[str, Any]
) -> BeamSearchParams:
    """The options of a beam search; ``n`` is the number of beams to return. Raises ConfigError for sampling options."""
    given = dict(sampling)
    shown = given.pop("n", None)
    for name in given:
        if name not in BEAM_OPTIONS:
            raise ConfigError(f"beam search does not sample: remove --{name.replace('_', '-')} or --beams")
    if early_stopping is not None and early_stopping not in EARLY:
        raise ConfigError(f"--early-stopping is true, false or never, not {early_stopping!r}")
    return BeamSearchParams(
        beams,
        given.pop("max_tokens", GREEDY["max_tokens"]),
        length_penalty=1.0 if length_penalty is None else length_penalty,
        early_stopping=EARLY[early_stopping or "false"],
        num_return_sequences=shown,
        **given,
    )


def search_facts(llm: LLM, answer: RequestOutput) -> dict[str, str]:
    """The figures of a search: each of its steps adds a token to every beam."""
    metrics, rate = answer.metrics, answer.metrics.tokens_per_second
    result = {"speed": f"{metrics.decode_tokens} beam steps" + (f", {rate:.0f} steps/s" if rate else "")}
    if llm.speculative.drafter is not None:
        steps, drafted = metrics.tokens_per_round, metrics.num_draft_tokens
        rounds = f"{metrics.rounds} rounds" + ("" if steps is None else f", {steps:.2f} beam steps a round")
        result["speculation"] = f"{llm.speculative.method}, {rounds}, {drafted} drafted tokens"
    return result


Position = Mapping[int, "Logprob"]


def likeliest(item: Position, count: int) -> dict[int, Logprob]:
    """The ``count`` likeliest tokens of a position, which may have its own token besides."""
    return dict(pair for pair in sorted(item.items(), key=lambda pair: pair[1].rank) if pair[1].rank <= count)


def as_objects(tokens: Sequence[int], result: Sequence[Position | None], count: int) -> list[dict[str, Any] | None]:
    """Log-probabilities for ``--json``; null for the prompt's first token. Minus infinity becomes ``LOWEST``, as over
    HTTP."""
    from forerun.engine.jobs import finite

    def one(token: int, value: Logprob) -> dict[str, Any]:
        return {"token": token, "text": value.decoded_token, "logprob": finite(value.logprob)}

    def whole(token: int, item: Position) -> dict[str, Any]:
        top = [one(*pair) for pair in likeliest(item, count).items()]
        return one(token, item[token]) | {"rank": item[token].rank, "top": top}

    return [None if item is None else whole(token, item) for token, item in zip(tokens, result)]


def lines(tokens: Sequence[int], result: Sequence[Position | None], count: int, tokenizer: Any) -> Iterator[str]:
    """Yields a line per token: its text, log-probability and rank, and the likeliest tokens."""
    from forerun.models.text.tokenizer import token_text

    texts = [repr(token_text(tokenizer, token)) for token in tokens]
    width = max(map(len, texts), default=0)
    for token, text, item in zip(tokens, texts, result):
        if item is None:
            yield f"  {text:<{width}}        -"
            continue
        top = "  ".join(f"{each.decoded_token!r} {each.logprob:.2f}" for each in likeliest(item, count).values())
        yield f"  {text:<{width}}  {item[token].logprob:7.2f}  rank {item[token].rank:<6d} {top}".rstrip()
