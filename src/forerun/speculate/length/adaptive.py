"""``adaptive``: each sequence drafts as far as recent acceptance and measured cost say it pays, 0 included.

The budgets maximise expected tokens per second of the coming round: positions are admitted in the order of their
chance of being reached and accepted (the prefix scheduler of DSpark, deepseek-ai/DeepSpec, algorithm 1, with the
best of all prefixes instead of the first drop, because rows are padded and cost comes in steps). They depend on
earlier rounds alone, so rules that compare p with q stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from time import perf_counter

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting, policies
from forerun.speculate.length.beliefs import Beliefs, MethodBelief, News
from forerun.speculate.length.ledger import Entry, Ledger
from forerun.speculate.length.plan import Coasting, Doubt, Plan, decodes, nobody
from forerun.speculate.length.prices import Drafting, Prices


@policies.register("adaptive")
class Adaptive(LengthPolicy):
    """Whatever is believed of drafts, they need a balance of the account that covers their price: errors of the
    estimates cost a bounded share of the time."""

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
    """Tests that everything known about a method counts for while nobody drafts with it: what a trial finds is news."""
    SEQUENCE_OPEN = 2.0
    """And about a sequence, while nobody drafts."""
    UNTRIED = 7
    """Rows that drafts get in a round while a method has not been tested as often, or its price is not known."""
    MARGIN = 1.04
    """A draft must promise this much more than plain decoding; where it has been kept up, anything more."""
    REPLAN = 16
    """Rounds that a plan with drafts holds: planning costs host time, and beliefs move slowly."""
    COASTING = 32
    """And where it pays so well that most of them need not be watched."""
    LUCK = -0.5
    """Which power of the number of sequences the account's limits follow: luck evens out over them."""
    LOAN = 0.5
    """How far below zero the account may be taken by a plan that goes on, for one sequence."""
    TOGETHER = 8
    """Rounds with drafts that are accounted for at once, no more than the account could pay for."""
    TRIAL = 4
    """Rounds that a trial lasts, unless the account says no before."""
    BETWEEN = (8, 64)
    """Plain rounds before the next trial; each one in vain doubles them, unless drafts have earned what it takes."""
    REST = 256
    """Most rounds without a thought of drafts."""
    LITTLE = 8
    """Fewer tokens to catch up on than so many are not counted."""
    GOOD = 1.1
    """What the best plan must promise to be left for deeper drafts, for the sake of their price."""
    CHECKS = (4, 128)
    """Drafts are interrupted by two plain rounds after so many at first, and after so many at last."""
    clock = staticmethod(perf_counter)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.prices = Prices(setting)
        methods = {
            method: MethodBelief(len(nodes) - 1, self.RATE, self.METHOD_WEIGHT)
            for method, nodes in setting.nodes.items()
        }
        self.beliefs = Beliefs(methods, self.METHOD_FADE, self.SEQUENCE_FADE)
        self.seen: dict[int, int] = {}
        """Committed tokens of each sequence that its drafter has been shown."""
        self.ledger = Ledger(self.prices)
        self.account = self.ledger.account
        self._took = 0.0
        """Seconds of its own that were not counted yet."""
        self._plan = Plan()
        self._check = self.CHECKS[0]
        self._settling = False
        """Whether plain rounds go on until what was measured before them is priced."""
        self._wait, self._between = 0, self.BETWEEN[0]
        """Plain rounds until a trial, and how many the last one was worth."""
        self._doubts: dict[int, Doubt] = {}
        """By number of sequences."""
        self._asked: list[int] = []
        self._groups: list[Drafting] = []
        self._steady: list[int] = []
        """Sequences for which the last round's budgets hold unless the plan ends; empty: look again."""
        self._news: list[tuple[list[str], list[News]]] = []
        """Rounds with drafts that nothing was learnt from yet."""
        self._coasting = Coasting()

    def budgets(self, sequences: Seq[Sequence]) -> list[int]:
        plan = self._plan
        repeats = plan.left > 0 and bool(self._steady) and self._repeats(sequences)
        if (self._coasting.left or self._coasting.gone) and not (repeats and self._coasting.left):
            self._wake(sequences)
        if repeats:
            plan.left -= 1
        elif plan.rests:
            # When all of them left, there are no rows for drafts in this round, but the next one is planned.
            plan.left = plan.left - 1 if plan.still(sequences) else 0
            self._asked, self._groups = [0] * len(sequences), []
        else:
            began = self.clock()
            self._asked = self._choose(sequences)
            asked = {sequence.id: depth for sequence, depth in zip(sequences, self._asked) if depth}
            self._groups = self._drafting(sequences, asked) if asked else []
            self._took += self.clock() - began
        return self._asked

    def _wake(self, sequences: Seq[Sequence]) -> None:
        """Watch again: drafters have seen what those got for whom they drafted meanwhile."""
        drafted = {key for key, asked in zip(self._steady, self._asked) if asked}
        for sequence in sequences:
            if sequence.id in drafted:
                self.seen[sequence.id] = len(sequence.tokens)
        self.prices.since += self._coasting.gone
        self._coasting = Coasting()

    def longest_nodes(self, sequence: Sequence) -> int:
        """Where the plan holds, what it wants: rows and pages that are not going to be used are not reserved."""
        plan = self._plan
        if plan.rests or sequence.drafter is None:
            return 0
        depth = self.longest(sequence)
        if plan.left:
            depth = min(depth, plan.budgets.get(sequence.id, depth))
        return self.setting.nodes[sequence.drafter][depth]

    def _choose(self, sequences: Seq[Sequence]) -> list[int]:
        longest = [self.longest(sequence) for sequence in sequences]
        if not any(longest):
            return longest
        plan = self._plan
        if plan.left and not plan.fits(sequences):
            plan.left = 0  # rows of this round were reserved for it: as far as newcomers like, as it says for others
            longest = [min(cap, plan.budgets.get(s.id, cap)) for cap, s in zip(longest, sequences)]
        if not plan.left:
            self._digest()
            if self._calibrates(sequences):
                return [0] * len(sequences)
            plan = self._plan = self._decide(sequences, longest)
            if plan.rests:
                return [0] * len(sequences)
        plan.left -= 1
        return [min(cap, plan.budgets.get(s.id, 0)) for cap, s in zip(longest, sequences)]

    def _calibrates(self, sequences: Seq[Sequence]) -> bool:
        """Whether plain decoding is to be measured: at first, and beside drafts as often as costs a hundredth of what
        they promise."""
        prices = self.prices
        if any(sequence.scheduled > 1 for sequence in sequences):
            return False
        if self._settling and prices.wait:
            return True
        probed = self._plan.probes and prices.since > 0
        checks = prices.since >= self._until_check()
        self._settling = probed or checks or not prices.sure(len(sequences))
        if checks and not probed and self._plan.promise > 1.0:
            self._check = min(2 * self._check, self.CHECKS[1])
        return self._settling

    def _until_check(self) -> int:
        """How many rounds with drafts may follow each other; a trial ends with plain rounds."""
        promised = self._plan.promise - 1.0
        return min(self._check, max(2 * self.CHECKS[0], int(200 * promised))) if promised > 0.0 else 1

    def _lag(self, sequence: Sequence) -> int:
        """Committed tokens that its drafter has to catch up on, beyond what the last rounds gave it."""
        lag = len(sequence.tokens) - self.seen.get(sequence.id, 0)
        return lag if lag >= self.LITTLE else 0

    def _decide(self, sequences: Seq[Sequence], longest: Seq[int]) -> Plan:
        """The best plan if the account covers it, else a small trial, else rest until there is enough for one."""
        self.beliefs.learn(self._news, self.seen)
        self._news.clear()
        self._wait -= self.ledger.rest()
        account, luck = self.account, len(sequences) ** self.LUCK
        account.open(luck)
        best = self._best(sequences, self._affordable(sequences, longest))
        goes_on = self._plan.promise > 1.0
        pays = best.promise > (1.0 if goes_on else self.MARGIN)
        needed = -self.LOAN * luck if goes_on else self._excess(sequences, best.budgets)
        if len(sequences) > 1:
            needed = min(needed, luck * account.START)
        if pays and account.balance >= needed:
            best.promise = max(best.promise, self.MARGIN)
            rounds = self.COASTING if self._rich(best.promise) else self.REPLAN
            due = self._check - self.prices.since  # a check may be overdue while prompts are read
            best.left = min(rounds, due if due > 0 else self.TOGETHER)
            if goes_on and (deeper := self._deeper(sequences, longest, best)) is not None:
                return deeper
            return best
        if goes_on:
            self._wait = self._between = self.BETWEEN[0]
        if pays and not goes_on and len(sequences) > 1:
            return self._rest(sequences, needed)  # a trial would spend what it takes
        trial = best.budgets if len(sequences) == 1 and any(best.budgets.values()) else self._trial(sequences, longest)
        price = self.TRIAL * self._excess(sequences, trial) - (self.TRIAL - 1) * self.ledger.aftermath()
        price = min(price, luck * account.START)
        if account.balance < price or self._wait > 0:
            return self._rest(sequences, price)
        most = self.BETWEEN[account.balance <= account.START]
        self._wait = self._between = min(2 * self._between, most)
        return Plan(trial, self.TRIAL)

    def _rest(self, sequences: Seq[Sequence], price: float) -> Plan:
        """Nobody drafts until the account covers this price and enough rounds have passed since the last trial."""
        self.beliefs.loosen(math.inf, self.SEQUENCE_OPEN)
        self._check = self.CHECKS[0]
        rounds = max(int((price - self.account.balance) / self.account.SPEND) + 1, self._wait)
        return Plan.rest(min(rounds, self.REST), sequences)

    def _deeper(self, sequences: Seq[Sequence], longest: Seq[int], best: Plan) -> Plan | None:
        """The deepest drafts instead of the best plan, now and then, where the account is well filled."""
        deepest = {s.id: cap for s, cap in zip(sequences, longest) if s.scheduled == 1}
        doubt = self._doubts.setdefault(len(sequences), Doubt())
        if best.budgets == deepest:
            doubt.calm()
            return None
        may = best.promise > self.GOOD and self.account.balance >= self.account.START
        if not doubt.due(best.left, may and not any(map(self._lag, sequences))):
            return None
        return Plan(deepest, self.TRIAL, best.promise, probes=True)

    def _affordable(self, sequences: Seq[Sequence], longest: Seq[int]) -> list[int]:
        """How deep each may draft where the account has to cover what their drafters must catch up on."""
        left = self.account.balance * self.prices.round(len(sequences), len(sequences))
        depths = list(longest)
        for index in sorted(range(len(depths)), key=lambda i: self._lag(sequences[i])):
            lag, method = self._lag(sequences[index]), sequences[index].drafter
            if depths[index] and lag and method is not None:
                left -= self.prices.draft[method].per_token * lag
                depths[index] *= left > 0.0
        return depths

    def _drafting(self, sequences: Seq[Sequence], budgets: Mapping[int, int]) -> list[Drafting]:
        """What each method does in a round with these budgets."""
        groups: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            if budgets.get(sequence.id) and sequence.drafter is not None:
                groups.setdefault(sequence.drafter, []).append(sequence)
        return [
            Drafting(method, len(group), max(budgets[s.id] for s in group), sum(map(self._lag, group)))
            for method, group in groups.items()
        ]

    def _excess(self, sequences: Seq[Sequence], budgets: Mapping[int, int]) -> float:
        """What a round with these budgets costs beyond a plain one if no draft is accepted, in plain rounds; at most
        what can be saved."""
        rows = float(sum(sequence.scheduled for sequence in sequences))
        plain = self.prices.round(len(sequences), rows)
        for sequence in sequences:
            depth = budgets.get(sequence.id)
            if depth and sequence.drafter is not None:
                made = self.beliefs.methods[sequence.drafter].existence()[depth - 1]
                rows += made * self.setting.nodes[sequence.drafter][depth]
        cost = self.prices.round(len(sequences), rows)
        cost += sum(self.prices.drafting(*part) for part in self._drafting(sequences, budgets))
        excess = max(cost + self.ledger.host / self.prices.pace, plain) / plain - 1.0
        return min(excess + self.ledger.aftermath(), self.account.SAVED)

    def _trial(self, sequences: Seq[Sequence], longest: Seq[int]) -> dict[int, int]:
        """A short draft for one sequence: of those whose drafters have least to catch up on, the least known."""

        def rank(index: int) -> tuple[int, float]:
            own = self.beliefs.own.get(sequences[index].id)
            return self._lag(sequences[index]), own.tested[0] if own is not None else 0.0

        budgets = nobody(sequences)
        budgets[sequences[min((i for i, cap in enumerate(longest) if cap), key=rank)].id] = 1
        return budgets

    def _best(self, sequences: Seq[Sequence], longest: Seq[int]) -> Plan:
        """The admission prefix with the most expected tokens per second among those that are not empty."""
        count, rows = len(sequences), float(sum(sequence.scheduled for sequence in sequences))
        offers = self.beliefs.offers(sequences, longest, self.setting.nodes, self.SEQUENCE_WEIGHT)
        plain = self.prices.round(count, rows)
        best, chosen = 0.0, 0
        tokens, extra = float(count), self.ledger.host / self.prices.pace
        drafting: dict[str, tuple[int, int]] = {}
        costs: dict[str, float] = {}
        untried = any(self._untried(sequence.drafter) for sequence in sequences if sequence.drafter is not None)
        for place, (gain, depth, index, added) in enumerate(offers[: self.UNTRIED] if untried else offers, start=1):
            sequence = sequences[index]
            method = sequence.drafter
            assert method is not None
            tokens, rows = tokens + gain, rows + added
            drafters, levels = drafting.get(method, (0, 0))
            drafting[method] = drafters, levels = drafters + (depth == 1), max(levels, depth)
            costs[method] = self.prices.drafting(method, drafters, levels)
            if depth == 1:
                extra += self.prices.draft[method].per_token * self._lag(sequence) / self.account.HORIZON
            speed = tokens / (self.prices.round(count, rows) + sum(costs.values()) + extra)
            if speed > best:
                best, chosen = speed, place
        budgets = nobody(sequences)
        for _, depth, index, _ in offers[:chosen]:
            budgets[sequences[index].id] = depth
        promise = best * plain / count
        pays = promise > self.MARGIN
        active = {sequences[index].drafter for _, _, index, _ in offers[:chosen] if pays}
        self.beliefs.forget(budgets if pays else {}, active, self.SILENT_FADE, self.OPEN)
        return Plan(budgets, self.REPLAN, promise)

    def _untried(self, method: str) -> bool:
        return self.beliefs.methods[method].tested[0] < self.UNTRIED or self.prices.untried(method)

    def observe(self, sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], seconds: Seconds) -> None:
        if self._coasting.left:
            self._coasting.see(sum([len(verdict.tokens) for verdict in verdicts]))
            if self._coasting.slack < 0.0:
                self._plan.left = 0
                self.beliefs.loosen(self.OPEN, self.SEQUENCE_OPEN)
            return
        if not self._groups:
            self._digest()
            self.ledger.idle += 1
            self.prices.streak += 1
            # In a long rest only the last rounds are looked at: this costs host time too.
            if self._plan.left < self.prices.RECENT or self.prices.wait:
                self._observe_plain(verdicts, seconds)
            return
        news, steady = [], decodes(verdicts)
        for asked, sequence, draft, verdict in zip(self._asked, sequences, drafts, verdicts):
            if asked:
                known = self.seen.get(sequence.id, 0)
                if len(draft) or len(sequence.tokens) - len(verdict.tokens) - known < self.LITTLE:
                    self.seen[sequence.id] = len(sequence.tokens)
                    news.append(News(sequence, asked, draft, verdict))
                else:
                    steady = False
        self.ledger.entries.append(Entry(self._groups, drafts, verdicts, seconds))
        self._news.append(([part.method for part in self._groups], news))
        if steady and any(part.behind for part in self._groups):
            self._groups = [part._replace(behind=0) for part in self._groups]
        self._steady = [sequence.id for sequence in sequences] if steady else []
        if len(self.ledger.entries) >= min(self.TOGETHER, self.account.balance):
            before = self.account.balance
            brought = self._digest()
            if self.account.balance < before:
                self._plan.left = min(self._plan.left, self.REPLAN)
            elif steady and self._rich(self._plan.promise):
                self._coasting = Coasting.over(self._plan.left, len(sequences), brought)

    def _repeats(self, sequences: Seq[Sequence]) -> bool:
        """Whether the last round's budgets are the plan's for this one."""
        if [sequence.id for sequence in sequences] != self._steady:
            return False
        return all(self.longest(sequence) >= asked for asked, sequence in zip(self._asked, sequences))

    def _digest(self) -> float:
        """Account for rounds with drafts; returns their tokens per round."""
        ledger = self.ledger
        count = len(ledger.entries)
        if not count:
            return 0.0
        began = self.clock()
        sequences = len(ledger.entries[-1].verdicts)
        self._wait -= ledger.rest()
        brought = ledger.settle()
        took = (self._took + self.clock() - began) / count
        ledger.host += 0.2 * (min(took, 2.0 * ledger.host) - ledger.host) if ledger.host else took / self.REPLAN
        self._took = 0.0
        if self.account.balance < -self.LOAN * sequences**self.LUCK:
            self._plan.left = 0
        return brought / count

    def _rich(self, promise: float) -> bool:
        """Whether drafts pay so well that not every round need be watched."""
        return promise > self.GOOD and self.account.balance > 0.75 * self.account.SAVED

    def _observe_plain(self, verdicts: Seq[Verdict], seconds: Seconds) -> None:
        if decodes(verdicts):
            self.prices.plain(len(verdicts), seconds.verify + seconds.accept)
        else:
            self.prices.streak -= 1

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        if source.id in self.seen:
            self.seen[sequence.id] = self.seen[source.id]
        if source.id in self.beliefs.own:
            self.beliefs.own[sequence.id] = self.beliefs.own[source.id]

    def release(self, sequence: Sequence) -> None:
        self.beliefs.own.pop(sequence.id, None)
        self.seen.pop(sequence.id, None)
