"""A machine and a drafter that exist only as figures: what a length policy decides, played without a model."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.models.base import MixtureInfo
from forerun.speculate.length import Seconds, Setting, policies
from forerun.speculate.length.adaptive import Adaptive
from forerun.theory import expected_experts


@dataclass
class Machine:
    """Prices in milliseconds. ``slow(seconds)`` multiplies everything at that time."""

    base: float = 3.6
    per_sequence: float = 0.11
    per_row: float = 0.19
    draft: float = 0.45
    per_level: float = 0.5
    per_draft_token: float = 0.1
    per_token_behind: float = 0.025
    jitter: float = 0.03
    spikes: float = 0.01
    """Share of rounds that take three times as long."""
    slow: Callable[[int], float] = lambda seconds: 1.0
    multiple: int = 2
    cold_penalty: float = 0.0
    """How much slower the target's first round after drafts is; later ones less and less."""
    thaws: float = 6.0
    """In how many rounds that falls to a third."""
    host: float = 0.0
    """What the policy and the drafter's bookkeeping take in a round with drafts."""
    mixture: MixtureInfo | None = None
    again: float = 0.0
    """The share of experts that two rows have in common, of one text or of two."""
    per_expert: float = 0.0
    """Of all layers."""

    def experts(self, rows):
        """That rows read, those of all layers."""
        if self.mixture is None:
            return 0.0
        count, chosen = self.mixture.count, self.mixture.chosen
        return self.mixture.layers * expected_experts(count, chosen, rows, self.again)

    def verify(self, sequences, rows):
        padded = -(-rows // self.multiple) * self.multiple
        experts = self.per_expert * self.experts(padded)
        return 1e-3 * (self.base + self.per_sequence * sequences + self.per_row * padded + experts)

    def drafting(self, sequences, levels, behind):
        if not sequences:
            return 0.0
        each = self.per_level + self.per_draft_token * sequences
        return 1e-3 * (self.draft + each * levels + self.per_token_behind * behind)

    def disturb(self, draw, seconds):
        spike = 3.0 if draw.random() < self.spikes else 1.0
        return self.slow(seconds) * spike * math.exp(self.jitter * draw.gauss(0.0, 1.0))


@dataclass
class Play:
    """Tokens and seconds of a run, and what it drafted."""

    seconds: float = 0.0
    work: float = 0.0
    """Seconds that it would have taken on a machine that nothing disturbs."""
    plain_work: float = 0.0
    """The same if each token had come from a plain round of as many sequences."""
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    """Per round, drafted tokens."""
    emitted: list[int] = field(default_factory=list)
    """Per round, tokens."""

    @property
    def tokens(self):
        return sum(self.emitted)

    @property
    def speed(self):
        return self.tokens / self.seconds


def play(
    machine, policy, count, accepts, *, depth=3, length=64, requests=0, prompt=64, exists=1.0, windowed=1.0, seed=0
):
    """Decode ``requests`` (0: ``count``) answers of ``length`` tokens, ``count`` at a time.

    ``accepts(request, position)`` is the chance that the draft of a position is accepted; a draft is made at all with
    chance ``exists``. Where a drafter began with the last tokens, ``windowed`` multiplies the chances. ``policy`` None:
    plain decoding.
    """
    draw = random.Random(seed)
    result, silent = Play(), 99
    drawn_until = {}
    began = {}

    def accepted(request, position):
        return accepts(request, position) * (1.0 if began.get(request) is None else windowed)

    def lag(sequence):
        if not machine.per_token_behind:  # it reads nothing that costs
            return 0
        if sequence.reads is None and began.get(sequence.id) is not None:
            return len(sequence.tokens)
        return len(sequence.tokens) - drawn_until.get(sequence.id, 0)

    decides = _policy(machine, policy, depth, lag)
    todo = [_request(i, prompt, length, policy) for i in range(max(requests, count))][::-1]
    running = []
    while todo or running:
        while todo and len(running) < count:
            running.append(todo.pop())
        for sequence in running:
            sequence.scheduled, sequence.num_computed_tokens = 1, len(sequence.tokens) - 1
        budgets = decides.budgets(running)
        drafting = [i for i, budget in enumerate(budgets) if budget]
        behind = 0
        for i in drafting:
            window = None if running[i].id in drawn_until else running[i].reads
            behind += min(lag(running[i]), window or sys.maxsize)
            if window is not None or running[i].reads is None:
                began[running[i].id] = running[i].reads
            drawn_until[running[i].id] = len(running[i].tokens)
        drafts = [Draft.chain([0] * budget if draw.random() < exists else []) for budget in budgets]
        verdicts = [_verdict(sequence, draft, accepted, draw) for sequence, draft in zip(running, drafts)]
        rows = len(running) + sum(len(draft) for draft in drafts)
        silent = 0 if drafting else silent + 1
        cold = 1.0 + (machine.cold_penalty * math.exp((1 - silent) / machine.thaws) if silent else 0.0)
        work = machine.drafting(len(drafting), max(budgets), behind), cold * machine.verify(len(running), rows)
        slow = machine.disturb(draw, result.seconds)
        parts = slow * work[0], slow * work[1]
        result.work += sum(work) + (1e-3 * machine.host if drafting else 0.0)
        emitted = sum(len(verdict.tokens) for verdict in verdicts)
        result.plain_work += emitted * machine.verify(len(running), len(running)) / len(running)
        for sequence, verdict in zip(running, verdicts):
            sequence.tokens.extend(verdict.tokens)
            if sequence.id in drawn_until:
                drawn_until[sequence.id] += len(verdict.tokens)
        decides.observe(running, drafts, verdicts, Seconds(*parts, 0.0, round(machine.experts(rows))))
        result.seconds += sum(parts)
        result.emitted.append(emitted)
        result.rounds += 1
        result.drafted.append(rows - len(running))
        for sequence in running:
            if not sequence.remaining:
                decides.release(sequence)
        running = [sequence for sequence in running if sequence.remaining]
    return result


def _policy(machine, policy, depth, lag):
    models = frozenset({"m"} if machine.per_token_behind > 1.0 else ())
    setting = Setting({"m": list(range(depth + 1))}, machine.multiple, lag, models, machine.mixture)
    decides = policies[policy or "fixed"](setting)
    ticks = itertools.count()
    if isinstance(decides, Adaptive):
        decides.clock = lambda: next(ticks) * 0.5e-3 * machine.host
    return decides


def _request(number, prompt, length, policy):
    params = SamplingParams(max_tokens=length)
    sequence = RequestState(number, [0] * (prompt + 1), prompt, params, seed=0, max_tokens=prompt + length)
    sequence.drafter = "m" if policy is not None else None
    return sequence


def _verdict(sequence, draft, accepts, draw):
    matched = 0
    while matched < len(draft) and draw.random() < accepts(sequence.id, sequence.num_output + matched):
        matched += 1
    verdict = Verdict(path=list(range(matched)), token=0, fed=1)
    verdict.tested = min(matched + 1, len(draft))
    verdict.tokens = [0] * min(matched + 1, sequence.remaining)
    return verdict
