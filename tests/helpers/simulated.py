"""A machine and a drafter that exist only as figures: what a length policy decides, played without a model."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import mul

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict, evidence
from forerun.models.run.base import MixtureInfo
from forerun.speculate.length import Seconds, Setting, policies
from forerun.speculate.length.adaptive import Adaptive
from forerun.speculate.length.base import Parts
from forerun.speculate.length.prices import Timed
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
    prices: tuple[float, ...] = ()
    """Cost of 1, 2, 3, ... rows over one row's, as measured; beyond them as between the last two. Replaces
    ``per_row``."""
    later: tuple[float, tuple[float, ...]] | None = None
    """From this second on, these ``prices``."""
    own_model: bool = False
    """The drafter has a model of its own."""
    looks_up: bool = False
    """Drafts are looked up: the policy says what of them is verified."""
    cold_penalty: float = 0.0
    """How much slower the target's first round after drafts is; later ones less and less."""
    thaws: float = 6.0
    """In how many rounds that falls to a third."""
    host: float = 0.0
    """What the policy takes to make a plan."""
    follows: float = 0.0
    """What the work for speculation takes for each sequence of a round that is not at rest, drafts or not."""
    keeps: float = 0.0
    """What it takes of a round at rest."""
    room: int = sys.maxsize
    """Requests for which there is room while prices are measured."""
    mixture: MixtureInfo | None = None
    again: float = 0.0
    """The share of experts that two rows have in common, of one text or of two."""
    per_expert: float = 0.0
    """Of all layers."""
    per_context: tuple[float, float] = (0.0, 0.0)
    """Of a token of context beyond 64: of a sequence, and of each further row."""

    def experts(self, rows):
        """That rows read, those of all layers."""
        if self.mixture is None:
            return 0.0
        count, chosen = self.mixture.count, self.mixture.chosen
        return self.mixture.layers * expected_experts(count, chosen, rows, self.again)

    def verify(self, sequences, rows, context=0.0):
        attention = context * (sequences * self.per_context[0] + (rows - sequences) * self.per_context[1])
        if self.prices:
            prices, beyond = self.prices, max(0, rows - len(self.prices))
            cost = prices[min(rows, len(prices)) - 1] + beyond * (prices[-1] - prices[-2])
            return 1e-3 * (self.base * cost + self.per_sequence * sequences + attention)
        padded = -(-rows // self.multiple) * self.multiple
        experts = self.per_expert * self.experts(padded)
        return 1e-3 * (self.base + self.per_sequence * sequences + self.per_row * padded + experts + attention)

    def drafting(self, sequences, levels, behind):
        if not sequences:
            return 0.0
        each, levels = self.per_level + self.per_draft_token * sequences, 1 if self.looks_up else levels
        return 1e-3 * (self.draft + each * levels + self.per_token_behind * behind)

    def following(self, policy, running):
        rest = getattr(policy, "_rest", None)
        rests = (rest and rest.resting) or all(sequence.drafter is None for sequence in running)
        return 1e-3 * (self.keeps if rests else self.follows) * len(running)

    def at(self, seconds):
        """Prices of this second."""
        if self.later is not None and seconds > self.later[0]:
            self.prices, self.later = self.later[1], None

    def disturb(self, draw, seconds):
        self.at(seconds)
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
    drafted: list[int] = field(default_factory=list)
    """Per round, drafted tokens."""
    emitted: list[int] = field(default_factory=list)
    """Per round, tokens."""
    works: list[tuple[float, float]] = field(default_factory=list)
    """Per round, ``work``, and ``plain_work`` of the tokens that its drafts bring on average."""

    kept: str | None = None
    """What the policy keeps for the next process."""

    @property
    def rounds(self):
        return len(self.emitted)

    @property
    def tokens(self):
        return sum(self.emitted)

    @property
    def speed(self):
        return self.tokens / self.seconds

    def slowest(self, rounds=200):
        """The least speed over plain decoding of any so many consecutive rounds."""
        sums = [(0.0, 0.0)]
        for work, plain in self.works:
            sums.append((sums[-1][0] + work, sums[-1][1] + plain))
        pairs = zip(sums, sums[rounds:])
        return min(((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs), default=sums[-1][1] / sums[-1][0])


class _Reader:
    """What a drafter has read of each sequence."""

    def __init__(self, machine):
        self.machine, self.until = machine, {}
        self.began = {}
        """By request: with how many last tokens it began; None: with all."""

    def lag(self, sequence):
        if not self.machine.per_token_behind:  # it reads nothing that costs
            return 0
        if sequence.reads is None and self.began.get(sequence.id) is not None:
            return len(sequence.tokens)
        return len(sequence.tokens) - self.until.get(sequence.id, 0)

    def reads(self, sequence):
        """Tokens that it reads before it drafts."""
        window = None if sequence.id in self.until or not _models(self.machine) else sequence.reads
        behind = min(self.lag(sequence), window or sys.maxsize)
        if window is not None or sequence.reads is None:
            self.began[sequence.id] = sequence.reads
        self.until[sequence.id] = len(sequence.tokens)
        return behind

    def follows(self, sequence, tokens):
        if sequence.id in self.until:
            self.until[sequence.id] += tokens


def play(
    machine, policy, count, accepts, *, depth=3, length=64, requests=0, prompt=64, exists=1.0, windowed=1.0, seed=0,
    ends=lambda request: sys.maxsize, kept=None,
):  # fmt: skip
    """Decode ``requests`` (0: ``count``) answers of ``length`` tokens, ``count`` at a time.

    ``accepts(request, position)`` is the chance that the draft of a position is accepted; a draft is made at all with
    chance ``exists``. Where a drafter began with the last tokens, ``windowed`` multiplies the chances. ``policy`` None:
    plain decoding. ``ends(request)``: after how many tokens the model ends an answer by itself. ``kept``: what the
    policy of an earlier process has kept.
    """
    draw, result, silent = random.Random(seed), Play(), 99
    reader = _Reader(machine)

    def accepted(request, position):
        return accepts(request, position) * (1.0 if reader.began.get(request) is None else windowed)

    def over(sequence):
        return not sequence.remaining or sequence.num_output >= ends(sequence.id)

    ticks = itertools.count()
    decides = _policy(machine, policy, depth, reader.lag, draw, ticks)
    if kept is not None:
        decides.restore(json.loads(kept))
    todo = [_request(i, prompt, length, policy) for i in range(max(requests, count))][::-1]
    running = []
    while todo or running:
        while todo and len(running) < count:
            running.append(todo.pop())
        for sequence in running:
            sequence.scheduled, sequence.num_computed_tokens = 1, len(sequence.tokens) - 1
        before = next(ticks)
        budgets = decides.budgets(running)
        following = machine.following(decides, running)
        host = 1e-3 * machine.host * (next(ticks) > before + 1) + following
        drafting = [i for i, budget in enumerate(budgets) if budget]
        behind = sum(reader.reads(running[i]) for i in drafting)
        drafts = [
            _draft(s, budget if draw.random() < exists else 0, accepted, draw) for s, budget in zip(running, budgets)
        ]
        for draft in drafts:
            draft.method = "m"
            draft.evidence = [evidence(3 + index, 0.9) for index in range(len(draft))] if machine.looks_up else []
        if machine.looks_up:
            drafts = [d.cut(s.worth(d)) if len(d) and s.worth else d for s, d in zip(running, drafts)]
        verdicts = [_verdict(s, draft, ends(s.id) - s.num_output) for s, draft in zip(running, drafts)]
        rows = len(running) + sum(len(draft) for draft in drafts)
        silent = 0 if drafting and not machine.looks_up else silent + 1  # a look-up leaves the caches alone
        cold = 1.0 + (machine.cold_penalty * math.exp((1 - silent) / machine.thaws) if silent else 0.0)
        context = max(0.0, sum(len(sequence.tokens) for sequence in running) / len(running) - 64)
        verify = machine.verify(len(running), rows, context)
        work = machine.drafting(len(drafting), max(budgets), behind), cold * verify
        slow = machine.disturb(draw, result.seconds)
        parts = slow * work[0], slow * work[1]
        result.work += sum(work) + host
        emitted = sum(len(verdict.tokens) for verdict in verdicts)
        plain = emitted * machine.verify(len(running), len(running), context) / len(running)
        result.plain_work += plain
        expected = sum(_expected(sequence, draft, accepted) for sequence, draft in zip(running, drafts))
        result.works.append((sum(work) + host, expected * plain / emitted))
        for sequence, verdict in zip(running, verdicts):
            sequence.tokens.extend(verdict.tokens)
            reader.follows(sequence, len(verdict.tokens))
        decides.observe(running, drafts, verdicts, Seconds(*parts, 0.0, round(machine.experts(rows))))
        decides.observe_host(slow * following)
        result.seconds += sum(parts)
        result.emitted.append(emitted)
        result.drafted.append(rows - len(running))
        for sequence in filter(over, running):
            decides.release(sequence)
        running = [sequence for sequence in running if not over(sequence)]
    result.kept = json.dumps(decides.state()) if policy == "adaptive" else None
    return result


def _models(machine):
    """The methods with a model of their own, which may begin with the last tokens of a text; a head reads all."""
    return frozenset({"m"} if machine.own_model or machine.per_token_behind > 1.0 else ())


def _policy(machine, policy, depth, lag, draw, ticks):
    models = _models(machine)

    @contextmanager
    def trials(sequences):
        def time_round(method, deep, rows, long=False):
            if long and not any(machine.per_context):
                return Timed(rows, deep, 0.0, 0.0)  # no room
            slow, total = machine.disturb(draw, 0.0), sequences * rows
            asks = method is not None and (deep or machine.looks_up)
            drafting = machine.drafting(sequences if asks else 0, max(deep, 1), 0)
            verify, experts = machine.verify(sequences, total, 2048 * long), round(machine.experts(total))
            return Timed(total, deep, max(1e-9, slow * drafting), slow * verify, experts, 2048 * long)

        yield (time_round, {"m": 1e-3 * machine.per_token_behind}) if sequences <= machine.room else None

    nodes, parts = {"m": list(range(depth + 1))}, {"m": Parts(("m",), None)} if machine.looks_up else {}
    setting = Setting(nodes, machine.multiple, lag, models, models, machine.mixture, parts, trials)
    decides = policies[policy or "fixed"](setting)
    if isinstance(decides, Adaptive):
        decides.clock = lambda: next(ticks) * 1e-3 * machine.host
        decides.prices.clock = lambda: 0.0
    return decides


def _request(number, prompt, length, policy):
    params = SamplingParams(max_tokens=length)
    sequence = RequestState(number, [0] * (prompt + 1), prompt, params, seed=0, max_tokens=prompt + length)
    sequence.drafter = "m" if policy is not None else None
    return sequence


def _expected(sequence, draft, accepts):
    """Tokens that a draft brings on average, at most those that the answer still gets."""
    chances = itertools.accumulate((accepts(sequence.id, sequence.num_output + d) for d in range(len(draft))), mul)
    return min(1.0 + sum(chances), sequence.remaining)


def _draft(sequence, depth, accepts, draw):
    """A chain whose tokens are right (0) up to the first that is wrong (1)."""
    tokens = []
    for index in range(depth):
        right = (not tokens or tokens[-1] == 0) and draw.random() < accepts(sequence.id, sequence.num_output + index)
        tokens.append(0 if right else 1)
    return Draft.chain(tokens)


def _verdict(sequence, draft, left):
    matched = draft.tokens.index(1) if 1 in draft.tokens else len(draft)
    verdict = Verdict(path=list(range(matched)), token=0, fed=1)
    verdict.tested = min(matched + 1, len(draft))
    wrong = draft.shadow is not None and draft.shadow.depth == matched and draft.shadow.token == 1
    after = 2 if wrong or matched < len(draft) else 0
    verdict.tokens = ([0] * matched + [after])[: min(sequence.remaining, left)]
    return verdict


def gpu(count, **costs):
    """An H100 with a model of 1.5B in bfloat16 and ``count`` streams, by what a prototype measured: rows are nearly
    free up to sixteen; beyond, every tile of sixteen reads the weights again."""

    def price(rows):
        return 1.0 + 0.02 * (min(rows, 5) - 1) + 0.02 * max(0, min(rows, 16) - 5) / 11 + 0.0115 * max(0, rows - 16)

    usual = {"base": 1.9, "per_sequence": 0.005, "per_draft_token": 0.0, "multiple": 1, "spikes": 0.005}
    prices = tuple(map(price, range(1, 5 * count + 2)))
    return Machine(**{**usual, "host": 0.05 + 0.012 * count, "prices": prices, **costs})


GPU_DRAFTS = {
    "head": {"draft": 0.15, "per_level": 0.1, "per_token_behind": 0.0005},
    "model": {"draft": 0.3, "per_level": 0.9, "per_token_behind": 0.005, "own_model": True},
    "lookup": {
        "draft": 0.02, "per_draft_token": 0.012, "per_level": 0.0, "per_token_behind": 0.0, "looks_up": True,
    },
}  # fmt: skip
"""A layer, half of the target's layers, and look-ups on the host."""
