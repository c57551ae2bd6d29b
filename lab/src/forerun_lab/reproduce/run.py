"""Parts in turn, each kept as soon as it is there, and the page of all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import forerun
from forerun.core.errors import ConfigError
from forerun.measure.environment import processor
from forerun.measure.page import markdown
from forerun_lab.reproduce import asked, formulas, measured, seq2seq, worked
from forerun_lab.reproduce.parts import Section, Settings

PARTS: dict[str, Section] = {
    part.name: part
    for group in (formulas.PARTS, measured.PARTS, seq2seq.PARTS, worked.PARTS, asked.PARTS)
    for part in group
}
PAGE = "reproduction.md"
HEAD = """# What the references print, made again

Written by `forerun reproduce`; tables that were measured say where. Printed values stand beside ours, rows that
disagree are kept. Tables that share measurements were made by the first of them.
"""


def reproduce(settings: Settings, only: Sequence[str] = (), again: bool = False) -> Path:
    """Make the parts that are not in ``settings.folder`` yet (all of ``only`` with ``again``) and write the page.
    Returns the page's path. A part is a JSON file there, so that an interrupted run goes on. Raises ConfigError for an
    unknown part."""
    unknown = set(only) - set(PARTS)
    if unknown:
        raise ConfigError(f"unknown table {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    settings.folder.mkdir(parents=True, exist_ok=True)
    for name in only or PARTS:
        path = settings.folder / f"{name}.json"
        if path.exists() and not again:
            settings.progress(f"{name}: kept from an earlier run")
            continue
        settings.progress(f"{name}: {PARTS[name].title}")
        began = perf_counter()
        made = asdict(PARTS[name].make(settings)) | {
            "seconds": round(perf_counter() - began, 1),
            "processor": processor(),
            "version": forerun.__version__,
        }
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    page = settings.folder / PAGE
    page.write_text(written(_found(settings.folder, settings.progress)), encoding="utf-8")
    return page


def _found(folder: Path, warn: Callable[[str], None]) -> Iterable[tuple[Section, Mapping[str, Any]]]:
    for part in PARTS.values():
        path = folder / f"{part.name}.json"
        if not path.exists():
            continue
        try:
            yield part, json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            warn(f"{path} is not what was written: remove it, and it is made again")


def written(parts: Iterable[tuple[Section, Mapping[str, Any]]]) -> str:
    """The page, in markdown."""
    lines = [HEAD.rstrip(), ""]
    for part, made in parts:
        lines += [f"## {part.title}", "", f"{part.place} (`--only {part.name}`).", ""]
        lines += markdown(made["columns"], made["rows"]).splitlines()
        notes = [part.why, *made["notes"]]
        lines += ["", " ".join(note for note in notes if note), ""]
        if not part.seconds:
            lines += [f"Made in {made['seconds']:.1f} seconds, on {made['processor']}.", ""]
    return "\n".join(line.rstrip() for line in lines).replace("\n\n\n", "\n\n").rstrip() + "\n"
