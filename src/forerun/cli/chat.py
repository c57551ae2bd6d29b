"""``forerun chat``: the conversation, the commands that change it, and the command itself."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forerun.cli.console import check_file, out, read_file, read_input, set_threads, table, warn_synthetic, write_file
from forerun.cli.options import (
    ANSWERING,
    SAMPLING,
    SPECULATIVE,
    ChatTemplate,
    Flags,
    Threads,
    names_method,
    speculative_config,
    takes,
)
from forerun.core.errors import ConfigError, RequestError, check_text
from forerun.core.folders import expanded
from forerun.core.threads import AUTO
from forerun.sampling.params import SamplingParams

if TYPE_CHECKING:
    from forerun.cli.chat_session import ChatSession

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
NOT_HERE = ("n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "bad_words_ids")
"""Sampling options that do not apply to a conversation."""
SETTABLE = [name for name in SamplingParams.names() if name not in NOT_HERE]
MODEL = "smollm2"
PAGE_SIZE = 16
"""Whole pages are kept between turns; with smaller ones, less is read again."""
DEFAULTS: dict[str, Any] = {"max_tokens": None, "seed": 0}
MILD: dict[str, Any] = {"temperature": 0.7, "min_p": 0.05}
"""For models without sampling settings: at temperature 0, small ones repeat themselves."""


@dataclass
class Conversation:
    """The messages so far, and how the next answer is made."""

    params: SamplingParams
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(**DEFAULTS, **MILD))
    """What ``/set NAME`` goes back to."""
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    """Messages of user and assistant, alternating."""
    trace: bool = False

    def messages(self) -> list[dict[str, str]]:
        """The system prompt, if there is one, and the turns."""
        head = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def say(self, role: str, text: str) -> None:
        self.turns.append({"role": role, "content": text})

    def take_back(self) -> bool:
        """Removes the user's last message and what came after it. False if there is none."""
        while self.turns:
            if self.turns.pop()["role"] == USER:
                return True
        return False


@dataclass(frozen=True)
class ReplyText:
    """What a command leads to: a text to show, an answer to generate, the end of the session."""

    text: str = ""
    ask: bool = False
    end: bool = False


COMMANDS = {
    "help": ("", "list the commands (or /?)"),
    "reset": ("", "start a new conversation with the same system prompt (or /clear)"),
    "system": ("[TEXT]", "set the system prompt; without TEXT, remove it"),
    "set": ("[NAME [VALUE]]", "show or change sampling options, such as /set temperature 0.7"),
    "show": ("", "show the model, the options and the number of messages"),
    "trace": ("on|off", "colour each token by the outcome of its draft"),
    "undo": ("", "remove the last message and its answer"),
    "retry": ("", "answer the last message again with the next seed (or /regenerate)"),
    "save": ("FILE", "save the messages as JSON"),
    "load": ("FILE", "load saved messages"),
    "exit": ("", "end the program (or /bye, /quit)"),
}
"""Argument and help of each command; the method of that name in ``ChatCommands`` runs it."""
ALIASES = {"?": "help", "clear": "reset", "regenerate": "retry", "bye": "exit", "quit": "exit"}


def completions() -> dict[str, list[str]]:
    """What may follow each beginning of a line."""
    names = sorted(f"/{name}" for name in (*COMMANDS, *ALIASES))
    return {"": names, "/set": sorted(SETTABLE), "/trace": ["on", "off"]}


