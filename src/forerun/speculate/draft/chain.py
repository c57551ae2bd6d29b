"""Chains drafted in one call, ``kernels/decoder.cpp``: read what is new, choose a token, feed it, and so on. The same
tokens and q as ``grow`` with a ``Chooser``, without Python between the steps.

It serves requests without penalties, bans and grammars.

What the draft model will say next may be guessed from its text, so that one call of it drafts several tokens
(``ChainLookup``): the end of the text is looked up in what is before it (prompt lookup, Saxena 2023); the draft model
reads what followed there together with its last token, and keeps what it would have said itself. This is staged
speculative decoding (Spector and Re, arXiv 2308.04623) with n-grams inside, in one compiled call: drafts are the same,
but sooner.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

import torch

from forerun import kernels
from forerun.attention.base import Attention
from forerun.attention.kernel import KernelAttention
from forerun.core.batch import Batch
from forerun.core.config import COUNT
from forerun.core.request import Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft
from forerun.kernels import structs
from forerun.kernels.structs import PassStruct
from forerun.models.fused import Fused
from forerun.sampling.draw import node_key
from forerun.sampling.noise import target_key, uniform
from forerun.sampling.warp import Row
from forerun.speculate.draft.base import Chooser, DrafterConfig
from forerun.speculate.draft.levels import StepsConfig

NOTHING = -1
RATES = (0.0, 0.4, 0.6, 0.8)
"""By tokens of the match, so many at most: how often a guess is expected to be right, until some have been seen."""
REACH = len(RATES) - 1
RECENT = 8192
"""How many of a text's last tokens are searched."""
WEIGHT, FADE = 4.0, 0.98
"""Guesses that an expectation counts for, and what a match leaves of the evidence before it."""
PRICE = 0.06
"""What another row is expected to add to a call of one row, until calls have been timed."""
VARIED = 0.1
"""Variance of the row counts above which their price can be fitted."""


@dataclass(slots=True)
class ChainGuess:
    """What is guessed for some chains, and what became of the first one's."""

    counts: array[int]
    longest: int
    texts: array[int] = field(default_factory=lambda: array("q"))
    """End to end, each with its first guess behind it."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    guessed: array[int] = field(default_factory=lambda: array("q"))
    first: list[list[int]] = field(default_factory=list)
    """What the first call reads behind each text."""
    match: int = 0
    """Tokens of the first text's end that were found before the first call."""
    passes: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.passes = array("q", bytes(8 * len(PassStruct._fields) * self.longest))

    @property
    def rows(self) -> int:
        """The most that a call reads."""
        return len(self.first) * (1 + max(self.counts))

    def add(self, text: array[int], depth: int) -> None:
        """Look up what the first call reads behind ``text`` for a chain of at most ``depth`` tokens."""
        library = kernels.library()
        assert library is not None
        out, found = array("q", bytes(8 * max(1, *self.counts))), array("q", (0, 0))
        at = [numbers.buffer_info()[0] for numbers in (text, self.counts, out, found)]
        library.look_up(at[0], len(text), at[1], REACH, depth - 1, at[2], at[3])
        if not self.first:
            self.match = found[0]
        guess = out[: found[1]]
        self.texts += text + guess
        self.lengths.append(len(text))
        self.guessed.append(len(guess))
        self.first.append(guess.tolist())

    @property
    def fields(self) -> dict[str, int]:
        """Of ``structs.Chains``."""
        parts = {
            "texts": self.texts, "lengths": self.lengths, "guessed": self.guessed, "most": self.counts,
            "passes": self.passes,
        }  # fmt: skip
        return {"reach": REACH} | {name: part.buffer_info()[0] for name, part in parts.items()}


