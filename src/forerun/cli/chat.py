"""``forerun chat``: what it remembers, the commands that change it, and the command itself."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
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
"""Sampling options that a conversation has no place for."""
SETTABLE = [name for name in SamplingParams.names() if name not in NOT_HERE]


@dataclass
class Conversation:
    """The messages so far, and how the next answer is made."""

    params: SamplingParams
    defaults: Mapping[str, Any]
    """What ``/set NAME`` alone goes back to, where that is not the class's own default."""
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    """User and assistant by turns."""
    trace: bool = False

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def say(self, role: str, text: str) -> None:
        self.turns.append({"role": role, "content": text})

    def take_back(self) -> bool:
        """Forget the last message of the user and what came after it; False: there is none."""
        while self.turns:
            if self.turns.pop()["role"] == USER:
                return True
        return False


@dataclass(frozen=True)
class ReplyText:
    """What a command leads to: a text to show, an answer to make, the end."""

    text: str = ""
    ask: bool = False
    end: bool = False


@dataclass(frozen=True)
class ChatCommand:
    usage: str
    help: str
    run: Callable[[ChatCommands, str], ReplyText]


class ChatCommands:
    """The lines that begin with a slash. ``facts`` are what ``/show`` tells of the model."""

    def __init__(self, talk: Conversation, facts: Mapping[str, str]) -> None:
        self.talk = talk
        self.facts = facts

    def run(self, line: str) -> ReplyText:
        """Raises ForerunError for what cannot be done; nothing has changed then."""
        name, _, rest = line.removeprefix("/").partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            raise ConfigError(f"there is no command /{name}: /help lists them; put a space before a message like this")
        rest = rest.strip()
        if rest and command.usage == name:
            raise ConfigError(f"/{name} takes nothing behind it")
        return command.run(self, rest)

    def help(self, rest: str) -> ReplyText:
        shown = table({f"/{command.usage}": command.help for command in COMMANDS.values()})
        return ReplyText(
            f"{shown}\n\n"
            'A line that ends with a backslash goes on in the next; """ begins and ends several lines.\n'
            "Ctrl-C stops an answer; Ctrl-D, or Ctrl-C twice, ends the program."
        )

    def reset(self, rest: str) -> ReplyText:
        self.talk.turns.clear()
        return ReplyText("a new conversation")

    def set_system(self, rest: str) -> ReplyText:
        self.talk.system = rest or None
        return ReplyText("the system prompt is set" if rest else "there is no system prompt")

    def set(self, rest: str) -> ReplyText:
        """``NAME VALUE``; a value that is JSON is read as such. ``NAME`` alone: back to its default."""
        talk = self.talk
        name, _, text = rest.partition(" ")
        if not name:
            return ReplyText(self._sampling())
        name = name.replace("-", "_")
        if name not in SETTABLE:
            raise ConfigError(f"there is no sampling option {name!r} here: there are {', '.join(SETTABLE)}")
        value = _parse(text.strip()) if text.strip() else talk.defaults.get(name, UNSET[name])
        talk.params = replace(talk.params, **{name: value})
        return ReplyText(f"{name} is {json.dumps(value, default=list)}")

    def _sampling(self) -> str:
        params = self.talk.params
        return ", ".join(f"{name} {json.dumps(getattr(params, name), default=list)}" for name in self._changed())

    def _changed(self) -> list[str]:
        """Sampling options worth showing: the usual ones, and those that are not as they come."""
        usual = ("temperature", "seed", "max_tokens")
        return [n for n in SETTABLE if n in usual or getattr(self.talk.params, n) != getattr(PLAIN, n)]

    def show(self, rest: str) -> ReplyText:
        talk = self.talk
        result = {**self.facts, "sampling": self._sampling(), "system": talk.system or "none"}
        result["messages"] = str(len(talk.turns))
        result["colours"] = "on" if talk.trace else "off"
        return ReplyText(table(result))

    def trace(self, rest: str) -> ReplyText:
        if rest not in ("on", "off"):
            raise ConfigError("/trace takes on or off")
        self.talk.trace = rest == "on"
        return ReplyText()

    def undo(self, rest: str) -> ReplyText:
        if not self.talk.take_back():
            raise RequestError("there is nothing to undo")
        return ReplyText("the last message and its answer are forgotten")

    def retry(self, rest: str) -> ReplyText:
        talk = self.talk
        if not talk.turns:
            raise RequestError("there is nothing to answer again")
        params = talk.params
        again = params if params.greedy or params.seed is None else replace(params, seed=params.seed + 1)
        if talk.turns[-1]["role"] == ASSISTANT:
            talk.turns.pop()
        talk.params = again
        if params.greedy:
            return ReplyText("temperature 0 answers alike again: /set temperature 0.7 makes it vary", ask=True)
        return ReplyText("" if again.seed is None else f"seed is {again.seed}", ask=True)

    def save(self, rest: str) -> ReplyText:
        path = _path("save", rest)
        check_file(path)
        write_file(path, json.dumps(self.talk.messages(), ensure_ascii=False, indent=2) + "\n")
        return ReplyText(f"{len(self.talk.messages())} messages are in {path}")

    def load(self, rest: str) -> ReplyText:
        path = _path("load", rest)
        messages = read_messages(path)
        first = messages[0]["role"] if messages else None
        self.talk.system = messages[0]["content"] if first == SYSTEM else None
        self.talk.turns = messages[1:] if first == SYSTEM else messages
        return ReplyText(f"{len(messages)} messages are back")

    def exit(self, rest: str) -> ReplyText:
        return ReplyText(end=True)


