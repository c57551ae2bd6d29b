"""``adaptive``: each sequence drafts as far as recent acceptance and measured cost say it pays, 0 included.

The budgets maximise the expected tokens per second of the coming rounds: positions are admitted in the order of their
chance of being reached and accepted, and the best of all prefixes of that order is taken (the scheduler of DSpark,
deepseek-ai/DeepSpec, algorithm 1). They depend on earlier rounds alone, so rules that compare p with q stay exact.
"""

from __future__ import annotations

import sys
from collections import deque
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


class Lengths:
    """How many tokens answers have, for what is invested in one: half of them are longer than ``HALF`` and their rest
    is as long as they already are (a Lomax distribution of shape 1), until answers were seen."""

    HALF = 32
    WEIGHT = 4.0

    def __init__(self) -> None:
        self.seen: deque[int] = deque(maxlen=64)

    def rest(self, sequence: RequestState) -> float:
        """Expected tokens that are still to come of an answer."""
        so_far, most = sequence.num_output, sequence.remaining
        start = self.HALF + so_far
        prior = start * log((start + most) / start) if most > 0 else 0.0
        longer = [min(length - so_far, most) for length in self.seen if length > so_far]
        return (self.WEIGHT * prior + sum(longer)) / (self.WEIGHT + len(longer))


class Entry(NamedTuple):
    """A round with drafts, until it is learnt from."""

    drafts: list[tuple[int, str, int | None, int, int, int, int]]
    """Per sequence that was asked for a draft: its id, the method, what it ``reads``, depths that were asked, made and
    kept, and how many nodes the draft had."""
    sequences: int
    rows: int
    tokens: int
    draft: float
    verify: float
    behind: dict[str, int]
    measured: bool
    experts: int


@dataclass
class DraftPlan:
    """Who drafts how far, for how many rounds."""

    budgets: Mapping[int, int] = field(default_factory=dict)
    """By sequence; empty: nobody drafts."""
    left: int = 0
    promise: float = 1.0
    """Expected speed over plain decoding."""
    known: frozenset[int] = frozenset()
    """The sequences that it was made for."""
    expected: float = 0.0
    """Tokens of a round."""
    brought: float = 0.0
    """How many tokens more than that there were so far, over ``rounds``."""
    rounds: int = 0

    def disappoints(self, tokens: int) -> bool:
        """See a round; whether they bring so much less than expected that it is time to look again."""
        self.rounds += 1
        self.brought += tokens - self.expected
        return self.rounds >= 6 and self.brought < -0.3 * self.rounds * self.expected


