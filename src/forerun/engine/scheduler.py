"""Who takes part in the next round. Knows tokens and pages, never tensors."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from forerun.cache.pool import Pages
from forerun.cache.prefix import PrefixTree
from forerun.core.errors import RequestError
from forerun.core.request import RequestState

PATIENCE = 256
"""How many rounds later a request is served for the first step of ``priority``; for further ones, ever fewer."""
LONGEST_WAIT = 1024
"""Rounds by which no priority, however large, moves a request's turn."""
SMALLEST_CHUNK = 16
"""Prompt tokens that are read in every round whatever else there is to do, if no fewer prompts wait than decode."""
FEWEST_TOKENS = 4
"""The same for one prompt among many who decode: each of them waits for it."""
DEPTH_SPREAD = 30.0
"""Depths that differ by less tell little of what depth costs."""


class PrefillBudget:
    """How many prompt tokens may ride in a round with decoding sequences, so that it takes at most about twice as
    long as rounds did before the prompt came.

    A prompt token's price is base + slope * depth, the tokens before it: both are fitted to recent rounds (least
    squares, older rounds fading), of any prompt, so that the next one begins with what the last one taught. By how much
    rounds grow meanwhile for other reasons, longer contexts above all, is what the price leaves unexplained. A chunk is
    at most twice the last one, and the smallest while there is no price. ``fixed`` decides it all beforehand. Which
    round a prompt's tokens are read in changes no token of any request.
    """

    LIMIT = 1.8
    """Of a round with prompt tokens, in rounds before. What is missing to 2 is for prices that come late and for drafts
    that are accepted less than before."""
    WEIGHT = 0.2
    """Of the latest round, in the running means."""
    FADE = 0.99
    """What is left of a round's weight in the fit, a round later."""
    LEAST_BASE = 0.2
    """Of the mean price: what a token costs however near the beginning."""
    STALE = 256
    """After so many rounds beside prompts, one is spent on decoding alone, to compare with."""

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed = fixed
        self.rounds = 0
        self.plain: dict[int, tuple[float, int]] = {}
        """Decoding sequences -> mean seconds of rounds without prompt tokens, and when there was one."""
        self.growth = 0.0
        """Seconds that a round without prompt tokens would take now, beyond that mean."""
        self._given = 0
        self._moments = [0.0] * 5
        """Of (tokens, tokens * depth, seconds) over rounds: 11, 12, 22, 13, 23."""

    def allowance(self, decoding: int, depth: int = 0, least: int = SMALLEST_CHUNK) -> int:
        """Prompt tokens for a round in which ``decoding`` sequences decode, ``depth`` tokens into their prompt;
        ``least`` of them whatever they cost."""
        if self.fixed is not None:
            return self.fixed
        plain = self._plain(decoding)
        if plain is None:
            return 0
        price = self.price(depth)
        requested = 0 if price is None else int(((self.LIMIT - 1) * plain - self.growth) / price)
        self._given = max(least, min(requested, 2 * self._given))
        return self._given

    def price(self, depth: float) -> float | None:
        """Seconds that a prompt token adds to a round; None: no prompt was read yet."""
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
        known = [n for n, (_, at) in self.plain.items() if abs(n - decoding) <= near and self.rounds - at <= self.STALE]
        return self.plain[min(known, key=lambda n: abs(n - decoding))][0] if known else None

    def observe(self, decoding: int, prompt_tokens: int, seconds: float, depth: float = 0.0) -> None:
        """Learn from a round; ``depth`` is its prompt tokens' mean."""
        if not decoding or self.fixed is not None:
            return
        plain = self._plain(decoding) if prompt_tokens else None
        self.rounds += 1
        if not prompt_tokens:
            mean = self.plain.get(decoding, (seconds, 0))[0]
            self.plain[decoding] = mean + self.WEIGHT * (min(seconds, 2 * mean) - mean), self.rounds
            self.growth *= 1 - self.WEIGHT
        elif plain is not None:
            added, known = seconds - plain - self.growth, self.price(depth)
            if known is not None:  # one slow round, on a busy machine, must not count for much
                expected = known * prompt_tokens
                added = min(added, 2 * expected)
                self.growth += self.WEIGHT * (added - expected)
            added = max(added, 0.02 * plain)
            pair = prompt_tokens, prompt_tokens * depth
            latest = pair[0] * pair[0], pair[0] * pair[1], pair[1] * pair[1], pair[0] * added, pair[1] * added
            self._moments = [self.FADE * old + new for old, new in zip(self._moments, latest)]


