"""The generated table counts what passed, per drafter, layout and rule, and hides no failure."""

from types import SimpleNamespace

from matrix import Combination
from table import PROPERTY, markdown


def report(name, index=None):
    properties = [] if index is None else [(PROPERTY, list(index))]
    return SimpleNamespace(nodeid=f"tests/conformance/{name}", duration=30.0, user_properties=properties)


def test_cells_count_what_passed():
    chain = Combination("ngram", "chain", "coupled", None, "native", "fixed")
    stats = {
        "passed": [
            report("a.py::test_x[1]", chain),
            report("a.py::test_x[2]", chain._replace(path="hf")),
            report("a.py::test_x[3]", chain._replace(rule="token", page_size=16)),
            report("b.py::test_some_thing[a]"),
        ],
        "failed": [report("a.py::test_x[4]", chain._replace(length="adaptive")), report("b.py::test_some_thing[b]")],
    }
    text = markdown(stats, "pytest --conformance-table FILE", 9)
    assert "4 of 6 tests passed in 3 minutes; 3 more were not run: torch" in text
    assert "| drafter | draft | layout | `coupled` | `token` |" in text
    assert "| `ngram` | chain | slotted | **2/3** | – |" in text
    assert "| `ngram` | chain | paged 16 | – | 1/1 |" in text
    assert "| some thing | **1/2** |" in text
    assert "- `tests/conformance/a.py::test_x[4]`" in text
    assert "pytest --conformance-table FILE" in text
    assert "not run" not in markdown(stats, "pytest", 6)
