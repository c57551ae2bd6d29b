"""What is counted of requests, what a round looked like token by token, and the state of an engine at a moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from forerun.core.tree import Draft, Verdict


@dataclass
class RequestMetrics:
    """Counts of one request; rates are None where nothing was drafted."""

    rounds: int = 0
    """Target forwards that decoded for this request, prefill left out."""
    num_drafts: int = 0
    """Rounds that carried a draft."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry j: how many drafts had exactly j tokens accepted."""
    accepted_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    """Round by round, those with a draft only."""
    tested: int = 0
    matched: int = 0
    overlap: float = 0.0
    decode_tokens: int = 0
    """Tokens emitted by those rounds."""
    start: float = 0.0
    first_token: float | None = None
    end: float | None = None
    draft_error: str | None = None
    """Why this request lost its drafter, if it did; it went on as plain decoding."""
    preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV a prefix hit supplied."""
    synthetic: bool = False
    """Drafts were accepted at given rates, whatever their tokens: the text is not the target's."""

    def add(self, draft: Draft, verdict: Verdict) -> None:
        """Count one decoding round."""
        self.rounds += 1
        self.decode_tokens += len(verdict.tokens)
        if not len(draft):
            return
        self.num_drafts += 1
        self.num_draft_tokens += len(draft)
        self.num_accepted_draft_tokens += verdict.accepted
        missing = verdict.accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[verdict.accepted] += 1
        self.accepted_per_step.append(verdict.accepted)
        self.drafted_per_step.append(len(draft))
        self.tested += verdict.tested
        self.matched += verdict.matched
        self.overlap += verdict.overlap

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per drafted round, the target's own included (vLLM's definition)."""
        return 1 + self.num_accepted_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.decode_tokens / self.rounds if self.rounds else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def alpha(self) -> float | None:
        """Mean of sum min(p, q) over drafted positions whose drafted prefix was accepted (Leviathan et al. 2023,
        corollary 3.6)."""
        return self.overlap / self.tested if self.tested else None

    @property
    def match_rate(self) -> float | None:
        """The same positions' accepted share under the rule in use."""
        return self.matched / self.tested if self.tested else None

    @property
    def seconds(self) -> float | None:
        return self.end - self.start if self.end is not None else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens over decoding time: from the first token to the last."""
        if self.end is None or self.first_token is None or self.end <= self.first_token or not self.decode_tokens:
            return None
        return self.decode_tokens / (self.end - self.first_token)

    @property
    def time_to_first_token(self) -> float | None:
        return self.first_token - self.start if self.first_token is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Every count and rate."""
        rates = [name for name, value in vars(RequestMetrics).items() if isinstance(value, property)]
        return {name: getattr(self, name) for name in (*(item.name for item in fields(self)), *rates)}

    @classmethod
    def merged(cls, parts: list[RequestMetrics]) -> RequestMetrics:
        """One request's metrics from its n sequences; beams share one."""
        parts = list({id(part): part for part in parts}.values())
        if len(parts) == 1:
            return parts[0]
        total = cls(start=min(p.start for p in parts), synthetic=parts[0].synthetic)
        for part in parts:
            for name in ("rounds", "num_drafts", "num_draft_tokens", "num_accepted_draft_tokens", "tested", "matched",
                         "overlap", "decode_tokens", "preemptions", "num_cached_tokens"):  # fmt: skip
                setattr(total, name, getattr(total, name) + getattr(part, name))
            _add_counts(total.acceptance_histogram, part.acceptance_histogram)
            total.accepted_per_step += part.accepted_per_step
            total.drafted_per_step += part.drafted_per_step
            total.draft_error = total.draft_error or part.draft_error
        firsts = [p.first_token for p in parts if p.first_token is not None]
        ends = [p.end for p in parts if p.end is not None]
        total.first_token, total.end = min(firsts, default=None), max(ends, default=None)
        return total


SHORTEST = 6
"""Texts of up to two to this many tokens are counted together."""


def counted(metric: str, help: str) -> Any:
    """A count, with its name and help in the server's metrics."""
    return field(default=0, metadata={"metric": metric, "help": help})


