"""Who takes part in the next round. Knows tokens and pages, never tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from forerun.cache.pool import Pages
from forerun.core.errors import RequestError
from forerun.core.sequence import Sequence


class Scheduler:
    """First come, first served, under a row budget and the pool's pages.

    ``max_nodes`` is the most rows a draft adds. ``on_preempt`` is told who lost their cache entries: they are
    recomputed later, without a changed token.
    """

    def __init__(
        self,
        pool: Pages,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_nodes: int,
        on_preempt: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_rows = max_num_batched_tokens
        self.max_nodes = max_nodes
        self.on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError if it could never fit."""
        if self.pool.pages_for(sequence.max_tokens + self.max_nodes) > self.pool.num_pages:
            raise RequestError(
                f"the request may need {sequence.max_tokens} tokens of KV cache; the pool holds "
                f"{self.pool.num_pages * self.pool.page_size}"
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drop a finished or aborted sequence and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.free(sequence.id)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Sequence]:
        """Set ``scheduled`` on every sequence of the next round and return them.

        Running sequences come first, oldest first; the youngest are preempted when pages run out.
        """
        rows = self.max_rows
        chosen: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            rows -= self._give(sequence, rows, chosen, preempt=True)
        while self.waiting and len(self.running) < self.max_num_seqs and rows > 0:
            sequence = self.waiting[0]
            given = self._give(sequence, rows, chosen, preempt=False)
            if not given:
                break
            rows -= given
            self.waiting.popleft()
            self.running.append(sequence)
        return chosen

    def _give(self, sequence: Sequence, rows: int, chosen: list[Sequence], *, preempt: bool) -> int:
        """Schedule as much of ``sequence`` as rows and pages allow; returns the rows used."""
        sequence.scheduled = 0
        missing = len(sequence.tokens) - sequence.cached
        count = min(missing, rows)
        if count < 1:
            return 0
        nodes = self.max_nodes if count == missing else 0
        need = sequence.cached + count + nodes
        while not self.pool.can_reserve(sequence.id, need):
            victim = self.running[-1] if preempt and self.running else None
            if victim is None or victim is sequence:
                if preempt and len(self.running) > 1:
                    self.preempt(sequence)
                return 0
            self.preempt(victim)
            if victim in chosen:
                chosen.remove(victim)
        self.pool.reserve(sequence.id, need)
        sequence.scheduled = count
        chosen.append(sequence)
        return count + nodes

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages back; it waits at the head of the queue and is recomputed."""
        self.running.remove(sequence)
        self.pool.free(sequence.id)
        sequence.cached = sequence.scheduled = 0
        self.waiting.appendleft(sequence)
        self.on_preempt(sequence)
