"""``make size``: lines of Python by folder, and the budgets of pyproject.toml that they must keep."""

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["forerun"]["size"]
"""Most ``lines`` and ``files`` of a folder."""


def measured(folder):
    """Lines by the folder's own folders, and how many files."""
    lines = Counter()
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, folder
    for file in files:
        index = file.relative_to(ROOT / folder).parts
        lines[index[0] if len(index) > 1 else "."] += len(file.read_text(encoding="utf-8").splitlines())
    return lines, len(files)


def excesses():
    """What is above its budget, a line each."""
    result = []
    for folder, budget in BUDGETS.items():
        lines, files = measured(folder)
        for name, value in (("lines", lines.total()), ("files", files)):
            if value > budget.get(name, value):
                result.append(f"{folder} has {value:,} {name} of Python, {value - budget[name]:,} above its budget")
    return result


def main():
    for folder, budget in BUDGETS.items():
        lines, files = measured(folder)
        limits = ", ".join(f"{name} {limit:,}" for name, limit in budget.items())
        print(f"{folder}: {lines.total():,} lines, {files} files (budget: {limits})")
        for index, count in lines.most_common():
            print(f"  {index:14}{count:7,}")
    for excess in excesses():
        print(excess, file=sys.stderr)
    return bool(excesses())


if __name__ == "__main__":
    sys.exit(main())
