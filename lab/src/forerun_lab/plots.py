"""Pictures of a benchmark, legible on light and dark pages. The only place that needs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError

Row = Mapping[str, Any]
INK = "#7b7f86"
"""Of text and axes: contrast above 4 on white and on GitHub's dark page."""
GAIN, LOSS, MARK, CHAIN = "#2a9d5c", "#c8553d", "#d08c00", "#5b8fd6"
FASTER, SLOWER, UNCLEAR = "faster", "slower", "no clear difference"
VERDICTS = {FASTER: GAIN, SLOWER: LOSS, UNCLEAR: INK}
TREE_PANELS = {"tokens_per_round": "tokens per round", "speedup": "speed over plain decoding"}
SPEED, ACCEPTANCE, TREES = "speedup.svg", "acceptance.svg", "trees.svg"
CELL = (0.16, 0.62, 0.36)
POSITIONS = 6
"""Positions of a draft that are shown."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError, before anything is measured, where the plots could not be written."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--plots writes into a folder; {folder} is a file")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"no folder {folder.absolute().parent} for the plots")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--plots needs matplotlib: pip install './lab[plots]'") from None


def label(row: Row) -> str:
    """A contender's name in the pictures."""
    parts = [row["method"]]
    if row.get("num_speculative_tokens"):
        parts.append(f"k={row['num_speculative_tokens']}")
    if row.get("tree") not in (None, "yes"):
        parts.append(f"tree {row['tree']}")
    parts += [row[key] for key in ("accept", "length") if row.get(key) not in (None, "coupled", "fixed")]
    return " ".join(parts) + (" (synthetic)" if row["synthetic"] else "")


def plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw ``run_bench``'s result into ``folder``: ``speedup.svg``, ``acceptance.svg`` where something was drafted,
    and ``trees.svg`` where trees were measured beside their chains. Gives the files."""
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)
    for name in (SPEED, ACCEPTANCE, TREES):  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "forerun", "font.sans-serif": ["DejaVu Sans"], "font.size": 8,
        "axes.titlesize": 9, "text.color": INK,
        "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.labelcolor": INK,
    }  # fmt: skip
    rows = result["rows"]
    first = min(row["concurrency"] for row in rows)
    alone = [row for row in rows if row["concurrency"] == first]
    trees = [row for row in alone if row["over_chain"] is not None]
    with matplotlib.rc_context(style):
        drawn = {SPEED: _speed(Figure, rows)}
        drafted = [row for row in alone if row["acceptance_by_position"] is not None]
        if drafted:
            drawn[ACCEPTANCE] = _acceptance(Figure, drafted)
        if trees:
            drawn[TREES] = _trees(Figure, alone, trees)
        about = result["environment"]
        mode = "invariant" if about["invariant"] else "not invariant"
        note = f"{about['model']} {about['dtype']}, {about['prompt_set']} prompts, {mode}, {about['threads']} thread(s)"
        for name, figure in drawn.items():
            figure.suptitle(note, fontsize=8)
            _save(figure, folder / name)
    return [folder / name for name in drawn]


def _save(figure: Any, path: Path) -> None:
    """As SVG, coordinates to a hundredth of a point: these files are kept in repositories."""
    drawing = StringIO()
    figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    path.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", drawing.getvalue()), encoding="utf-8")


def _panels(rows: Iterable[Row]) -> dict[tuple[float, int], list[Row]]:
    panels: dict[tuple[float, int], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["temperature"], row["concurrency"]), []).append(row)
    return panels


def _axes(figure_class: Any, count: int, names: Sequence[str], width: float) -> tuple[Any, list[Any]]:
    """Panels side by side that share the names on their left, the first on top."""
    figure = figure_class(figsize=(width * count + 1.6, 0.21 * len(names) + 1.15), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    for each in axes:
        each.set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    return figure, list(axes)


def _legend(figure: Any, axes: Iterable[Any]) -> None:
    """One for all panels, below them."""
    reported = {text: handle for each in axes for handle, text in zip(*each.get_legend_handles_labels())}
    result = {text: reported[text] for text in sorted(reported)}
    if result:
        figure.legend(result.values(), result.keys(), loc="outside lower right", ncols=len(result), fontsize=7)


def _title(temperature: float, concurrency: int) -> str:
    return f"T = {temperature:g}, {concurrency} at a time"


def _verdict(row: Row) -> str:
    """What a row's repeats say together: a range that holds 1 says nothing."""
    least, most = row["speedup_range"]
    return FASTER if least > 1 else SLOWER if most < 1 else UNCLEAR


