"""The memory budget that all KV pools of an engine share, and sizes in bytes as text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.core.errors import ConfigError
from forerun.core.threads import GROUPS, OWN_GROUPS, control_groups, group_numbers

if TYPE_CHECKING:
    import torch

    from forerun.cache.pool import Pool

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
KEPT_STATES = 2**30
"""Bytes for recurrent states in the prefix cache where the memory budget is unknown."""


def parse_bytes(size: int | str, name: str = "kv_cache_memory") -> int:
    """Bytes of a number or a text such as ``2GiB``, ``512 MB`` or ``1.5GiB``. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in UNITS or isinstance(size, bool):
        raise ConfigError(f"{name} must be bytes or a size such as '2GiB', not {size!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def megabytes(count: int) -> str:
    """Bytes as text, such as ``25.2 MB``."""
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


def spare_bytes(device: torch.device, groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Bytes that the KV caches may take by default: most of the free GPU memory, or half of the main memory that the
    machine, this process's control groups and its limit of address space (``ulimit -v``) leave. None if unknown."""
    if device.type == "cuda":
        import torch

        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    left = []
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        left += [int(match[1]) * 1024] if match is not None else []
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        left += [most - mapped] if most != resource.RLIM_INFINITY else []
    except (OSError, ImportError):
        pass
    for group in control_groups("memory", groups, own):
        for used, inactive, *limits in MEMORY_FILES:
            present = [number for file in limits for number in group_numbers(group, file) or ()]
            if present:
                left.append(min(present) - sum(group_numbers(group, used) or ()) + _statistic(group, inactive))
    return max(0, min(left)) // 2 if left else None


MEMORY_FILES = (
    ("memory.current", "inactive_file", "memory.max", "memory.high"),
    ("memory.usage_in_bytes", "total_inactive_file", "memory.limit_in_bytes"),
)
"""Of control groups of versions 2 and 1: the file of the bytes in use, the name in ``memory.stat`` of those that the
system takes back, and the files of the limits."""


def _statistic(group: Path, name: str) -> int:
    try:
        match = re.search(rf"^{name} (\d+)$", (group / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match is not None else 0


def budget(given: int | None, utilization: float | None, device: torch.device) -> int | None:
    """Bytes for the KV caches: ``given``, or a GPU's ``utilization`` less what is in use; None: ``spare_bytes``."""
    if utilization is None:
        return given
    if device.type != "cuda":
        warnings.warn(
            "gpu_memory_utilization has no effect without a GPU: use kv_cache_memory", RuntimeWarning, stacklevel=2
        )
        return given
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(utilization * total) - (total - free))


def share(pools: Sequence[Pool], budget: int | None, num_pages: int | None, processes: int = 1) -> None:
    """Resizes all pools to the same number of pages, and so of tokens.

    Args:
        pools: the target's, then the drafters'. No pool grows: it has enough for all requests.
        budget: bytes for all pools together, encoders' sources and recurrent states included; None: ``spare_bytes``.
        num_pages: pages of each pool, in place of the budget.
        processes: how many processes hold the target's pool.

    Raises:
        ConfigError: the budget does not pay for one page, or the system does not give it.
    """
    import torch

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
        try:
            pool.allocate()
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            size, on_gpu = megabytes(pool.num_pages * pool.page_bytes), isinstance(error, torch.OutOfMemoryError)
            more = "set gpu_memory_utilization" if on_gpu else "raise the limit of address space (ulimit -v)"
            raise ConfigError(
                f"the {'GPU' if on_gpu else 'system'} does not give {size} for KV caches: lower kv_cache_memory or "
                f"max_model_len, or {more}"
            ) from error


def _share_states(pools: Sequence[Pool], budget: int | None, page: int) -> int:
    """Resizes the recurrent states and returns their bytes.

    Running sequences get at most half of the budget, states in the prefix cache a quarter of it (``KEPT_STATES`` where
    it is None). There are twice as many as sequences, because beams may begin while others end. Raises ConfigError
    where the budget does not pay for one sequence.
    """
    kept = [pool.states for pool in pools if pool.states is not None]
    if not kept:
        return 0
    each = sum(states.bytes_per_sequence for states in kept)
    if budget is not None and budget < each + page:
        raise ConfigError(
            f"{budget} bytes for caches are less than a sequence's state and one page of keys and values "
            f"({each + page} bytes): raise kv_cache_memory or gpu_memory_utilization"
        )
    count, stay = kept[0].count // 2, (KEPT_STATES if budget is None else budget // 4) // each
    if budget is not None:
        count = max(1, min(count, budget // 2 // each))
    for states in kept:
        states.resize(min(2 * count, states.count), min(stay, states.max_kept))
    return count * each + sum(states.max_kept * states.bytes_per_sequence for states in kept)
