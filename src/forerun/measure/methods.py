"""The ``speculative_config`` mappings that ``bench`` and ``check`` compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, product
from operator import mul
from typing import Any

from forerun.core.errors import ConfigError, ForerunError
from forerun.engine.config import NONE, SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.measure.config import ALL
from forerun.measure.rounds import engine_of
from forerun.speculate.accept import rules
from forerun.speculate.accept.synthetic import KEYS as SYNTHETIC
from forerun.speculate.draft import drafters

SHOWN = ("accept", "length", "num_speculative_tokens", "tree", "tree_nodes")
"""Options with a table column of their own."""
NEEDS_GRAMMAR = "drafts only for requests with structured output, and there is none here"


def method_configs(
    methods: Sequence[str],
    accepts: Sequence[str],
    lengths: Sequence[str],
    counts: Sequence[int | None],
    shared: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Every combination as a ``speculative_config``. ``none`` comes first, as often as it is named: measured against
    itself, it shows the noise. ``["all"]`` stands for every method; empty ``counts`` for each method's default.

    A key of ``shared`` goes to every method that has it. A method's name in it holds options of that method alone, or a
    list of such options, one configuration each. Raises ConfigError for an option that no method has, an unknown name
    or an invalid combination; with ``["all"]``, ``runnable`` sorts out the latter.
    """
    every = ALL in methods
    if every:
        methods = list(drafters)
    configs: list[dict[str, Any]] = [{"method": NONE} for _ in range(max(1, list(methods).count(NONE)))]
    used: set[str] = set()
    for method, accept, length, count in product(dict.fromkeys(methods), accepts, lengths, counts or [None]):
        if method == NONE:
            continue
        own = {item.name for item in fields(drafters[method].config_class)} | {*rules[accept].options(), *SYNTHETIC}
        known = {key: value for key, value in shared.items() if key in own}
        used |= {*known, method}
        several = shared.get(method, {})
        for options in several if several and isinstance(several, list) else [several]:
            config = {**known, **_options_of(method, options), "method": method, "accept": accept, "length": length}
            if count is not None:
                if "num_speculative_tokens" in config:
                    raise ConfigError(
                        f"num_speculative_tokens of {method!r} is set twice: as an option and in --spec-tokens"
                    )
                config["num_speculative_tokens"] = count
            if not every:
                SpeculativeConfig.parse(config)
            configs.append(config)
    for key in shared:
        if key not in used:
            instead = ": rules are named by --accept" if key == "accept" else ""
            raise ConfigError(f"no method of {', '.join(methods)} has an option {key!r}{instead}")
    return configs


def labels(configs: Sequence[Mapping[str, Any]], columns: Sequence[str] = SHOWN) -> list[str]:
    """Labels of configurations: the method, and options in which its configurations differ outside ``columns``."""
    result = []
    for config in configs:
        same_method = [other for other in configs if other["method"] == config["method"]]
        keys = [key for key in config if key not in columns]
        differ = [key for key in keys if any(key not in other or other[key] != config[key] for other in same_method)]
        result.append(" ".join([config["method"], *(f"{key}={config[key]}" for key in differ)]))
    return result


def _options_of(method: str, options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ConfigError(f"the options of {method!r} must be a mapping, or some in a list, not {options!r}")
    for key in ("method", "accept", "length"):
        if key in options:
            raise ConfigError(f"{key!r} applies to all methods: remove it from the options of {method!r}")
    return dict(options)


def with_trees(configs: Iterable[Mapping[str, Any]], nodes: int) -> list[dict[str, Any]]:
    """Each configuration, followed by its ``tree_of`` with about ``nodes`` nodes; unchanged for 0."""
    result: list[dict[str, Any]] = []
    for config in configs:
        result.append(dict(config))
        tree = tree_of(config, nodes) if nodes else None
        if tree is not None:
            result.append(tree)
    return result


def tree_of(config: Mapping[str, Any], nodes: int) -> dict[str, Any] | None:
    """The configuration with trees of about ``nodes`` nodes and the same depth: the likeliest nodes if the method ranks
    them, else a fixed shape. None for a method that drafts only chains, or trees by default."""
    try:
        drafter = SpeculativeConfig.parse(config).drafter
    except ConfigError:
        return None
    if drafter is None or drafter.branches:
        return None
    for more in ({"tree_nodes": nodes}, {"tree": shape(drafter.num_speculative_tokens, nodes)}):
        tree = {**config, **more}
        try:
            SpeculativeConfig.parse(tree)
        except ConfigError:
            continue
        return tree
    return None


def size(tree: Sequence[int]) -> int:
    """Nodes of a tree, given the children per node at each depth."""
    return sum(accumulate(tree, mul))


def shape(depth: int, nodes: int) -> list[int]:
    """Children per node at each depth: as wide as ``nodes`` permit, none wider than the one above, at least a chain."""
    widths = [1] * depth
    level, refused = 0, 0
    while refused < depth:
        widths[level] += 1
        refused += 1
        if size(widths) > nodes or (level and widths[level] > widths[level - 1]):
            widths[level] -= 1
        else:
            refused = 0
        level = (level + 1) % depth
    return widths


def runnable(llm: LLM, configs: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Configurations that fit ``llm``'s target and draft plain requests; by label, why the others do not."""
    kept: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    configs = list(configs)
    for name, config in zip(labels(configs), configs, strict=True):
        try:
            engine = engine_of(llm, config, max_num_seqs=1)
        except ForerunError as error:
            left_out[name] = " ".join(str(error).split())
            continue
        if any(drafter.needs.grammar for drafter in engine.router.drafters.values()):
            left_out[name] = NEEDS_GRAMMAR
        else:
            kept.append(dict(config))
    return kept, left_out
