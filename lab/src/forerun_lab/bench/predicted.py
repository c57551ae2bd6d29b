"""``python -m forerun_lab.bench.predicted``: predictions of plans compared with measurements of benchmarks.

Reads the output of ``forerun plan --json`` and ``forerun bench --json``, in any order. A setting's prediction is from
the plan for its model, temperature and number of requests. A group's choice is the setting with the best prediction, or
plain decoding if none reaches ``MARGIN``. Losing rows are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from forerun.core.errors import ConfigError
from forerun.measure.page import markdown
from forerun.measure.planner import MARGIN

COLUMNS = ("model", "method", "k", "tree", "temperature", "concurrency")
TITLES = ["model", "method", "k", "tree", "T", "at a time", "predicted", "measured", "±", "off by"]
GROUP_TITLES = ["model", "T", "at a time", "settings", "median error", "chosen", "best", "chosen over best"]
Setting = tuple[str, int, str | None]
"""Method, depth, tree."""
Group = tuple[str, float, int]
"""Model, temperature, requests at a time."""


def predictions(plan: Mapping[str, Any]) -> dict[Setting, float]:
    """Speed over plain decoding by method, depth and tree."""
    result: dict[tuple[str, int, str | None], float] = {
        (p["method"], p["k"], None): p["speedup"] for p in plan["predictions"]
    }
    for item in plan["trees"]:
        for shape in item["fixed"]:
            result[shape["method"], len(shape["tree"]), "x".join(map(str, shape["tree"]))] = shape["speedup"]
    return result


def join(files: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """``{"rows": [...], "groups": [...], "median_error": ...}``. Raises ConfigError for a setting without a plan, and
    if there is no setting."""
    files = list(files)
    plans: dict[Group, dict[Setting, float]] = {}
    for plan in files:
        if "predictions" in plan:
            group = (plan["environment"]["model"], plan["temperature"], plan["concurrency"])
            if group in plans:
                raise ConfigError(f"two plans for {group}")
            plans[group] = predictions(plan)
    rows = []
    for bench in files:
        for row in bench.get("rows", ()):
            if row["num_speculative_tokens"] is None:
                continue
            if row["length"] != "fixed":
                raise ConfigError(
                    f"a plan knows fixed lengths, and {row['method']} was measured with {row['length']!r}"
                )
            group = (bench["environment"]["model"], row["temperature"], row["concurrency"])
            setting = (row["method"], row["num_speculative_tokens"], row["tree"])
            if setting not in plans.get(group, {}):
                raise ConfigError(f"no plan for {group} predicts {setting}")
            predicted, measured = plans[group][setting], row["speedup"]
            values = (group[0], *setting, *group[1:])
            rows.append(
                dict(zip(COLUMNS, values))
                | {"predicted": predicted, "measured": measured, "measured_error": row["speedup_error"]}
                | {"off": predicted / measured - 1}
            )
    if not rows:
        raise ConfigError("give at least one plan and one measurement (forerun plan --json, forerun bench --json)")
    return {
        "rows": rows,
        "groups": [_group(rows, group) for group in plans if any(_of(row, group) for row in rows)],
        "median_error": median(abs(row["off"]) for row in rows),
    }


def _of(row: Mapping[str, Any], group: Group) -> bool:
    return (row["model"], row["temperature"], row["concurrency"]) == group


def _group(rows: Sequence[Mapping[str, Any]], group: Group) -> dict[str, Any]:
    """The chosen setting's speed over the best measured one's, plain decoding among both."""
    plain = {"method": "none", "k": None, "tree": None, "measured": 1.0, "predicted": MARGIN}
    inside = [plain, *(row for row in rows if _of(row, group))]
    chosen, best = (max(inside, key=lambda row: row[key]) for key in ("predicted", "measured"))
    return {
        **dict(zip(("model", "temperature", "concurrency"), group)),
        "settings": len(inside) - 1,
        "median_error": median(abs(row["off"]) for row in inside[1:]),
        "chosen": name(chosen),
        "best": name(best),
        "chosen_over_best": chosen["measured"] / best["measured"],
    }


def name(row: Mapping[str, Any]) -> str:
    """A setting as the table names it."""
    if row["k"] is None:
        return str(row["method"])
    return f"{row['method']}, {'k = ' + str(row['k']) if row['tree'] is None else row['tree']}"


def table(result: Mapping[str, Any]) -> str:
    """Markdown tables of groups and of rows."""
    groups, rows = [], []
    for each in result["groups"]:
        cells = [each["model"], f"{each['temperature']:g}", each["concurrency"], each["settings"]]
        groups.append(
            [*cells, f"{each['median_error']:.1%}", each["chosen"], each["best"], f"{each['chosen_over_best']:.2f}"]
        )
    for row in result["rows"]:
        error = "" if row["measured_error"] is None else f"{row['measured_error']:.2f}"
        cells = [row["model"], f"`{row['method']}`", row["k"], row["tree"] or "", f"{row['temperature']:g}"]
        cells += [row["concurrency"], f"{row['predicted']:.2f}", f"{row['measured']:.2f}", error, f"{row['off']:+.0%}"]
        rows.append(cells)
    return f"{markdown(GROUP_TITLES, groups)}\n\n{markdown(TITLES, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun_lab.bench.predicted", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="what plan and bench printed with --json")
    parser.add_argument("--out", type=Path, help="JSON file to write, with the machine that each file was made on")
    args = parser.parse_args()
    try:
        files = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
        result = join(files)
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        sys.exit(f"error: these are not all files of forerun plan --json and forerun bench --json ({error!r})")
    print(table(result))
    print(f"\n{len(result['rows'])} settings, median error {result['median_error']:.1%}")
    if args.out:
        about = [item["environment"] for item in files if "rows" in item]
        args.out.write_text(json.dumps({"environments": about} | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
