"""Types of options where a plug-in names classes: this file has no ``from __future__ import annotations``."""

from dataclasses import dataclass

import pytest

from forerun.core.config import check_types
from forerun.core.errors import ConfigError
from refusals import refused


@dataclass
class Options:
    count: int = 1
    share: float = 0.5
    on: bool = False
    name: str = ""
    most: int | None = None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": "x"}, "count must be an integer, not 'x'"),
        ({"count": 2.5}, "count must be an integer, not 2.5"),
        ({"count": True}, "count must be an integer, not True"),
        ({"share": None}, "share must be a number, not None"),
        ({"on": 1}, "on must be true or false, not 1"),
        ({"name": 3}, "name must be text, not 3"),
        ({"most": "x"}, "most must be an integer, not 'x'"),
    ],
)
def test_types_are_checked_where_they_are_classes(given, message):
    refused(ConfigError, message, check_types, Options, given)
    check_types(Options, {"count": 2, "share": 1, "on": True, "name": "x", "most": None})