class ChainLookup:
    """Guesses at most ``most`` tokens, as many as pay: the n-th saves a call if all n are right, and costs a row."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.right = [WEIGHT * rate for rate in RATES]
        self.tried = [WEIGHT] * len(RATES)
        self.price = PRICE
        self._sums = [0.0] * 5

    def counts(self, chains: int = 1) -> array[int]:
        """int64 [REACH + 1]: how many tokens to guess, by how many tokens of the end were found. A call is saved
        only once every one of the ``chains`` has got that far, so each chain's row counts."""
        result, price = array("q", [0]), chains * self.price / (1.0 + (chains - 1) * self.price)
        for right, tried in zip(self.right[1:], self.tried[1:]):
            rate, count = right / tried, 0
            while count < self.most and rate ** (count + 1) > price:
                count += 1
            result.append(count)
        return result

    def begin(self, texts: Sequence[Sequence[int]], depths: Sequence[int], known: int) -> ChainGuess | None:
        """For chains of at most so many tokens behind each text, by a model that knows the first ``known`` ids. None:
        no guess pays; what says so is forgotten, little by little."""
        guess = ChainGuess(self.counts(len(texts)), max(depths))
        if not any(guess.counts):
            self.price += (1.0 - FADE) * (PRICE - self.price)
            for match in range(len(RATES)):
                self._see(match, 0, 0)
            return None
        for text, depth in zip(texts, depths):
            recent = array("q", text[-RECENT:])
            guess.add(recent if max(recent) < known else array("q", (min(token, known - 1) for token in recent)), depth)
        return guess

    def _see(self, match: int, right: int, tried: int) -> None:
        self.right[match] = FADE * self.right[match] + (1.0 - FADE) * WEIGHT * RATES[match] + right
        self.tried[match] = FADE * self.tried[match] + (1.0 - FADE) * WEIGHT + tried

    def learn(self, guess: ChainGuess) -> None:
        """From the calls of a chain. The first one reads more than what was guessed."""
        size = len(PassStruct._fields)
        for at in range(0, len(guess.passes), size):
            each = PassStruct(*guess.passes[at : at + size])
            if not each.rows:
                break
            match = each.match if at else guess.match
            self._see(match, each.right, each.right + (each.right < each.guessed))
            if at:
                self._time(each.rows, each.nanoseconds / 1e9)

    def _time(self, rows: int, seconds: float) -> None:
        """Fit a line through what calls took by rows, recent ones first."""
        weight, x, y, xx, xy = self._sums
        if weight:
            seconds = min(seconds, 3.0 * y / weight)
        sample = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = weight, x, y, xx, xy = [FADE * before + now for before, now in zip(self._sums, sample)]
        variance = xx / weight - (x / weight) ** 2
        if weight > 8.0 and variance > VARIED:
            slope = (xy / weight - x * y / weight**2) / variance
            one = y / weight - slope * (x / weight - 1.0)
            self.price = max(slope / one, 0.01) if one > 0.0 else PRICE
        elif variance < VARIED / 4:
            self.price = PRICE


def plain(sequence: RequestState) -> bool:
    """Whether only temperature, min-p, top-k and top-p stand between a sequence's logits and its distribution, and it
    drafts alone."""
    return sequence.group is None and sequence.constraint is None and not sequence.params.edits


