"""``--config FILE``: a command's options as YAML, each by its long name without the dashes."""

from __future__ import annotations

import difflib
import inspect
import json
import operator
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.console import one_line, read_file
from forerun.core.errors import ConfigError, shown

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "text"}


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Make what a file says the defaults of the command, so that its command line wins. Raises ConfigError for a file
    that cannot be read, and for a key or value that the command does not take."""
    if file is not None:
        parameters = inspect.signature(context.command.callback or read_config).parameters
        options = {name.replace("_", "-"): item for name, item in parameters.items() if name != "config"}
        given = _parsed(file)
        for key in given:
            if key not in options:
                close = difflib.get_close_matches(str(key), options, n=1)
                meant = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(options)}"
                raise ConfigError(f"{file}: {context.info_name} has no option {shown(key)}; {meant}")
        context.default_map = {
            options[key].name: _value(f"{file}: {key}", value, options[key].annotation) for key, value in given.items()
        }
    return file


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="YAML file with these options, named without dashes; the command line wins",
        callback=read_config,
        is_eager=True,
    ),
]


def _parsed(file: Path) -> dict[Any, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [str(key.value) for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{file}: {twice} is there twice")
            return super().construct_mapping(node, deep)

    try:
        result = yaml.load(read_file(file), Loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a month 13, a number of 5,000 digits
        raise ConfigError(f"{file} is not valid YAML: {one_line(error)}") from None
    if result is None:
        return {}
    if not isinstance(result, dict):
        raise ConfigError(f"{file} must hold options, as lines of the form name: value")
    return result


def _value(where: str, value: Any, annotation: Any) -> Any:
    """``value`` as the command line's parser takes it, if it is of the option's type and in its range."""
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
    taken: Any = {float: (int, float), Path: str}.get(kind, kind)
    if not isinstance(value, taken) or (kind is not bool and isinstance(value, bool)):
        words = "a mapping" if option.metavar == "JSON" else WORDS[kind]
        quotes = ": put it in quotes" if kind is str and isinstance(value, (bool, int, float)) else ""
        raise ConfigError(f"{where} must be {words}, not {shown(value)}{quotes}")
    for limit, beyond, side in ((option.min, operator.lt, "least"), (option.max, operator.gt, "most")):
        if limit is not None and beyond(value, limit):
            raise ConfigError(f"{where} must be at {side} {limit}, not {shown(value)}")
    return value