@policies.register("adaptive")
class Adaptive(LengthPolicy):
    """Errors of the estimates cost a bounded share of the time: rounds with drafts draw on a balance, in plain rounds,
    that plain rounds and tokens fill."""

    reproducible = False
    MARGIN, KEEP = 1.06, 1.03
    """What a plan must promise to begin, and to go on."""
    ROUNDS = 32
    """Rounds that a plan with drafts holds."""
    TRIAL = 3
    """Rounds of a trial."""
    SPEND = 0.005
    """What a plain round pays into the balance."""
    START, MOST, DEBT = 0.8, 12.0, -0.5
    """The first balance, which plain rounds fill again; most that is kept; what ends a plan."""
    MODEL, MODEL_WEIGHT, MODEL_START = 0.7, 8.0, 3.0
    """What is expected of a draft model, which somebody chose: rate, and its weight in drafts; and the first balance,
    as its drafts cost more than a look into the text."""
    WAITS = (16, 64)
    """Plain rounds before the next trial: at first, and at most. A trial in vain doubles them."""
    CLEAR = 1.15
    """A promise that stands whatever the caches do."""
    CHECK = 3
    """Plain rounds of a check: the first one after drafts finds other data in the caches."""
    CHECKS = (16, 256)
    """Rounds with drafts between plain ones that are measured: at first, and at most."""
    REST = 256
    """Most plain rounds without a thought of drafts."""
    OPEN = 6.0
    """Drafts that all evidence about a method counts for at most when it is tried again."""
    OWN_WEIGHT, OWN_FADE, OWN_OPEN = 8.0, 0.93, 2.0
    """The same of one sequence: how many drafts its method's rates count for, and what is kept of its own evidence."""
    DEEPER = 64
    """Rounds after which deeper drafts than planned are tried, and twice as many the next time."""
    WINDOWS = (64, 128, 256)
    """How many of the last tokens a drafter may begin with, instead of at least twice as many."""
    CHEAP = 2.0
    """Tokens of a sequence in a batch that may be lost to reading: what pays shows once drafts are made."""
    BLUR = 24.0
    """A drafter that reads the last n tokens keeps n / (n + BLUR) of each rate (measured at 128: 0.83 to 0.89)."""
    clock = staticmethod(perf_counter)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.costs = Costs(setting.nodes, setting.row_multiple, setting.mixture)
        self.methods = {
            method: Acceptance(
                len(nodes) - 1, *((self.MODEL_WEIGHT, 0.95, self.MODEL) if method in setting.models else ())
            )
            for method, nodes in setting.nodes.items()
        }
        self.windowed: dict[tuple[str, int], Acceptance] = {}
        """The same of drafters that began with the last tokens, so many of them."""
        self.own: dict[int, Acceptance] = {}
        self.lengths = Lengths()
        self.balance = self.MODEL_START if setting.models else self.START
        self._plan = DraftPlan()
        self._entries: list[Entry] = []
        self._asked: list[int] = []
        self._behind: dict[str, int] = {}
        self._streak = 0
        """Plain rounds since the last one with drafts."""
        self._rested = 0
        """Plain rounds since rest was last thought about."""
        self._since = 0
        """Rounds with drafts since a plain one was measured."""
        self._check = self.CHECKS[0]
        self._wait, self._next_wait = 0, self.WAITS[0]
        self._deeper, self._next_deeper = self.DEEPER, 2 * self.DEEPER
        self._took = 0.0
        """Seconds of its own that were not booked yet."""

    def longest_nodes(self, sequence: RequestState) -> int:
        """No more than the plan wants: rows and pages that are not going to be used are not reserved."""
        plan = self._plan
        if sequence.drafter is None or (plan.left and not plan.budgets and sequence.id in plan.known):
            return 0
        depth = self.longest(sequence)
        if plan.left:
            depth = min(depth, plan.budgets.get(sequence.id, depth))
        return self.setting.nodes[sequence.drafter][depth]

    def budgets(self, sequences: Requests) -> list[int]:
        plan = self._plan
        if plan.left and not plan.budgets and not plan.known.isdisjoint([sequence.id for sequence in sequences]):
            plan.left -= 1
            self._asked = [0] * len(sequences)
            return self._asked
        longest = [self.longest(sequence) for sequence in sequences]
        if any(longest):
            if not plan.left or not all(s.id in plan.known or not cap for s, cap in zip(sequences, longest)):
                began = self.clock()
                plan = self._plan = self._decide(sequences, longest)
                self._took += self.clock() - began
            plan.left -= 1
            longest = [min(cap, plan.budgets.get(s.id, 0)) for s, cap in zip(sequences, longest)]
        self._asked = longest
        self._behind = {}
        for sequence, depth in zip(sequences, longest):
            if not depth or sequence.drafter is None:
                continue
            behind = min(self.setting.behind(sequence), sequence.reads or sys.maxsize)
            if behind > depth + 1:
                self._behind[sequence.drafter] = self._behind.get(sequence.drafter, 0) + behind
        return longest

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        decoding = all(verdict.fed == 1 for verdict in verdicts)
        count = len(sequences)
        if not any(self._asked):
            self._streak, self._rested = self._streak + 1, self._rested + 1
            if decoding:
                self._since = 0 if self._streak >= self.CHECK else self._since
                if self._streak <= self.costs.SETTLED + 2 or not self.costs.sure(count):
                    self.costs.plain(count, seconds.verify + seconds.accept, self._streak, seconds.experts)
            return
        self._streak = 0
        self._since += 1
        made = [
            (s.id, s.drafter or "", s.reads, asked, draft.depth, verdict.matched, len(draft))
            for s, asked, draft, verdict in zip(sequences, self._asked, drafts, verdicts)
            if asked
        ]
        rows, tokens = count + sum(map(len, drafts)), sum([len(verdict.tokens) for verdict in verdicts])
        verify = seconds.verify + seconds.accept
        if self._plan.disappoints(tokens):
            self._plan.left = 0
        entry = Entry(made, count, rows, tokens, seconds.draft, verify, self._behind, decoding, seconds.experts)
        self._entries.append(entry)

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        self._plan.known |= {sequence.id} if source.id in self._plan.known else set()
        if source.id in self._plan.budgets:
            self._plan.budgets = {**self._plan.budgets, sequence.id: self._plan.budgets[source.id]}

    def release(self, sequence: RequestState) -> None:
        self.own.pop(sequence.id, None)
        if sequence.num_output:
            self.lengths.seen.append(sequence.num_output)

    def _learn(self, sequences: Requests) -> None:
        """Learn from the rounds with drafts since the last plan, and book them. Nothing is kept about who has left."""
        entries, self._entries = self._entries, []
        costs, took = self.costs, self._took / max(1, len(entries))
        self._took, here = 0.0, {sequence.id: sequence.reads for sequence in sequences}
        for entry in entries:
            parts: dict[str, list[int]] = {}
            for key, method, reads, asked, made, kept, nodes in entry.drafts:
                self.methods[method].count(max(0, nodes - self.setting.nodes[method][made]))
                if here.get(key, 0) == reads:
                    self._own(key, method).learn(asked, made, kept)
                self._belief(method, reads).learn(asked, made, kept)
                parts.setdefault(method, []).append(made)
            if not entry.measured:
                continue
            drafted = [Drafted(m, len(made), max(made), entry.behind.get(m, 0)) for m, made in parts.items()]
            count = entry.sequences
            costs.drafted(entry.rows, entry.draft, entry.verify, drafted, count, entry.experts)
            plain = costs.verify(count, count)
            drafting = sum(costs.draft(d.method, d.sequences, d.depth) for d in drafted)
            if not all(costs.priced(d.method) for d in drafted):
                drafting = min(drafting, entry.draft / costs.slowdown)
            cost = costs.verify(entry.rows, count, entry.experts) + drafting + took
            gain = entry.tokens / count - cost / plain
            self.balance = max(min(self.balance + gain, self.MOST), -self.MOST)

    def _decide(self, sequences: Requests, longest: list[int]) -> DraftPlan:
        """The best plan if the balance covers it, else a short trial, else rest until there is enough for one."""
        self._learn(sequences)
        known = frozenset([sequence.id for sequence in sequences])
        reading = any(sequence.scheduled > 1 for sequence in sequences)  # such rounds measure nothing
        if not self.costs.sure(len(sequences)) and not (reading and self.costs.rows.points):
            return DraftPlan({}, 1 if reading else self.costs.SURE, self._plan.promise, known)
        if self._since >= self._check and not reading:
            self._check = min(2 * self._check, self.CHECKS[1]) if self._plan.promise > 1.0 else self.CHECKS[0]
            sure = self.costs.cold_known or self._plan.promise > self.CLEAR
            return DraftPlan({}, self.CHECK if sure else self.costs.SETTLED + 3, self._plan.promise, known)
        goes_on = self._plan.promise > 1.0
        self._invest(sequences, longest)
        if not any(longest):  # they wait until reading pays, or seems to again
            for belief in (*self.methods.values(), *self.windowed.values()):
                belief.forget(self._rested)
            self._pay_in()
            return DraftPlan({}, self.TRIAL, self._plan.promise, known)
        best = self._best(sequences, longest)
        pays = best.promise > (self.KEEP if goes_on else self.MARGIN)
        if pays and self.balance > (self.DEBT if goes_on else 0.0):
            if self._untried(sequences, longest):
                return DraftPlan(self._few(sequences, longest), self.TRIAL, 1.0, best.known)
            self._next_wait = self.WAITS[0]
            due = self._check - self._since  # a check may be overdue while prompts are read
            best.left = min(self.ROUNDS, due if due > 0 else self.TRIAL * 4)
            best.promise = max(best.promise, self.MARGIN)
            best.expected = self._tokens(sequences, best.budgets)
            return self._explore(sequences, longest, best)
        if goes_on:
            self._wait = self._next_wait
        return self._rest_or_try(sequences, longest, best)

    def _untried(self, sequences: Requests, longest: list[int]) -> bool:
        """Whether hardly anything is known of the drafts of somebody who would get some."""
        asked = {(s.drafter, s.reads) for s, cap in zip(sequences, longest) if cap and s.drafter is not None}
        return any(self._belief(*each).reached[0] < self.TRIAL for each in asked)

    def _few(self, sequences: Requests, longest: list[int]) -> dict[int, int]:
        """Short drafts for those two who are likeliest to get them accepted."""
        depth = 2 if len(sequences) == 1 else 1
        likely = sorted((-self._rates(s)[0], s.id, min(cap, depth)) for s, cap in zip(sequences, longest) if cap)
        return {key: depth for _, key, depth in likely[:2]}

    def _explore(self, sequences: Requests, longest: list[int], best: DraftPlan) -> DraftPlan:
        """Now and then the deepest drafts, for the sake of their price and acceptance."""
        self._deeper -= best.left
        if self._deeper > 0 or self.balance < self.START:
            return best
        self._deeper, self._next_deeper = self._next_deeper, min(2 * self._next_deeper, self.REST)
        self._since = self._check  # their price counts once a plain round has followed
        budgets = {s.id: cap for s, cap in zip(sequences, longest) if best.budgets.get(s.id)}
        return DraftPlan(budgets, min(best.left, self.TRIAL), best.promise, best.known)

    def _rest_or_try(self, sequences: Requests, longest: list[int], best: DraftPlan) -> DraftPlan:
        aftermath = self.costs.aftermath()
        if not self._streak:
            self.balance -= aftermath
        self._pay_in()
        trial = best.budgets if len(sequences) == 1 and best.budgets else self._few(sequences, longest)
        price = self.TRIAL * max(0.0, 1.0 - self._speed(sequences, trial)) + aftermath
        short = max(0.0, min(price, self.START) - self.balance)
        known = frozenset([sequence.id for sequence in sequences])
        if trial and self._wait <= 0 and not short:
            self._wait = self._next_wait
            rich = self.balance > self.START
            for belief in (*self.methods.values(), *self.windowed.values()):
                belief.loosen(self.OPEN)
            for belief in self.own.values():
                belief.loosen(self.OWN_OPEN)
            self._next_wait = self.WAITS[0] if rich else min(2 * self._next_wait, self.WAITS[1])
            return DraftPlan(trial, self.TRIAL, 1.0, known)
        self._check = self.CHECKS[0]
        return DraftPlan({}, min(max(int(short / self.SPEND), self._wait, 1), self.REST), known=known)

    def _pay_in(self) -> None:
        """Book the plain rounds since this was done last."""
        most = self.MOST if self.setting.models else self.START  # a draft model's try may cost a whole prompt
        self.balance = max(self.balance, min(self.balance + self._rested * self.SPEND, most))
        self._wait, self._rested = self._wait - self._rested, 0

    def _rates(self, sequence: RequestState) -> list[float]:
        method, reads = sequence.drafter or "", sequence.reads
        rates = self.methods[method].rates()
        if reads is not None:
            quality = reads / (reads + self.BLUR)
            rates = self._belief(method, reads).rates([quality * rate for rate in rates])
        own = self.own.get(sequence.id)
        return own.rates(rates) if own is not None else rates

    def _belief(self, method: str, reads: int | None) -> Acceptance:
        whole = self.methods[method]
        if reads is None:
            return whole
        return self.windowed.setdefault((method, reads), Acceptance(len(whole.asked), whole.weight, whole.fade))

    def _own(self, key: int, method: str) -> Acceptance:
        if key not in self.own:
            self.own[key] = Acceptance(len(self.methods[method].asked), self.OWN_WEIGHT, self.OWN_FADE)
        return self.own[key]

    def _best(self, sequences: Requests, longest: list[int], copies: int = 1) -> DraftPlan:
        """The budgets with the most expected tokens per second, of so many ``copies`` of the sequences."""
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
            result = self._speed(sequences, {s.id: d for s, d in zip(sequences, depths) if d}, copies)
            if result > speed:
                best, speed = list(depths), result
        known = frozenset([sequence.id for sequence, cap in zip(sequences, longest) if cap])
        return DraftPlan({s.id: d for s, d in zip(sequences, best) if d}, 0, speed, known)

    def _tokens(self, sequences: Requests, budgets: Mapping[int, int]) -> float:
        """Expected tokens of a round with ``budgets``."""
        depths = [(sequence, budgets.get(sequence.id, 0)) for sequence in sequences]
        return len(sequences) + sum(sum(accumulate(self._rates(s)[:depth], mul)) for s, depth in depths if depth)

    def _speed(self, sequences: Requests, budgets: Mapping[int, int], copies: int = 1) -> float:
        """Expected tokens per second with ``budgets`` over those of plain decoding, of so many ``copies``."""
        count, tokens = copies * len(sequences), copies * self._tokens(sequences, budgets)
        rows = float(count)
        drafting: dict[str, tuple[int, float]] = {}
        costs, seconds = self.costs, 0.0
        for sequence in sequences:
            depth, method = budgets.get(sequence.id, 0), sequence.drafter
            if not depth or method is None:
                continue
            more, belief = self.methods[method].more, self._belief(method, sequence.reads)
            nodes = [number + (more if length else 0.0) for length, number in enumerate(self.setting.nodes[method])]
            exists = list(accumulate(belief.existence()[:depth], mul))
            ends = [here - after for here, after in zip([1.0, *exists], [*exists, 0.0])]  # by length
            made = sum(exists)
            if count == 1:
                seconds = sum(
                    fraction * costs.verify(1 + nodes[length]) for length, fraction in enumerate(ends) if fraction
                )
            rows += copies * sum(fraction * nodes[length] for length, fraction in enumerate(ends))
            number, deepest = drafting.get(method, (0, 0.0))
            drafting[method] = number + copies, max(deepest, made)
        seconds = seconds or costs.verify(rows, count)
        seconds += sum(costs.draft(method, number, depth) for method, (number, depth) in drafting.items())
        return tokens / count * costs.verify(count, count) / seconds

    def _invest(self, sequences: Requests, longest: list[int]) -> None:
        """Who has a drafter that must read first what it missed: whether that pays, and how much of it; and whether
        one that began with the last tokens should read them all. Sets ``sequence.reads``, and the caps of those who
        wait to 0."""
        each = self.costs.verify(len(sequences), len(sequences)) / len(sequences)  # what one token of a sequence takes
        for index, sequence in enumerate(sequences):
            method = sequence.drafter
            if not longest[index] or method is None:
                continue
            behind, began, before = self.setting.behind(sequence), sequence.id in self.own, sequence.reads
            away = behind > self.setting.nodes[method][-1] + 1
            options: list[tuple[int | None, int]] = [(before, behind if away else 0)]
            if began and before is not None:
                options.append((None, len(sequence.tokens)))
            elif away and not began:
                options = [(None, behind), *((n, n) for n in self.WINDOWS if 2 * n <= behind)]
            elif not away:
                continue
            saved = [self._saved(sequence, longest[index], reads, len(sequences)) for reads, _ in options]
            worth = [seconds * each - self.costs.read(method, n) for seconds, (_, n) in zip(saved, options)]
            most = max(worth)
            cheap = len(sequences) > 1 and most > -self.CHEAP * each
            choice = worth.index(most) if most > 0.0 or cheap else None
            room = longest[index] == len(self.setting.nodes[method]) - 1
            for n in (0, worth.index(most)) if room and not began else ():
                loss = (max(most, 0.0) - worth[n]) / each
                if loss < self.balance and self._belief(method, options[n][0]).reached[0] < self.TRIAL:
                    self.balance, choice = self.balance - loss, n  # little is known: the balance pays for a try
                    break
            if choice is not None:
                sequence.reads = options[choice][0]
                if began and sequence.reads != before:
                    del self.own[sequence.id]
            elif away:
                longest[index] = 0

    def _saved(self, sequence: RequestState, cap: int, reads: int | None, count: int) -> float:
        """Plain rounds that drafts save over the rest of an answer, of ``count`` answers alike, when the drafter began
        with ``reads`` tokens."""
        before, sequence.reads = sequence.reads, reads
        own = self.own.pop(sequence.id) if reads != before and sequence.id in self.own else None
        best = self._best([sequence], [cap], count)
        # An answer ends somewhere in a draft.
        rest = self.lengths.rest(sequence) - self._tokens([sequence], best.budgets)
        sequence.reads = before
        if own is not None:
            self.own[sequence.id] = own
        return rest * (1.0 - 1.0 / best.promise)

    def state(self) -> dict[str, Any] | None:
        """What was learnt, for the next engine of the same kind on this machine; None: next to nothing."""
        if not self.costs.sure(1) or any(belief.asked[0] < self.OPEN for belief in self.methods.values()):
            return None
        beliefs = {
            method: [[round(value, 3) for value in values] for values in (b.reached, b.kept, b.asked, b.made)]
            for method, b in self.methods.items()
        }
        return {"costs": self.costs.state(), "acceptance": beliefs, "lengths": list(self.lengths.seen)}

    def restore(self, state: Any) -> None:
        """Take over another's ``state``; whatever else it is given, nothing."""
        try:
            beliefs = {m: [[float(x) for x in values] for values in state["acceptance"][m]] for m in self.methods}
            lengths = [int(length) for length in state["lengths"]]
            costs = Costs(self.setting.nodes, self.setting.row_multiple, self.setting.mixture)
            costs.restore(state["costs"])
        except (TypeError, KeyError, ValueError):
            return
        depths = {len(values) for m in self.methods for values in beliefs[m]}
        if depths != {len(belief.asked) for belief in self.methods.values()}:
            return
        self.costs = costs
        self._deeper = self.DEEPER // 4  # kept prices may be of another hour
        for method, (reached, kept, asked, made) in beliefs.items():
            belief = self.methods[method]
            belief.reached, belief.kept, belief.asked, belief.made = reached, kept, asked, made
            belief.loosen(self.OPEN)
        self.lengths.seen.extend(lengths)


