"""Tests of what only some machines have: elsewhere they are left out, counted, and the report says why."""

from collections import Counter

import pytest

LEFT_OUT = pytest.StashKey[Counter[str]]()
"""Of pytest's config: how many tests this machine has not run, by the reason."""
NO_KERNELS = "no kernel of ours for this processor"
NO_PACKING = "oneDNN packs no weights of this dtype here"


def where(possible, values, reason=NO_KERNELS):
    """Parameters of a test; those that are not ``possible`` on this machine are left out, for ``reason``."""

    def parameter(value):
        fits = possible(value) if callable(possible) else possible
        values = value if isinstance(value, tuple) else (value,)
        return pytest.param(*values, marks=() if fits else pytest.mark.elsewhere(reason))

    return [parameter(value) for value in values]
