"""The page that says which test stands against which complaint names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_on_the_page_exists():
    rows = (ROOT / "docs" / "complaints.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in rows if row.startswith("| ") and "complaint" not in row and "bad input" not in row]
    assert sum(bool(re.match(r"\| \d+ \|", row)) for row in rows) == 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test
