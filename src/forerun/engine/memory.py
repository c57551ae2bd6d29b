"""One memory budget for every KV pool of an engine, known when it starts."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

from forerun.cache.pool import Pool
from forerun.core.errors import ConfigError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: int | str) -> int:
    """Bytes of a number or a text such as ``2GiB``, ``512 MB`` or ``1.5GiB``. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in UNITS or isinstance(size, bool):
        raise ConfigError(f"kv_cache_memory must be bytes or a size such as '2GiB', not {size!r}")
    return int(float(found[1]) * UNITS[found[2].upper()])


def share(pools: Seq[Pool], budget: int | None, num_pages: int | None) -> None:
    """Give every pool the same number of pages, hence of tokens: as many as ``budget`` bytes pay for in all of them,
    or ``num_pages``; none gets more than it has, which is enough for everybody. Raises ConfigError if that is none.
    """
    if budget is not None:
        each = sum(pool.page_bytes for pool in pools)
        num_pages = budget // each
        if num_pages < 1:
            raise ConfigError(
                f"kv_cache_memory of {budget} bytes is less than one page of every KV cache ({each} bytes): "
                "raise it, or set page_size to a smaller one"
            )
    for pool in pools:
        if num_pages is not None and num_pages < pool.num_pages:
            pool.resize(num_pages)
