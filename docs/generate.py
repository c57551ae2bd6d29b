"""The parts of the reference that are made from the code, as Markdown. A page asks for one with a line
``<!-- generated: NAME -->``; ``conf.py`` puts it there when the site is built, so it cannot be stale."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "lab" / "benchmarks" / "results"
MARKUP = re.compile(r"\[/?[a-z][a-z ]*\]")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [" ".join(str(cell).replace("|", "\\|").split()) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Help or docstring text without the marks of other languages."""
    return MARKUP.sub("", text.replace("``", "`")).replace("<", "&lt;").replace("*", "\\*")


# ---------------------------------------------------------------- commands


def panels(command: Any) -> dict[str, list[tuple[str, str, str]]]:
    """Options of a command by the panel of its help: names, default, what they do."""
    result: dict[str, list[tuple[str, str, str]]] = {}
    for each in command.params:
        if "--help" in each.opts:
            continue
        option = bool(each.opts and each.opts[0].startswith("-"))
        names = ", ".join(
            f"`{name}`" for name in ([*each.opts, *each.secondary_opts] if option else [each.name.upper()])
        )
        shown = each.show_default if isinstance(getattr(each, "show_default", None), str) else None
        value = "" if each.default in (None, False, (), []) or callable(each.default) else str(each.default)
        if isinstance(value, str) and value.startswith("Sentinel"):
            value = ""
        panel = getattr(each, "rich_help_panel", None) or ""
        result.setdefault(panel, []).append((names, shown or value, plain(getattr(each, "help", None) or "")))
    return result


def commands() -> str:
    from forerun.cli.main import COMMANDS, load

    parts: list[str] = []
    seen: dict[tuple[str, tuple[str, ...]], str] = {}
    for name in COMMANDS:
        command = load(name)
        parts.append(f"## forerun {name}\n\n{plain(inspect.cleandoc(command.help or ''))}\n")
        for panel, options in panels(command).items():
            key = (panel, tuple(option[0] for option in options))
            if panel and key in seen:
                first = seen[key]
                parts.append(f"**{panel}**: as for [`forerun {first}`](#forerun-{first}).\n")
                continue
            seen[key] = name
            if panel:
                parts.append(f"**{panel}**\n")
            parts.append(table(("option", "default", "meaning"), options))
    return "\n".join(parts)


# ---------------------------------------------------------------- speculation


def first_line(thing: Any) -> str:
    """The first sentence of a class's own docstring, or of its module's."""
    return sentence(thing.__doc__) if thing.__doc__ else module_line(thing)


def module_line(thing: Any) -> str:
    """The first sentence of its module's docstring, behind the name that it begins with."""
    return sentence((sys.modules[thing.__module__].__doc__ or "").partition(": ")[2])


