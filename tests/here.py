"""Tests of what only some machines have: elsewhere they are left out, counted, and the report says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[Counter[str]]()
"""Of pytest's config: how many tests this machine has not run, by the reason."""
NO_KERNELS = "no kernel of ours for this processor"
NO_PACKING = "oneDNN packs no weights of this dtype here"


def where(possible: bool | Callable[[Any], bool], values: Iterable[Any], reason: str = NO_KERNELS) -> list[Any]:
    """Parameters of a test; those that are not ``possible`` on this machine are left out, for ``reason``."""

    def parameter(value: Any) -> Any:
        fits = possible(value) if callable(possible) else possible
        values = value if isinstance(value, tuple) else (value,)
        return pytest.param(*values, marks=() if fits else pytest.mark.elsewhere(reason))

    return [parameter(value) for value in values]