COMMANDS = {
    "help": ChatCommand("help", "this list", ChatCommands.help),
    "reset": ChatCommand("reset", "forget the conversation; the system prompt stays", ChatCommands.reset),
    "system": ChatCommand("system [TEXT]", "set the system prompt, or remove it", ChatCommands.set_system),
    "set": ChatCommand("set [NAME [VALUE]]", "show or change sampling options: /set temperature 0.7", ChatCommands.set),
    "show": ChatCommand("show", "the model, the options and the length of the conversation", ChatCommands.show),
    "trace": ChatCommand("trace on|off", "colour each token by what became of its draft", ChatCommands.trace),
    "undo": ChatCommand("undo", "forget the last message and its answer", ChatCommands.undo),
    "retry": ChatCommand("retry", "answer the last message again, with the next seed", ChatCommands.retry),
    "save": ChatCommand("save FILE", "write the messages as JSON", ChatCommands.save),
    "load": ChatCommand("load FILE", "go on with messages that were saved", ChatCommands.load),
    "exit": ChatCommand("exit", "end the program", ChatCommands.exit),
}
PLAIN = SamplingParams()
UNSET = {item.name: item.default for item in fields(SamplingParams)}


def table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _path(command: str, text: str) -> Path:
    """A file's name, which may be quoted."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"/{command}: {error}") from None
    if len(parts) != 1:
        raise ConfigError(f"/{command} takes one file name, in quotes if it has spaces")
    return expanded(parts[0])


def read_messages(path: Path) -> list[dict[str, str]]:
    """Messages that ``/save`` wrote. Raises ConfigError for anything else."""
    try:
        result = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    good = isinstance(result, list) and all(
        isinstance(item, dict) and set(item) == {"role", "content"} and isinstance(item["content"], str)
        for item in result
    )
    roles = [item["role"] for item in result] if good else []
    turns = roles[1:] if roles[:1] == [SYSTEM] else roles
    if not good or turns != [USER, ASSISTANT] * (len(turns) // 2):
        raise ConfigError(
            f"{path} is not a saved conversation: a list of messages with role and content, user and assistant by turns"
        )
    return result


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
