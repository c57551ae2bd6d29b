"""The page that says which test stands against which complaint names tests that a usual run comes to."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GONE = "tests/unit/repository/test_complaints.py::test_that_is_not_there"
ON_DEMAND = "tests/conformance/test_soak.py::test_soak_of_the_bundled_pair"


def named():
    """The tests on the page, at least one in each row of its tables."""
    rows = (ROOT / "tests" / "complaints.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in rows if row.startswith("| ") and not row.endswith("| tests |")]
    assert sum(bool(re.match(r"\| \d+ \|", row)) for row in rows) == 15
    assert sum(bool(re.match(r"\| `\w+\.py` \|", row)) for row in rows) == 28
    result = set()
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py::\w+)`", row)
        assert len(tests) == max(1, row.count("tests/")), row
        result.update(tests)
    return result


def collected(files):
    """The tests of these files that a usual run comes to: not those that are left out of it."""
    result = set()
    for file in files:
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                marks = {ast.unparse(mark) for mark in node.decorator_list}
                if not any(re.search(r"\bmark\.full\b|\belsewhere\b", mark) for mark in marks):
                    result.add(f"{file}::{node.name}")
    return result


def test_every_test_on_the_page_is_collected():
    """Beside one that is gone and one that no usual run collects, which both must be missed."""
    names = named() | {GONE, ON_DEMAND}
    assert names - collected({name.partition("::")[0] for name in names}) == {GONE, ON_DEMAND}
