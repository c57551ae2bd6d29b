"""Calls that must fail, and what they say."""

import pytest

from forerun import ForerunError


def refused(kind, message, call, *given, **options):
    """The error of this ``kind`` that ``call(*given, **options)`` raises: ``message``, a pattern, is in it. One of ours
    is one line."""
    with pytest.raises(kind, match=message) as caught:
        call(*given, **options)
    assert not isinstance(caught.value, ForerunError) or "\n" not in str(caught.value)
    return caught.value