@dataclass(frozen=True, slots=True)
class ChainRunner:
    """Drafts with ``fused``, which predicts over the target's ids or, in ascending order, those of ``names`` int64.
    ``feeds``: a step's input is the last one's output before the final norm, beside the token (EAGLE-3). Chains end
    where the chance of all of it falls below ``floor``, a logarithm; ``words`` are the ids' own for noise. A chain
    reads the tokens that ``lookup`` guesses with the token before them: one call for all that are right."""

    fused: Fused
    chooser: Chooser
    floor: float
    words: torch.Tensor
    names: torch.Tensor | None
    feeds: bool
    lookup: ChainLookup | None = None

    @classmethod
    def find(
        cls,
        fused: Fused | None,
        attention: Attention,
        chooser: Chooser,
        config: StepsConfig,
        *,
        feeds: bool = False,
        names: torch.Tensor | None = None,
        lookup: ChainLookup | None = None,
    ) -> ChainRunner | None:
        """None where the call is not here or does not do what is asked for."""
        sampler = chooser.sampler
        if fused is None or fused.keeps_state or sampler.compiled is None or config.branches:
            return None
        size = sampler.vocab_size if names is None else len(names)
        if fused.vocab_size != size or not isinstance(attention, KernelAttention):
            return None
        words = sampler.compiled.ids
        kept = words if names is None else words[names].contiguous()
        return cls(fused, chooser, config.floor, kept, names, feeds, lookup)

    @property
    def branches(self) -> bool:
        """Whether a chain that ends because the draft is unsure gets the next best token beside its last one."""
        return self.floor > -inf and self.chooser.rule.trees and not self.chooser.rule.needs_q

    def draft(
        self,
        everyone: Requests,
        ready: Sequence[int],
        budgets: Sequence[int],
        batch: Batch,
        attention: Attention,
        given: torch.Tensor | None = None,
        texts: Sequence[Sequence[int]] = (),
    ) -> list[Draft]:
        """One draft for each of ``everyone``, a chain of at most its budget where it is in ``ready``. ``batch`` reads
        what each of these lacks: its spans that ask for logits, one row each, are theirs, in order. The cache's pages
        have room for all but the last tokens. ``texts``: the tokens that each will have read after ``batch``."""
        assert isinstance(attention, KernelAttention)
        sequences, depths = [everyone[i] for i in ready], [budgets[i] for i in ready]
        count, longest = len(sequences), max(depths)
        theirs = [i for i, span in enumerate(batch.spans) if span.logits]
        starts = array("q", [batch.spans[i].end for i in theirs])
        guess = self.lookup.begin(texts, depths, self.fused.num_ids) if self.lookup is not None and texts else None
        if guess is not None:
            batch = _behind(batch, dict(zip(theirs, guess.first)))
        wide = 0 if guess is None else guess.rows
        prepared = self.fused.prepare(batch, attention, given, ahead=longest, wide=wide)
        temperatures = array("f", [self.chooser.row(sequence).effective_temperature for sequence in sequences])
        thresholds = array(
            "f", [fraction for sequence in sequences for fraction in (sequence.params.min_p, sequence.params.top_p)]
        )
        top_ks = array("q", [sequence.params.top_k for sequence in sequences])
        hot, size = any(temperatures), self.fused.vocab_size
        width = size if self.names is None else self.chooser.sampler.vocab_size
        q = torch.empty(longest * count, width) if hot else None
        keys, quantiles = self._keys(sequences, longest) if hot else (array("Q"), array("d"))
        tokens = array("q", bytes(8 * longest * count))
        siblings = array("q", [NOTHING]) * count
        tables = array("q", [prepared.plan.table_starts[i] for i in theirs])
        requested = array("q", depths)
        if not len(theirs) == len(depths) == count or self.words.numel() < size:
            raise ValueError(f"{len(theirs)} spans that ask for logits and {len(depths)} depths for {count} sequences")
        at = [numbers.buffer_info()[0] for numbers in (requested, starts, tables, temperatures, thresholds, top_ks)]
        noise = [numbers.buffer_info()[0] if numbers else 0 for numbers in (keys, quantiles)]
        chains = structs.Chains(
            count, longest, at[0], at[1], at[2], at[3], at[4], at[5], self.words.data_ptr(),
            0 if self.names is None else self.names.data_ptr(), noise[0], noise[1], tokens.buffer_info()[0],
            0 if q is None else q.data_ptr(), width, int(self.feeds), structs.number(self.floor),
            siblings=siblings.buffer_info()[0] if self.branches else 0,
        )  # fmt: skip
        call = array("q", chains if guess is None else chains._replace(**guess.fields))
        fused = self.fused
        fused.draft(*fused.addresses, prepared.address, call.buffer_info()[0])
        if self.lookup is not None and guess is not None:
            self.lookup.learn(guess)
        attention.finish(prepared.plan)
        drafts = [Draft() for _ in everyone]
        for i, (index, depth, start) in enumerate(zip(ready, depths, starts)):
            chain = [token for token in tokens[i : depth * count : count] if token != NOTHING]
            fed = max(0, len(chain) - 1)
            attention.pool.advance(batch.spans[theirs[i]].key, start + fed)
            rows = range(i, longest * count, count) if temperatures[i] else [POINT_MASS] * longest
            drafts[index] = Draft.chain(chain, q, rows)
            if siblings[i] != NOTHING:
                drafts[index].add(siblings[i], len(chain) - 2, rows[len(chain) - 1])
        return drafts

    def _keys(self, sequences: Requests, longest: int) -> tuple[array[int], array[float]]:
        """For each step and sequence, the key of the target's own noise at that position; or, under rules that compare
        p with q, the place in the cumulative sum of a draw of its own. One of the two is empty."""
        chooser, keys, quantiles = self.chooser, array("Q"), array("d")
        for step in range(longest):
            for sequence in sequences:
                root = len(sequence.tokens)
                if not chooser.rule.needs_q:
                    keys.append(target_key(sequence.seed, root + step))
                else:
                    quantiles.append(uniform(node_key(chooser.purpose, Row(sequence, range(step)), root, step - 1)))
        return keys, quantiles


def _behind(batch: Batch, tokens: Mapping[int, list[int]]) -> Batch:
    """The batch with ``tokens`` behind spans, by their number, and these rows' logits."""
    spans = list(batch.spans)
    for index, more in tokens.items():
        span = spans[index]
        rows = range(span.count - 1, span.count + len(more))
        spans[index] = replace(span, tokens=[*span.tokens, *more], logits=list(rows))
    return Batch(spans, batch.device)


@dataclass(frozen=True)
class CatchUpConfig(DrafterConfig):
    """Options of drafters that read the text themselves."""

    prefill_chunk: int = 192
    """Most tokens per round that sequences catch up on before they draft, all of them together."""
    limits: ClassVar = {"prefill_chunk": COUNT}

    def shares(self, missing: Sequence[int]) -> list[int]:
        """How many of the tokens that each sequence lacks it reads this round.

        What a round leaves behind is read whole, and besides, so that nobody who drafts waits for a long prompt and no
        prompt for many who draft. Of the others, those who lack least come first.
        """
        small, left = self.num_speculative_tokens + 1, self.prefill_chunk
        counts = list(missing)
        for index in sorted((i for i, lacks in enumerate(missing) if lacks > small), key=missing.__getitem__):
            counts[index] = min(missing[index], left)
            left -= counts[index]
        return counts
