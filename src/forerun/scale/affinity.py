"""Which replica a request goes to, and how many replicas the load takes."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

R = TypeVar("R", bound=Hashable)

BLOCK = 64
"""Tokens: prompts are compared in blocks of this size, as the caches behind keep them."""
BOUND = 1.25
"""Of the mean load: no replica is preferred beyond it. See Mirrokni, Thorup and Zadimoghaddam 2017, consistent hashing
with bounded loads."""
REMEMBERED = 100_000
"""Blocks and sessions that are known; the ones longest not seen are forgotten first."""


def blocks(tokens: Sequence[int], size: int = BLOCK) -> Iterator[bytes]:
    """A name for each whole block of a prompt and all before it."""
    digest = hashlib.blake2b(digest_size=12)
    for end in range(size, len(tokens) + 1, size):
        digest.update(",".join(map(str, tokens[end - size : end])).encode() + b";")
        yield digest.digest()


class Affinity:
    """Orders replicas for a request and remembers where requests went. Several of these, in front of the same replicas,
    agree on prompts that none of them has seen, because those go by a hash."""

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        self._seen: OrderedDict[bytes, Hashable] = OrderedDict()
        """By block or session: the replica that had it last."""

    def order(
        self, load: Mapping[R, int], names: Sequence[bytes], session: str | None = None, refused: int = 0
    ) -> list[R]:
        """The replicas of ``load``, requests in progress by replica, the best first, for a prompt whose blocks have
        these ``names``. A request that was ``refused`` so often, for a replica's weights, begins so far down, and the
        best ones come last."""
        limit = math.ceil(BOUND * (sum(load.values()) + 1) / max(1, len(load)))
        known = self._matches(names)
        home = self._seen.get(_of_session(session)) if session is not None else None
        key = _of_session(session) if session is not None else next(iter(names), None)

        def rank(replica: R) -> tuple[bool, bool, int, int, bytes]:
            fits = load[replica] < limit
            # What is cached counts where there is room, else nothing but the load.
            matched = known.get(replica, 0) if fits else 0
            drawn = _weight(key, replica) if key is not None else b""
            spread = load[replica] if not fits or key is None else 0
            return not fits, replica != home, -matched, spread, drawn

        ranked = sorted(load, key=rank)
        turn = refused % max(1, len(ranked))
        return ranked[turn:] + ranked[:turn]

    def note(self, replica: Hashable, names: Sequence[bytes], session: str | None = None) -> None:
        """A request whose prompt's blocks have these ``names`` went to ``replica``."""
        for name in names if session is None else [*names, _of_session(session)]:
            self._seen[name] = replica
            self._seen.move_to_end(name)
        while len(self._seen) > self.remembered:
            self._seen.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """A replica has ended, and what it had cached with it."""
        for name in [name for name, where in self._seen.items() if where == replica]:
            del self._seen[name]

    def _matches(self, names: Sequence[bytes]) -> dict[Hashable, int]:
        """By replica: how many leading blocks of a prompt it had, as far as is known."""
        result: dict[Hashable, int] = {}
        for count, name in enumerate(names, start=1):
            where = self._seen.get(name)
            if where is None:
                break
            result[where] = count
        return result


def _of_session(session: str) -> bytes:
    return b"session:" + session.encode(errors="replace")


def _weight(key: bytes, replica: Hashable) -> bytes:
    """Rendezvous hashing: for each key another order, of which a lost replica takes nothing but its own place."""
    return hashlib.blake2b(key + repr(replica).encode(), digest_size=8).digest()


FULL = 0.75
"""Share of a replica's sequences that are in use when there are as many replicas as wanted."""
PAGES = 0.8
"""The same for its KV pages: beyond it long requests push each other out."""


def wanted(replicas: int, *, requests: float, usage: float, capacity: int) -> int:
    """Replicas for so many ``requests``, running or queued, where each of ``replicas`` decodes up to ``capacity`` at a
    time and uses, at the mean, the share ``usage`` of its pages."""
    by_queue = math.ceil(requests / (FULL * capacity))
    by_pages = math.ceil(replicas * usage / PAGES)
    return max(1, by_queue, by_pages)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: from an ``AutoscalingContext``, replicas and a state, which is empty. Its delays
    and bounds apply to the number afterwards."""
    reported = context.aggregated_metrics or {}
    usages, capacity, listeners = (
        list((reported.get(name) or {}).values()) for name in ("usage", "capacity", "listeners")
    )
    if not capacity:
        return max(1, context.target_num_replicas), {}
    return wanted(
        context.current_num_replicas,
        requests=context.total_num_requests - sum(listeners),  # those are Ray's requests, and wait for tokens alone
        usage=sum(usages) / len(usages),
        capacity=int(sum(capacity) / len(capacity)),
    ), {}
