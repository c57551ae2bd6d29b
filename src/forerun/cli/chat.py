"""``forerun chat``: the conversation, the commands that change it, and the command itself."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from forerun.cli.console import check_file, out, read_file, set_threads, warn_synthetic, write_file
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
from forerun.core.errors import ConfigError, RequestError
from forerun.core.folders import expanded
from forerun.sampling.params import SamplingParams

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
NOT_HERE = ("n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "bad_words_ids")
"""Sampling options that do not apply to a conversation."""
SETTABLE = [name for name in SamplingParams.names() if name not in NOT_HERE]
MODEL = "smollm2"
PAGE_SIZE = 16
"""Whole pages are kept between turns; with smaller ones, less is read again."""
DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(SamplingParams)}
DEFAULTS |= {"temperature": 0.0, "max_tokens": 1024, "seed": 0}


@dataclass
class Conversation:
    """The messages so far, and how the next answer is made."""

    params: SamplingParams
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
    "help": ("", "this list"),
    "reset": ("", "forget the conversation; the system prompt stays"),
    "system": ("[TEXT]", "set the system prompt, or remove it"),
    "set": ("[NAME [VALUE]]", "show or change sampling options: /set temperature 0.7"),
    "show": ("", "the model, the options and the length of the conversation"),
    "trace": ("on|off", "colour each token by what became of its draft"),
    "undo": ("", "forget the last message and its answer"),
    "retry": ("", "answer the last message again, with the next seed"),
    "save": ("FILE", "write the messages as JSON"),
    "load": ("FILE", "continue with saved messages"),
    "exit": ("", "end the program"),
}
"""Argument and help of each command; the method of that name in ``ChatCommands`` runs it."""


class ChatCommands:
    """Runs the lines that begin with a slash. ``facts`` describe the model, for ``/show``."""

    def __init__(self, conversation: Conversation, facts: Mapping[str, str]) -> None:
        self.conversation = conversation
        self.facts = facts

    def run(self, line: str) -> ReplyText:
        """Runs one command. Raises ForerunError for what cannot be done; nothing has changed then."""
        name, _, argument = line.removeprefix("/").partition(" ")
        if name not in COMMANDS:
            raise ConfigError(f"there is no command /{name}: /help lists them; put a space before a message like this")
        argument = argument.strip()
        if argument and not COMMANDS[name][0]:
            raise ConfigError(f"/{name} takes no argument")
        reply: ReplyText = getattr(self, name)(argument)
        return reply

    def help(self, argument: str) -> ReplyText:
        shown = table({f"/{name} {usage}".rstrip(): text for name, (usage, text) in COMMANDS.items()})
        return ReplyText(
            f"{shown}\n\n"
            'A line that ends with a backslash continues in the next; """ begins and ends several lines.\n'
            "Ctrl-C stops an answer; Ctrl-D, or Ctrl-C twice, ends the program."
        )

    def reset(self, argument: str) -> ReplyText:
        self.conversation.turns.clear()
        return ReplyText("a new conversation")

    def system(self, argument: str) -> ReplyText:
        self.conversation.system = argument or None
        return ReplyText("the system prompt is set" if argument else "there is no system prompt")

    def set(self, argument: str) -> ReplyText:
        """``NAME VALUE``, where VALUE may be JSON; ``NAME`` alone sets the default; nothing shows the options."""
        name, _, text = argument.partition(" ")
        if not name:
            return ReplyText(self._sampling())
        name = name.replace("-", "_")
        if name not in SETTABLE:
            raise ConfigError(f"there is no sampling option {name!r} here: there are {', '.join(SETTABLE)}")
        value = _parse(text.strip()) if text.strip() else DEFAULTS[name]
        self.conversation.params = replace(self.conversation.params, **{name: value})
        return ReplyText(f"{name} is {json.dumps(value, default=list)}")

    def _sampling(self) -> str:
        """The usual sampling options, and those that differ from the class's defaults."""
        values, usual = vars(self.conversation.params), ("temperature", "seed", "max_tokens")
        shown = [name for name in SETTABLE if name in usual or values[name] != getattr(SamplingParams(), name)]
        return ", ".join(f"{name} {json.dumps(values[name], default=list)}" for name in shown)

    def show(self, argument: str) -> ReplyText:
        conversation = self.conversation
        result = {**self.facts, "sampling": self._sampling(), "system": conversation.system or "none"}
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
            raise RequestError("there is nothing to undo")
        return ReplyText("the last message and its answer are forgotten")

    def retry(self, argument: str) -> ReplyText:
        conversation, params = self.conversation, self.conversation.params
        if not conversation.turns:
            raise RequestError("there is nothing to answer again")
        if not params.greedy and params.seed is not None:
            params = replace(params, seed=params.seed + 1)
        if conversation.turns[-1]["role"] == ASSISTANT:
            conversation.turns.pop()
        conversation.params = params
        if params.greedy:
            return ReplyText("temperature 0 gives the same answer again: /set temperature 0.7 makes it vary", ask=True)
        return ReplyText("" if params.seed is None else f"seed is {params.seed}", ask=True)

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


def table(rows: Mapping[str, str]) -> str:
    """Names and values in two columns."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


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
    try:
        result = json.loads(read_file(path))
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
            f"{path} is not a saved conversation: a list of messages with role and content, user and assistant in turn"
        )
    return result


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
    from forerun.cli.chat_session import ChatSession, Terminal, model_facts
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
    conversation = Conversation(params, system=system, trace=trace)
    session = Terminal if terminal else ChatSession
    session(llm, conversation, template, model_facts(llm, named=names_method(speculative))).run()
    llm.close()