@dataclass
class EngineStats:
    """Totals of an engine since it started; seconds by phase."""

    prompt_tokens: int = counted("prompt_tokens", "prompt tokens of accepted requests")
    generated_tokens: int = counted("generation_tokens", "emitted tokens")
    prefix_queries: int = counted("prefix_cache_queries", "prompt tokens looked up in the prefix cache")
    prefix_hits: int = counted("prefix_cache_hits", "prompt tokens found in the prefix cache")
    state_hits: int = counted("prefix_cache_state_hits", "requests that began with a kept state")
    prefix_reread: int = counted("prefix_cache_reread", "prompt tokens in known pages, read again: no state")
    preemptions: int = counted("num_preemptions", "times a sequence lost its pages")
    rounds: int = counted("num_rounds", "target forwards")
    num_drafts: int = counted("spec_decode_num_drafts", "rounds of a sequence that carried a draft")
    num_draft_tokens: int = counted("spec_decode_num_draft_tokens", "drafted tokens")
    num_accepted_tokens: int = counted("spec_decode_num_accepted_tokens", "drafted tokens that were accepted")
    accepted_per_pos: list[int] = field(default_factory=list)
    by_context: dict[int, list[int]] = field(default_factory=dict)
    """Drafts, drafted and accepted tokens by the length of the text drafted for, up to the key, a power of two."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    host_seconds: float = 0.0
    """Scheduling, stopping, detokenizing and publishing: a step outside the round."""
    synthetic: bool = False
    """Drafts are accepted at given rates, whatever their tokens."""
    threads: int = 0
    """CPU threads of the latest round."""

    def add(self, draft: Draft, verdict: Verdict, length: int) -> None:
        """Count what one sequence of ``length`` tokens got from a round."""
        self.generated_tokens += len(verdict.tokens)
        if not len(draft):
            return
        self.num_drafts += 1
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += verdict.accepted
        counts = self.by_context.setdefault(1 << max(SHORTEST, (length - 1).bit_length()), [0, 0, 0])
        counts[0] += 1
        counts[1] += len(draft)
        counts[2] += verdict.accepted
        self.accepted_per_pos.extend([0] * (verdict.accepted - len(self.accepted_per_pos)))
        for position in range(verdict.accepted):
            self.accepted_per_pos[position] += 1

    def include(self, part: EngineStats) -> None:
        """Add another engine's totals."""
        for name, theirs in vars(part).items():
            ours = getattr(self, name)
            if isinstance(ours, list):
                _add_counts(ours, theirs)
            elif isinstance(ours, dict):
                for key, counts in theirs.items():
                    _add_counts(ours.setdefault(key, []), counts)
            else:
                setattr(self, name, ours or theirs if isinstance(ours, bool) else ours + theirs)


def _add_counts(ours: list[int], theirs: list[int]) -> None:
    """Add counts by position; ``ours`` grows to as many."""
    ours.extend([0] * (len(theirs) - len(ours)))
    for index, count in enumerate(theirs):
        ours[index] += count


@dataclass(frozen=True)
class Snapshot:
    """``pages`` are the target's KV pages of ``page_size`` tokens, ``free_pages`` those that nobody's tokens need."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    page_size: int
    caches_prefixes: bool
    stats: EngineStats
    kept_states: int = 0
    """Layers' states that are kept for prompts that begin alike."""

    @property
    def usage(self) -> float:
        """Share of the pages in use, from 0 to 1."""
        return 1 - self.free_pages / self.pages

    @classmethod
    def merged(cls, parts: Iterable[Snapshot]) -> Snapshot:
        """Several engines of one kind as one."""
        several, stats = list(parts), EngineStats()
        for part in several:
            stats.include(part.stats)
        counted = ("running", "waiting", "pages", "free_pages", "kept_states")
        sums = {name: sum(getattr(part, name) for part in several) for name in counted}
        return replace(several[0], stats=stats, **sums)


ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one sequence.

    ``tokens`` were emitted, each of the kind beside it in ``origins``: accepted from the draft, corrected by the
    target (a draft was rejected there), bonus (the whole draft was accepted), plain (nothing was drafted).
    ``rejected`` holds what was drafted behind the kept tokens, in drafting order; alternatives to these are left out.
    """

    tokens: tuple[int, ...]
    origins: tuple[str, ...]
    rejected: tuple[int, ...]
    drafted: int
    method: str | None

    @classmethod
    def of(cls, draft: Draft, verdict: Verdict) -> RoundTrace:
        origins = [ACCEPTED] * verdict.accepted
        if len(verdict.tokens) > verdict.accepted:
            last = verdict.path[-1] if verdict.path else -1
            ended = not draft.children(last)
            origins.append(PLAIN if not len(draft) else BONUS if ended else CORRECTED)
        behind = {verdict.path[verdict.accepted - 1] if verdict.accepted else -1}
        rejected = []
        for node, parent in enumerate(draft.parents):
            if parent in behind:
                behind.add(node)
                rejected.append(draft.tokens[node])
        return cls(tuple(verdict.tokens), tuple(origins), tuple(rejected), len(draft), draft.method)
