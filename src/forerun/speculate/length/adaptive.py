"""``adaptive``: each sequence drafts as far as measured prices and recent acceptance say it pays, 0 included.

Budgets maximise the expected tokens per second of the coming rounds: positions are admitted in the order of their
chance of being reached and accepted, and the best of all prefixes of that order is taken (the scheduler of DSpark,
deepseek-ai/DeepSpec, algorithm 1). Prices are measured (``prices.py``), so only acceptance is learnt from the rounds.

A looked-up draft costs next to nothing before it is verified. So look-ups come first, and the policy then says how much
of what they found is worth its rows (``worth``): more than plain decoding, and more than what the drafter that pays for
each token would bring. All this depends on earlier rounds and on the text alone, so rules that compare p with q stay
exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any

from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdict, Verdicts
from forerun.speculate.length.acceptance import AnswerLengths, Drafting, Lookups
from forerun.speculate.length.base import LengthPolicy, Parts, Seconds, Setting, policies
from forerun.speculate.length.prices import Prices, PriceTable
from forerun.speculate.length.rest import Rest


@dataclass
class Plan:
    """How far drafters that pay for each token draft, for some rounds. Look-ups draft beside it."""

    depths: Mapping[int, int] = field(default_factory=dict)
    """By the id of the sequence; none: 0."""
    speedup: float = 1.0
    """Expected speed over plain decoding."""
    rate: float = 0.0
    """Expected tokens per second of the table."""
    sequences: frozenset[int] = frozenset()
    rounds_left: int = 0
    lost: float = 0.0
    """Plain rounds that its rounds have cost beyond the tokens they brought."""


@policies.register("adaptive")
class Adaptive(LengthPolicy):
    """Drafts as deep as the expected speed is best; where rounds with speculation lose, drafters rest (``rest.py``)."""

    reproducible = False
    MARGIN = 1.03
    """The expected speedup from which drafts are used."""
    START, EXPLORES = (1.2, 0.9), 0.001
    """Plain rounds that drafts which are not expected to pay may cost: at first and at most, alone and in a batch; and
    by how much that grows with each round without drafts."""
    PLANNING = 0.002
    """A plan holds for so many rounds that planning takes this part of the time."""
    LATE = 8
    """After this many slow rounds with drafts, plain ones show whether the machine itself is slow."""
    HEAD, MODEL = (0.6, 4.0, 6.0, 0.1), (0.7, 8.0, 24.0, 3.0)
    """What is assumed of a drafter and of a draft model: the arguments of ``Drafting``."""
    WAITS = (2, 4, 8, 16, 32)
    """After this many more tokens, a drafter may begin to read."""
    LEAST, BETTER, FINDS = 0.05, 1.15, 0.15
    """Least gain of a looked-up chain, in tokens; its factor over the other part's gain; the gain of look-ups that is
    assumed at first."""
    FOUND, PROBES = 0.05, 0.004
    """Weight of a look-up in what look-ups bring, and the part of the time for those that are not expected to pay."""
    LOOKS = 8
    """At rest, one round in this many has look-ups."""
    OTHERS = 0.1
    """Weight of a round in the number of rows that a sequence drafts."""
    RECENT = 0.04
    """Weight of a round in the recent speed."""
    clock = staticmethod(perf_counter)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.prices = Prices(
            setting.nodes, setting.row_multiple, setting.mixture, setting.trials, setting.threads, setting.busy
        )
        self.drafting: dict[tuple[str, bool], Drafting] = {}
        """By method, and whether requests sample."""
        self.lookups: dict[tuple[str, bool], Lookups] = {}
        self.lengths = AnswerLengths()
        self._plan = Plan()
        self._table: PriceTable | None = None
        self._budgets: Sequence[int] = ()
        self._found: dict[str, float] = {}
        """By method, the recent mean of what a look-up brought, in tokens."""
        self._recent = (0.0, 0.0)
        """Tokens and seconds of recent rounds, by the table."""
        self._others = 0.0
        """Drafted rows of a sequence and round, recently."""
        self._rests: defaultdict[int, Rest] = defaultdict(Rest)
        """By the binary digits of the number of sequences less one."""
        self._rest: Rest | None = None
        """That of this round; None: nobody in it may draft."""
        self._round: tuple[float, float, float, float] | None = None
        """What it will be told of this round, but for the host's seconds."""
        self._idle = False
        """Whether nothing is learnt from this round: it is one of many at rest."""
        self._number = 0
        self._plain = False
        """Whether the last round was one without drafts."""
        self._allowance = max(self.START)
        """Plain rounds that drafts which are not expected to pay may cost now."""
        self._behind: dict[int, int] = {}
        """By sequence, the backlog of its drafter before this round."""
        self._planning = 0.0
        """Seconds of a plan, usually."""
        self._chances_now: dict[object, list[float]] = {}
        """Those of ``_chances``, while a plan is made."""

    def move(self, setting: Setting) -> None:
        super().move(setting)
        self.prices.trials, self.prices.threads = setting.trials, setting.threads
        self.prices.busy = setting.busy

    def expect(self, count: int) -> None:
        if self.setting.nodes:
            self.prices.at(count)

    def parts(self, sequence: RequestState) -> Parts:
        return self.setting.parts.get(sequence.drafter or "", Parts((), sequence.drafter))

    def budgets(self, sequences: Requests) -> list[int]:
        self._round = None
        rest = self._rests[(len(sequences) - 1).bit_length()]
        self._rest = rest
        self._number += 1
        self._idle = self._quiet(self._number)
        if self._idle:
            self._budgets = [0] * len(sequences)
            return list(self._budgets)
        if rest.resting:
            self._table = table = self._price_table(sequences)
            probes = self._number % self.LOOKS == 0
            # Look-ups are worth what they bring beyond plain rounds.
            self._plan = Plan(rate=len(sequences) / self.prices.verify(table, len(sequences), len(sequences)))
            self._budgets = [self._probe(sequence) if probes else 0 for sequence in sequences]
            return list(self._budgets)
        longest = [self.longest(sequence) for sequence in sequences]
        self._rest = rest if any(longest) else None
        if not any(longest):  # also where this plan's own 0 was reserved: it comes to an end all the same
            self._plan.rounds_left -= 1
            self._budgets = longest
            return longest
        self._table = table = self._price_table(sequences)
        plan = self._plan
        # Planning takes time, too, so a plan holds for several rounds, unless a sequence is not in it.
        if plan.rounds_left <= 0 or not all(s.id in plan.sequences or not cap for s, cap in zip(sequences, longest)):
            began = self.clock()
            self._plan = plan = self._make_plan(sequences, longest, table)
            self._planning += 0.2 * (self.clock() - began - self._planning)
            per_round = len(sequences) / max(plan.rate, 1e-9) * (table.level or 1.0)
            plan.rounds_left = max(1, int(self._planning / (self.PLANNING * per_round)))
        plan.rounds_left -= 1
        self._behind.clear()
        budgets = [self._budget(s, cap, plan) if cap else 0 for s, cap in zip(sequences, longest)]
        self._budgets = budgets
        return budgets

    def _quiet(self, number: int) -> bool:
        """Whether that round is one of many at rest in which nothing is looked up or compared."""
        rest = self._rest
        quiet = rest is not None and rest.resting and not rest.comparing and self.prices.compared
        return quiet and number % self.LOOKS > 0

    def _price_table(self, sequences: Requests) -> PriceTable:
        return self.prices.at(len(sequences), sum([len(s.tokens) for s in sequences]) / len(sequences))

    def _budget(self, sequence: RequestState, cap: int, plan: Plan) -> int:
        """Sets what the parts of the sequence's drafter may draft; returns the most of them."""
        parts = self.parts(sequence)
        depth = min(cap, plan.depths.get(sequence.id, 0)) if parts.steps is not None else 0
        if depth:
            self._behind[sequence.id] = self.setting.backlog(sequence)
        looks = cap if parts.lookups and self._looks(sequence, plan) else 0
        return self._set(sequence, parts, depth, looks)

    def _probe(self, sequence: RequestState) -> int:
        """At rest, what a sequence may look up in this round."""
        parts = self.parts(sequence)
        return self._set(sequence, parts, 0, self.longest(sequence) if parts.lookups else 0)

    def _set(self, sequence: RequestState, parts: Parts, depth: int, looks: int) -> int:
        sequence.depths = {**dict.fromkeys(parts.lookups, looks), **({parts.steps: depth} if parts.steps else {})}
        sequence.worth = partial(self.worth, sequence) if looks else None
        return max(depth, looks)

    def _looks(self, sequence: RequestState, plan: Plan) -> bool:
        """Whether a look-up is worth its time; of those that are not, some are made for ``PROBES`` of the time."""
        method, count = sequence.drafter or "", len(plan.sequences)
        found = self._found.get(method, self.FINDS)
        price = self.prices.draft(self._table, method, 0) * plan.rate if self._table else 0.0
        price /= count if count >= self.prices.BATCH else 1
        if found <= price and self._number % ceil(price / self.PROBES):
            return False
        self._found[method] = (1.0 - self.FOUND) * found
        return True

    def worth(self, sequence: RequestState, draft: Draft) -> int:
        """How many of a looked-up chain's tokens are worth their rows; 0 also if the other part's draft is better."""
        table, plan, count = self._table, self._plan, len(self._budgets)
        if table is None:
            return len(draft)
        learnt = self._lookup(draft.method or "", not sequence.params.greedy)
        others = (count - 1) * self._others  # drafted rows of the other sequences
        price = self.prices.verify(table, count, count)
        steps = max(0.0, plan.speedup - 1.0) if sequence.id in plan.depths else 0.0  # tokens that the other part gains
        best, most = 0, self.BETTER * steps + self.LEAST
        chance, expected, gain = 1.0, 0.0, 0.0
        for length, evidence in enumerate(draft.evidence, 1):
            chance *= learnt.rate(sequence.id, evidence)
            expected += chance
            extra = self.prices.verify(table, count + others + length, count) - price
            net = expected - plan.rate * extra * length / (others + length)
            if net > most:
                gain += net - most
                best, most = length, net
            elif chance < 0.02:
                break
        method = sequence.drafter or ""
        self._found[method] = self._found.get(method, self.FINDS) + self.FOUND * gain
        return best

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        if self._idle:
            assert self._rest is not None
            self._plain = True
            self._rest.skip()
            return
        count, rows = len(sequences), len(sequences) + sum(map(len, drafts))
        self._chances_now.clear()
        for sequence, draft, verdict, budget in zip(sequences, drafts, verdicts, self._budgets):
            if budget or draft.shadow:
                self._learn(sequence, draft, verdict)
            if not budget and sequence.drafter is not None:
                self._drafting(sequence).forget(sequence.id)
        table = self._table
        if table is None or not all(verdict.fed == 1 for verdict in verdicts):
            if self._rest is not None:
                self._rest.skip()
            return  # a round that also read a prompt says nothing of what verifying costs
        drafted = rows > count
        if any(self._budgets):
            self._others += self.OTHERS * ((rows - count) / count - self._others)
        tokens, cost = sum([len(verdict.tokens) for verdict in verdicts]), self.prices.verify(table, rows, count)
        plain = self.prices.verify(table, count, count)
        spent = seconds.draft + seconds.verify + seconds.accept
        self.prices.observe(table, count, rows, seconds.verify + seconds.accept, seconds.experts, self._plain)
        self._plain = not drafted
        if self._rest is not None and self._rest.resting:
            self._round = tokens / count * plain, cost, spent, seconds.accept
            return
        parts = [(s, self.parts(s).steps, draft) for s, draft in zip(sequences, drafts) if len(draft)]
        asked = {s.drafter or "": d.depth for s, steps, d in parts if steps and d.method in (steps, s.drafter)}
        cost += sum([self.prices.draft(table, method, depth) for method, depth in asked.items()])
        if len(asked) == 1 and seconds.draft:
            self.prices.observe_draft(table, *asked.popitem(), sum(self._behind.values()), seconds.draft)
        self._round = tokens / count * plain, cost, spent, seconds.accept
        fade = 1.0 - self.RECENT
        self._recent = fade * self._recent[0] + tokens, fade * self._recent[1] + cost
        loss = cost / plain - tokens / count if drafted else 0.0
        self._plan.lost += loss
        if self._plan.speedup < self.MARGIN:
            self._allowance += self.EXPLORES * (not drafted) - loss
        late = drafted and self.prices.slower == self.LATE
        if late and self._rest is not None:
            self._rest.check()
        if late or self._plan.lost > 0.0:
            self._plan.rounds_left = 0

    def _learn(self, sequence: RequestState, draft: Draft, verdict: Verdict) -> None:
        steps, matched, tokens = self.parts(sequence).steps, verdict.matched, verdict.tokens
        if draft.shadow is not None:
            method, depth, token, evidence = draft.shadow
            if matched >= depth and len(tokens) > depth:
                self._lookup(method, not sequence.params.greedy).learn(sequence.id, evidence, tokens[depth] == token)
        if draft.evidence:
            learnt = self._lookup(draft.method or "", not sequence.params.greedy)
            for depth, evidence in enumerate(draft.evidence[: matched + 1]):
                learnt.learn(sequence.id, evidence, depth < matched)
        elif steps is not None and (budget := (sequence.depths or {}).get(steps)):
            if not len(draft) and self.setting.backlog(sequence) < self._behind.get(sequence.id, 0):
                return  # it read, and may draft in a later round
            self._drafting(sequence).count(sequence, budget, draft, verdict.path)

    def longest_nodes(self, sequence: RequestState) -> int:
        """At most the plan's budget, so that no rows and pages are reserved in vain."""
        if sequence.drafter is None or self._quiet(self._number + 1):
            return 0
        depth = self.longest(sequence)
        if not self.parts(sequence).lookups and self._plan.rounds_left and sequence.id in self._plan.sequences:
            depth = min(depth, self._plan.depths.get(sequence.id, 0))
        return self.setting.nodes[sequence.drafter][depth]

    def observe_host(self, seconds: float) -> None:
        if self._rest is not None and self._round is not None:
            plain, price, others, host = self._round
            self._rest.observe(plain, price, others + seconds, host + seconds)

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        plan = self._plan
        plan.sequences |= {sequence.id} if source.id in plan.sequences else set()
        if source.id in plan.depths:
            plan.depths = {**plan.depths, sequence.id: plan.depths[source.id]}

    def release(self, sequence: RequestState) -> None:
        self._rests[0].shorten()
        if sequence.drafter is not None:
            self._drafting(sequence).release(sequence.id)
        for learnt in self.lookups.values():
            learnt.own.pop(sequence.id, None)
        if sequence.num_output:
            self.lengths.seen.append(sequence.num_output)

    def _lookup(self, method: str, samples: bool) -> Lookups:
        return self.lookups.setdefault((method, samples), Lookups())

    def _drafting(self, sequence: RequestState) -> Drafting:
        return self._learnt(sequence.drafter or "", not sequence.params.greedy)

    def _learnt(self, method: str, samples: bool) -> Drafting:
        if (method, samples) not in self.drafting:
            prior = self.MODEL if method in self.setting.models else self.HEAD
            parts = self.setting.parts.get(method)
            deepest = len(self.setting.nodes[method]) - 1 if parts is None or parts.deepest is None else parts.deepest
            self.drafting[method, samples] = Drafting(deepest, *prior)
        return self.drafting[method, samples]

    def _chances(self, sequence: RequestState) -> list[float]:
        """By depth, the chance that all tokens of this sequence's next draft up to there are accepted."""
        drafting = self._drafting(sequence)
        own = sequence.id if sequence.id in drafting.own else None
        key = sequence.drafter, sequence.params.greedy, own, sequence.reads
        if key not in self._chances_now:
            self._chances_now[key] = drafting.expected(sequence)
        return self._chances_now[key]

    def _make_plan(self, sequences: Requests, longest: list[int], table: PriceTable) -> Plan:
        self._chances_now.clear()
        stepping = [
            min(cap, self._drafting(s).depth) if cap and self.parts(s).steps is not None else 0
            for s, cap in zip(sequences, longest)
        ]
        self._choose_reads(sequences, stepping, table)
        best = self._best_plan(sequences, stepping, table)
        plain = len(sequences) / self.prices.verify(table, len(sequences), len(sequences))
        self._allowance = min(self._allowance, self.START[len(sequences) >= self.prices.BATCH])
        while best.depths and best.speedup < self.MARGIN:
            time = self._expected_tokens(sequences, best.depths) / len(sequences) / best.speedup
            if time - 1.0 <= self._allowance:
                break
            stepping = [min(cap, max(best.depths.values()) - 1) for cap in stepping]  # a shorter one costs less
            best = self._best_plan(sequences, stepping, table)
        tokens, seconds = self._recent
        # Look-ups are not part of the plan. Where they bring more than it expects, the recent speed shows it.
        best.rate = max(plain, best.speedup * plain, tokens / seconds if seconds else 0.0)
        best.sequences = frozenset([sequence.id for sequence in sequences])
        return best

    def _best_plan(self, sequences: Requests, longest: list[int], table: PriceTable, copies: int = 1) -> Plan:
        """The budgets with the most expected tokens per second, for a batch of ``copies`` of these sequences."""
        chances: list[tuple[float, int, int]] = []
        for index, (sequence, cap) in enumerate(zip(sequences, longest)):
            if cap:
                each = self._chances(sequence)[:cap]
                chances += [(chance, index, depth) for depth, chance in enumerate(each, 1)]
        chances.sort(key=lambda each: -each[0])
        depths, best, speed = [0] * len(sequences), [0] * len(sequences), 0.0
        step = max(1, len(sequences) // 2)  # of a large batch every prefix would be priced, to no end
        for number, (_, index, depth) in enumerate(chances, 1):
            depths[index] = depth
            if number % step and number < len(chances):
                continue
            result = self._speedup(sequences, {s.id: d for s, d in zip(sequences, depths) if d}, table, copies)
            if result > speed:
                best, speed = list(depths), result
        return Plan({s.id: d for s, d in zip(sequences, best) if d}, speed or 1.0)

    def _expected_tokens(self, sequences: Requests, depths: Mapping[int, int]) -> float:
        """Expected tokens of a round."""
        tokens = float(len(sequences))
        for sequence in sequences:
            if depth := depths.get(sequence.id):
                drafting = self._drafting(sequence)
                tokens += sum(self._chances(sequence)[:depth]) + drafting.early(depth) * drafting.beside[1]
        return tokens

    def _speedup(self, sequences: Requests, depths: Mapping[int, int], table: PriceTable, copies: int = 1) -> float:
        """Expected tokens per second over those of plain decoding, for ``copies`` of these sequences."""
        count, tokens, rows = len(sequences), self._expected_tokens(sequences, depths), 0.0
        deepest: dict[str, float] = {}
        for sequence in sequences:
            method, depth = sequence.drafter or "", depths.get(sequence.id, 0)
            if depth:
                drafting, nodes = self._drafting(sequence), self.setting.nodes[method]
                exists = drafting.exists[:depth]
                rows += drafting.early(depth) * drafting.beside[0] + sum(
                    [chance * (after - here) for chance, here, after in zip(exists, nodes, nodes[1:])]
                )
                deepest[method] = max(deepest.get(method, 0.0), sum(exists))
        plain = self.prices.verify(table, copies * count, copies * count)
        seconds = self.prices.verify(table, copies * (count + rows), copies * count)
        seconds += sum(self.prices.draft(table, method, depth) for method, depth in deepest.items())
        return tokens / count * plain / seconds

    def _choose_reads(self, sequences: Requests, longest: list[int], table: PriceTable) -> None:
        """Decides which drafters read the tokens that they have not seen, and from where.

        A drafter with a long backlog reads all of it, starts from the last tokens, or waits. One that started from the
        last tokens may go on to read everything. Sets ``sequence.reads``; sets to 0 in ``longest`` who waits.
        """
        count = len(sequences)
        token = self.prices.verify(table, count, count) / count  # seconds of a plain token
        known: dict[object, tuple[float, float]] = {}
        for index, sequence in enumerate(sequences):
            method = sequence.drafter
            if not longest[index] or method is None:
                continue
            backlog, reads, drafting = self.setting.backlog(sequence), sequence.reads, self._drafting(sequence)
            started = sequence.id in drafting.own
            waits = backlog > self.setting.nodes[method][-1] + 1
            options: list[tuple[int | None, int]] = [(reads, backlog if waits else 0)]
            if started and reads is not None and method in self.setting.models:  # a head keeps no states to read later
                options.append((None, len(sequence.tokens)))
            elif waits and not started:
                windows = drafting.WINDOWS if method in self.setting.skips else ()
                options = [(None, backlog), *((n, n) for n in windows if 2 * n <= backlog)]
            elif not waits:
                continue
            rates = [self._saving(sequence, longest[index], n, table, count, known) for n, _ in options]
            price = table.read.get(method, 0.0)
            ways = [(tokens, share * token, price * n) for (tokens, share), (_, n) in zip(rates, options)]
            now = self._worth(sequence, ways, 0)
            best = max(now)
            if waits and best > 0.0 and best < max(max(self._worth(sequence, ways, wait)) for wait in self.WAITS):
                longest[index] = 0  # an answer that ends soon pays for no reading
                continue
            if best > 0.0:
                sequence.reads = options[now.index(best)][0]
                if sequence.reads != reads:
                    drafting.own.pop(sequence.id, None)
            elif waits:
                longest[index] = 0

    def _worth(self, sequence: RequestState, ways: Sequence[tuple[float, float, float]], wait: int) -> list[float]:
        """Seconds that each way to read saves if it begins after ``wait`` more tokens: the tokens of its rounds, the
        seconds that a token saves, and those of reading."""
        chance, rest = self.lengths.beyond(sequence, wait)
        return [(rest - chance * tokens) * saved - chance * reading for tokens, saved, reading in ways]

    def _saving(
        self, sequence: RequestState, cap: int, reads: int | None, table: PriceTable, count: int,
        known: dict[object, tuple[float, float]],
    ) -> tuple[float, float]:  # fmt: skip
        """If its drafter starts from ``reads`` tokens: tokens of a round, and the plain rounds saved by each token.

        ``count``: answers like this one in the batch. ``known``: results for drafts without evidence of their own.
        """
        # The plan below reads both of these; they are put back behind it.
        before, sequence.reads, all_own = sequence.reads, reads, self._drafting(sequence).own
        own = all_own.pop(sequence.id, None) if reads != before else None
        known_by = sequence.id if sequence.id in all_own else None
        key = known_by, sequence.drafter, sequence.params.greedy, cap, reads
        if key not in known:
            best = self._best_plan([sequence], [cap], table, count)
            # The last draft reaches beyond the end of the answer, so that a round's tokens save nothing.
            known[key] = self._expected_tokens([sequence], best.depths), 1.0 - 1.0 / max(1.0, best.speedup)
        sequence.reads = before
        if own is not None:
            all_own[sequence.id] = own
        return known[key]

    def state(self) -> dict[str, Any] | None:
        """What was learnt, as JSON, for the next engine of the same kind on this machine; None if it is nothing."""
        if not self.prices.tables:
            return None
        drafting, lookups = ([[*key, each.state()] for key, each in d.items()] for d in (self.drafting, self.lookups))
        return {
            "prices": self.prices.state(), "vain": self.prices.vain, "drafting": drafting, "lookups": lookups,
            "lengths": list(self.lengths.seen), "rests": [[size, rest.state()] for size, rest in self._rests.items()],
        }  # fmt: skip

    def restore(self, state: Any) -> None:
        """Continues from another engine's ``state``. Anything else is ignored."""
        try:
            lengths = [int(length) for length in state["lengths"]]
            for method, samples, learnt in state["drafting"]:
                self._learnt(str(method), bool(samples)).restore(learnt)
            for method, samples, learnt in state["lookups"]:
                self._lookup(str(method), bool(samples)).restore(learnt)
            for size, compared in state["rests"]:
                self._rests[int(size)].restore(compared)
            self.prices.restore(state["prices"], state["vain"])
        except (TypeError, KeyError, ValueError):
            self.drafting, self.lookups = {}, {}
            self._rests.clear()
            return
        self.lengths.seen.extend(lengths)
