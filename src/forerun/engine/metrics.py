"""Metrics of requests and of the engine, snapshots of its state, and traces of rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from forerun.core.tree import Draft, Verdict


@dataclass
class RequestMetrics:
    """Counts of one request; rates are None where nothing was drafted."""

    rounds: int = 0
    """Target forwards that decoded for this request, without prefill."""
    num_drafts: int = 0
    """Rounds with a draft."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_prediction_tokens: int = 0
    """Tokens that were looked up in a request's prediction and text."""
    num_accepted_prediction_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry j: how many drafts had exactly j tokens accepted."""
    accepted_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    """Both have an entry for each round with a draft."""
    tested: int = 0
    """Drafted positions whose drafted prefix was accepted."""
    matched: int = 0
    """Those that were accepted."""
    overlap: float = 0.0
    """Sum of sum min(p, q) over the tested positions."""
    decode_tokens: int = 0
    """Tokens emitted by ``rounds``."""
    start: float = 0.0
    first_token: float | None = None
    end: float | None = None
    draft_error: str | None = None
    """Why the drafter failed, if it did; the request went on with plain decoding."""
    preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens from the prefix cache."""
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
        self.acceptance_histogram.extend([0] * (verdict.accepted + 1 - len(self.acceptance_histogram)))
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
        """Mean of sum min(p, q) over the tested positions (Leviathan et al. 2023, corollary 3.6)."""
        return self.overlap / self.tested if self.tested else None

    @property
    def match_rate(self) -> float | None:
        """Fraction of the tested positions that the rule accepted."""
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
        total = cls(start=min(part.start for part in parts), synthetic=parts[0].synthetic)
        for part in parts:
            for name, value in vars(part).items():
                if name == "acceptance_histogram":
                    _add_counts(total.acceptance_histogram, value)
                elif name not in ("start", "first_token", "end", "draft_error", "synthetic"):
                    setattr(total, name, getattr(total, name) + value)
        total.draft_error = next(filter(None, [part.draft_error for part in parts]), None)
        total.first_token = min((p.first_token for p in parts if p.first_token is not None), default=None)
        total.end = max((part.end for part in parts if part.end is not None), default=None)
        return total


SHORTEST = 6
"""Sequences of up to 2 ** SHORTEST tokens are counted together."""


def counted(metric: str, help: str) -> Any:
    """A count with its name and help on the server's metrics page."""
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
    """Drafts, drafted tokens and accepted tokens by context length; a key is an upper bound, a power of two."""
    by_drafter: dict[str, list[int]] = field(default_factory=dict)
    """The same by the method that drafted."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    host_seconds: float = 0.0
    """A step's time outside the round: scheduling, stopping, detokenizing and publishing."""
    synthetic: bool = False
    """Drafts are accepted at given rates, whatever their tokens."""
    threads: int = 0
    """CPU threads of the latest round."""

    def add(self, draft: Draft, verdict: Verdict, length: int) -> None:
        """Counts one sequence's round; ``length`` is its number of tokens before it."""
        self.generated_tokens += len(verdict.tokens)
        if not len(draft):
            return
        self.num_drafts += 1
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += verdict.accepted
        counts = [self.by_context.setdefault(1 << max(SHORTEST, (length - 1).bit_length()), [0, 0, 0])]
        if draft.method is not None:
            counts.append(self.by_drafter.setdefault(draft.method, [0, 0, 0]))
        for each in counts:
            each[0], each[1], each[2] = each[0] + 1, each[1] + len(draft), each[2] + verdict.accepted
        self.accepted_per_pos.extend([0] * (verdict.accepted - len(self.accepted_per_pos)))
        for position in range(verdict.accepted):
            self.accepted_per_pos[position] += 1

    def include(self, part: EngineStats) -> None:
        """Adds another engine's totals."""
        for name, value in vars(part).items():
            total = getattr(self, name)
            if isinstance(total, list):
                _add_counts(total, value)
            elif isinstance(total, dict):
                for key, counts in list(value.items()):  # another thread may add a key
                    _add_counts(total.setdefault(key, []), counts)
            else:
                setattr(self, name, total or value if isinstance(total, bool) else total + value)


def _add_counts(total: list[int], counts: list[int]) -> None:
    """Adds ``counts`` to ``total`` by position; ``total`` grows to their length."""
    total[:] = map(sum, zip_longest(total, counts, fillvalue=0))


@dataclass(frozen=True)
class Snapshot:
    """An engine's state. ``pages`` are the target's KV pages, ``free_pages`` those that no sequence needs."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    page_size: int
    caches_prefixes: bool
    stats: EngineStats
    kept_states: int = 0
    """Recurrent states in the prefix cache."""

    @property
    def usage(self) -> float:
        """Fraction of the pages in use, from 0 to 1."""
        return 1 - self.free_pages / self.pages

    @classmethod
    def merged(cls, parts: Iterable[Snapshot]) -> Snapshot:
        """The sum of several engines of one kind."""
        several, stats = list(parts), EngineStats()
        for part in several:
            stats.include(part.stats)
        names = ("running", "waiting", "pages", "free_pages", "kept_states")
        sums = {name: sum(getattr(part, name) for part in several) for name in names}
        return replace(several[0], stats=stats, **sums)


ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one sequence.

    ``origins`` says of each emitted token whether it was accepted from the draft, corrected by the target (a drafted
    token was rejected there), bonus (the whole draft was accepted), or plain (nothing was drafted). ``rejected`` are
    the drafted tokens after the accepted ones, in drafting order; alternatives to the accepted ones are left out.
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
            ended = not draft.children(verdict.path[-1] if verdict.path else -1)
            origins.append(PLAIN if not len(draft) else BONUS if ended else CORRECTED)
        subtree = {verdict.path[verdict.accepted - 1] if verdict.accepted else -1}
        rejected = []
        for node, parent in enumerate(draft.parents):
            if parent in subtree:
                subtree.add(node)
                rejected.append(draft.tokens[node])
        return cls(tuple(verdict.tokens), tuple(origins), tuple(rejected), len(draft), draft.method)
