"""``adaptive``: each sequence drafts as far as recent acceptance and measured cost say it pays, 0 included.

The budgets maximise expected tokens per second of the coming round: positions are admitted in the order of their
chance of being reached and accepted (the prefix scheduler of DSpark, deepseek-ai/DeepSpec, algorithm 1, with the
best of all prefixes instead of the first drop, because rows are padded and cost comes in steps). They depend on
earlier rounds alone, so rules that compare p with q stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting, policies
from forerun.speculate.length.beliefs import Belief, MethodBelief
from forerun.speculate.length.costs import CostCurve, DraftCost, verification

Offer = tuple[float, int, int, float]
"""A position that may be drafted: expected tokens it adds, its depth, whose it is, expected rows it adds."""


@dataclass
class _Plan:
    """Budgets that were found best."""

    budgets: dict[int, int] = field(default_factory=dict)
    """By sequence."""
    left: int = 0
    """For how many more rounds they hold."""
    promise: float = 1.0
    """Their expected speed over plain decoding."""

    def fits(self, sequences: Seq[Sequence]) -> bool:
        """Whether it was made for about this batch."""
        return 4 * sum(sequence.id in self.budgets for sequence in sequences) > 3 * len(sequences)


@policies.register("adaptive")
class Adaptive(LengthPolicy):
    """What is not believed to be the fastest is tried too, short drafts where nobody drafts and plain rounds where
    somebody does, but at a bounded price whatever is found: ``SPEND`` of the time."""

    reproducible = False
    RATE = 0.6
    """What is expected of a drafter before anything is known, with the weight of ``METHOD_WEIGHT`` tests."""
    METHOD_WEIGHT = 3.0
    METHOD_FADE = 0.97
    """What a round with drafts leaves of the evidence before it."""
    SEQUENCE_WEIGHT = 8.0
    """Tests that the method's rate counts for among a sequence's own."""
    SEQUENCE_FADE = 0.93
    SILENT_FADE = 0.98
    """What a plan that leaves a sequence out keeps of the evidence about it: in the end it is tried again."""
    OPEN = 8.0
    """Tests that everything known about a method counts for while nobody drafts with it: what a probe finds is news."""
    UNTRIED = 7
    """Rows that drafts get in a round while a method has not been tested as often, or its price is not known."""
    MARGIN = 1.02
    """A draft must promise this much more than plain decoding."""
    CROWD = 0.02
    """And so much more for each of the next three sequences: a batch's promises rest on more estimates, and were
    measured to be kept less."""
    CALIBRATION = 3
    REPLAN = 4
    """Rounds that a plan with drafts holds: planning costs host time, and beliefs move slowly."""
    REST = 16
    """Rounds that one without drafts holds."""
    SPEND = 0.01
    SAVED = 4.0
    """Most time that can be saved for trying, in rounds."""
    CHEAPEST = 0.05
    """Least price of trying a draft, in plain rounds: what the host does for it."""
    PROBED = 4
    """Most sequences that try a draft at once."""
    HORIZON = 32
    """Rounds over which the price of a drafter's catching up is spread."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.verify = CostCurve(verification, (1.0, 0.05, 0.03), setting.row_multiple)
        self.draft = {method: DraftCost() for method in setting.nodes}
        self.methods = {
            method: MethodBelief(len(nodes) - 1, self.RATE, self.METHOD_WEIGHT)
            for method, nodes in setting.nodes.items()
        }
        self.beliefs: dict[int, Belief] = {}
        self.seen: dict[int, int] = {}
        """Committed tokens of each sequence that its drafter has been shown."""
        self.saved = 0.0
        """Seconds that may be spent on trying."""
        self.pace = 1.0
        """How slow the machine is at present; prices are what they would be at 1."""
        self._plan = _Plan()
        self._since = 0
        """Rounds since everybody decoded plainly."""
        self._asked: list[int] = []
        self._behind: list[int] = []

    def _rows(self, count: float) -> int:
        multiple = self.setting.row_multiple
        return ceil(count / multiple - 1e-6) * multiple

    def budgets(self, sequences: Seq[Sequence]) -> list[int]:
        self._asked = self._choose(sequences)
        self._behind = [self._lag(s) if budget else 0 for s, budget in zip(sequences, self._asked)]
        return self._asked

    def longest_nodes(self, sequence: Sequence) -> int:
        """Where the plan holds, what it wants: rows and pages that are not going to be used are not reserved."""
        planned = self._plan.budgets.get(sequence.id) if self._plan.left else None
        if planned == 0 or sequence.drafter is None:
            return 0
        depth = self.longest(sequence)
        return self.setting.nodes[sequence.drafter][depth if planned is None else min(depth, planned)]

    def _choose(self, sequences: Seq[Sequence]) -> list[int]:
        longest = [self.longest(sequence) for sequence in sequences]
        if not any(longest):
            return longest
        plan = self._plan
        if not plan.left or not plan.fits(sequences):
            rows = sum(sequence.scheduled for sequence in sequences)
            if self._calibrates(sequences, rows):
                return [0] * len(sequences)
            plan = self._plan = self._best(sequences, longest, rows)
            tried = self._try(sequences, longest, rows)
            if tried is not None:
                return tried
        plan.left -= 1
        return [min(cap, plan.budgets.get(s.id, 0)) for cap, s in zip(longest, sequences)]

    def _calibrates(self, sequences: Seq[Sequence], rows: int) -> bool:
        """Whether the price of plain decoding is to be measured for about so many sequences: at once at first, then
        after twice as many rounds every time, lest everything rests on one bad moment."""
        if any(sequence.scheduled > 1 for sequence in sequences):
            return False
        count = len(sequences)
        near = range(-(count // 4), count // 4 + 1)
        known = sum(self.verify.known(count + n, self._rows(rows + n)) for n in near)
        return known < self.CALIBRATION or self._since >= self.REPLAN << min(known - self.CALIBRATION, 16)

    def _lag(self, sequence: Sequence) -> int:
        """Committed tokens that its drafter has to catch up on, beyond what the last round gave it."""
        return len(sequence.tokens) - self.seen.get(sequence.id, 0)

    def _offers(self, sequences: Seq[Sequence], longest: Seq[int]) -> list[Offer]:
        """Every position that may be drafted, the most promising first."""
        exists = {method: belief.existence() for method, belief in self.methods.items()}
        shared = {method: belief.acceptance() for method, belief in self.methods.items()}
        offers: list[Offer] = []
        for index, (sequence, cap) in enumerate(zip(sequences, longest)):
            if not cap or sequence.drafter is None:
                continue
            rates, there = shared[sequence.drafter], exists[sequence.drafter]
            own = self.beliefs.get(sequence.id)
            if own is not None:
                rates = own.rates(rates, self.SEQUENCE_WEIGHT)
            nodes, chance = self.setting.nodes[sequence.drafter], 1.0
            for depth in range(1, cap + 1):
                chance *= rates[depth - 1]
                made = there[depth - 1]
                offers.append((chance * made, depth, index, made * (nodes[depth] - nodes[depth - 1])))
        offers.sort(key=lambda offer: (-offer[0], offer[1]))
        return offers

    def _best(self, sequences: Seq[Sequence], longest: Seq[int], rows: int) -> _Plan:
        """The admission prefix with the most expected tokens per second."""
        began = perf_counter()
        count = len(sequences)
        offers = self._offers(sequences, longest)
        plain = self._seconds(count, rows)
        best, chosen = (self.MARGIN + self.CROWD * min(count - 1, 3)) * count / plain, 0
        tokens, extra, wanted = float(count), 0.0, float(rows)
        drafting: dict[str, tuple[int, int]] = {}
        prices: dict[str, float] = {}
        untried = any(self._untried(sequence.drafter) for sequence in sequences if sequence.drafter is not None)
        for place, (gain, depth, index, added) in enumerate(offers, start=1):
            sequence = sequences[index]
            method = sequence.drafter
            assert method is not None
            tokens, wanted = tokens + gain, wanted + added
            drafters, levels = drafting.get(method, (0, 0))
            drafting[method] = drafters, levels = drafters + (depth == 1), max(levels, depth)
            prices[method] = self._draft_seconds(method, drafters, levels)
            if depth == 1:
                extra += self.draft[method].per_token * self._lag(sequence) / self.HORIZON
            speed = tokens / (self._seconds(count, wanted) + sum(prices.values()) + extra)
            if speed > best:
                best, chosen = speed, place
            if untried and place >= self.UNTRIED:
                break
        budgets = dict.fromkeys((sequence.id for sequence in sequences), 0)
        for _, depth, index, _ in offers[:chosen]:
            budgets[sequences[index].id] = depth
        for key, budget in budgets.items():
            if not budget and key in self.beliefs:
                self.beliefs[key].fade(self.SILENT_FADE)
        active = {sequences[index].drafter for _, _, index, _ in offers[:chosen]}
        for method, belief in self.methods.items():
            if method not in active:
                belief.loosen(self.OPEN)
        # Planning may take a hundredth of the time.
        worth = int((perf_counter() - began) / (0.01 * plain * self.pace))
        left = min(max(worth, self.REPLAN), self.REST) if chosen else self.REST
        return _Plan(budgets, left, best * plain / count)

    def _seconds(self, count: int, rows: float) -> float:
        """Expected seconds of a verification with so many rows."""
        found = self.verify.estimate(count, self._rows(rows))
        return found if found is not None else 1.0

    def _untried(self, method: str) -> bool:
        return self.methods[method].tested[0] < self.UNTRIED or self.draft[method].curve.estimate(1, 1) is None

    def _draft_seconds(self, method: str, sequences: int, levels: int) -> float:
        known = self.draft[method].curve.estimate(sequences, levels)
        return known if known is not None else 0.1 * levels * self._seconds(1, 1)

    def _try(self, sequences: Seq[Sequence], longest: Seq[int], rows: int) -> list[int] | None:
        """Budgets that do the other thing for a round, if enough time was saved for it."""
        count = len(sequences)
        plain = self._seconds(count, rows)
        budgets = [self._plan.budgets[sequence.id] for sequence in sequences]
        if any(budgets):
            price, budgets = (self._plan.promise - 1.0) * plain, [0] * count
        else:
            depth = max(1, self.setting.row_multiple - 1) if count == 1 else 1
            able = sorted((i for i, cap in enumerate(longest) if cap), key=lambda i: self._lag(sequences[i]))
            groups: dict[str, list[int]] = {}
            for index in able[: self.PROBED]:
                budgets[index] = min(longest[index], depth)
                groups.setdefault(sequences[index].drafter or "", []).append(self._lag(sequences[index]))
            made = sum(depth * len(lags) * self.methods[method].existence()[0] for method, lags in groups.items())
            price = max(self._seconds(count, rows + made) - plain, self.CHEAPEST * plain)
            for method, lags in groups.items():
                price += self._draft_seconds(method, len(lags), depth) + self.draft[method].per_token * sum(lags)
        if self.saved < min(price, self.SAVED * plain):
            return None
        self.saved -= price
        return budgets

    def observe(self, sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], seconds: Seconds) -> None:
        if all(verdict.fed == 1 for verdict in verdicts):
            point = (len(sequences), self._rows(len(sequences) + sum(len(draft) for draft in drafts)))
            spent = seconds.verify + seconds.accept
            expected = self.verify.estimate(*point) if self.verify.known(*point) >= self.CALIBRATION else None
            if expected is not None:
                # At rest where a quarter of the rounds is faster, as the prices are.
                self.pace *= 1.01 if spent > expected * self.pace else 0.97
            spent /= self.pace
            self.verify.add(*point, spent)
            self.saved = min(self.saved + self.SPEND * spent, self.SAVED * spent)
        self._since += 1
        if not any(self._asked):
            self._since = 0
        else:
            self._price(sequences, seconds.draft / self.pace)
            for method in {s.drafter for s, asked in zip(sequences, self._asked) if asked and s.drafter is not None}:
                self.methods[method].fade(self.METHOD_FADE)
            for index, sequence in enumerate(sequences):
                if self._asked[index] and sequence.drafter is not None:
                    self._learn(sequence, index, drafts[index], verdicts[index])

    def _price(self, sequences: Seq[Sequence], seconds: float) -> None:
        """Learn what drafting cost; methods that drafted together share it as their estimates say."""
        groups: dict[str, list[int]] = {}
        for index, sequence in enumerate(sequences):
            if self._asked[index] and sequence.drafter is not None:
                groups.setdefault(sequence.drafter, []).append(index)
        levels = {method: max(self._asked[i] for i in group) for method, group in groups.items()}
        guesses = {method: self._draft_seconds(method, len(group), levels[method]) for method, group in groups.items()}
        total = sum(guesses.values())
        for method, group in groups.items():
            behind, guess = sum(self._behind[i] for i in group), guesses[method]
            self.draft[method].add(len(group), levels[method], behind, guess, seconds * guess / total)

    def _learn(self, sequence: Sequence, index: int, draft: Draft, verdict: Verdict) -> None:
        assert sequence.drafter is not None
        if not len(draft) and self._behind[index]:
            return
        self.seen[sequence.id] = len(sequence.tokens)
        method = self.methods[sequence.drafter]
        method.learn_made(self._asked[index], draft.depth)
        if len(draft):
            method.learn(verdict.tested, verdict.matched)
            own = self.beliefs.get(sequence.id)
            if own is None:
                own = self.beliefs[sequence.id] = Belief(len(method.tested))
            own.fade(self.SEQUENCE_FADE)
            own.learn(verdict.tested, verdict.matched)

    def release(self, sequence: Sequence) -> None:
        self.beliefs.pop(sequence.id, None)
        self.seen.pop(sequence.id, None)
