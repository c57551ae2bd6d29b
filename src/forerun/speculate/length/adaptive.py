"""``adaptive``: each sequence drafts as far as recent acceptance and measured cost say it pays, 0 included.

The budgets maximise the expected tokens per second of the coming rounds: positions are admitted in the order of their
chance of being reached and accepted, and the best of all prefixes of that order is taken (the scheduler of DSpark,
deepseek-ai/DeepSpec, algorithm 1). They depend on earlier rounds alone, so rules that compare p with q stay exact.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log
from operator import mul
from time import perf_counter
from typing import Any, NamedTuple

from forerun.core.request import Requests, RequestState
from forerun.core.tree import Drafts, Verdicts
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting, policies
from forerun.speculate.length.costs import Costs, Drafted


class AnswerLengths:
    """The lengths of recent answers, from which it predicts how long a running one goes on.

    The prior is a Lomax distribution of shape 1: half of the answers are longer than ``HALF`` tokens. It counts as much
    as ``WEIGHT`` answers.
    """

    HALF = 32
    WEIGHT = 4.0

    def __init__(self) -> None:
        self.seen: deque[int] = deque(maxlen=64)

    def expected_remaining(self, sequence: RequestState) -> float:
        """Expected number of tokens that this answer still gets."""
        so_far, most = sequence.num_output, sequence.remaining
        start = self.HALF + so_far
        prior = start * log((start + most) / start) if most > 0 else 0.0
        longer = [min(length - so_far, most) for length in self.seen if length > so_far]
        return (self.WEIGHT * prior + sum(longer)) / (self.WEIGHT + len(longer))


class DraftRecord(NamedTuple):
    """What became of the draft of one sequence; lengths are depths."""

    sequence: int
    """Its id."""
    method: str
    reads: int | None
    """``RequestState.reads`` at that time."""
    requested: int
    drafted: int
    accepted: int
    nodes: int


class RoundRecord(NamedTuple):
    """A round with drafts that the policy has not learnt from yet. ``draft`` and ``verify`` are seconds."""

    drafts: list[DraftRecord]
    sequences: int
    rows: int
    tokens: int
    draft: float
    verify: float
    backlog: dict[str, int]
    """By method, committed tokens that drafters had to read first."""
    measured: bool
    """False while a sequence reads its prompt: such a round says nothing about costs."""
    experts: int


@dataclass
class DraftPlan:
    """The draft length of each sequence for some rounds."""

    budgets: Mapping[int, int] = field(default_factory=dict)
    """Depth by the id of the sequence; empty: plain rounds."""
    rounds_left: int = 0
    speedup: float = 1.0
    """Expected speed over plain decoding."""
    sequences: frozenset[int] = frozenset()
    """Ids of the sequences that the plan covers."""
    expected_tokens: float = 0.0
    """Expected tokens of a round, all sequences together."""
    surplus: float = 0.0
    """Tokens beyond the expected ones in the ``rounds`` so far; negative if there were fewer."""
    rounds: int = 0

    def falls_short(self, tokens: int) -> bool:
        """Count a round with so many tokens. True if the rounds bring so much less than expected that the plan ends."""
        self.rounds += 1
        self.surplus += tokens - self.expected_tokens
        return self.rounds >= 6 and self.surplus < -0.3 * self.rounds * self.expected_tokens


@policies.register("adaptive")
class Adaptive(LengthPolicy):
    """Drafts as deep as the expected speed is best, and bounds what wrong estimates may cost.

    The bound is a balance in units of plain rounds. Plain rounds and accepted tokens add to it, rounds with drafts
    subtract their cost. Drafting stops when the balance is used up.
    """

    reproducible = False
    MARGIN, KEEP_MARGIN = 1.06, 1.03
    """The expected speedup that a plan needs to start, and to be renewed."""
    ROUNDS = 32
    """Most rounds of one plan with drafts."""
    TRIAL = 3
    """Rounds of a trial."""
    CREDIT = 0.005
    """What a plain round adds to the balance."""
    FIRST_BALANCE = 0.8
    """The balance at the start, up to which plain rounds fill it. It pays for a trial."""
    MOST_BALANCE = 12.0
    LEAST_BALANCE = -0.5
    """The balance that ends drafting."""
    MODEL_RATE, MODEL_WEIGHT, MODEL_BALANCE = 0.7, 8.0, 3.0
    """For draft models: the prior acceptance rate, its weight in drafts, and the first balance. Their drafts cost more
    than a lookup does."""
    WAITS = (16, 64)
    """Plain rounds before the next trial: at first, and at most. A trial without success doubles them."""
    CHECK = 3
    """Plain rounds that measure the machine's speed. The first one after drafts is slower, as it finds cold caches."""
    CHECKS = (16, 256)
    """Rounds with drafts between two such checks: at first, and at most."""
    LONGEST_PAUSE = 256
    """Most plain rounds before a new plan."""
    TRIAL_WEIGHT = 6.0
    """Most drafts that old evidence about a method weighs when a trial starts, so that new results count."""
    OWN_WEIGHT, OWN_FADE, OWN_TRIAL_WEIGHT = 8.0, 0.93, 2.0
    """Evidence about a single sequence: the weight of its method's rates, decay per draft, most weight in a trial."""
    DEEPEST_AFTER = 64
    """Rounds after which the deepest drafts are tried again. Each time doubles it."""
    WINDOWS = (64, 128, 256)
    """A drafter may start from the last so many tokens, if its backlog is at least twice as long."""
    CHEAP_READS = 2.0
    """In a batch, what reading may cost in tokens of one sequence without a gain: only drafts show whether it pays."""
    WINDOW_LOSS = 24.0
    """A drafter that reads the last n tokens keeps n / (n + WINDOW_LOSS) of each rate (at 128: 0.83 to 0.89)."""
    clock = staticmethod(perf_counter)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.methods = tuple(setting.nodes)
        """Those whose acceptance is saved."""
        self.costs = Costs(setting.nodes, setting.row_multiple, setting.mixture)
        self.by_method: dict[tuple[str, int | None], Acceptance] = {
            (method, None): Acceptance(
                len(nodes) - 1, *((self.MODEL_WEIGHT, 0.95, self.MODEL_RATE) if method in setting.models else ())
            )
            for method, nodes in setting.nodes.items()
        }
        """By method and window: the tokens that a drafter started from; None: all of them."""
        self.by_sequence: dict[int, Acceptance] = {}
        self.lengths = AnswerLengths()
        self.balance = self.MODEL_BALANCE if setting.models else self.FIRST_BALANCE
        self._plan = DraftPlan()
        self._records: list[RoundRecord] = []
        self._budgets: list[int] = []
        self._backlogs: dict[str, int] = {}
        self._plain_rounds = 0
        """Plain rounds since the last one with drafts."""
        self._uncredited = 0
        """Plain rounds that the balance has not been credited with."""
        self._since_check = 0
        """Rounds with drafts since the last check."""
        self._check_after = self.CHECKS[0]
        self._wait, self._next_wait = 0, self.WAITS[0]
        self._until_deepest, self._next_until_deepest = self.DEEPEST_AFTER, 2 * self.DEEPEST_AFTER
        self._own_seconds = 0.0
        """Seconds that planning took and that were not charged yet."""

    def add(self, method: str, nodes: Sequence[int]) -> None:
        """What is learnt of it is not saved."""
        super().add(method, nodes)
        self.by_method[method, None] = Acceptance(len(nodes) - 1)
        self.costs.reading[method] = deque(maxlen=5)

    def longest_nodes(self, sequence: RequestState) -> int:
        """At most the plan's budget, so that no rows and pages are reserved in vain."""
        plan = self._plan
        if sequence.drafter is None or (plan.rounds_left and not plan.budgets and sequence.id in plan.sequences):
            return 0
        depth = self.longest(sequence)
        if plan.rounds_left:
            depth = min(depth, plan.budgets.get(sequence.id, depth))
        return self.setting.nodes[sequence.drafter][depth]

    def budgets(self, sequences: Requests) -> list[int]:
        plan = self._plan
        if (
            plan.rounds_left
            and not plan.budgets
            and not plan.sequences.isdisjoint([sequence.id for sequence in sequences])
        ):
            plan.rounds_left -= 1
            self._budgets = [0] * len(sequences)
            return self._budgets
        longest = [self.longest(sequence) for sequence in sequences]
        if any(longest):
            if not plan.rounds_left or not all(s.id in plan.sequences or not cap for s, cap in zip(sequences, longest)):
                began = self.clock()
                plan = self._plan = self._make_plan(sequences, longest)
                self._own_seconds += self.clock() - began
            plan.rounds_left -= 1
            longest = [min(cap, plan.budgets.get(s.id, 0)) for s, cap in zip(sequences, longest)]
        self._budgets = longest
        self._backlogs = {}
        for sequence, depth in zip(sequences, longest):
            if not depth or sequence.drafter is None:
                continue
            backlog = min(self.setting.backlog(sequence), sequence.reads or sys.maxsize)
            if backlog > depth + 1:
                self._backlogs[sequence.drafter] = self._backlogs.get(sequence.drafter, 0) + backlog
        return longest

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        decoding = all(verdict.fed == 1 for verdict in verdicts)
        count = len(sequences)
        if not any(self._budgets):
            self._plain_rounds, self._uncredited = self._plain_rounds + 1, self._uncredited + 1
            if decoding:
                self._since_check = 0 if self._plain_rounds >= self.CHECK else self._since_check
                if self._plain_rounds <= self.costs.SETTLED + 2 or not self.costs.plain_known(count):
                    self.costs.observe_plain(
                        count, seconds.verify + seconds.accept, self._plain_rounds, seconds.experts
                    )
            return
        self._plain_rounds = 0
        self._since_check += 1
        records = [
            DraftRecord(s.id, s.drafter or "", s.reads, budget, draft.depth, verdict.matched, len(draft))
            for s, budget, draft, verdict in zip(sequences, self._budgets, drafts, verdicts)
            if budget
        ]
        rows, tokens = count + sum(map(len, drafts)), sum([len(verdict.tokens) for verdict in verdicts])
        verify = seconds.verify + seconds.accept
        if self._plan.falls_short(tokens):
            self._plan.rounds_left = 0
        self._records.append(
            RoundRecord(records, count, rows, tokens, seconds.draft, verify, self._backlogs, decoding, seconds.experts)
        )

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        self._plan.sequences |= {sequence.id} if source.id in self._plan.sequences else set()
        if source.id in self._plan.budgets:
            self._plan.budgets = {**self._plan.budgets, sequence.id: self._plan.budgets[source.id]}

    def release(self, sequence: RequestState) -> None:
        self.by_sequence.pop(sequence.id, None)
        if sequence.num_output:
            self.lengths.seen.append(sequence.num_output)

    def _learn(self, sequences: Requests) -> None:
        """Update acceptance, costs and balance from the rounds with drafts since the last plan."""
        records, self._records = self._records, []
        costs, planning = self.costs, self._own_seconds / max(1, len(records))
        self._own_seconds, running = 0.0, {sequence.id: sequence.reads for sequence in sequences}
        for record in records:
            depths: dict[str, list[int]] = {}
            for sequence, method, reads, *lengths, nodes in record.drafts:
                drafted = lengths[1]
                self.by_method[method, None].count(max(0, nodes - self.setting.nodes[method][drafted]))
                if running.get(sequence, 0) == reads:
                    self._acceptance_of(sequence, method).learn(*lengths)
                self._acceptance(method, reads).learn(*lengths)
                depths.setdefault(method, []).append(drafted)
            if not record.measured:
                continue
            drafts = [Drafted(m, len(each), max(each), record.backlog.get(m, 0)) for m, each in depths.items()]
            count = record.sequences
            costs.observe_drafted(record.rows, record.draft, record.verify, drafts, count, record.experts)
            plain = costs.verify(count, count)
            drafting = sum(costs.draft(d.method, d.sequences, d.depth) for d in drafts)
            if not all(costs.has_price(d.method) for d in drafts):
                drafting = min(drafting, record.draft / costs.slowdown)
            cost = costs.verify(record.rows, count, record.experts) + drafting + planning
            gain = record.tokens / count - cost / plain
            self.balance = max(min(self.balance + gain, self.MOST_BALANCE), -self.MOST_BALANCE)

    def _make_plan(self, sequences: Requests, longest: list[int]) -> DraftPlan:
        """The best plan if the balance allows it, else a short trial, else plain rounds until it allows one."""
        self._learn(sequences)
        ids = frozenset([sequence.id for sequence in sequences])
        reading = any(sequence.scheduled > 1 for sequence in sequences)  # such rounds measure nothing
        if not self.costs.plain_known(len(sequences)) and not (reading and self.costs.rows.points):
            return DraftPlan({}, 1 if reading else self.costs.PLAIN_ROUNDS, self._plan.speedup, ids)
        if self._since_check >= self._check_after and not reading:
            self._check_after = (
                min(2 * self._check_after, self.CHECKS[1]) if self._plan.speedup > 1.0 else self.CHECKS[0]
            )
            return DraftPlan({}, self.CHECK, self._plan.speedup, ids)
        drafting = self._plan.speedup > 1.0
        self._choose_reads(sequences, longest)
        if not any(longest):  # all wait until reading their backlog is expected to pay
            for acceptance in self.by_method.values():
                acceptance.forget(self._uncredited)
            self._credit_plain_rounds()
            return DraftPlan({}, self.TRIAL, self._plan.speedup, ids)
        best = self._best_plan(sequences, longest)
        pays = best.speedup > (self.KEEP_MARGIN if drafting else self.MARGIN)
        if pays and self.balance > (self.LEAST_BALANCE if drafting else 0.0):
            if self._untried(sequences, longest):
                return DraftPlan(self._trial_budgets(sequences, longest), self.TRIAL, 1.0, best.sequences)
            self._next_wait = self.WAITS[0]
            due = self._check_after - self._since_check  # a check may be overdue while prompts are read
            best.rounds_left = min(self.ROUNDS, due if due > 0 else self.TRIAL * 4)
            best.speedup = max(best.speedup, self.MARGIN)
            best.expected_tokens = self._expected_tokens(sequences, best.budgets)
            return self._try_deepest(sequences, longest, best)
        if drafting:
            self._wait = self._next_wait
        return self._pause_or_try(sequences, longest, best)

    def _untried(self, sequences: Requests, longest: list[int]) -> bool:
        """Whether a sequence would get drafts of a kind that has hardly been tried."""
        kinds = {(s.drafter, s.reads) for s, cap in zip(sequences, longest) if cap and s.drafter is not None}
        return any(self._acceptance(*kind).reached[0] < self.TRIAL for kind in kinds)

    def _trial_budgets(self, sequences: Requests, longest: list[int]) -> dict[int, int]:
        """Short drafts for the two sequences with the highest acceptance rates."""
        depth = 2 if len(sequences) == 1 else 1
        likely = sorted((-self._rates(s)[0], s.id, min(cap, depth)) for s, cap in zip(sequences, longest) if cap)
        return {key: depth for _, key, depth in likely[:2]}

    def _try_deepest(self, sequences: Requests, longest: list[int], best: DraftPlan) -> DraftPlan:
        """The plan itself, or now and then a trial of the deepest drafts, to learn their cost and acceptance."""
        self._until_deepest -= best.rounds_left
        if self._until_deepest > 0 or self.balance < self.FIRST_BALANCE:
            return best
        self._until_deepest = self._next_until_deepest
        self._next_until_deepest = min(2 * self._next_until_deepest, self.LONGEST_PAUSE)
        self._since_check = self._check_after  # their costs count once a plain round has followed
        budgets = {s.id: cap for s, cap in zip(sequences, longest) if best.budgets.get(s.id)}
        return DraftPlan(budgets, min(best.rounds_left, self.TRIAL), best.speedup, best.sequences)

    def _pause_or_try(self, sequences: Requests, longest: list[int], best: DraftPlan) -> DraftPlan:
        """A trial if it is due and the balance covers its cost, else plain rounds."""
        cold_cost = self.costs.cold_cost()
        if not self._plain_rounds:
            self.balance -= cold_cost
        self._credit_plain_rounds()
        trial = best.budgets if len(sequences) == 1 and best.budgets else self._trial_budgets(sequences, longest)
        price = self.TRIAL * max(0.0, 1.0 - self._speedup(sequences, trial)) + cold_cost
        short = max(0.0, min(price, self.FIRST_BALANCE) - self.balance)
        ids = frozenset([sequence.id for sequence in sequences])
        if trial and self._wait <= 0 and not short:
            self._wait = self._next_wait
            rich = self.balance > self.FIRST_BALANCE
            for acceptance in self.by_method.values():
                acceptance.cap_weight(self.TRIAL_WEIGHT)
            for acceptance in self.by_sequence.values():
                acceptance.cap_weight(self.OWN_TRIAL_WEIGHT)
            self._next_wait = self.WAITS[0] if rich else min(2 * self._next_wait, self.WAITS[1])
            return DraftPlan(trial, self.TRIAL, 1.0, ids)
        self._check_after = self.CHECKS[0]
        return DraftPlan({}, min(max(int(short / self.CREDIT), self._wait, 1), self.LONGEST_PAUSE), sequences=ids)

    def _credit_plain_rounds(self) -> None:
        """Add the plain rounds since the last call to the balance."""
        # A draft model's trial may cost the reading of a whole prompt.
        most = self.MOST_BALANCE if self.setting.models else self.FIRST_BALANCE
        self.balance = max(self.balance, min(self.balance + self._uncredited * self.CREDIT, most))
        self._wait, self._uncredited = self._wait - self._uncredited, 0

    def _rates(self, sequence: RequestState) -> list[float]:
        """By depth, the chance that a token of this sequence's next draft is accepted if all before it are."""
        method, reads = sequence.drafter or "", sequence.reads
        rates = self.by_method[method, None].rates()
        if reads is not None:
            quality = reads / (reads + self.WINDOW_LOSS)
            rates = self._acceptance(method, reads).rates([quality * rate for rate in rates])
        own = self.by_sequence.get(sequence.id)
        return own.rates(rates) if own is not None else rates

    def _acceptance(self, method: str, reads: int | None) -> Acceptance:
        key, whole = (method, reads), self.by_method[method, None]
        if key not in self.by_method:
            self.by_method[key] = Acceptance(len(whole.requested), whole.weight, whole.fade)
        return self.by_method[key]

    def _acceptance_of(self, sequence: int, method: str) -> Acceptance:
        if sequence not in self.by_sequence:
            depth = len(self.by_method[method, None].requested)
            self.by_sequence[sequence] = Acceptance(depth, self.OWN_WEIGHT, self.OWN_FADE)
        return self.by_sequence[sequence]

    def _best_plan(self, sequences: Requests, longest: list[int], copies: int = 1) -> DraftPlan:
        """The budgets with the most expected tokens per second, for a batch of so many ``copies`` of the sequences."""
        chances: list[tuple[float, int, int]] = []
        for index, (sequence, cap) in enumerate(zip(sequences, longest)):
            if cap:
                rates = accumulate(self._rates(sequence)[:cap], mul)
                chances += [(chance, index, depth) for depth, chance in enumerate(rates, 1)]
        chances.sort(key=lambda each: -each[0])
        depths, best, speed = [0] * len(sequences), [0] * len(sequences), 1.0
        step = max(1, len(sequences) // 2)
        for number, (_, index, depth) in enumerate(chances, 1):
            depths[index] = depth
            if number % step and number < len(chances):
                continue
            result = self._speedup(sequences, {s.id: d for s, d in zip(sequences, depths) if d}, copies)
            if result > speed:
                best, speed = list(depths), result
        ids = frozenset([sequence.id for sequence, cap in zip(sequences, longest) if cap])
        return DraftPlan({s.id: d for s, d in zip(sequences, best) if d}, 0, speed, ids)

    def _expected_tokens(self, sequences: Requests, budgets: Mapping[int, int]) -> float:
        """Expected tokens of a round with ``budgets``."""
        depths = [(sequence, budgets.get(sequence.id, 0)) for sequence in sequences]
        return len(sequences) + sum(sum(accumulate(self._rates(s)[:depth], mul)) for s, depth in depths if depth)

    def _speedup(self, sequences: Requests, budgets: Mapping[int, int], copies: int = 1) -> float:
        """Expected tokens per second with ``budgets`` over those of plain decoding, for so many ``copies``."""
        count, tokens = copies * len(sequences), copies * self._expected_tokens(sequences, budgets)
        rows = float(count)
        drafting: dict[str, tuple[int, float]] = {}
        costs, seconds = self.costs, 0.0
        for sequence in sequences:
            depth, method = budgets.get(sequence.id, 0), sequence.drafter
            if not depth or method is None:
                continue
            extra, acceptance = self.by_method[method, None].extra_nodes, self._acceptance(method, sequence.reads)
            nodes = [number + (extra if length else 0.0) for length, number in enumerate(self.setting.nodes[method])]
            exists = list(accumulate(acceptance.existence()[:depth], mul))
            ends = [here - after for here, after in zip([1.0, *exists], [*exists, 0.0])]  # chance of each length
            if count == 1:
                seconds = sum(
                    fraction * costs.verify(1 + nodes[length]) for length, fraction in enumerate(ends) if fraction
                )
            rows += copies * sum(fraction * nodes[length] for length, fraction in enumerate(ends))
            number, deepest = drafting.get(method, (0, 0.0))
            drafting[method] = number + copies, max(deepest, sum(exists))
        seconds = seconds or costs.verify(rows, count)
        seconds += sum(costs.draft(method, number, depth) for method, (number, depth) in drafting.items())
        return tokens / count * costs.verify(count, count) / seconds

    def _choose_reads(self, sequences: Requests, longest: list[int]) -> None:
        """Decide which drafters read the tokens that they have not seen, and from where.

        A drafter with a long backlog reads all of it, starts from the last tokens, or waits. One that started from the
        last tokens may go on to read everything. Sets ``sequence.reads``; sets to 0 in ``longest`` who waits.
        """
        token = self.costs.verify(len(sequences), len(sequences)) / len(sequences)  # seconds of a plain token
        for index, sequence in enumerate(sequences):
            method = sequence.drafter
            if not longest[index] or method is None:
                continue
            backlog, reads, started = self.setting.backlog(sequence), sequence.reads, sequence.id in self.by_sequence
            waits = backlog > self.setting.nodes[method][-1] + 1
            options: list[tuple[int | None, int]] = [(reads, backlog if waits else 0)]
            if started and reads is not None:
                options.append((None, len(sequence.tokens)))
            elif waits and not started:
                options = [(None, backlog), *((n, n) for n in self.WINDOWS if 2 * n <= backlog)]
            elif not waits:
                continue
            saved = [self._rounds_saved(sequence, longest[index], n, len(sequences)) for n, _ in options]
            worth = [rounds * token - self.costs.read(method, n) for rounds, (_, n) in zip(saved, options)]
            best = max(worth)
            cheap = len(sequences) > 1 and best > -self.CHEAP_READS * token
            choice = worth.index(best) if best > 0.0 or cheap else None
            if not started and longest[index] == len(self.setting.nodes[method]) - 1:
                for option in (0, worth.index(best)):  # the balance pays for one that was not tried
                    loss = (max(best, 0.0) - worth[option]) / token
                    tries = self._acceptance(method, options[option][0]).reached[0]
                    if loss < self.balance and tries < self.TRIAL:
                        self.balance, choice = self.balance - loss, option
                        break
            if choice is not None:
                sequence.reads = options[choice][0]
                if started and sequence.reads != reads:
                    del self.by_sequence[sequence.id]
            elif waits:
                longest[index] = 0

    def _rounds_saved(self, sequence: RequestState, cap: int, reads: int | None, count: int) -> float:
        """Plain rounds that drafts save in the rest of this answer, if its drafter starts from ``reads`` tokens.

        ``count``: answers like this one in the batch.
        """
        before, sequence.reads = sequence.reads, reads
        own = self.by_sequence.pop(sequence.id) if reads != before and sequence.id in self.by_sequence else None
        best = self._best_plan([sequence], [cap], count)
        # The last draft reaches beyond the end of the answer.
        rest = self.lengths.expected_remaining(sequence) - self._expected_tokens([sequence], best.budgets)
        sequence.reads = before
        if own is not None:
            self.by_sequence[sequence.id] = own
        return rest * (1.0 - 1.0 / best.speedup)

    def state(self) -> dict[str, Any] | None:
        """What was learnt, as JSON, for the next engine of the same kind on this machine; None if it is too little."""
        methods = {method: self.by_method[method, None] for method in self.methods}
        if not self.costs.plain_known(1) or any(a.requested[0] < self.TRIAL_WEIGHT for a in methods.values()):
            return None
        counts = {m: [[round(value, 3) for value in values] for values in a.counts] for m, a in methods.items()}
        return {"costs": self.costs.state(), "acceptance": counts, "lengths": list(self.lengths.seen)}

    def restore(self, state: Any) -> None:
        """Continue from another engine's ``state``. Anything else is ignored."""
        methods = {method: self.by_method[method, None] for method in self.methods}
        try:
            counts = {m: [[float(x) for x in values] for values in state["acceptance"][m]] for m in methods}
            lengths = [int(length) for length in state["lengths"]]
            costs = Costs(self.setting.nodes, self.setting.row_multiple, self.setting.mixture)
            costs.restore(state["costs"])
        except (TypeError, KeyError, ValueError):
            return
        depths = {len(values) for m in methods for values in counts[m]}
        if depths != {len(acceptance.requested) for acceptance in methods.values()}:
            return
        self.costs = costs
        self._until_deepest = self.DEEPEST_AFTER // 4  # the machine may have been busier then
        for method, acceptance in methods.items():
            acceptance.reached, acceptance.accepted, acceptance.requested, acceptance.drafted = counts[method]
            acceptance.cap_weight(self.TRIAL_WEIGHT)
        self.lengths.seen.extend(lengths)


class Acceptance:
    """What recent drafts yielded by depth, as counts that decay by ``fade`` with each draft.

    ``rates`` and ``existence`` are estimates: the prior weighs as much as ``weight`` drafts and decays as well.
    """

    FIRST = 0.6
    """The prior rate at the first depth; deeper, the prior is the estimate of the depth before."""
    HALF_LIFE = 256
    """Plain rounds in which a drafter that waits loses half of its evidence."""
    LEAST_WEIGHT = 0.5
    """The least weight of the prior."""

    def __init__(self, depth: int, weight: float = 3.0, fade: float = 0.95, first: float = FIRST) -> None:
        self.weight = weight
        self.fade = fade
        self.first = first
        self._prior_weight = weight
        self.reached = [0.0] * depth
        """Drafts whose tokens before this depth were all accepted."""
        self.accepted = [0.0] * depth
        self.requested = [0.0] * depth
        """Drafts that were budgeted to this depth and had a token one depth before it."""
        self.drafted = [0.0] * depth
        self.extra_nodes = 0.0
        """Mean number of nodes beyond those of a draft's depth: a second token beside the last one."""

    @property
    def counts(self) -> tuple[list[float], list[float], list[float], list[float]]:
        return self.reached, self.accepted, self.requested, self.drafted

    def count(self, extra_nodes: int) -> None:
        self.extra_nodes += (1.0 - self.fade) * (extra_nodes - self.extra_nodes)

    def learn(self, requested: int, drafted: int, accepted: int) -> None:
        """Count one draft, by its lengths."""
        fade = self.fade
        self._prior_weight = max(fade * self._prior_weight, self.LEAST_WEIGHT)
        for depth in range(min(requested, drafted + 1, len(self.requested))):
            self.requested[depth] = fade * self.requested[depth] + 1.0
            self.drafted[depth] = fade * self.drafted[depth] + (depth < drafted)
            if depth <= accepted:
                self.reached[depth] = fade * self.reached[depth] + 1.0
                self.accepted[depth] = fade * self.accepted[depth] + (depth < accepted)

    def cap_weight(self, most: float) -> None:
        """Reduce the evidence to at most so many drafts, so that new ones change the estimates."""
        for counts, hits in ((self.reached, self.accepted), (self.requested, self.drafted)):
            for depth, count in enumerate(counts):
                if count > most:
                    counts[depth], hits[depth] = most, hits[depth] * most / count

    def forget(self, rounds: int) -> None:
        """Decay after so many plain rounds without a draft."""
        factor = 0.5 ** (rounds / self.HALF_LIFE)
        for counts in self.counts:
            counts[:] = [factor * count for count in counts]
        self._prior_weight = self.weight + factor * (self._prior_weight - self.weight)

    def rates(self, prior: Sequence[float] | None = None) -> list[float]:
        """By depth, the chance that a draft has a token there and that it is accepted, if all before it are.

        ``prior``: rates by depth without evidence; None: ``first``, then the estimate of the depth before.
        """
        if prior is not None:
            weight = self.weight
            return [(hit + weight * rate) / (n + weight) for hit, n, rate in zip(self.accepted, self.reached, prior)]
        return self._chances(self.reached, self.accepted, self.first)

    def existence(self) -> list[float]:
        """By depth, the chance that a draft has a token there, accepted or not, if it has one at the depth before."""
        return self._chances(self.requested, self.drafted, 1.0)

    def _chances(self, counts: Sequence[float], hits: Sequence[float], before: float) -> list[float]:
        chances = []
        for count, hit in zip(counts, hits):
            before = (hit + self._prior_weight * before) / (count + self._prior_weight)
            chances.append(before)
        return chances


@policies.register("planned")
class Planned(Adaptive):
    """Measures ``MEASURED`` drafts of full length per method, then keeps the best length for good."""

    MEASURED = 24

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plans: dict[str, int] = {}
        self._drafts: Counter[str] = Counter()
        self._sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        """Accepted tokens, and tokens that were tested."""

    def _make_plan(self, sequences: Requests, longest: list[int]) -> DraftPlan:
        for record in self._records:
            for draft in record.drafts:
                self._drafts[draft.method] += 1
                self._sums[draft.method][0] += draft.accepted
                self._sums[draft.method][1] += min(draft.accepted + 1, draft.drafted)
        self._learn(sequences)
        ids = frozenset([sequence.id for sequence in sequences])
        methods = {s.drafter for s, cap in zip(sequences, longest) if cap and s.drafter is not None}
        undecided = methods - set(self.plans)
        due = undecided and (not self.costs.plain_known(len(sequences)) or self._since_check >= self.CHECKS[0])
        if due and all(sequence.scheduled <= 1 for sequence in sequences):
            return DraftPlan({}, 2, sequences=ids)
        for method in undecided:
            if self._drafts[method] >= self.MEASURED:
                self.plans[method] = self._length(method, len(sequences))
        caps = {s.id: self.plans.get(s.drafter or "", cap) for s, cap in zip(sequences, longest)}
        return DraftPlan(caps, self.TRIAL, 2.0, ids)

    def _length(self, method: str, count: int) -> int:
        """The depth with the most expected tokens per second when ``count`` sequences draft alike."""
        nodes, (accepted, tested) = self.setting.nodes[method], self._sums[method]
        rate = accepted / max(1, tested)

        def speed(depth: int) -> float:
            drafting = self.costs.draft(method, count, depth)
            tokens = sum(rate**level for level in range(depth + 1))
            return tokens / (self.costs.verify(count * (1 + nodes[depth]), count) + drafting)

        return max(range(len(nodes)), key=speed)
