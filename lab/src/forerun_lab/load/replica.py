"""One replica on paper: the engine's batching, with rounds that only take their time.

Rounds that are alike are one stretch: until somebody is done, runs out of pages or arrives, nothing changes.
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
"""Multiples of it, modulo 1, lie evenly however many there are."""


@dataclass(frozen=True)
class Limits:
    """A replica's, as its engine has them: requests decoded together (``seats``), rows of a forward, prompt tokens
    beside decoding (None: as many as double a round), KV pages (None: enough for all) and a page's tokens, and whether
    prefixes are kept."""

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

    __slots__ = ("arrival", "common", "done", "first", "held", "left", "number", "quantile", "read", "reused", "wanted")

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.arrival = arrival
        self.quantile = (0.5 + number * GOLDEN) % 1
        """How well drafts guess it, as a share of all requests: the first is in the middle."""
        self.wanted = arrival.prompt
        """Tokens to read before it decodes: its prompt, and what it had already when it lost its pages."""
        self.read = 0
        self.reused = 0
        self.left = float(arrival.output)
        """Tokens that are missing; halves, as tokens of a round are a mean."""
        self.held = 0
        """Pages of its own."""
        self.common = 0
        """Pages that it shares with those whose prompts begin alike."""
        self.first = math.nan
        self.done = math.nan

    @property
    def reads(self) -> bool:
        return self.read < self.wanted

    @property
    def length(self) -> float:
        """Tokens in all, those to come left out."""
        return self.arrival.prompt + self.arrival.output - self.left


class SimulatedText:
    """The cached beginning of a text that prompts share."""

    __slots__ = ("pages", "tokens", "users")

    def __init__(self) -> None:
        self.tokens = 0
        """That have been computed."""
        self.pages = 0
        self.users = 0


class Cache:
    """Pages: of jobs, of texts that prompts begin with, and of tails that nobody will ask for, the least recently used
    of which go first."""

    def __init__(self, limits: Limits) -> None:
        self.page = limits.page
        self.total = math.inf if limits.pages is None else limits.pages
        self.free: float = self.total
        self.texts: OrderedDict[Hashable, SimulatedText] = OrderedDict()
        """By prefix, or, behind an ended job, by its number in a tuple."""
        self.unused = 0

    def text(self, name: Hashable) -> SimulatedText:
        result = self.texts.get(name)
        if result is None:
            result = self.texts[name] = SimulatedText()
        self.texts.move_to_end(name)
        return result

    def take(self, count: int) -> bool:
        """Take pages, from unused texts where none are free; False: there are not as many, and nothing was taken."""
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
        """Free what its only user does not need of a text."""
        if text.users == 1 and text.pages > pages:
            self.free += text.pages - pages
            text.pages, text.tokens = pages, min(text.tokens, pages * self.page)

    def leave(self, text: SimulatedText) -> None:
        text.users -= 1
        if not text.users:
            self.unused += text.pages

    def keep(self, job: SimulatedJob, pages: int) -> None:
        """Of the free pages, so many hold what a job has computed, until somebody needs them."""
        if pages and self.total < math.inf:
            self.text(("job", job.number)).pages += pages
            self.free -= pages
            self.unused += pages

    def pop(self, job: SimulatedJob) -> int:
        """Free what was kept of a job; its pages."""
        text = self.texts.pop(("job", job.number), None)
        if text is None:
            return 0
        self.unused -= text.pages
        self.free += text.pages
        return text.pages


class SimulatedReplica:
    """``add`` requests as they come, and ``end`` the stretch under way at ``until``, which begins the next one."""

    def __init__(self, costs: LoadCosts, limits: Limits) -> None:
        self.costs = costs
        self.limits = limits
        self.cache = Cache(limits)
        self.prefill_budget = PrefillBudget(limits.chunk)
        self.waiting: deque[SimulatedJob] = deque()
        self.running: list[SimulatedJob] = []
        self.until = math.inf
        self.busy = 0.0
        """Seconds in which it computed."""
        self.streams = 0.0
        """Of these, times the requests that decoded."""
        self.preempted = 0
        self._began = 0.0
        self._each = 0.0
        self._rounds = 0
        self._way: Way = costs.ways[0]
        self._chunks: list[tuple[SimulatedJob, int]] = []
        self._held = False
        """Whether there were prompts to read and no rows for them."""

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, job: SimulatedJob, now: float) -> None:
        """A request arrives: it is seen when the round under way ends."""
        self.waiting.append(job)
        if self.until == math.inf:
            self._begin(now)
        elif self._rounds > 1 and len(self.running) < self.limits.seats:
            gone = max(1, math.ceil((now - self._began) / self._each - 1e-9))
            if gone < self._rounds:
                self._rounds, self.until = gone, self._began + gone * self._each
                self._give_back()

    def end(self) -> list[SimulatedJob]:
        """The stretch ends; who is answered."""
        now, rounds = self.until, self._rounds
        decoding = [job for job in self.running if not job.reads]
        spent = now - self._began
        self.busy += spent
        self.streams += spent * len(decoding)
        read = sum(count for _, count in self._chunks)
        depth = sum(count * (job.read + count / 2) for job, count in self._chunks) / max(1, read)
        self.prefill_budget.rounds += rounds - 1
        self.prefill_budget.observe(len(decoding), read, self._each, depth)
        for job in decoding:
            job.left -= rounds * self._way.brings(job.quantile)
        for job, count in self._chunks:
            job.read += count
            self._computed(job)
            if not job.reads:
                job.left -= 1
                if math.isnan(job.first):
                    job.first = now
        ended = [job for job in self.running if not job.reads and job.left < 1e-6]
        for job in ended:
            job.done = now
            self._leave(job)
        self._begin(now)
        return ended

    # ------------------------------------------------------------------------------------------------------ rounds

    def _begin(self, now: float) -> None:
        self._began = now
        self._secure()
        decoding = [job for job in self.running if not job.reads]
        count = len(decoding)
        self._way = self.costs.best(count) if count else self.costs.ways[0]
        self._chunks = self._prompts(count)
        if not count and not self._chunks:
            self.until = math.inf
            return
        read = sum(tokens for _, tokens in self._chunks)
        depth = sum(job.read * tokens for job, tokens in self._chunks) / max(1, read)
        self._each = self.costs.round(self._way, count, read, depth)
        self._rounds = 1
        if not self._held and not any(job.reads for job in self.running):
            self._rounds = self._alike(decoding)
        self.until = now + self._rounds * self._each

    def _alike(self, decoding: list[SimulatedJob]) -> int:
        """Rounds until the first one is done, or pages must be found."""
        rounds = math.ceil(min(job.left / self._way.brings(job.quantile) for job in decoding) - 1e-6)
        if self.cache.total < math.inf and not self._grow(decoding, rounds):
            return 1
        return max(1, rounds)

    def _prompts(self, decoding: int) -> list[tuple[SimulatedJob, int]]:
        """Whose prompts are read in the next round, and how much of each, as ``Scheduler`` decides it."""
        limits, chosen = self.limits, []
        self._held = False
        reading = [job for job in self.running if job.reads]
        if not reading and not (self.waiting and len(self.running) < limits.seats):
            return []
        rows = limits.rows - decoding
        if decoding:
            least = least_prefill(len(reading) + len(self.waiting), decoding)
            depth = reading[0].read if reading else 0
            beside = max(SMALLEST_CHUNK, rows - decoding * self._way.k)
            rows = min(rows, self.prefill_budget.allowance(decoding, depth, least), beside)
        self._held = rows <= 0
        for job in reading:
            tokens = min(rows, job.wanted - job.read)
            rows -= tokens
            if tokens:
                chosen.append((job, tokens))
        while rows > 0 and self.waiting and len(self.running) < limits.seats and self._admit(self.waiting[0]):
            job = self.waiting.popleft()
            insort(self.running, job, key=_number)
            tokens = min(rows, job.wanted - job.read)
            rows -= tokens
            chosen.append((job, tokens))
        return chosen

    # ------------------------------------------------------------------------------------------------------- pages

    def _admit(self, job: SimulatedJob) -> bool:
        """Pages for all its tokens, those of a known beginning included, unless somebody is computing that now."""
        cache = self.cache
        name = job.arrival.prefix if self.limits.prefixes else None
        pages, own = -(-job.wanted // cache.page), cache.pop(job)
        text, common, reused = None, 0, 0
        if name is not None:
            limit = min(self._shared(job), job.wanted - 1)
            text, common = cache.text(name), limit // cache.page
            reused = min(text.tokens, limit)
            if self._being_read(job, reused, limit):
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
        job.held, job.common = pages - common, common
        reused = min(reused, text.tokens) if text is not None else 0
        if own and reused >= common * cache.page:
            reused = max(reused, min((common + own) * cache.page, job.wanted - 1))
        job.read = reused
        job.reused += reused
        return True

    def _being_read(self, job: SimulatedJob, reused: int, limit: int) -> bool:
        """Whether another one is about to compute the next page that this one needs."""
        end = (reused // self.limits.page + 1) * self.limits.page
        return end <= limit and any(
            other.read < end and other.arrival.prefix == job.arrival.prefix and self._shared(other) >= end
            for other in self.running
        )

    @staticmethod
    def _shared(job: SimulatedJob) -> int:
        """How many of the tokens that it has to read are its text's."""
        arrival = job.arrival
        return job.wanted if arrival.shared == arrival.prompt else arrival.shared

    def _computed(self, job: SimulatedJob) -> None:
        """Its text's tokens may be reused as far as it has read them."""
        if job.arrival.prefix is not None and self.limits.prefixes:
            text = self.cache.text(job.arrival.prefix)
            text.tokens = max(text.tokens, min(job.read, self._shared(job)))

    def _grow(self, decoding: list[SimulatedJob], rounds: int) -> bool:
        """Pages for so many rounds' tokens of all; False: there are not as many, and nothing was taken."""
        requested = [max(0, self._lacks(job, rounds)) for job in decoding]
        if not self.cache.take(sum(requested)):
            return False
        for job, count in zip(decoding, requested):
            job.held += count
        return True

    def _give_back(self) -> None:
        """Pages for rounds that the stretch no longer has."""
        if self.cache.total < math.inf:
            for job in self.running:
                spare = -self._lacks(job, self._rounds)
                job.held, self.cache.free = job.held - spare, self.cache.free + spare

    def _lacks(self, job: SimulatedJob, rounds: int) -> int:
        """Pages that it needs for so many rounds beyond those that it has; below 0: that it could do without."""
        # The last token is not fed before the round that follows it.
        length = job.length + min(rounds * self._way.brings(job.quantile), job.left) - 1
        return math.ceil((length - 1e-6) / self.cache.page) - job.held - job.common

    def _secure(self) -> None:
        """Pages for the next round; the last ones lose theirs where there are too few."""
        if self.cache.total == math.inf:
            return
        for job in list(self.running):
            while not job.reads and self._lacks(job, 1) > 0 and not self._grow([job], 1):
                self._preempt(self.running[-1])

    def _preempt(self, job: SimulatedJob) -> None:
        self.preempted += 1
        self._release(job)
        job.wanted, job.read = math.ceil(job.length - 1e-6), 0
        self.waiting.appendleft(job)

    def _leave(self, job: SimulatedJob) -> None:
        """An answered request: what it has computed stays, as long as there is room."""
        arrival, text = job.arrival, None
        if arrival.prefix is not None and self.limits.prefixes:
            text = self.cache.text(arrival.prefix)
        if text is not None and arrival.shared == arrival.prompt:
            # The answer is the text's next tokens: its pages are the text's now.
            common = max(text.pages, (arrival.prompt + arrival.output - 1) // self.cache.page)
            moved = min(common - text.pages, job.held)
            text.pages, text.tokens = text.pages + moved, max(text.tokens, arrival.prompt + arrival.output - 1)
            job.held -= moved
        self._release(job)

    def _release(self, job: SimulatedJob) -> None:
        """Take it out; its full pages stay known."""
        self.running.remove(job)
        fed = math.ceil(job.length - 1e-6) - 1 if not job.reads else job.read
        kept = min(job.held, max(0, fed // self.cache.page - job.common)) if self.limits.prefixes else 0
        self.cache.free += job.held
        self.cache.keep(job, kept)
        job.held = 0
        if job.arrival.prefix is not None and self.limits.prefixes:
            self.cache.leave(self.cache.texts[job.arrival.prefix])


def _number(job: SimulatedJob) -> int:
    return job.number
