"""A simulated replica: the engine's batching, with rounds that only cost time.

Equal rounds are simulated as one stretch: nothing changes until a request ends, arrives or needs pages.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

from forerun.core.errors import ConfigError, shown
from forerun.engine.scheduler import SMALLEST_CHUNK, PrefillBudget, least_prefill
from forerun_lab.load.arrivals import Arrival
from forerun_lab.load.costs import LoadCosts, Way

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, are evenly distributed."""


@dataclass(frozen=True)
class Limits:
    """A replica's limits: requests decoded together (``seats``), rows of a forward, prompt tokens beside decoding
    (``chunk``; None: as many as double a round's time), KV pages (None: enough for all), tokens of a page, and whether
    prefixes are cached."""

    seats: int = 8
    rows: int = 2048
    chunk: int | None = None
    pages: int | None = None
    page: int = 64
    prefixes: bool = True
    positions: int = 1 << 30
    """Tokens of a request and its answer."""

    def __post_init__(self) -> None:
        for name in ("seats", "rows", "chunk", "pages", "page", "positions"):
            value = getattr(self, name)
            if value is None and name in ("chunk", "pages"):
                continue
            if value is None or not 1 <= value <= 1 << 40:
                raise ConfigError(f"a replica's {name} must be a whole number, 1 or more, not {shown(value)}")


class SimulatedJob:
    """A request in a replica."""

    __slots__ = (
        "arrival", "done", "first", "number", "own_pages", "quantile", "read", "remaining", "reused", "shared_pages",
        "to_read",
    )  # fmt: skip

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.arrival = arrival
        self.quantile = (0.5 + number * GOLDEN) % 1
        """The request's rank by acceptance among all requests, from 0 to 1; the first one is in the middle."""
        self.to_read = arrival.prompt
        """Tokens to read before it decodes: its prompt and, after a preemption, its answer so far."""
        self.read = 0
        self.reused = 0
        self.remaining = float(arrival.output)
        """Tokens still to be generated; fractional, because a round's tokens are a mean."""
        self.own_pages = 0
        """Pages that no other request uses."""
        self.shared_pages = 0
        """Pages of the prefix that it shares with others."""
        self.first = math.nan
        self.done = math.nan

    @property
    def reads(self) -> bool:
        return self.read < self.to_read

    @property
    def length(self) -> float:
        """Tokens so far, prompt included."""
        return self.arrival.prompt + self.arrival.output - self.remaining


class SimulatedText:
    """A cached prefix."""

    __slots__ = ("pages", "tokens", "users")

    def __init__(self) -> None:
        self.tokens = 0
        """Computed tokens."""
        self.pages = 0
        self.users = 0


class Cache:
    """The pages of running jobs, of prefixes, and of finished jobs' remaining pages. Unused pages are evicted, the
    least recently used first."""

    def __init__(self, limits: Limits) -> None:
        self.page = limits.page
        self.total = math.inf if limits.pages is None else limits.pages
        self.free: float = self.total
        self.texts: OrderedDict[Hashable, SimulatedText] = OrderedDict()
        """By prefix; a finished job's pages by ("job", number)."""
        self.unused = 0

    def text(self, name: Hashable) -> SimulatedText:
        result = self.texts.get(name)
        if result is None:
            result = self.texts[name] = SimulatedText()
        self.texts.move_to_end(name)
        return result

    def take(self, count: int) -> bool:
        """Allocate pages, evicting unused texts if too few are free; False, without effect, if there are not enough."""
        if count > self.free + self.unused:
            return False
        while self.free < count:
            name = next(name for name, text in self.texts.items() if not text.users)
            text = self.texts[name]
            gone = int(min(text.pages, count - self.free))
            text.pages -= gone
            text.tokens = min(text.tokens, text.pages * self.page)
            self.free += gone
            self.unused -= gone
            if not text.pages:
                del self.texts[name]
        self.free -= count
        return True

    def use(self, text: SimulatedText) -> None:
        if not text.users:
            self.unused -= text.pages
        text.users += 1

    def trim(self, text: SimulatedText, pages: int) -> None:
        """Free a text's pages beyond ``pages`` if it has one user."""
        if text.users == 1 and text.pages > pages:
            self.free += text.pages - pages
            text.pages, text.tokens = pages, min(text.tokens, pages * self.page)

    def leave(self, text: SimulatedText) -> None:
        text.users -= 1
        if not text.users:
            self.unused += text.pages

    def keep(self, job: SimulatedJob, pages: int) -> None:
        """Let free pages hold a job's computed tokens until they are evicted."""
        if pages and self.total < math.inf:
            self.text(("job", job.number)).pages += pages
            self.free -= pages
            self.unused += pages

    def pop(self, job: SimulatedJob) -> int:
        """Free the pages that ``keep`` held for a job; returns their number."""
        text = self.texts.pop(("job", job.number), None)
        if text is None:
            return 0
        self.unused -= text.pages
        self.free += text.pages
        return text.pages


