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
    "auto_qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B (Q4_K_M), its 0.5B as draft",
    "auto_smollm2": "SmolLM2-135M (Q4_1), its bundled head",
}
"""Files of results, and what they measured. The same with an ending is of another processor."""
OTHER = "_avx2"
SETS = {"humaneval": "code that repeats prompts", "categories-small": "mixed chat"}
HEAD = ("One request, T = 0: tokens/s", "plain", "`auto`", "`auto` over plain", "whole requests", "slower")


def rate(result: dict[str, Any]) -> float:
    """Tokens per second behind the first token."""
    return float((result["tokens"] - 1) / max(result["seconds"] - result["first"], 1e-9))


def pairs_of(run: dict[str, Any], prompts: str, temperature: float) -> list[dict[str, Any]]:
    same = (pair for pair in run["pairs"] if (pair["prompt"], pair["temperature"]) == (prompts, temperature))
    return [pair for pair in same if pair["plain"]["tokens"] > 1]


def ratios_of(pairs: list[dict[str, Any]]) -> list[float]:
    return [rate(pair["auto"]) / rate(pair["plain"]) for pair in pairs]


def row(pairs: list[dict[str, Any]]) -> list[str]:
    """Both speeds, the ratios of speeds and of whole requests, and how many pairs the drafts made slower."""
    plain, auto = (f"{statistics.median(rate(pair[who]) for pair in pairs):.0f}" for who in ("plain", "auto"))
    ratios = ratios_of(pairs)
    whole = [pair["plain"]["seconds"] / pair["auto"]["seconds"] for pair in pairs]
    slower = f"{sum(ratio < 1 for ratio in ratios)} of {len(pairs)}"
    return [plain, auto, f"**{shown(ratios)}**", shown(whole), slower]


def brief(runs: list[dict[str, Any]], temperature: float) -> str:
    """The medians of all rows in one line."""
    medians, slower, count = [], 0, 0
    for run in runs:
        for prompts in SETS:
            ratios = ratios_of(pairs_of(run, prompts, temperature))
            medians.append(f"{statistics.median(ratios):.2f}")
            slower, count = slower + sum(ratio < 1 for ratio in ratios), count + len(ratios)
    return f"{', '.join(medians)} ({slower} of {count} slower)"


def read(ending: str = "") -> dict[str, dict[str, Any]]:
    files = {title: RESULTS / f"{file}{ending}.json" for file, title in MODELS.items()}
    return {title: json.loads(file.read_text(encoding="utf-8")) for title, file in files.items()}


def table() -> str:
    runs, others = read(), [*read(OTHER).values()]
    rows = (
        [f"{title.partition(' ')[0]}: {SETS[prompts]}", *row(pairs_of(run, prompts, 0.0))]
        for title, run in runs.items()
        for prompts in SETS
    )
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]
    machine, other = next(iter(runs.values())), others[0]
    lines += [
        "",
        "Speeds are medians after the first token, ratios medians of pairs (95 % interval; extremes of five or fewer).",
        f"{'; '.join(runs)}; answers of up to {max(pair['answer'] for pair in machine['pairs'])} tokens.",
        f"{machine['threads']} threads of {machine['processor']}, {machine['date']}.",
        f"The same ratios at T = 0.8: {brief([*runs.values()], 0.8)};",
        f"at T = 0 on an {other['processor']}, {other['date']}: {brief(others, 0.0)}.",
    ]
    return "\n".join(lines) + "\n"


def written(readme: str) -> str:
    """``readme`` with the table that the files give."""
    begin = readme.index(BEGIN) + len(BEGIN)
    return readme[:begin] + table() + readme[readme.index(END, begin) :]


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
