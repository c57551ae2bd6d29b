"""The page beside the bundled weights, written from their records: `python -m forerun_lab.train.report`."""

import json
from pathlib import Path
from typing import Any

import forerun_lab.pretrained
from forerun import pretrained
from forerun.speculate.draft.heads.head import FORMAT
from forerun_lab.train.folder import RECORD

HEAD = """# Bundled models

A Python-code target, a draft distilled from it and heads that read its hidden states, all trained on CPython's standard
library (PSF licence) with `forerun train`. `forerun.pretrained.path("target")` is a folder that transformers can load.
Written by `python -m forerun_lab.train.report` from the `training.json` beside each model's weights and from the heads'
own configurations.

Losses are nats per token on the held-out files, cut into sequences of the length named. alpha is the mean over
positions of sum min(p, q) at temperature 1 (Leviathan et al., arXiv 2211.17192) and, at temperature 0, the share of
positions where draft and target have the same most likely token. All figures are those of the saved bfloat16 weights.
"""


def report(folder: Path) -> str:
    """Markdown about the models in a folder."""
    records = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob(f"*/{RECORD}"))}
    parts = [HEAD]
    for name in sorted(records, key=lambda name: (name != "target", name)):
        size = (folder / name / "model.safetensors").stat().st_size
        parts.append(_section(name, records[name], size))
    heads = [path.parent for path in sorted(folder.glob("*/config.json")) if FORMAT in path.read_text()]
    if heads:
        parts.append(_heads(heads))
    return "\n".join(parts)


def _section(name: str, record: dict[str, Any], size: int) -> str:
    lines = [f"## {name}", "", "| | |", "|---|---|"]
    rows = {
        "corpus": record.get("corpus"),
        "parameters": f"{record['parameters']:,}",
        "weights": f"{size / 1e6:.1f} MB",
        "trained on": f"{record['tokens']:,} tokens in {record['steps']:,} steps, {record['seconds'] / 60:.0f} minutes",
        "planned tokens": "; ".join(f"{tokens:,} from token {start:,} on" for start, tokens in record["plans"]),
        "seed": record["seed"],
        "corpus tokens (training, held out)": f"{record['corpus_tokens']:,}, {record['held_out_tokens']:,}",
    }
    lines += [f"| {key} | {value} |" for key, value in rows.items()]
    lines += [
        f"| held-out loss, sequences of {length} | {loss:.3f} |" for length, loss in record["held_out_loss"].items()
    ]
    for text, figures in record.get("alpha", {}).items():
        title = text.replace("_", " ")
        lines.append(f"| alpha, {title} | {figures['t1']:.3f} at T = 1, {figures['t0']:.3f} at T = 0 |")
    lines += ["", "Recipe: " + ", ".join(f"{key} {_plain(value)}" for key, value in record["recipe"].items()) + ".", ""]
    if "held_out_files" in record and name == "target":
        lines += ["Held-out files: " + ", ".join(f"`{file}`" for file in record["held_out_files"]) + ".", ""]
    return "\n".join(lines)


def _heads(folders: list[Path]) -> str:
    """One row a head. Losses are the heads' own, summed over the positions ahead as each method weights them, so that
    they compare with the untrained head's and not with another method's."""
    lines = [
        "## Heads",
        "",
        "Losses are each method's own, summed over the positions ahead: compare them with the untrained head's only.",
        "",
        "| head | tokens ahead | weights | trained on | held-out loss | untrained | options |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in folders:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = (folder / "model.safetensors").stat().st_size
        lines.append(
            f"| {folder.name} | {config['depth']} | {size / 1e6:.2f} MB | {config['tokens']:,} tokens, "
            f"{config['seconds'] / 60:.0f} minutes | {config['held_out_loss']:.2f} | {config['untrained_loss']:.2f} | "
            f"{_plain(config['options']) if config['options'] else ''} |"
        )
    return "\n".join([*lines, ""])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {item}" for key, item in value.items()) + ")"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    for package in (pretrained, forerun_lab.pretrained):
        folder = Path(str(package.__file__)).parent
        (folder / "README.md").write_text(report(folder), encoding="utf-8")
