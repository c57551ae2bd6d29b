"""README's table of ``auto`` beside plain decoding: ``python lab/benchmarks/table.py`` writes it between its marks,
from the files that ``auto.py`` left in ``results``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from forerun_lab.intervals import shown

ROOT = Path(__file__).resolve().parents[2]
RESULTS, README = ROOT / "lab" / "benchmarks" / "results", ROOT / "README.md"
BEGIN, END = "<!-- lab/benchmarks/table.py writes this table -->\n", "<!-- end of the table -->"
MODELS = {
    "auto_qwen2.5-coder-1.5b.json": "Qwen2.5-Coder-1.5B (Q4_K_M), its 0.5B as draft",
    "auto_smollm2.json": "SmolLM2-135M (Q4_1), its bundled head",
}
SETS = {"humaneval": "code that repeats its prompt", "categories-small": "mixed chat"}
HEAD = ("One request, T = 0: tokens/s", "plain", "`auto`", "`auto` over plain", "whole request", "slower")


def rate(result: dict[str, Any]) -> float:
    """Tokens per second behind the first token."""
    return float((result["tokens"] - 1) / max(result["seconds"] - result["first"], 1e-9))


def row(run: dict[str, Any], prompts: str) -> list[str]:
    """Prompts, both speeds, the ratios of speeds and of whole requests, and how many pairs the drafts made slower."""
    pairs = [pair for pair in run["pairs"] if pair["prompt"] == prompts and pair["plain"]["tokens"] > 1]
    speeds = {who: [rate(pair[who]) for pair in pairs] for who in ("plain", "auto")}
    ratios = [auto / plain for plain, auto in zip(*speeds.values(), strict=True)]
    whole = [pair["plain"]["seconds"] / pair["auto"]["seconds"] for pair in pairs]
    plain, auto = (f"{statistics.median(values):.0f}" for values in speeds.values())
    slower = f"{sum(ratio < 1 for ratio in ratios)} of {len(pairs)}"
    return [plain, auto, f"**{shown(ratios)}**", shown(whole), slower]


def table() -> str:
    runs = {title: json.loads((RESULTS / file).read_text(encoding="utf-8")) for file, title in MODELS.items()}
    rows = (
        [f"{title.partition(' ')[0]}: {SETS[prompts]}", *row(run, prompts)]
        for title, run in runs.items()
        for prompts in SETS
    )
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]
    lines += [
        "",
        "Speeds are medians after the first token, ratios are medians of pairs (95 %; of five or fewer, the extremes).",
    ]
    for title, run in runs.items():
        longest = max(pair["answer"] for pair in run["pairs"])
        machine = f"{run['threads']} threads of {run['processor']}"
        lines.append(f"{title}: {machine}, {run['date']}, answers of up to {longest} tokens.")
    return "\n".join(lines) + "\n"


def written(readme: str) -> str:
    """``readme`` with the table that the files give."""
    begin = readme.index(BEGIN) + len(BEGIN)
    return readme[:begin] + table() + readme[readme.index(END, begin) :]


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