def sentence(text: str) -> str:
    text = " ".join(plain(text).split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", text)[0]


def keys(config: type) -> list[tuple[str, str, str]]:
    docs = attribute_docs(config)
    return [(f"`{f.name}`", f"`{f.default!r}`", plain(docs.get(f.name, ""))) for f in fields(config)]


def attribute_docs(kind: type) -> dict[str, str]:
    """The docstring of each field of a class, inherited ones included."""
    from sphinx.pycode import ModuleAnalyzer

    result: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        found = ModuleAnalyzer.for_module(owner.__module__).find_attr_docs()
        result |= {name: " ".join(lines).strip() for (of, name), lines in found.items() if of == owner.__qualname__}
    return result


def methods() -> str:
    from forerun.speculate.draft.base import DrafterConfig
    from forerun.speculate.names import LAB_KEYS, drafters

    shared = {f.name for f in fields(DrafterConfig)}
    parts = ["### Keys of every method\n", table(("key", "default", "meaning"), keys(DrafterConfig))]
    for name in drafters:
        drafter = drafters[name]
        own = [row for row in keys(drafter.config_class) if row[0].strip("`") not in shared]
        note = " Part of forerun-lab." if name in LAB_KEYS else ""
        parts.append(f"### {name}\n\n{first_line(drafter)}{note}\n")
        if own:
            parts.append(table(("key", "default", "meaning"), own))
    return "\n".join(parts)


def rules() -> str:
    from forerun.speculate.names import rules as registry

    rows = []
    for name in sorted(registry):
        rule = registry[name]
        promise = (
            "same seed, same tokens"
            if rule.identity
            else "same distribution"
            if rule.lossless
            else "none: see its bound"
        )
        rows.append((f"`{name}`", promise, "yes" if rule.trees else "no", first_line(rule)))
    return table(("rule", "promise", "trees", "what it does"), rows)


def policies() -> str:
    from forerun.speculate.names import policies as registry

    rows = [(f"`{name}`", module_line(registry[name])) for name in sorted(registry)]
    return table(("policy", "what it does"), rows)


# ---------------------------------------------------------------- Python


def engine_options() -> str:
    from forerun.cli.options import ENGINE

    rows = [(f"`{f.name}`", f"`{f.default}`" if f.default is not None else "", plain(f.help)) for f in ENGINE.flags]
    return table(("option", "default", "meaning"), rows)


def sampling_options() -> str:
    from forerun.sampling.params import SamplingParams

    rows = [
        (f"`{f.name}`", f"`{f.default!r}`", plain(f.metadata["help"]))
        for f in fields(SamplingParams)
        if f.name != "bad_words_ids"
    ]
    return table(("field", "default", "meaning"), rows)


# ---------------------------------------------------------------- server


def request_fields() -> str:
    from forerun.serve import anthropic, ollama, responses, schema

    parts = []
    for model in (
        schema.CompletionRequest, schema.ChatRequest, responses.ResponseRequest, ollama.OllamaChat,
        ollama.OllamaGenerate, anthropic.MessagesRequest,
    ):  # fmt: skip
        rows = [(f"`{name}`", plain(field.description or "")) for name, field in sorted(model.model_fields.items())]
        parts.append(f"### {model.__name__}\n\n" + table(("field", "meaning"), rows))
    return "\n".join(parts)


def metrics() -> str:
    """The metrics' table of the server's guide, which a test compares with a running server."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page.split("\n## Metrics\n")[1].split("\n## ")[0]
    return section[section.index("| metric") :]


# ---------------------------------------------------------------- models


def architectures() -> str:
    from forerun.models.architectures.families import ARCHITECTURES

    rows = []
    for name, each in sorted(ARCHITECTURES.items()):
        attention = each.attention
        extras = [
            word
            for word, has in (
                ("experts", each.experts is not None),
                ("latent attention", each.latent is not None),
                ("sliding window", getattr(attention, "window", "none") != "none"),
                ("soft cap", bool(getattr(attention, "softcap", None))),
                ("norms of queries and keys", getattr(each.norms, "query", None) is not None),
            )
            if has
        ]
        gguf = f"`{each.gguf}`" if each.gguf else "no"
        rows.append((f"`{name}`", f"`{each.causal}`", gguf, ", ".join(extras) or ""))
    return table(("`model_type`", "class", "GGUF name", "has"), rows)


def known_models() -> str:
    from forerun.models.files.fetch import KNOWN

    rows = [
        (f"`{name}`", each.title, f"{each.size / 1e6:.0f} MB", each.licence, ", ".join(f"`{d}`" for d in each.drafts))
        for name, each in KNOWN.items()
    ]
    return table(("name", "model", "size", "licence", "drafts for it"), rows)


def gguf_types() -> str:
    from forerun.models.formats.gguf_types import EXPANDED, PACKED, bits_per_weight

    rows = []
    for kind in sorted((*PACKED, *EXPANDED), key=lambda kind: (-bits_per_weight(kind)[0], kind)):
        file, memory = (f"{each:.3g}" for each in bits_per_weight(kind))
        form = "bfloat16" if kind in EXPANDED else PACKED[kind].form
        rows.append((kind.upper(), file, memory, "itself" if form == kind else form))
    return table(("type", "bits a weight in the file", "in memory", "held as"), rows)


def weight_forms() -> str:
    from forerun.models.kinds import CPU_KINDS, FLOATS, GPU_KINDS

    rows = [(f"`{kind}`", "yes" if kind in CPU_KINDS else "no", "yes" if kind in GPU_KINDS else "no")
            for kind in dict.fromkeys((*CPU_KINDS, *GPU_KINDS))]  # fmt: skip
    rows += [(f"`{kind}`", "yes", "yes") for kind in FLOATS]
    return table(("`--quantization`", "CPU", "GPU"), rows)


# ---------------------------------------------------------------- performance


QUESTIONS = (
    ("How fast is one request, beside other engines?", "smollm2_peers_zen4"),
    ("And with two threads?", "smollm2_peers_2_threads_zen4"),
    ("What does the model's own text bring?", "smollm2_text_quiet_zen4"),
    ("What does a trained head bring?", "smollm2_long_head_quiet_zen4"),
    ("Which kinds of draft were tried?", "smollm2_kinds_zen4"),
    ("What about many requests at once?", "smollm2_streams_zen4"),
    ("And code?", "smollm2_humaneval_zen4"),
    ("And a model of 1B shape, where acceptance is set to what was published?", "shape_1b_q4_0_zen4"),
)
"""A question a table: a result's file holds the machine, the options and every row, the losing ones too."""


def method_of(row: dict[str, Any]) -> str:
    """A row's method with what it differs in."""
    name, _, options = row["method"].partition(" ")
    options = options.replace("src/forerun/pretrained/", "")
    notes = [options if len(options) < 60 else "with options", row.get("length") or ""]
    return f"`{name}` " + ", ".join(note for note in notes if note)


def performance() -> str:
    parts = []
    for question, file in QUESTIONS:
        data = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
        where = data["environment"]
        rows = [
            (
                method_of(row),
                row["temperature"],
                row["concurrency"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['speedup']:.2f}" if row["speedup"] else "",
                f"{row['tokens_per_round']:.2f}" if row.get("tokens_per_round") else "",
                {True: "yes", False: "no", None: ""}[row.get("identical")],
            )
            for row in data["rows"]
        ]
        threads, set_ = where.get("threads"), where.get("prompt_set")
        parts.append(f"## {question}\n")
        parts.append(
            f"{where['model']}, {where.get('model_path')}; {where['processor']}, {threads} thread"
            f"{'s' if threads != 1 else ''}; prompts `{set_}`, {where.get('max_tokens')} tokens an answer. "
            f"File: `lab/benchmarks/results/{file}.json`.\n"
        )
        head = ("method", "T", "requests at once", "tokens/s", "speed-up", "tokens a round", "same tokens")
        parts.append(table(head, rows))
    return "\n".join(parts)


def speeds() -> str:
    """The table at the head of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("writes this table -->\n")[2].partition("<!-- end")[0]


PARTS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        commands, methods, rules, policies, engine_options, sampling_options, request_fields, metrics, architectures,
        known_models, gguf_types, weight_forms, performance, speeds,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """``text`` with every mark replaced by what it names. Raises KeyError for a name that is not there."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), text)