class Acceptance:
    """What drafts bring by depth, from recent rounds.

    ``rates``: given that all before was kept, the chance that the draft has a token at this depth and that it is kept.
    ``existence``: given that the draft got there, kept or not, the chance that it has a token there, which costs a row.
    Expectations count for ``weight`` drafts; a draft leaves ``fade`` of the evidence before it, expectations included.
    """

    FIRST = 0.6
    """The rate of a drafter that nothing is known about."""
    HALF_LIFE = 256
    """Plain rounds in which half of the evidence is forgotten while a drafter waits."""
    LEAST = 0.5
    """What an expectation counts for at least."""

    def __init__(self, depth: int, weight: float = 3.0, fade: float = 0.95, first: float = FIRST) -> None:
        self.weight = weight
        self.fade = fade
        self.first = first
        self._first = weight
        self.reached = [0.0] * depth
        self.kept = [0.0] * depth
        self.asked = [0.0] * depth
        self.made = [0.0] * depth
        self.more = 0.0
        """Nodes that a draft has beyond the most of its depth, in the mean: a second token beside the last."""

    def count(self, more: int) -> None:
        self.more += (1.0 - self.fade) * (more - self.more)

    def learn(self, asked: int, made: int, kept: int) -> None:
        """One draft: ``asked`` tokens deep, ``made`` deep, of which ``kept`` were accepted."""
        fade = self.fade
        self._first = max(fade * self._first, self.LEAST)
        for depth in range(min(asked, made + 1, len(self.asked))):
            self.asked[depth] = fade * self.asked[depth] + 1.0
            self.made[depth] = fade * self.made[depth] + (depth < made)
            if depth <= kept:
                self.reached[depth] = fade * self.reached[depth] + 1.0
                self.kept[depth] = fade * self.kept[depth] + (depth < kept)

    def loosen(self, most: float) -> None:
        """Let the evidence count for at most so many drafts, so that new results change the expectation."""
        for counts, hits in ((self.reached, self.kept), (self.asked, self.made)):
            for depth, count in enumerate(counts):
                if count > most:
                    counts[depth], hits[depth] = most, hits[depth] * most / count

    def forget(self, rounds: int) -> None:
        """So many plain rounds went by without a draft."""
        left = 0.5 ** (rounds / self.HALF_LIFE)
        for counts in (self.reached, self.kept, self.asked, self.made):
            counts[:] = [left * count for count in counts]
        self._first = self.weight + left * (self._first - self.weight)

    def rates(self, expected: Sequence[float] | None = None) -> list[float]:
        """``expected``: the rates without evidence; None: at every depth that of the depth before."""
        if expected is not None:
            weight = self.weight
            return [(hit + weight * rate) / (n + weight) for hit, n, rate in zip(self.kept, self.reached, expected)]
        return self._follow(self.reached, self.kept, self.first)

    def existence(self) -> list[float]:
        return self._follow(self.asked, self.made, 1.0)

    def _follow(self, counts: Sequence[float], hits: Sequence[float], before: float) -> list[float]:
        chances = []
        for count, hit in zip(counts, hits):
            before = (hit + self._first * before) / (count + self._first)
            chances.append(before)
        return chances