class ChatCommands:
    """Runs the lines that begin with a slash. ``facts`` describe the model, for ``/show``."""

    def __init__(self, conversation: Conversation, facts: Mapping[str, str]) -> None:
        self.conversation = conversation
        self.facts = facts

    def run(self, line: str) -> ReplyText:
        """Runs one command. Raises ForerunError for what cannot be done; nothing has changed then."""
        given, _, argument = line.removeprefix("/").partition(" ")
        name = ALIASES.get(given, given)
        if name not in COMMANDS:
            raise ConfigError(f"unknown command /{name}: see /help; begin a message like this with a space")
        argument = argument.strip()
        if argument and not COMMANDS[name][0]:
            raise ConfigError(f"/{given} takes no argument")
        reply: ReplyText = getattr(self, name)(argument)
        return reply

    def help(self, argument: str) -> ReplyText:
        shown = table({f"/{name} {usage}".rstrip(): text for name, (usage, text) in COMMANDS.items()})
        return ReplyText(
            f"{shown}\n\n"
            'A backslash at the end of a line continues it; """ encloses several lines; Alt-Enter breaks a line.\n'
            "Pasted text is one message. Tab completes commands. Ctrl-C stops an answer; Ctrl-D ends the program."
        )

    def reset(self, argument: str) -> ReplyText:
        self.conversation.turns.clear()
        return ReplyText("new conversation")

    def system(self, argument: str) -> ReplyText:
        self.conversation.system = argument or None
        return ReplyText("system prompt set" if argument else "system prompt removed")

    def set(self, argument: str) -> ReplyText:
        """``NAME VALUE``, where VALUE may be JSON; ``NAME`` alone sets the default; nothing shows the options."""
        name, _, text = argument.partition(" ")
        if not name:
            return ReplyText(sampling_line(self.conversation.params))
        name = name.replace("-", "_")
        if name not in SETTABLE:
            raise ConfigError(f"unknown sampling option {name!r}: choose one of {', '.join(SETTABLE)}")
        value = _parse(text.strip()) if text.strip() else getattr(self.conversation.defaults, name)
        self.conversation.params = replace(self.conversation.params, **{name: value})
        return ReplyText(f"{name} is {json.dumps(value, default=list)}")

    def show(self, argument: str) -> ReplyText:
        conversation = self.conversation
        result = {**self.facts, "sampling": sampling_line(conversation.params), "system": conversation.system or "none"}
        result["messages"] = str(len(conversation.turns))
        result["colours"] = "on" if conversation.trace else "off"
        return ReplyText(table(result))

    def trace(self, argument: str) -> ReplyText:
        if argument not in ("on", "off"):
            raise ConfigError("/trace takes on or off")
        self.conversation.trace = argument == "on"
        return ReplyText()

    def undo(self, argument: str) -> ReplyText:
        if not self.conversation.take_back():
            raise RequestError("nothing to undo")
        return ReplyText("last message and answer removed")

    def retry(self, argument: str) -> ReplyText:
        conversation, params = self.conversation, self.conversation.params
        if not conversation.turns:
            raise RequestError("nothing to answer again")
        random = params.seed is None or params.seed == -1
        if not params.greedy and params.seed is not None and not random:
            params = replace(params, seed=(params.seed + 1) % 2**64)
        if conversation.turns[-1]["role"] == ASSISTANT:
            conversation.turns.pop()
        conversation.params = params
        if params.greedy:
            return ReplyText("temperature 0 repeats the answer: try /set temperature 0.7", ask=True)
        return ReplyText("" if random else f"seed is {params.seed}", ask=True)

    def save(self, argument: str) -> ReplyText:
        path, messages = _path("save", argument), self.conversation.messages()
        check_file(path)
        write_file(path, json.dumps(messages, ensure_ascii=False, indent=2) + "\n")
        return ReplyText(f"{len(messages)} messages saved to {path}")

    def load(self, argument: str) -> ReplyText:
        messages = read_messages(_path("load", argument))
        has_system = bool(messages) and messages[0]["role"] == SYSTEM
        self.conversation.system = messages[0]["content"] if has_system else None
        self.conversation.turns = messages[1:] if has_system else messages
        return ReplyText(f"{len(messages)} messages loaded")

    def exit(self, argument: str) -> ReplyText:
        return ReplyText(end=True)


def sampling_line(params: SamplingParams) -> str:
    """The usual sampling options, and those that are not neutral."""
    values, usual = vars(params), ("temperature", "seed")
    neutral = vars(SamplingParams(max_tokens=None))
    shown = [name for name in SETTABLE if name in usual or values[name] != neutral[name]]
    return ", ".join(f"{name} {json.dumps(values[name], default=list)}" for name in shown)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _path(command: str, text: str) -> Path:
    """The one file name that a command takes, which may be quoted."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"/{command}: {error}") from None
    if len(parts) != 1:
        raise ConfigError(f"/{command} takes one file name, in quotes if it has spaces")
    return expanded(parts[0])


def read_messages(path: Path) -> list[dict[str, str]]:
    """Reads messages that ``/save`` wrote. Raises ConfigError for anything else."""
    text = read_file(path)
    try:
        result: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    valid = isinstance(result, list) and all(
        isinstance(item, dict) and set(item) == {"role", "content"} and isinstance(item["content"], str)
        for item in result
    )
    roles = [item["role"] for item in result] if valid else []
    turns = roles[1:] if roles[:1] == [SYSTEM] else roles
    if not valid or turns != [USER, ASSISTANT] * (len(turns) // 2):
        raise ConfigError(
            f"{path} is not a saved conversation: it must be a list of messages (role, content) that alternate between "
            "user and assistant"
        )
    messages: list[dict[str, str]] = result
    return messages


CHAT_ENGINE = Flags("engine", [flag for flag in ANSWERING.flags if flag.name != "logprobs_mode"]).showing(
    model=MODEL, page_size=str(PAGE_SIZE), max_num_seqs="1"
)
RUN_ENGINE = Flags("engine", [flag for flag in CHAT_ENGINE.flags if flag.name != "model"])
OWN = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, **MILD}
CHAT_SAMPLING = Flags("sampling", [flag for flag in SAMPLING.flags if flag.name not in NOT_HERE]).showing(
    max_tokens="the rest of the context", **{name: f"the model's, else {value}" for name, value in OWN.items()}
)
System = Annotated[str | None, typer.Option(help="System prompt.")]
GenerationConfig = Annotated[
    str, typer.Option(metavar="auto|vllm", help="Sampling defaults: auto uses the model's own, vllm neutral ones.")
]


@takes(CHAT_ENGINE, SPECULATIVE, CHAT_SAMPLING)
def chat(
    system: System = None,
    trace: Annotated[bool, typer.Option("--trace", help="Colour each token by the outcome of its draft.")] = False,
    chat_template: ChatTemplate = None,
    generation_config: GenerationConfig = AUTO,
    threads: Threads = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Chat with a model in the terminal. Type /help for commands.

    Without a terminal, each line of standard input is a message, and only answers go to standard output.
    """
    options = engine, speculative, sampling, chat_template, generation_config, threads
    with _session(*options, system, trace=trace, terminal=sys.stdin.isatty() and sys.stdout.isatty()) as session:
        session.run()


