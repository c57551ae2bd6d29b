"""``forerun chat``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from forerun.cli.console import out, read_file, set_threads, warn_synthetic
from forerun.cli.conversation import NOT_HERE, Conversation
from forerun.cli.options import (
    ENGINE,
    SAMPLING,
    SPECULATIVE,
    ChatTemplate,
    Flags,
    Threads,
    names_method,
    speculative_config,
    takes,
)
from forerun.core.errors import ConfigError
from forerun.sampling.params import SamplingParams

MODEL = "smollm2"
PAGE_SIZE = 16
"""Whole pages are kept between turns; smaller ones leave less to read again."""
DEFAULTS = {"temperature": 0.0, "max_tokens": 1024, "seed": 0}
CHAT_ENGINE = Flags("engine", [flag for flag in ENGINE.flags if flag.name != "logprobs_mode"])
CHAT_SAMPLING = Flags("sampling", [flag for flag in SAMPLING.flags if flag.name not in NOT_HERE])


@takes(
    CHAT_ENGINE.showing(model=MODEL, page_size=str(PAGE_SIZE), max_num_seqs="1"),
    SPECULATIVE,
    CHAT_SAMPLING.showing(max_tokens=str(DEFAULTS["max_tokens"])),
)
def chat(
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="colour each token by what became of its draft")] = False,
    chat_template: ChatTemplate = None,
    threads: Threads = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Talk with a model in the terminal; /help there lists what can be done.

    Without a terminal, each line of standard input is a message, and the answers are all of standard output.
    """
    template = None if chat_template is None else read_file(chat_template)
    params = SamplingParams(**{**DEFAULTS, **sampling})
    from forerun.cli.talking import ChatSession, Piped, Terminal, facts
    from forerun.engine.llm import LLM

    options = {"threads": set_threads(threads), "model": MODEL, "page_size": PAGE_SIZE, "max_num_seqs": 1, **engine}
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        out().print(Text(f"loading {options['model']}", style="dim"))
    llm = LLM(**options, speculative_config=speculative_config(speculative, options))
    warn_synthetic(llm)
    if template is None and not getattr(llm.tokenizer, "chat_template", None):
        raise ConfigError(
            f"{llm.model.info.name} has no chat template: give one with --chat-template FILE, or continue texts with "
            "forerun generate"
        )
    talk = Conversation(params, DEFAULTS, system=system, trace=trace)
    kind: type[ChatSession] = Terminal if terminal else Piped
    kind(llm, talk, template, facts(llm, named=names_method(speculative))).run()
    llm.close()