@policies.register("planned")
class Planned(Adaptive):
    """The plan is made once per method, after ``MEASURED`` drafts as long as the method allows."""

    MEASURED = 24

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plans: dict[str, int] = {}
        self._rounds = dict.fromkeys(setting.nodes, 0)
        self._sums = {method: [0, 0] for method in setting.nodes}

    def _decide(self, sequences: Requests, longest: list[int]) -> DraftPlan:
        for entry in self._entries:
            for _, method, _, _, made, kept, _ in entry.drafts:
                self._rounds[method] += 1
                self._sums[method][0] += kept
                self._sums[method][1] += min(kept + 1, made)
        self._learn(sequences)
        known = frozenset([sequence.id for sequence in sequences])
        methods = {s.drafter for s, cap in zip(sequences, longest) if cap and s.drafter is not None}
        undecided = methods - set(self.plans)
        due = undecided and (not self.costs.sure(len(sequences)) or self._since >= self.CHECKS[0])
        if due and all(sequence.scheduled <= 1 for sequence in sequences):
            return DraftPlan({}, 2, known=known)
        for method in undecided:
            if self._rounds[method] >= self.MEASURED:
                self.plans[method] = self._length(method, len(sequences))
        caps = {s.id: self.plans.get(s.drafter or "", cap) for s, cap in zip(sequences, longest)}
        return DraftPlan(caps, self.TRIAL, 2.0, known)

    def _length(self, method: str, count: int) -> int:
        """The depth with the most expected tokens per second when ``count`` sequences draft alike."""
        nodes, (kept, tested) = self.setting.nodes[method], self._sums[method]
        rate = kept / max(1, tested)

        def speed(depth: int) -> float:
            drafting = self.costs.draft(method, count, depth)
            tokens = sum(rate**level for level in range(depth + 1))
            return tokens / (self.costs.verify(count * (1 + nodes[depth]), count) + drafting)

        return max(range(len(nodes)), key=speed)
