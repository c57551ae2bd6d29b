"""One memory budget for every KV pool of an engine, known when it starts; and sizes as people write them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from forerun.cache.pool import Pool

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


KEPT_STATES = 2**30
"""Bytes for states in the prefix cache where nobody knows how much memory there is."""


def parse_bytes(size: int | str, name: str = "kv_cache_memory") -> int:
    """Bytes of a number or a text such as ``2GiB``, ``512 MB`` or ``1.5GiB``. Raises ConfigError."""
    result = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if result is None or result[2].upper() not in UNITS or isinstance(size, bool):
        raise ConfigError(f"{name} must be bytes or a size such as '2GiB', not {size!r}")
    return int(float(result[1]) * UNITS[result[2].upper()])


def megabytes(count: int) -> str:
    """Such as ``25.2 MB``."""
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


def spare_bytes(device: torch.device) -> int | None:
    """What the KV caches may take where nobody has said: most of the GPU memory that is free, half of the main memory
    that is available. None: not known."""
    if device.type == "cuda":
        import torch

        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    try:
        result = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        return None
    return int(result[1]) * 1024 // 2 if result is not None else None


def budget(given: int | None, utilization: float | None, device: torch.device) -> int | None:
    """Bytes for the KV caches: those given, or, of a GPU, its share less what is in use. None: as ``spare_bytes``."""
    if utilization is None:
        return given
    if device.type != "cuda":
        warnings.warn(
            "gpu_memory_utilization says nothing where the model is not on a GPU: kv_cache_memory bounds the KV caches",
            RuntimeWarning,
            stacklevel=2,
        )
        return given
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(utilization * total) - (total - free))


def share(pools: Sequence[Pool], budget: int | None, num_pages: int | None, processes: int = 1) -> None:
    """Give every pool the same number of pages, hence of tokens: ``num_pages``, or as many as ``budget`` bytes (None:
    ``spare_bytes``) pay for in all of them, once encoders' sources have their room; none gets more than it has, which
    is enough for everybody. The first one is in each of so many ``processes``. Raises ConfigError if that is none.
    """
    each = sum(pool.page_bytes for pool in pools)
    if pools[0].device.type == "cpu":  # they share its memory
        each += (processes - 1) * pools[0].page_bytes
    if num_pages is None:
        budget = budget if budget is not None else spare_bytes(pools[0].device)
        sources = sum(pool.sources.nbytes for pool in pools if pool.sources is not None)
        states = _share_states(pools, budget, each)
        num_pages = max(0, budget - sources - states) // each if budget is not None else None
    else:
        _share_states(pools, None, each)
    if num_pages is not None and num_pages < 1:
        raise ConfigError(
            f"{budget} bytes for KV caches are less than one page of every one of them ({each} bytes): raise "
            "kv_cache_memory or gpu_memory_utilization, lower max_model_len, or set page_size to a smaller one"
        )
    for pool in pools:
        if num_pages is not None and num_pages < pool.num_pages:
            pool.resize(num_pages)


def _share_states(pools: Sequence[Pool], budget: int | None, page: int) -> int:
    """Bytes for what layers keep of as many sequences as there may be, or as are paid for by half of the budget, and
    for states in the prefix cache, of a quarter of it (None: of ``KEPT_STATES``). Raises ConfigError where not even
    one sequence is paid for. Beams that begin while others end may take as much again for a moment."""
    kept = [pool.states for pool in pools if pool.states is not None]
    if not kept:
        return 0
    each = sum(states.bytes_each for states in kept)
    if budget is not None and budget < each + page:
        raise ConfigError(
            f"{budget} bytes for caches are less than a sequence's state and one page of keys and values "
            f"({each + page} bytes): raise kv_cache_memory or gpu_memory_utilization"
        )
    count, stay = kept[0].count // 2, (KEPT_STATES if budget is None else budget // 4) // each
    if budget is not None:
        count = max(1, min(count, budget // 2 // each))
    for states in kept:
        states.resize(min(2 * count, states.count), min(stay, states.most_kept))
    return count * each + sum(states.most_kept * states.bytes_each for states in kept)
