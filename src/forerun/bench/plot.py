"""A picture of a benchmark: measured speed-ups as bars, predictions as marks. The only place that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise ConfigError, before anything is measured, where the plot could not be written."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot writes {', '.join(SUFFIXES)} files, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"no folder {path.absolute().parent} for the plot")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib: pip install 'forerun[bench]'") from None


def label(row: Mapping[str, Any]) -> str:
    """A contender's name in the picture."""
    parts = [row["method"]]
    if row.get("num_speculative_tokens"):
        parts.append(f"k={row['num_speculative_tokens']}")
    parts += [row[key] for key in ("accept", "length") if row.get(key) not in (None, "coupled", "fixed")]
    return " ".join(parts) + (" (synthetic)" if row["synthetic"] else "")


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Write ``run_bench``'s result: a panel per temperature and concurrency, losing rows included."""
    from matplotlib.figure import Figure

    panels: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        panels.setdefault((row["temperature"], row["concurrency"]), []).append(row)
    tallest = max(map(len, panels.values()))
    figure = Figure(figsize=(4.2 * len(panels) + 1.5, 0.34 * tallest + 1.6), layout="constrained")
    for axes, ((temperature, concurrency), rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items()
    ):
        places = range(len(rows))
        speeds = [row["speedup"] for row in rows]
        colors = ["#2a9d5c" if speed >= 1 else "#c8553d" for speed in speeds]
        low = [speed - row["speedup_range"][0] for speed, row in zip(speeds, rows)]
        high = [row["speedup_range"][1] - speed for speed, row in zip(speeds, rows)]
        axes.barh(places, speeds, color=colors, xerr=[low, high], ecolor="#888888", height=0.6)
        known = [(place, row["predicted_speedup"]) for place, row in zip(places, rows) if row["predicted_speedup"]]
        if known:
            axes.plot(
                [value for _, value in known], [place for place, _ in known], "D", color="#222222", label="predicted"
            )
            axes.legend(loc="lower right", fontsize=8, frameon=False)
        for place, row in zip(places, rows):
            axes.annotate(f" {row['tokens_per_second']:.0f} tok/s", (0, place), va="center", fontsize=8, color="white")
        axes.axvline(1.0, color="#888888", linewidth=0.8)
        axes.set_yticks(list(places), [label(row) for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("speed over plain decoding")
        axes.set_title(f"temperature {temperature:g}, {concurrency} at a time", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    about = result["environment"]
    mode = "invariant" if about["invariant"] else "not invariant"
    figure.suptitle(f"{about['model']}, {about['model_path']}, {mode}, {about['threads']} thread(s)", fontsize=10)
    figure.savefig(path, dpi=150)
