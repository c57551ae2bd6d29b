"""Flags from dataclass fields, so that options are declared once, and ``--config FILE``, which reads them from YAML."""

from __future__ import annotations

import csv
import difflib
import functools
import inspect
import json
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from forerun.cli.console import one_line, read_file
from forerun.core.errors import ConfigError, shown
from forerun.engine.config import NONE, EngineConfig
from forerun.sampling.params import SamplingParams
from forerun.speculate.names import KEYS, LAB_KEYS, PROFILES, SHARED_KEYS, drafters, policies, rules

T = TypeVar("T")
Threads = Annotated[
    int | None, typer.Option(help="CPU threads.", show_default="auto: all usable cores, fewer while others need them")
]
ChatTemplate = Annotated[Path | None, typer.Option(help="Jinja file to use instead of the checkpoint's template.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]


@dataclass(frozen=True)
class Flag:
    """One command-line option. ``name`` is an identifier, with underscores; ``items`` is the item type of a
    comma-separated list; ``field`` is the config's name for it, if that differs."""

    name: str
    kind: Any
    help: str
    default: str | None = None
    panel: str | None = None
    is_json: bool = False
    items: Callable[[str], Any] | None = None
    field: str | None = None

    def parse(self, value: Any) -> Any:
        """Converts a value from the command line to the config's. Raises ConfigError."""
        if self.is_json:
            return parse_json(self.name, value)
        return value if self.items is None else split(self.name, value, self.items)

    def parameter(self) -> inspect.Parameter:
        option = typer.Option(
            f"--{self.name.replace('_', '-')}" + (f"/--no-{self.name.replace('_', '-')}" if self.kind is bool else ""),
            help=self.help,
            show_default=self.default if self.default is not None else False,
            rich_help_panel=self.panel,
            metavar="JSON" if self.is_json else None,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=typing.Annotated[self.kind | None, option],
        )


@dataclass(frozen=True)
class Flags:
    """A group of flags. A command gets those that were given as one mapping, its argument ``name``."""

    name: str
    flags: Sequence[Flag] = field(default_factory=tuple)

    def showing(self, **defaults: str) -> Flags:
        """The same flags with other defaults in ``--help``."""
        return Flags(self.name, [replace(flag, default=defaults.get(flag.name, flag.default)) for flag in self.flags])

    def pick(self, given: dict[str, Any]) -> dict[str, Any]:
        """Removes this group's values from ``given`` and returns those that the user gave."""
        picked = {}
        for flag in self.flags:
            value = given.pop(flag.name)
            if value is None or value == []:
                continue
            picked[flag.field or flag.name] = flag.parse(value)
        return picked


def parse_json(name: str, text: str) -> dict[str, Any]:
    """Parses an option's JSON object. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--{name.replace('_', '-')} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--{name.replace('_', '-')} must be a JSON object, not {text!r}")
    return value


def split(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """Splits a comma-separated option; items with commas are in double quotes. Raises ConfigError."""
    try:
        return [kind(part.strip()) for part in next(csv.reader([text], skipinitialspace=True), []) if part.strip()]
    except (ValueError, csv.Error):
        raise ConfigError(
            f"--{name.replace('_', '-')} must be a comma-separated list of {kind.__name__} values, not {text!r}"
        ) from None


def takes(*groups: Flags) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command with groups of flags; it gets one mapping per group."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        names = {group.name for group in groups}
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in names]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        parameters += [flag.parameter() for group in groups for flag in group.flags]

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            picked = {group.name: group.pick(given) for group in groups}  # takes them out of ``given``
            return command(**given, **picked)

        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def flags_of(
    kind: type, panel: str | None = None, *, skip: Sequence[str] = (), defaults: Mapping[str, Any] = {}
) -> list[Flag]:
    """One flag per field of the dataclass ``kind``, each a ``core.config.option``, here or in a base."""
    hints, bases = typing.get_type_hints(kind), [owner for owner in reversed(kind.__mro__) if is_dataclass(owner)]
    help_texts = {item.name: item.metadata["help"] for base in bases for item in fields(base) if item.metadata}
    result = []
    for item in fields(kind):
        if item.name in skip:
            continue
        value, is_json = option_type(hints[item.name])
        commas = item.metadata.get("commas")
        text = help_texts[item.name]
        if typing.get_origin(value) is list and commas is None:
            text += " Repeatable."
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        default = defaults.get(item.name, default)
        printed = None if default in (None, (), {}, MISSING) else str(default)
        if isinstance(default, tuple) and default:
            printed = ",".join(str(each).removesuffix(".0") for each in default)
        if commas is not None:
            items = typing.get_args(hints[item.name])[0]
            result.append(Flag(commas, str, text, printed, panel, items=items, field=item.name))
        else:
            result.append(Flag(item.name, value, text, printed, panel, is_json))
    return result


def option_type(hint: Any) -> tuple[Any, bool]:
    """The type that typer parses for a field of type ``hint``, and whether the option is JSON text."""
    union = isinstance(hint, types.UnionType)
    kinds = [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not type(None)]
    lists = [kind for kind in kinds if typing.get_origin(kind) in (list, tuple, Sequence)]
    if lists:
        return list[typing.get_args(lists[0])[0]], False  # type: ignore[misc]
    if typing.get_origin(kinds[0]) is not None:
        return str, True
    return kinds[0], False


def method_options() -> str:
    """Help on each method's own keys of ``speculative_config``, a line each."""
    own = {name: ", ".join(keys.split()) or "none" for name, keys in {**KEYS, **LAB_KEYS}.items()}
    lines = [f"{name}: {own.get(name, 'see the package that adds it')}" for name in drafters]
    return "\n\n".join([f"every method: {', '.join(SHARED_KEYS.split())}", *lines])


ANSWERING = Flags("engine", flags_of(EngineConfig, "Engine", skip=("seed", "trace", "threads", "generation_config")))
ENGINE = Flags("engine", [flag for flag in ANSWERING.flags if not flag.name.startswith("memory")])
"""For commands that measure."""
SERVED = Flags("engine", flags_of(EngineConfig, "Engine", skip=("trace", "threads")))
"""For commands that have no other seed."""
GREEDY = {"temperature": 0, "max_tokens": 128, "seed": 0}
SAMPLING = Flags("sampling", flags_of(SamplingParams, "Sampling", skip=("bad_words_ids",), defaults=GREEDY))
METHOD_DEFAULT = "auto"
METHOD_HELP = (
    f"Drafting method: {', '.join([NONE, *drafters])}. By default auto takes the first that applies: a bundled result "
    "of forerun tune, a known draft model on disk, the model's own MTP layer, suffix."
)
SYNTHETIC_HELP = (
    "Benchmark only: accept drafts at published Llama-3.2-1B rates. The text is meaningless. "
    f"One of {', '.join(PROFILES)}."
)
BUNDLED = "bundled"
"""The value of ``--tuned`` for the folder that comes with the package."""
TUNED_HELP = f"Result of forerun tune for this model: a folder, or {BUNDLED}."
SPECULATIVE = Flags(
    "speculative",
    [
        Flag("speculative_config", str, "All options of speculation as JSON: vLLM's keys.", None, "Speculation", True),
        Flag("tuned", str, TUNED_HELP, None, "Speculation"),
        Flag("spec_method", str, METHOD_HELP, METHOD_DEFAULT, "Speculation",
             field="method"),
        Flag("spec_model", str, "Draft model or head: checkpoint folder, GGUF file or hub name.", None, "Speculation",
             field="model"),
        Flag("spec_tokens", int, "Number of draft tokens per round.", "the method's", "Speculation",
             field="num_speculative_tokens"),
        Flag("accept", str, f"Acceptance rule: {', '.join(rules)}.", "coupled", "Speculation"),
        Flag(
            "length",
            str,
            f"Draft length policy: {', '.join(policies)}.",
            "adaptive without --spec-method, else fixed",
            "Speculation",
        ),
        Flag("synthetic", str, SYNTHETIC_HELP, None, "Speculation", field="synthetic_acceptance_rates"),
    ],
)  # fmt: skip


def speculative_config(given: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """Builds a ``speculative_config`` from the flags of ``SPECULATIVE``; ``engine.auto`` chooses a missing method.

    Raises ConfigError for a key that is given twice with different values.
    """
    config = dict(given.get("speculative_config") or {})
    if "tuned" in given:
        if names_method(given):
            raise ConfigError("--tuned conflicts with --spec-method and --spec-model: remove one")
        config = {**read_tuned(given["tuned"], engine), **config}
    for flag in SPECULATIVE.flags:
        key = flag.field or flag.name
        if key not in given or key in ("speculative_config", "tuned"):
            continue
        value = given[key]
        if "tuned" in given and key in ("accept", "length"):
            config[key] = value
        if config.setdefault(key, value) != value:
            option = flag.name.replace("_", "-")
            raise ConfigError(f"{key} is {config[key]!r} in --speculative-config and {value!r} in --{option}")
    if config.get("method") == METHOD_DEFAULT:
        del config["method"]
    if "method" not in config and "model" not in config:
        from forerun.engine.auto import choose

        config = choose(str(engine.get("model", EngineConfig.model)), config, engine.get("lora"))
    return config


def read_tuned(folder: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The ``speculative_config`` of a tuned folder for the engine's model. Raises ConfigError."""
    from forerun.engine.tuned import load

    return load(True if folder == BUNDLED else folder, str(engine.get("model", EngineConfig.model)), engine.get("lora"))


def names_method(given: Mapping[str, Any]) -> bool:
    """Whether the flags name a drafter, other than by ``--tuned``."""
    config = {**given.get("speculative_config", {}), **given}
    return "method" in config or "model" in config


TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "text"}


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Makes a file's options the command's defaults: the command line wins. Keys are long option names without dashes.

    Raises ConfigError for a file that cannot be read, and for a key or value that the command does not take.
    """
    if file is not None:
        parameters = inspect.signature(context.command.callback or read_config).parameters
        options = {name.replace("_", "-"): item for name, item in parameters.items() if name != "config"}
        given = _load_yaml(file)
        for key in given:
            if key not in options:
                close = difflib.get_close_matches(str(key), options, n=1)
                hint = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(options)}"
                raise ConfigError(f"{file}: {context.info_name} has no option {shown(key)}; {hint}")
        context.default_map = {
            options[key].name: _value(f"{file}: {key}", value, options[key].annotation) for key, value in given.items()
        }
    return file


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="YAML file of these options, without dashes. The command line overrides it.",
        callback=read_config,
        is_eager=True,
    ),
]


def _load_yaml(file: Path) -> dict[Any, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [str(key.value) for key, _ in node.value]
            if repeated := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{file}: duplicate option {repeated[0]}")
            return dict(super().construct_mapping(node, deep))

    try:
        result = yaml.load(read_file(file), Loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a month 13, a number of 5,000 digits
        raise ConfigError(f"{file} is not valid YAML: {one_line(error)}") from None
    if result is None:
        return {}
    if not isinstance(result, dict):
        raise ConfigError(f"{file} must be a YAML mapping, with lines of the form name: value")
    return result


def _value(where: str, value: Any, annotation: Any) -> Any:
    """Converts a YAML value to what the command line's parser gives. Raises ConfigError for a wrong type or range."""
    hint, option = typing.get_args(annotation)
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, not {shown(value)}")
        return [_single(where, item, typing.get_args(hint)[0], option) for item in value]
    return _single(where, value, hint, option)


def _single(where: str, value: Any, kind: type, option: Any) -> Any:
    if option.metavar == "JSON" and isinstance(value, dict):
        try:
            return json.dumps(value)
        except TypeError as error:
            raise ConfigError(f"{where} must be JSON's types: {error}") from None
    accepted: Any = {float: (int, float), Path: str}.get(kind, kind)
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        expected = "a mapping" if option.metavar == "JSON" else TYPE_NAMES[kind]
        hint = ": put it in quotes" if kind is str and isinstance(value, (bool, int, float)) else ""
        raise ConfigError(f"{where} must be {expected}, not {shown(value)}{hint}")
    for limit, beyond, side in ((option.min, operator.lt, "least"), (option.max, operator.gt, "most")):
        if limit is not None and beyond(value, limit):
            raise ConfigError(f"{where} must be at {side} {limit}, not {shown(value)}")
    return value
