"""Chooses the sequences of each round: continuous batching with chunked prefill. Handles no tensors."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from forerun.cache.pool import Pages
from forerun.cache.prefix import PrefixTree
from forerun.core.errors import RequestError
from forerun.core.request import RequestState

PATIENCE = 256
"""Rounds by which ``priority`` 1 delays a request; each further step delays it by fewer."""
LONGEST_WAIT = 1024
"""The limit of that delay, in rounds."""
SMALLEST_CHUNK = 16
"""Prompt tokens that are prefilled in every round in any case, if at least as many prompts wait as sequences decode."""
FIRST_CHUNK = 32
"""The least chunk of a prompt that is read alone, and the first one, which measures the pace."""
FEWEST_TOKENS = 4
"""``SMALLEST_CHUNK`` of one prompt for which many decoding sequences wait."""
DEPTH_SPREAD = 30.0
"""Regularises the fit: depths that differ by less say little about the cost of depth."""


class PrefillBudget:
    """Limits the prompt tokens of a round with decoding sequences, so that it takes about twice as long as without.

    The price of a prompt token is base + slope * depth, where depth is the number of tokens before it. Both are fitted
    to recent rounds by least squares, with older rounds fading; prices carry over from one prompt to the next. Time
    that the price does not explain counts as growth of the plain round, from longer contexts above all. A chunk is at
    most twice the last one, and the smallest while there is no price. ``fixed`` is a limit in place of all this. In
    which round a prompt token is computed changes no token of any request.
    """

    LIMIT = 1.8
    """The longest round, in plain rounds. The margin to 2 is for late prices, and for drafts that are accepted less."""
    WEIGHT = 0.2
    """Weight of the latest round in the running means."""
    FADE = 0.99
    """Factor of a round's weight in the fit, a round later."""
    LEAST_BASE = 0.2
    """Least base price, as a fraction of the mean price."""
    STEP = 0.03
    """Seconds of a round of prompts alone, if two plain rounds take less."""
    STALE = 256
    """Rounds with prompt tokens after which one decodes alone, for comparison."""

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed, self.bounded = fixed, False
        self.pace: float | None = None
        """Prompt tokens per second of rounds without decoding sequences."""
        self.rounds = 0
        self.plain: dict[int, tuple[float, int]] = {}
        """By number of decoding sequences: mean seconds of rounds without prompt tokens, and the last such round."""
        self.growth = 0.0
        """Seconds beyond that mean that a round without prompt tokens would take now."""
        self._last_allowance = 0
        self._moments = [0.0] * 5
        """Second moments of x1 = tokens, x2 = tokens * depth, x3 = seconds: 11, 12, 22, 13, 23."""

    def allowance(self, decoding: int, depth: int = 0, least: int = SMALLEST_CHUNK) -> int:
        """How many prompt tokens a round may have beside ``decoding`` sequences, but at least ``least``.

        ``depth``: how many tokens of the prompt are computed already.
        """
        if self.fixed is not None:
            return self.fixed
        plain = self._plain(decoding)
        if plain is None:
            return 0
        price = self.price(depth)
        affordable = 0 if price is None else int(((self.LIMIT - 1) * plain - self.growth) / price)
        self._last_allowance = max(least, min(affordable, 2 * self._last_allowance))
        return self._last_allowance

    def alone(self, rows: int) -> int:
        """How many of ``rows`` prompt tokens a round without decoding sequences may have."""
        if not self.bounded:
            return rows
        seconds = max(self.STEP, 2 * (self._plain(1) or 0.0))
        return min(rows, max(FIRST_CHUNK, int(seconds * (self.pace or 0.0)) // SMALLEST_CHUNK * SMALLEST_CHUNK))

    def price(self, depth: float) -> float | None:
        """Seconds that a prompt token adds to a round; None before the first prompt."""
        tokens, mixed, deep, seconds, weighted = self._moments
        if not tokens:
            return None
        determinant = tokens * (deep + tokens * DEPTH_SPREAD**2) - mixed * mixed
        slope = max(0.0, (tokens * weighted - mixed * seconds) / determinant)
        base = max(self.LEAST_BASE * seconds, seconds - slope * mixed) / tokens
        return max(base + slope * depth, 1e-9)

    def _plain(self, decoding: int) -> float | None:
        """Mean seconds of recent rounds without prompt tokens and with about as many sequences."""
        near = max(1, decoding // 4)
        recent = [
            n for n, (_, at) in self.plain.items() if self.rounds - at <= self.STALE and abs(n - decoding) <= near
        ]
        return self.plain[min(recent, key=lambda n: abs(n - decoding))][0] if recent else None

    def observe(self, decoding: int, prompt_tokens: int, seconds: float, depth: float = 0.0) -> None:
        """Learns from a round of ``seconds``; ``depth`` is the mean depth of its prompt tokens."""
        if not decoding and prompt_tokens >= FIRST_CHUNK:  # fewer say little about many
            pace = prompt_tokens / max(seconds, 1e-9)
            self.pace = pace if self.pace is None else (self.pace + pace) / 2
        if not decoding or self.fixed is not None:
            return
        plain = self._plain(decoding) if prompt_tokens else None
        self.rounds += 1
        if not prompt_tokens:
            mean = self.plain.get(decoding, (seconds, 0))[0]
            self.plain[decoding] = mean + self.WEIGHT * (min(seconds, 2 * mean) - mean), self.rounds
            self.growth *= 1 - self.WEIGHT
        elif plain is not None:
            added, price = seconds - plain - self.growth, self.price(depth)
            if price is not None:  # one slow round, on a busy machine, must not count for much
                expected = price * prompt_tokens
                added = min(added, 2 * expected)
                self.growth += self.WEIGHT * (added - expected)
            added = max(added, 0.02 * plain)
            x1, x2 = prompt_tokens, prompt_tokens * depth
            latest = x1 * x1, x1 * x2, x2 * x2, x1 * added, x2 * added
            self._moments = [self.FADE * old + new for old, new in zip(self._moments, latest)]


@dataclass(eq=False)
class Scheduler:
    """Continuous batching within ``max_num_batched_tokens`` rows and the pool's pages.

    A sequence's rank is its arrival, moved by its ``priority`` by less than ``LONGEST_WAIT`` rounds; lower ranks go
    first. So nobody waits for requests that arrive more than twice as many rounds later. In every round, each running
    sequence that decodes gets its row. Prompts are prefilled in rank order, as many tokens as ``prefill_budget``
    allows; three quarters of them go to prompts that are shorter than the rest of the first one. Drafts get the rows
    and pages that are left. A sequence is admitted when there are pages for all its tokens. If pages run out later, the
    last-ranked sequence is preempted and recomputed, which changes no token.

    Args:
        draft_rows: how many rows a decoding sequence's draft may add.
        most_nodes: most nodes of a draft that one beam has for its whole group; None: the rows of a round.
        tree: the prefix cache; ``reusable`` says how many of a new sequence's tokens may come from it.
        on_admit: called with a sequence and its number of reused tokens.
        on_preempt: called with a sequence that has lost its pages.
    """

    pool: Pages
    _: KW_ONLY
    max_num_seqs: int
    max_num_batched_tokens: int
    draft_rows: Callable[[RequestState], int] = lambda sequence: 0
    most_nodes: int | None = None
    prefill_budget: PrefillBudget = field(default_factory=PrefillBudget)
    tree: PrefixTree | None = None
    reusable: Callable[[RequestState], int] = lambda sequence: len(sequence.tokens)
    on_admit: Callable[[RequestState, int], None] = lambda sequence, reused: None
    on_preempt: Callable[[RequestState], None] = lambda sequence: None
    waiting: list[RequestState] = field(init=False, default_factory=list)
    running: list[RequestState] = field(init=False, default_factory=list)
    clock: int = field(init=False, default=0)
    _decoding: int = field(init=False, default=0)
    _prompt_tokens: int = field(init=False, default=0)
    _depth: float = field(init=False, default=0.0)

    def add(self, sequence: RequestState) -> None:
        """Queues a sequence. Raises RequestError if it could never fit."""
        beams = "" if sequence.group is None else f" for each of {sequence.max_sequences} beams"
        if sequence.max_sequences > self.max_num_seqs:
            raise RequestError(
                f"{sequence.max_sequences} beams are more than the {self.max_num_seqs} sequences decoded together: "
                "lower beam_width or raise max_num_seqs", param="beam_width",
            )  # fmt: skip
        shared = sequence.num_prompt // self.pool.page_size if beams else 0
        pages = shared + sequence.max_sequences * (self.pool.pages_for(sequence.max_tokens) - shared)
        if pages > self.pool.num_pages:
            raise RequestError(
                f"the request may need {sequence.max_tokens} tokens of KV cache{beams}; the pool holds "
                f"{self.pool.num_pages * self.pool.page_size}: lower max_tokens or raise kv_cache_memory"
            )
        delay = LONGEST_WAIT * sequence.priority / (abs(sequence.priority) + LONGEST_WAIT // PATIENCE - 1)
        sequence.rank = (self.clock + delay, sequence.id)
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: RequestState) -> None:
        """Drops a finished or aborted sequence and frees its pages. Full ones stay in the prefix cache."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._commit(sequence, ends=True)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def _commit(self, sequence: RequestState, *, ends: bool = False) -> None:
        """Adds the computed tokens of a sequence and its beams to the prefix cache; if it ``ends``, its state, too."""
        for part in sequence.sequences if self.tree is not None else ():
            assert self.tree is not None
            enter = self.tree.insert_finished if ends and sequence.group is None else self.tree.insert
            enter(part.id, part.tokens, len(part.tokens), source=part.source)

    def _free(self, sequence: RequestState) -> None:
        for part in sequence.sequences:
            self.pool.free(part.id)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[RequestState]:
        """Sets ``scheduled`` and ``draft_budget`` on every sequence of the next round and returns these."""
        self.clock += 1
        for sequence in list(self.running):
            self._reserve(sequence)
        decoding = [part for sequence in self.running if not _prefills(sequence) for part in sequence.sequences]
        for sequence in decoding:
            sequence.scheduled = _uncomputed(sequence)
        rows = max(0, self.max_num_batched_tokens - sum(sequence.scheduled for sequence in decoding))
        prompts: list[RequestState] = []
        self._decoding, self._prompt_tokens, self._depth = len(decoding), 0, 0.0
        if any(map(_prefills, self.running)) or self._has_seats():
            prompts = self._schedule_prompts(self._prefill_allowance(decoding, rows))
            if self.tree is not None:
                for sequence in prompts:
                    end = sequence.num_computed_tokens + sequence.scheduled
                    self.tree.keep_states(sequence.id, end, len(sequence.tokens))
            self._prompt_tokens = sum(sequence.scheduled for sequence in prompts)
            depths = sum(
                sequence.scheduled * (sequence.num_computed_tokens + sequence.scheduled / 2) for sequence in prompts
            )
            self._depth = depths / max(1, self._prompt_tokens)
        self._schedule_drafts(decoding, rows - self._prompt_tokens)
        return decoding + prompts

    def observe(self, seconds: float) -> None:
        """Ends a round that took ``seconds``: adds its committed tokens to the prefix cache."""
        self.prefill_budget.observe(self._decoding, self._prompt_tokens, seconds, self._depth)
        if self.tree is not None:
            for sequence in self.running:
                self._commit(sequence)

    def _prefill_allowance(self, decoding: list[RequestState], rows: int) -> int:
        """Prompt tokens beside decoding sequences, if there are any: not at the cost of drafts, but always some."""
        if not decoding:
            limit = self.prefill_budget.alone(rows)
            left = [_uncomputed(one) for one in [*filter(_prefills, self.running), *self.waiting]]
            return min(rows, max(limit, sum(each for each in left if each <= 4 * limit)))  # short ones go together
        drafts = sum(self.draft_rows(sequence) for sequence in decoding)
        prefilling = [sequence for sequence in self.running if _prefills(sequence)]
        least = least_prefill(len(prefilling) + len(self.waiting), len(decoding))
        depth = prefilling[0].num_computed_tokens if prefilling else 0
        return min(rows, self.prefill_budget.allowance(len(decoding), depth, least), max(SMALLEST_CHUNK, rows - drafts))

    def _reserve(self, sequence: RequestState) -> None:
        """Reserves entries for all tokens of a running sequence; preempts the last-ranked while pages are missing."""
        for part in sequence.sequences:
            part.scheduled, part.draft_budget = 0, None
        while sequence in self.running:
            if all(self.pool.try_reserve(part.id, len(part.tokens)) for part in sequence.sequences):
                return
            self.preempt(self.running[-1])

    def _schedule_prompts(self, rows: int) -> list[RequestState]:
        """Chunks for running sequences that prefill, then for as many of the waiting as fit."""
        chosen: list[RequestState] = []
        share = -(-rows // 4)
        if self._schedule_short(rows - share, chosen):
            rows = share  # a short prompt does not wait for more of a long one than that
        for sequence in self.running:
            if _prefills(sequence) and not sequence.scheduled:
                rows -= self._schedule_chunk(sequence, rows, chosen)
        while rows > 0 and self._has_seats():
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            rows -= self._schedule_chunk(sequence, rows, chosen)
        return chosen

    def _schedule_short(self, rows: int, chosen: list[RequestState]) -> int:
        """At most ``rows`` for prompts with less left than the first-ranked one that is being read, the shortest first;
        returns how many. The rest of the round is the first one's, so that it never waits for ever."""
        first = next(filter(_prefills, self.running), None)
        if first is None:
            return 0
        left, most = rows, _uncomputed(first)
        short = [one for one in self.running if _prefills(one) and _uncomputed(one) < most]
        while sum(map(_uncomputed, short)) < rows and self._has_seats():
            sequence = self.waiting[0]
            if len(sequence.tokens) >= most or sequence.priority > first.priority or not self._admit(sequence):
                break
            short.append(sequence)
        for sequence in sorted(short, key=_uncomputed):
            left -= self._schedule_chunk(sequence, left, chosen)
        return rows - left

    def _has_seats(self) -> bool:
        """Whether the first waiting sequence fits into ``max_num_seqs`` beside the running ones."""
        taken = sum([sequence.max_sequences for sequence in self.running])
        return bool(self.waiting) and taken + self.waiting[0].max_sequences <= self.max_num_seqs

    @staticmethod
    def _schedule_chunk(sequence: RequestState, rows: int, chosen: list[RequestState]) -> int:
        sequence.scheduled, sequence.draft_budget = min(rows, _uncomputed(sequence)), 0
        if sequence.scheduled:
            chosen.append(sequence)
        return sequence.scheduled

    def _admit(self, sequence: RequestState) -> bool:
        """Admits the first waiting sequence if there are pages for all its tokens, cached ones included.

        False also if a running sequence is just computing a prefix that it could reuse.
        """
        pool, count = self.pool, len(sequence.tokens)
        reused = 0
        if self.tree is not None:
            # The last token is always computed: a new token is drawn from its logits.
            limit = min(self.reusable(sequence), count - 1)
            if self._prefix_in_progress(sequence, limit):
                return False
            reused = self.tree.match_prefix(sequence.id, sequence.tokens, limit, source=sequence.source)
            if not pool.can_reserve(sequence.id, count):
                # Copying a page that is reused in part takes one more page than computing its tokens again.
                pool.free(sequence.id)
                reused = self.tree.match_prefix(
                    sequence.id, sequence.tokens, limit, partial=False, source=sequence.source
                )
        if not pool.try_reserve(sequence.id, count):
            pool.free(sequence.id)
            return False
        sequence.num_computed_tokens = reused
        self.waiting.pop(0)
        insort(self.running, sequence, key=_rank)
        self.on_admit(sequence, reused)
        return True

    def _prefix_in_progress(self, sequence: RequestState, limit: int) -> bool:
        """Whether a running sequence is about to compute more of this one's prefix, so that waiting saves work."""
        tree = self.tree
        assert tree is not None
        cached = tree.match_length(sequence.tokens, limit, sequence.source)
        for other in self.running:
            end = tree.next_start(other.id, len(other.tokens), other.num_computed_tokens, cached)
            if 0 < end <= limit and other.source == sequence.source and other.tokens[:end] == sequence.tokens[:end]:
                return True
        return False

    def _schedule_drafts(self, decoding: list[RequestState], rows: int) -> None:
        """Gives drafts rows and pages, where there are enough for a whole draft."""
        nodes = self.max_num_batched_tokens if self.most_nodes is None else self.most_nodes
        for sequence in decoding:
            requested = self.draft_rows(sequence)
            sequence.draft_budget = 0
            if not 0 < requested <= rows:
                continue
            for draft_budget in dict.fromkeys((min(requested * len(sequence.sequences), nodes), requested)):
                # One beam may take all drafts of its group, if that needs no page that no beam would need alone.
                end, most = len(sequence.tokens) + draft_budget, self.pool.pages_for(sequence.max_tokens + requested)
                if self.pool.pages_for(end) <= most and self.pool.try_reserve(sequence.id, end):
                    sequence.draft_budget = draft_budget
                    rows -= requested
                    break

    def preempt(self, sequence: RequestState) -> None:
        """Takes a sequence's pages back; it waits at its old rank and is recomputed."""
        self.running.remove(sequence)
        self._commit(sequence, ends=True)
        self._free(sequence)
        sequence.num_computed_tokens = sequence.scheduled = sequence.draft_budget = 0
        insort(self.waiting, sequence, key=_rank)
        self.on_preempt(sequence)


def least_prefill(prompts: int, decoding: int) -> int:
    """Prompt tokens that a round computes whatever they cost, if ``prompts`` wait beside ``decoding`` sequences."""
    return min(SMALLEST_CHUNK, max(FEWEST_TOKENS, SMALLEST_CHUNK * prompts // decoding))


def _uncomputed(sequence: RequestState) -> int:
    return len(sequence.tokens) - sequence.num_computed_tokens


def _prefills(sequence: RequestState) -> bool:
    """Whether tokens before the last one are still to be computed, so that it does not decode."""
    beams = sequence.group is not None and bool(sequence.group.members)
    return not beams and (not sequence.num_output or _uncomputed(sequence) != 1)


def _rank(sequence: RequestState) -> tuple[float, int]:
    return sequence.rank