@takes(RUN_ENGINE, SPECULATIVE, CHAT_SAMPLING)
def run(
    model: Annotated[str, typer.Argument(help="Model, as for --model of the other commands.")],
    question: Annotated[
        list[str] | None,
        typer.Argument(help="Message to answer. Piped standard input is appended.", show_default=False),
    ] = None,
    system: System = None,
    chat_template: ChatTemplate = None,
    generation_config: GenerationConfig = AUTO,
    threads: Threads = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Answer one question with a chat model. Without a question, start a chat.

    Only the answer goes to standard output.
    """
    parts = [" ".join(question or [])] + ([] if sys.stdin.isatty() else [read_input()])
    message = "\n\n".join(part for part in parts if part.strip())
    if not message and not sys.stdin.isatty():
        raise RequestError("no question: add one, or pipe it to standard input")
    check_text(message)
    options = {"model": model, **engine}, speculative, sampling, chat_template, generation_config, threads
    with _session(*options, system, terminal=sys.stdout.isatty()) as session:
        if message:
            session.handle(message)
        else:
            session.run()


@contextmanager
def _session(
    engine: Mapping[str, Any], speculative: Mapping[str, Any], sampling: Mapping[str, Any], chat_template: Path | None,
    generation_config: str, threads: int | None, system: str | None, *, trace: bool = False, terminal: bool,
) -> Iterator[ChatSession]:  # fmt: skip
    """Loads the model for a session, which shows answers as a terminal can if ``terminal``. Raises ConfigError."""
    template = None if chat_template is None else read_file(chat_template)
    if generation_config not in (AUTO, "vllm"):
        raise ConfigError(f"--generation-config must be auto or vllm, not {generation_config!r}")
    SamplingParams(**{**DEFAULTS, **sampling})  # mistakes are reported before the model is loaded
    from forerun.cli.chat_session import ChatSession, Terminal, model_facts
    from forerun.engine.llm import LLM

    fixed = {"model": MODEL, "page_size": PAGE_SIZE, "max_num_seqs": 1, **engine}
    options = {"threads": set_threads(threads), **fixed, "generation_config": generation_config}
    if terminal:
        out().print(Text(f"loading {options['model']}", style="dim"))
    with LLM(**options, speculative_config=speculative_config(speculative, options)) as llm:
        warn_synthetic(llm)
        if template is None and not getattr(llm.tokenizer, "chat_template", None):
            raise ConfigError(
                f"{llm.model.info.name} has no chat template: add --chat-template FILE, or continue texts with "
                "forerun generate"
            )
        llm.engine.prepare()
        own = llm.model.info.sampling
        if generation_config == "vllm":
            defaults, source = SamplingParams(**DEFAULTS), "neutral defaults"
        else:
            source = "the model's own" if own else "the model sets none"
            defaults = SamplingParams(**DEFAULTS, **(own or MILD))
        params = replace(defaults, **sampling)
        conversation = Conversation(params, defaults, system=system, trace=trace)
        facts = model_facts(llm, named=names_method(speculative))
        facts["sampling"] = f"{sampling_line(params)} ({source})"
        yield (Terminal if terminal else ChatSession)(llm, conversation, template, facts)
