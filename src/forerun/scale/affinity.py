"""Chooses the replica for a request, and how many replicas the load needs."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

R = TypeVar("R", bound=Hashable)

BLOCK = 64
"""Tokens of a block, in which prompts are compared: a page of the replicas' caches."""
BOUND = 1.25
"""Times the mean load up to which a replica is preferred: consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam 2017)."""
REMEMBERED = 100_000
"""Blocks and sessions that are remembered; the least recently seen ones are forgotten first."""


def block_hashes(tokens: Sequence[int], size: int = BLOCK) -> Iterator[bytes]:
    """Yields a hash of each full block of a prompt and of all tokens before it."""
    digest = hashlib.blake2b(digest_size=12)
    for end in range(size, len(tokens) + 1, size):
        digest.update(",".join(map(str, tokens[end - size : end])).encode() + b";")
        yield digest.digest()


class Affinity:
    """Orders replicas for a request, and remembers where requests went.

    Several of these in front of the same replicas agree on prompts that none of them has seen: a hash decides.
    """

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        self._seen: OrderedDict[bytes, Hashable] = OrderedDict()
        """The replica that had a block or session last, by its hash or key."""

    def order(
        self, load: Mapping[R, int], hashes: Sequence[bytes], session: str | None = None, rejections: int = 0
    ) -> list[R]:
        """Returns the replicas, the best first.

        Args:
            load: requests in progress by replica.
            hashes: the prompt's ``block_hashes``.
            session: requests of one session go to one replica.
            rejections: how often replicas with other weights rejected the request; that many of the best come last.
        """
        limit = math.ceil(BOUND * (sum(load.values()) + 1) / max(1, len(load)))
        matched = self._matches(hashes)
        key = _session_key(session) if session is not None else next(iter(hashes), None)
        home = self._seen.get(_session_key(session)) if session is not None else None

        def rank(replica: R) -> tuple[bool, bool, int, int, bytes]:
            # Beyond the bound, nothing but the load counts.
            overloaded = load[replica] >= limit
            cached = 0 if overloaded else matched.get(replica, 0)
            busy = load[replica] if overloaded or key is None else 0
            return overloaded, replica != home, -cached, busy, _weight(key, replica) if key is not None else b""

        ranked = sorted(load, key=rank)
        start = rejections % max(1, len(ranked))
        return ranked[start:] + ranked[:start]

    def note(self, replica: Hashable, hashes: Sequence[bytes], session: str | None = None) -> None:
        """Remember that a request with these ``block_hashes`` went to ``replica``."""
        for key in hashes if session is None else [*hashes, _session_key(session)]:
            self._seen[key] = replica
            self._seen.move_to_end(key)
        while len(self._seen) > self.remembered:
            self._seen.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """Forget a replica that has ended."""
        for key in [key for key, holder in self._seen.items() if holder == replica]:
            del self._seen[key]

    def _matches(self, hashes: Sequence[bytes]) -> dict[Hashable, int]:
        """How many leading blocks of a prompt each replica is known to have."""
        result: dict[Hashable, int] = {}
        for count, block in enumerate(hashes, start=1):
            replica = self._seen.get(block)
            if replica is None:
                break
            result[replica] = count
        return result


def _session_key(session: str) -> bytes:
    return b"session:" + session.encode(errors="replace")


def _weight(key: bytes, replica: Hashable) -> bytes:
    """Rendezvous hashing: another order for each key, in which losing a replica moves no other."""
    return hashlib.blake2b(key + repr(replica).encode(), digest_size=8).digest()


TARGET_SEQUENCES = 0.75
"""Fraction of a replica's sequences that should be in use."""
TARGET_PAGES = 0.8
"""The same for its KV pages: beyond it, long requests preempt each other."""


def replicas_needed(replicas: int, *, requests: float, usage: float, capacity: int) -> int:
    """Returns how many replicas the load needs.

    Args:
        replicas: how many there are.
        requests: running and queued ones.
        usage: the mean fraction of a replica's KV pages in use.
        capacity: the sequences that a replica decodes at a time.
    """
    by_queue = math.ceil(requests / (TARGET_SEQUENCES * capacity))
    return max(1, by_queue, math.ceil(replicas * usage / TARGET_PAGES))


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: takes an ``AutoscalingContext``, returns a number of replicas and an empty state.
    Ray applies its delays and bounds to the number."""
    reported = context.aggregated_metrics or {}
    usages, capacity, listeners = (
        list((reported.get(name) or {}).values()) for name in ("usage", "capacity", "listeners")
    )
    if not capacity:
        return max(1, context.target_num_replicas), {}
    return replicas_needed(
        context.current_num_replicas,
        requests=context.total_num_requests - sum(listeners),  # which are requests to Ray, too
        usage=sum(usages) / len(usages),
        capacity=int(sum(capacity) / len(capacity)),
    ), {}
