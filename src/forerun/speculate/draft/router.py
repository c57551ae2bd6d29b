"""Routes each sequence of a round to the drafter that its request chose."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forerun.cache.pool import Pool
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.models.run.base import Model
from forerun.speculate.draft.base import DraftContext, Drafter
from forerun.speculate.verify import Verification

log = logging.getLogger("forerun")
TOLERANCE = 1e-2
"""By how much the sum of a row of q may differ from 1: it may be of half precision."""


class Router:
    """Several drafters behind one ``propose``.

    If a drafter raises, its sequences decode plainly from then on. ``failures`` has the reason by sequence id, and the
    error is logged.
    """

    def __init__(self, drafters: Mapping[str, Drafter[Any]]) -> None:
        self.drafters = dict(drafters)
        self.failures: dict[int, str] = {}
        self._watching = [
            name
            for name, drafter in self.drafters.items()
            if drafter.watches and getattr(drafter.observe, "__func__", None) is not Drafter.observe
        ]
        self._asked: list[str] = []
        """Names of the drafters asked for drafts in this round."""

    @property
    def hidden(self) -> tuple[int, ...]:
        return tuple(sorted({layer for drafter in self.drafters.values() for layer in drafter.needs.hidden}))

    def _groups(self, sequences: Requests) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for index, sequence in enumerate(sequences):
            if sequence.drafter is not None:
                groups.setdefault(sequence.drafter, []).append(index)
        return groups

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft() for _ in sequences]
        self._asked = []
        if len(budgets) != len(sequences):
            raise ValueError(f"a length policy returned {len(budgets)} budgets for {len(sequences)} sequences")
        if not any(budgets):
            return drafts
        for name, indices in self._groups(sequences).items():
            drafter = self.drafters[name]
            asked = [(i, budgets[i]) for i in indices if budgets[i] > 0]
            if not asked:
                continue
            self._asked.append(name)
            chosen, lengths = [sequences[i] for i, _ in asked], [len(sequences[i].tokens) for i, _ in asked]
            try:
                proposed = drafter.propose(chosen, [budget for _, budget in asked])
                if [len(sequence.tokens) for sequence in chosen] != lengths:
                    raise ValueError("the drafter changed sequence.tokens, the request's own list: draft on a copy")
                _check(proposed, chosen, [budget for _, budget in asked], drafter.context)
            except Exception as error:  # noqa: BLE001 - a drafter is a plug-in; its requests must survive it
                for sequence, length in zip(chosen, lengths):
                    del sequence.tokens[length:]
                self._fail(drafter, [sequences[i] for i in indices], error)
                continue
            for (i, _), draft in zip(asked, proposed, strict=True):
                draft.method = draft.method or name
                worth = sequences[i].worth
                drafts[i] = draft.cut(worth(draft)) if worth and draft.evidence and drafter.has_evidence else draft
        return drafts

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        if not self._watching and not self._asked:
            return
        for name, indices in self._groups(sequences).items():
            if name not in self._watching and name not in self._asked:
                continue
            drafter = self.drafters[name]
            chosen = [sequences[i] for i in indices]
            try:
                drafter.observe(chosen, [drafts[i] for i in indices], [verdicts[i] for i in indices], result)
            except Exception as error:  # noqa: BLE001 - as in propose
                self._fail(drafter, chosen, error)

    def _fail(self, drafter: Drafter[Any], sequences: Requests, error: Exception) -> None:
        log.error("drafter %s failed; its requests go on without speculation", drafter.name, exc_info=error)
        for sequence in sequences:
            self.failures[sequence.id] = f"{type(error).__name__}: {error}"
            sequence.drafter = None
            _release(drafter, sequence)
        for pool in drafter.pools():
            pool.scrub()  # a state may be half that of another token

    def pools(self) -> list[Pool]:
        return [pool for drafter in self.drafters.values() for pool in drafter.pools()]

    def models(self) -> list[Model]:
        return [model for drafter in self.drafters.values() for model in drafter.models()]

    def backlog(self, sequence: RequestState) -> int:
        """See ``Drafter.backlog``."""
        return 0 if sequence.drafter is None else self.drafters[sequence.drafter].backlog(sequence)

    def close(self) -> None:
        for drafter in self.drafters.values():
            drafter.close()

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """See ``Drafter.fork``."""
        if source.id in self.failures:
            self.failures[sequence.id] = self.failures[source.id]
        if source.drafter is None:
            return
        drafter = self.drafters[source.drafter]
        try:
            drafter.fork(source, sequence)
        except Exception as error:  # noqa: BLE001 - as in propose
            self._fail(drafter, [source, sequence], error)

    def release(self, sequence: RequestState) -> None:
        for drafter in self.drafters.values():
            _release(drafter, sequence)


def _release(drafter: Drafter[Any], sequence: RequestState) -> None:
    try:
        drafter.release(sequence)
    except Exception as error:  # a drafter is a plug-in; no request waits for what it forgets
        log.error("drafter %s failed to release a request", drafter.name, exc_info=error)


def _check(drafts: Drafts, sequences: Requests, budgets: Sequence[int], context: DraftContext) -> None:
    """Raises ValueError for drafts that cannot be verified, or that would change what the target says."""
    if len(drafts) != len(sequences):
        raise ValueError(f"{len(drafts)} drafts for {len(sequences)} sequences")
    vocab_size, rule = context.sampler.vocab_size, context.rule
    drawn: dict[int, tuple[torch.Tensor, set[int]]] = {}
    for draft, sequence, budget in zip(drafts, sequences, budgets):
        if not len(draft):
            continue
        rows = draft.check()
        if draft.depth > budget:
            raise ValueError(f"a draft of depth {draft.depth} for a budget of {budget}")
        if sequence.draft_budget is not None and len(draft) > sequence.draft_budget:
            raise ValueError(f"a draft of {len(draft)} nodes where nodes_by_depth says {sequence.draft_budget} at most")
        if draft.late is None and (min(draft.ids) < 0 or max(draft.ids) >= vocab_size):
            raise ValueError(f"a drafted token is outside the vocabulary of {vocab_size}")
        if not rule.trees and not draft.is_chain:
            raise ValueError(f"a draft that branches, where accept={rule.name!r} supports chains only")
        if rows and draft.q is not None:
            drawn.setdefault(id(draft.q), (draft.q, set()))[1].update(rows)
    for q, rows in drawn.values():
        _check_q(q, rows, vocab_size, compared=rule.needs_q)


def _check_q(q: torch.Tensor, rows: set[int], vocab_size: int, *, compared: bool) -> None:
    """Raises ValueError unless these rows of q are there and, if they are ``compared`` with p, are distributions."""
    count, width = q.shape if q.dim() == 2 else (0, 0)
    if width != vocab_size or not q.is_floating_point():
        raise ValueError(f"q is [rows, {vocab_size}] of floats, not {[*q.shape]} of {q.dtype}")
    if min(rows) < 0 or max(rows) >= count:
        raise ValueError(f"a token was drawn from row {max(rows)} of a q of {count} rows")
    if not compared or not q.is_cpu:  # nobody waits for a GPU's
        return
    chosen = (q if len(rows) == count else q[sorted(rows)]).float()
    sums = chosen.sum(dim=1).tolist()
    if not (chosen.min().item() >= 0 and all(abs(each - 1) <= TOLERANCE for each in sums)):  # also for NaN
        raise ValueError("each row of q must be probabilities that add up to 1")