def _speed(figure_class: Any, rows: Sequence[Row]) -> Any:
    """Measured speed-ups as bars with the range of their repeats, predictions as marks; losing rows included. One
    scale for all panels."""
    panels = _panels(rows)
    names = list(dict.fromkeys(label(row) for row in rows))
    figure, axes = _axes(figure_class, len(panels), names, 2.1)
    for each, (panel, members) in zip(axes, panels.items()):
        each.sharex(axes[0])
        for verdict, color in VERDICTS.items():
            result = [row for row in members if _verdict(row) == verdict]
            at = [names.index(label(row)) for row in result]
            if result:
                each.barh(at, [row["speedup"] for row in result], color=color, alpha=0.5, height=0.62, label=verdict)
            for row, y in zip(result, at):
                _range(each, row, y, color)
        known = [(row["predicted_speedup"], names.index(label(row))) for row in members if row["predicted_speedup"]]
        if known:
            each.plot(*zip(*known), "d", color=MARK, markersize=4, label="predicted")
        each.axvline(1.0, color=INK, linewidth=0.7)
        each.set_title(_title(*panel))
        each.set_xlabel("speed over plain decoding")
    _legend(figure, axes)
    return figure


def _range(each: Any, row: Row, y: float, color: str) -> None:
    """From the slowest to the fastest repeat of a row."""
    each.plot(row["speedup_range"], [y, y], color=color, linewidth=1.8, solid_capstyle="butt")
    each.plot([], [], color=INK, linewidth=1.8, label="range of repeats")


def _acceptance(figure_class: Any, rows: Sequence[Row]) -> Any:
    """Per position of the draft, the share of drafts accepted at least so far: a cell each."""
    from matplotlib.colors import LinearSegmentedColormap

    fade = LinearSegmentedColormap.from_list("fade", [(*CELL, 0.0), (*CELL, 0.38)])
    panels = _panels(rows)
    names = list(dict.fromkeys(label(row) for row in rows))
    figure, axes = _axes(figure_class, len(panels), names, 2.4)
    for each, (panel, members) in zip(axes, panels.items()):
        shades = [[float("nan")] * POSITIONS for _ in names]
        for row in members:
            y = names.index(label(row))
            for x, fraction in enumerate(row["acceptance_by_position"][:POSITIONS]):
                shades[y][x] = fraction
                each.text(x + 1, y, f"{100 * fraction:.0f}", ha="center", va="center", fontsize=7)
        extent = (0.5, POSITIONS + 0.5, len(names) - 0.5, -0.5)
        each.imshow(shades, cmap=fade, vmin=0, vmax=1, aspect="auto", extent=extent, interpolation="nearest")
        each.set_xticks(range(1, POSITIONS + 1))
        each.set_title(_title(*panel))
        each.set_xlabel("accepted up to this position, % of drafts")
    return figure


def _trees(figure_class: Any, rows: Sequence[Row], trees: Sequence[Row]) -> Any:
    """Tokens per round and speed of each tree above its chain of the same depth. Panels that show the same quantity
    stand side by side and have one scale; what was timed has its range."""
    panels = _panels(trees)
    names = list(dict.fromkeys(label(row) for row in trees))
    figure, axes = _axes(figure_class, 2 * len(panels), names, 2.0)
    for start, (key, about) in zip((0, len(panels)), TREE_PANELS.items()):
        for each, (panel, members) in zip(axes[start:], panels.items()):
            each.sharex(axes[start])
            for tree in members:
                y = names.index(label(tree))
                for row, dy, color, name in (tree, -0.17, GAIN, "tree"), (_chain_of(tree, rows), 0.17, CHAIN, "chain"):
                    if key == "speedup":
                        _range(each, row, y + dy, color)
                    each.scatter([row[key]], [y + dy], s=16, color=color, zorder=3, label=name)
                if key == "speedup" and tree["predicted_speedup"]:
                    at = [tree["predicted_speedup"]]
                    each.scatter(at, [y - 0.17], s=14, color=MARK, marker="d", zorder=4, label="tree, predicted")
            if key == "speedup":
                each.axvline(1.0, color=INK, linewidth=0.7)
            each.set_title(_title(*panel))
            each.set_xlabel(about)
            each.grid(axis="y", color=INK, alpha=0.2, linewidth=0.6)
            each.margins(x=0.12)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    _legend(figure, axes)
    return figure


def _chain_of(tree: Row, rows: Sequence[Row]) -> Row:
    same = ("method", "accept", "length", "num_speculative_tokens", "temperature", "concurrency")
    return next(row for row in rows if row["tree"] is None and all(row.get(key) == tree.get(key) for key in same))