@dataclass(eq=False)
class Scheduler:
    """Continuous batching under a row budget and the pool's pages.

    A sequence ranks by its turn: its arrival, moved by less than ``LONGEST_WAIT`` rounds for its ``priority``. Lower
    values go first, and nobody waits for requests that come more than twice as many rounds later. In every round each
    running sequence that decodes gets its row; prompts are read in rank order, as many tokens as ``prefill_budget``
    allows; drafts get the rows and pages that are left. A sequence is admitted when the pages of all its tokens are
    there; when pages run out later, the last-ranked one is preempted and recomputed, without a changed token.

    ``draft_rows`` says how many rows a decoding sequence's draft may add, ``most_nodes`` how many one beam's that
    drafts for others too; ``reusable`` how many of a new one's tokens may come from ``tree``. ``on_admit`` learns how
    many did, ``on_preempt`` who lost their pages.
    """

    pool: Pages
    _: KW_ONLY
    max_num_seqs: int
    max_num_batched_tokens: int
    draft_rows: Callable[[RequestState], int] = lambda sequence: 0
    most_nodes: int | None = None
    """None: as many as a round has rows."""
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
        """Queue a sequence. Raises RequestError if it could never fit."""
        beams = "" if sequence.group is None else f" for each of {sequence.max_sequences} beams"
        if sequence.max_sequences > self.max_num_seqs:
            raise RequestError(
                f"{sequence.max_sequences} beams are more than the {self.max_num_seqs} sequences decoded together: "
                "lower beam_width or raise max_num_seqs", param="beam_width",
            )  # fmt: skip
        together = sequence.num_prompt // self.pool.page_size if beams else 0
        pages = together + sequence.max_sequences * (self.pool.pages_for(sequence.max_tokens) - together)
        if pages > self.pool.num_pages:
            raise RequestError(
                f"the request may need {sequence.max_tokens} tokens of KV cache{beams}; the pool holds "
                f"{self.pool.num_pages * self.pool.page_size}: lower max_tokens or raise kv_cache_memory"
            )
        moved = LONGEST_WAIT * sequence.priority / (abs(sequence.priority) + LONGEST_WAIT // PATIENCE - 1)
        sequence.rank = (self.clock + moved, sequence.id)
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: RequestState) -> None:
        """Drop a finished or aborted sequence and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._commit(sequence, ends=True)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def _commit(self, sequence: RequestState, *, ends: bool = False) -> None:
        """Enter what it has computed, all its beams, among the known prefixes; the state of one that ``ends``, too."""
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
        """Set ``scheduled`` and ``draft_budget`` on every sequence of the next round and return them."""
        self.clock += 1
        for sequence in list(self.running):
            self._secure(sequence)
        decoding = [part for sequence in self.running if not _reads(sequence) for part in sequence.sequences]
        for sequence in decoding:
            sequence.scheduled = _missing(sequence)
        rows = max(0, self.max_num_batched_tokens - sum(sequence.scheduled for sequence in decoding))
        prompts: list[RequestState] = []
        self._decoding, self._prompt_tokens, self._depth = len(decoding), 0, 0.0
        if any(map(_reads, self.running)) or self._has_seats():
            prompts = self._read_prompts(self._allowance(decoding, rows) if decoding else rows)
            if self.tree is not None:
                for sequence in prompts:
                    end = sequence.num_computed_tokens + sequence.scheduled
                    self.tree.keep_states(sequence.id, end, len(sequence.tokens))
            self._prompt_tokens = sum(sequence.scheduled for sequence in prompts)
            depths = sum(
                sequence.scheduled * (sequence.num_computed_tokens + sequence.scheduled / 2) for sequence in prompts
            )
            self._depth = depths / max(1, self._prompt_tokens)
        self._draft(decoding, rows - self._prompt_tokens)
        return decoding + prompts

    def observe(self, seconds: float) -> None:
        """A round is over: its committed tokens are cached, and it took so long."""
        self.prefill_budget.observe(self._decoding, self._prompt_tokens, seconds, self._depth)
        if self.tree is not None:
            for sequence in self.running:
                self._commit(sequence)

    def _allowance(self, decoding: list[RequestState], rows: int) -> int:
        """Prompt tokens beside decoding sequences: not at the cost of drafts, but always some."""
        drafts = sum(self.draft_rows(sequence) for sequence in decoding)
        least = fewest(sum(map(_reads, self.running)) + len(self.waiting), len(decoding))
        depth = next((sequence.num_computed_tokens for sequence in self.running if _reads(sequence)), 0)
        return min(rows, self.prefill_budget.allowance(len(decoding), depth, least), max(SMALLEST_CHUNK, rows - drafts))

    def _secure(self, sequence: RequestState) -> None:
        """Reserve entries for all tokens of a running sequence; the last ones are preempted where it needs pages."""
        for part in sequence.sequences:
            part.scheduled, part.draft_budget = 0, None
        while sequence in self.running:
            if all(self.pool.try_reserve(part.id, len(part.tokens)) for part in sequence.sequences):
                return
            self.preempt(self.running[-1])

    def _read_prompts(self, rows: int) -> list[RequestState]:
        """Chunks for those who lack more than one token, then for as many of the waiting as fit."""
        chosen: list[RequestState] = []
        for sequence in self.running:
            if _reads(sequence):
                rows -= self._read(sequence, rows, chosen)
        while rows > 0 and self._has_seats():
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            rows -= self._read(sequence, rows, chosen)
        return chosen

    def _has_seats(self) -> bool:
        """Whether the head of the queue may run beside those who do."""
        taken = sum([sequence.max_sequences for sequence in self.running])
        return bool(self.waiting) and taken + self.waiting[0].max_sequences <= self.max_num_seqs

    @staticmethod
    def _read(sequence: RequestState, rows: int, chosen: list[RequestState]) -> int:
        sequence.scheduled, sequence.draft_budget = min(rows, _missing(sequence)), 0
        if sequence.scheduled:
            chosen.append(sequence)
        return sequence.scheduled

    def _admit(self, sequence: RequestState) -> bool:
        """Take the head of the queue in if the pages of all its tokens are there, cached ones included, and nobody
        is computing them now."""
        pool, requested = self.pool, len(sequence.tokens)
        reused = 0
        if self.tree is not None:
            # The last token is always fed: its logits are what a new token is drawn from.
            limit = min(self.reusable(sequence), requested - 1)
            if self._being_read(sequence, limit):
                return False
            reused = self.tree.match_prefix(sequence.id, sequence.tokens, limit, source=sequence.source)
            if not pool.can_reserve(sequence.id, requested):
                # Copying a page that is reused in part takes one more page than reading its tokens again.
                pool.free(sequence.id)
                reused = self.tree.match_prefix(
                    sequence.id, sequence.tokens, limit, partial=False, source=sequence.source
                )
        if not pool.try_reserve(sequence.id, requested):
            pool.free(sequence.id)
            return False
        sequence.num_computed_tokens = reused
        self.waiting.pop(0)
        insort(self.running, sequence, key=_rank)
        self.on_admit(sequence, reused)
        return True

    def _being_read(self, sequence: RequestState, limit: int) -> bool:
        """Whether a running sequence is about to compute the next part of what this one begins with: better wait."""
        tree = self.tree
        assert tree is not None
        known = tree.match_length(sequence.tokens, limit, sequence.source)
        for other in self.running:
            end = tree.next_start(other.id, len(other.tokens), other.num_computed_tokens, known)
            if 0 < end <= limit and other.source == sequence.source and other.tokens[:end] == sequence.tokens[:end]:
                return True
        return False

    def _draft(self, decoding: list[RequestState], rows: int) -> None:
        """Rows and pages for drafts, where there are enough for whole ones."""
        nodes = self.max_num_batched_tokens if self.most_nodes is None else self.most_nodes
        for sequence in decoding:
            requested = self.draft_rows(sequence)
            sequence.draft_budget = 0
            if not 0 < requested <= rows:
                continue
            for draft_budget in dict.fromkeys((min(requested * len(sequence.sequences), nodes), requested)):
                # A group's drafts may all be behind one beam, as far as that takes no page that none of them has alone.
                end, most = len(sequence.tokens) + draft_budget, self.pool.pages_for(sequence.max_tokens + requested)
                if self.pool.pages_for(end) <= most and self.pool.try_reserve(sequence.id, end):
                    sequence.draft_budget = draft_budget
                    rows -= requested
                    break

    def preempt(self, sequence: RequestState) -> None:
        """Take a sequence's pages back; it waits in its old rank and is recomputed."""
        self.running.remove(sequence)
        self._commit(sequence, ends=True)
        self._free(sequence)
        sequence.num_computed_tokens = sequence.scheduled = sequence.draft_budget = 0
        insort(self.waiting, sequence, key=_rank)
        self.on_preempt(sequence)


def fewest(prompts: int, decoding: int) -> int:
    """Prompt tokens of a round whatever they cost, where so many prompts wait or are read beside ``decoding``."""
    return min(SMALLEST_CHUNK, max(FEWEST_TOKENS, SMALLEST_CHUNK * prompts // decoding))


def _missing(sequence: RequestState) -> int:
    return len(sequence.tokens) - sequence.num_computed_tokens


def _reads(sequence: RequestState) -> bool:
    """Whether it has still to read, so that it does not decode."""
    beams = sequence.group is not None and bool(sequence.group.members)
    return not beams and (not sequence.num_output or _missing(sequence) != 1)


def _rank(sequence: RequestState) -> tuple[float, int]:
    return sequence.rank