class SimulatedReplica:
    """``add`` takes a request at its arrival; ``end`` ends the current stretch at ``until`` and begins the next one."""

    def __init__(self, costs: LoadCosts, limits: Limits) -> None:
        self.costs = costs
        self.limits = limits
        self.cache = Cache(limits)
        self.prefill_budget = PrefillBudget(limits.chunk)
        self.waiting: deque[SimulatedJob] = deque()
        self.running: list[SimulatedJob] = []
        self.until = math.inf
        self.busy = 0.0
        """Seconds of computation."""
        self.streams = 0.0
        """Sum over rounds of their seconds times their decoding requests."""
        self.preempted = 0
        self._began = 0.0
        self._round_seconds = 0.0
        self._rounds = 0
        self._way: Way = costs.ways[0]
        self._chunks: list[tuple[SimulatedJob, int]] = []
        self._starved = False
        """Whether prompts waited without rows for them."""

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, job: SimulatedJob, now: float) -> None:
        """A request arrives; it is noticed when the current round ends."""
        self.waiting.append(job)
        if self.until == math.inf:
            self._begin(now)
        elif self._rounds > 1 and len(self.running) < self.limits.seats:
            gone = max(1, math.ceil((now - self._began) / self._round_seconds - 1e-9))
            if gone < self._rounds:
                self._rounds, self.until = gone, self._began + gone * self._round_seconds
                self._give_back()

    def end(self) -> list[SimulatedJob]:
        """End the stretch; returns the finished jobs."""
        now, rounds = self.until, self._rounds
        decoding = [job for job in self.running if not job.reads]
        spent = now - self._began
        self.busy += spent
        self.streams += spent * len(decoding)
        read = sum(count for _, count in self._chunks)
        depth = sum(count * (job.read + count / 2) for job, count in self._chunks) / max(1, read)
        self.prefill_budget.rounds += rounds - 1
        self.prefill_budget.observe(len(decoding), read, self._round_seconds, depth)
        for job in decoding:
            job.remaining -= rounds * self._way.brings(job.quantile)
        for job, count in self._chunks:
            job.read += count
            self._note_computed(job)
            if not job.reads:
                job.remaining -= 1
                if math.isnan(job.first):
                    job.first = now
        ended = [job for job in self.running if not job.reads and job.remaining < 1e-6]
        for job in ended:
            job.done = now
            self._finish(job)
        self._begin(now)
        return ended

    # ------------------------------------------------------------------------------------------------------ rounds

    def _begin(self, now: float) -> None:
        self._began = now
        self._ensure_pages()
        decoding = [job for job in self.running if not job.reads]
        count = len(decoding)
        self._way = self.costs.best(count) if count else self.costs.ways[0]
        self._chunks = self._prompts(count)
        if not count and not self._chunks:
            self.until = math.inf
            return
        read = sum(tokens for _, tokens in self._chunks)
        depth = sum(job.read * tokens for job, tokens in self._chunks) / max(1, read)
        self._round_seconds = self.costs.round(self._way, count, read, depth)
        self._rounds = 1
        if not self._starved and not any(job.reads for job in self.running):
            self._rounds = self._rounds_alike(decoding)
        self.until = now + self._rounds * self._round_seconds

    def _rounds_alike(self, decoding: list[SimulatedJob]) -> int:
        """Rounds until the first job ends, or until pages must be evicted."""
        rounds = math.ceil(min(job.remaining / self._way.brings(job.quantile) for job in decoding) - 1e-6)
        if self.cache.total < math.inf and not self._grow(decoding, rounds):
            return 1
        return max(1, rounds)

    def _prompts(self, decoding: int) -> list[tuple[SimulatedJob, int]]:
        """Jobs whose prompts are read in the next round, and the tokens of each, as ``Scheduler`` decides."""
        limits = self.limits
        chosen: list[tuple[SimulatedJob, int]] = []
        self._starved = False
        reading = [job for job in self.running if job.reads]
        if not reading and not (self.waiting and len(self.running) < limits.seats):
            return []
        rows = limits.rows - decoding
        if decoding:
            least = least_prefill(len(reading) + len(self.waiting), decoding)
            depth = reading[0].read if reading else 0
            beside = max(SMALLEST_CHUNK, rows - decoding * self._way.k)
            rows = min(rows, self.prefill_budget.allowance(decoding, depth, least), beside)
        self._starved = rows <= 0
        share = -(-rows // 4)
        if self._short(reading, rows - share, chosen):
            rows = share
        for job in (each for each in self.running if each.reads and each not in dict(chosen)):
            tokens = min(rows, job.to_read - job.read)
            rows -= tokens
            if tokens:
                chosen.append((job, tokens))
        while rows > 0 and self.waiting and len(self.running) < limits.seats and self._admit(self.waiting[0]):
            job = self.waiting.popleft()
            insort(self.running, job, key=_number)
            tokens = min(rows, job.to_read - job.read)
            rows -= tokens
            chosen.append((job, tokens))
        return chosen

    def _short(self, reading: list[SimulatedJob], rows: int, chosen: list[tuple[SimulatedJob, int]]) -> bool:
        """Chooses chunks of prompts with less left than the first, as ``Scheduler._schedule_short`` does."""
        if not reading:
            return False
        most = reading[0].to_read - reading[0].read
        short = [job for job in reading if job.to_read - job.read < most]
        while (
            sum(job.to_read - job.read for job in short) < rows
            and self.waiting
            and len(self.running) < self.limits.seats
            and self.waiting[0].to_read < most
            and self._admit(self.waiting[0])
        ):
            job = self.waiting.popleft()
            insort(self.running, job, key=_number)
            short.append(job)
        first = rows
        for job in sorted(short, key=lambda job: job.to_read - job.read):
            tokens = min(rows, job.to_read - job.read)
            rows -= tokens
            if tokens:
                chosen.append((job, tokens))
        return rows < first

    # ------------------------------------------------------------------------------------------------------- pages

    def _admit(self, job: SimulatedJob) -> bool:
        """Allocate pages for all tokens to read, those of a cached prefix included; False if there are too few or
        another job is computing the prefix."""
        cache = self.cache
        name = job.arrival.prefix if self.limits.prefixes else None
        pages, own = -(-job.to_read // cache.page), cache.pop(job)
        text, common, reused = None, 0, 0
        if name is not None:
            limit = min(self._shared(job), job.to_read - 1)
            text, common = cache.text(name), limit // cache.page
            reused = min(text.tokens, limit)
            if self._in_progress(job, reused, limit):
                cache.keep(job, own)
                return False
            cache.use(text)
        missing = pages - common + (max(0, common - text.pages) if text is not None else 0)
        if text is not None and missing > cache.free + cache.unused:
            cache.trim(text, common)
        if not cache.take(missing):
            if text is not None:
                cache.leave(text)
            cache.keep(job, own)
            return False
        if text is not None:
            text.pages = max(text.pages, common)
        job.own_pages, job.shared_pages = pages - common, common
        reused = min(reused, text.tokens) if text is not None else 0
        if own and reused >= common * cache.page:
            reused = max(reused, min((common + own) * cache.page, job.to_read - 1))
        job.read = reused
        job.reused += reused
        return True

    def _in_progress(self, job: SimulatedJob, reused: int, limit: int) -> bool:
        """Whether another job is computing the next page that this one needs."""
        end = (reused // self.limits.page + 1) * self.limits.page
        return end <= limit and any(
            other.read < end and other.arrival.prefix == job.arrival.prefix and self._shared(other) >= end
            for other in self.running
        )

    @staticmethod
    def _shared(job: SimulatedJob) -> int:
        """Tokens to read that belong to the job's prefix."""
        arrival = job.arrival
        return job.to_read if arrival.shared == arrival.prompt else arrival.shared

    def _note_computed(self, job: SimulatedJob) -> None:
        """Mark the prefix's tokens that the job has read as computed."""
        if job.arrival.prefix is not None and self.limits.prefixes:
            text = self.cache.text(job.arrival.prefix)
            text.tokens = max(text.tokens, min(job.read, self._shared(job)))

    def _grow(self, decoding: list[SimulatedJob], rounds: int) -> bool:
        """Allocate pages for ``rounds`` rounds of all jobs; False, without effect, if there are not enough."""
        requested = [max(0, self._missing_pages(job, rounds)) for job in decoding]
        if not self.cache.take(sum(requested)):
            return False
        for job, count in zip(decoding, requested):
            job.own_pages += count
        return True

    def _give_back(self) -> None:
        """Free pages for rounds that were cut from the stretch."""
        if self.cache.total < math.inf:
            for job in self.running:
                spare = -self._missing_pages(job, self._rounds)
                job.own_pages, self.cache.free = job.own_pages - spare, self.cache.free + spare

    def _missing_pages(self, job: SimulatedJob, rounds: int) -> int:
        """Pages that the job lacks for ``rounds`` more rounds; negative if it has more than it needs."""
        # The last token is not fed before the round that follows it.
        length = job.length + min(rounds * self._way.brings(job.quantile), job.remaining) - 1
        return math.ceil((length - 1e-6) / self.cache.page) - job.own_pages - job.shared_pages

    def _ensure_pages(self) -> None:
        """Allocate pages for the next round; preempt the last jobs if there are too few."""
        if self.cache.total == math.inf:
            return
        for job in list(self.running):
            while not job.reads and self._missing_pages(job, 1) > 0 and not self._grow([job], 1):
                self._preempt(self.running[-1])

    def _preempt(self, job: SimulatedJob) -> None:
        self.preempted += 1
        self._release(job)
        job.to_read, job.read = math.ceil(job.length - 1e-6), 0
        self.waiting.appendleft(job)

    def _finish(self, job: SimulatedJob) -> None:
        """Remove a finished job; its computed tokens stay cached until they are evicted."""
        arrival, text = job.arrival, None
        if arrival.prefix is not None and self.limits.prefixes:
            text = self.cache.text(arrival.prefix)
        if text is not None and arrival.shared == arrival.prompt:
            # In a conversation the answer extends the prefix: its pages become the prefix's.
            common = max(text.pages, (arrival.prompt + arrival.output - 1) // self.cache.page)
            moved = min(common - text.pages, job.own_pages)
            text.pages, text.tokens = text.pages + moved, max(text.tokens, arrival.prompt + arrival.output - 1)
            job.own_pages -= moved
        self._release(job)

    def _release(self, job: SimulatedJob) -> None:
        """Remove a job from the running ones; its full pages stay cached."""
        self.running.remove(job)
        fed = math.ceil(job.length - 1e-6) - 1 if not job.reads else job.read
        kept = min(job.own_pages, max(0, fed // self.cache.page - job.shared_pages)) if self.limits.prefixes else 0
        self.cache.free += job.own_pages
        self.cache.keep(job, kept)
        job.own_pages = 0
        if job.arrival.prefix is not None and self.limits.prefixes:
            self.cache.leave(self.cache.texts[job.arrival.prefix])


def _number(job: SimulatedJob) -> int:
    return job.number
