"""Drafts chains in one call of ``kernels/decoder.cpp``: prefill, choose a token, feed it, choose the next, and so on.

It gives the same tokens and q as ``levels.grow`` with a ``Chooser``, without Python between the steps. Requests with
penalties, bans or a grammar are not supported.

A draft model can read several tokens per forward, so ``ChainLookup`` guesses what it will draft: prompt lookup (Saxena
2023) finds the end of the text in what came before. The model reads the tokens that followed there together with its
last token, and keeps those that it would have drafted itself. This is staged speculative decoding (Spector and Re,
arXiv 2308.04623) with n-grams inside, in one compiled call. Drafts stay the same; they only come sooner.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, ClassVar

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
from forerun.models.run.fused import Fused
from forerun.sampling.draw import node_key
from forerun.sampling.noise import target_key, uniform
from forerun.sampling.warp import Row, restrictions
from forerun.speculate.draft.base import Chooser, DrafterConfig
from forerun.speculate.draft.levels import StepsConfig, floor_of

if TYPE_CHECKING:
    from forerun.models.run.graphs import Steps
    from forerun.speculate.draft.graph_chain import GraphChains

NO_TOKEN = -1
FEEDS_RAW, FEEDS_NORMED = 1, 2
"""A step's input includes the last step's output, before the final norm (EAGLE) or after it (MTP)."""
PRIOR_RATES = (0.0, 0.4, 0.6, 0.8)
"""Entry n: assumed rate of correct guesses after a match of n tokens, the last entry for longer ones too."""
REACH = len(PRIOR_RATES) - 1
"""Longest match, in tokens."""
RECENT = 8192
"""How many of a text's last tokens are searched."""
PRIOR_WEIGHT, DECAY = 4.0, 0.98
"""How many guesses the prior counts for, and the factor by which each match discounts earlier evidence."""
PRIOR_ROW_COST = 0.06
"""Assumed cost of one more row, as a fraction of a call with one row, until calls have been timed."""
MIN_VARIANCE = 0.1
"""Variance of the row counts above which the cost of a row can be fitted."""


@dataclass(slots=True)
class ChainGuess:
    """Guessed tokens for some chains, and what became of the first chain's guesses."""

    counts: array[int]
    longest: int
    texts: array[int] = field(default_factory=lambda: array("q"))
    """All texts end to end, each followed by its first guess."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    guessed: array[int] = field(default_factory=lambda: array("q"))
    first: list[list[int]] = field(default_factory=list)
    """For each text, the guessed tokens that the first call reads."""
    match: int = 0
    """Length of the match that the first text's guess comes from."""
    passes: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.passes = array("q", bytes(8 * len(PassStruct._fields) * self.longest))

    def add(self, text: array[int], depth: int) -> None:
        """Guesses what follows ``text``, for a chain of at most ``depth`` tokens."""
        library = kernels.library()
        assert library is not None
        out, found = array("q", bytes(8 * max(1, *self.counts))), array("q", (0, 0))
        at = structs.address
        library.prompt_lookup(at(text), len(text), at(self.counts), REACH, depth - 1, at(out), at(found))
        if not self.first:
            self.match = found[0]
        guess = out[: found[1]]
        self.texts += text + guess
        self.lengths.append(len(text))
        self.guessed.append(len(guess))
        self.first.append(guess.tolist())

    @property
    def fields(self) -> dict[str, int]:
        """The fields of ``structs.Chains`` that describe guesses."""
        return {
            "texts": structs.address(self.texts), "lengths": structs.address(self.lengths),
            "num_guessed": structs.address(self.guessed), "max_guess": structs.address(self.counts), "max_match": REACH,
            "passes": structs.address(self.passes),
        }  # fmt: skip


class ChainLookup:
    """How many tokens to guess, at most ``most``. The n-th guess costs a row and saves a call if all n are correct."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.right = [PRIOR_WEIGHT * rate for rate in PRIOR_RATES]
        self.tried = [PRIOR_WEIGHT] * len(PRIOR_RATES)
        self.price = PRIOR_ROW_COST
        self._sums = [0.0] * 5

    def counts(self, chains: int = 1) -> array[int]:
        """int64 [REACH + 1]: how many tokens to guess, by the length of the match. A call is saved only once every one
        of the ``chains`` has got that far, so the rows of all of them count."""
        result, price = array("q", [0]), chains * self.price / (1.0 + (chains - 1) * self.price)
        for right, tried in zip(self.right[1:], self.tried[1:]):
            rate, count = right / tried, 0
            while count < self.most and rate ** (count + 1) > price:
                count += 1
            result.append(count)
        return result

    def begin(self, texts: Sequence[Sequence[int]], depths: Sequence[int], known: int) -> ChainGuess | None:
        """Guesses for chains of at most ``depths`` tokens behind ``texts``, for a model that knows the first ``known``
        ids. Returns None if no guess pays; the evidence for that then fades."""
        guess = ChainGuess(self.counts(len(texts)), max(depths))
        if not any(guess.counts):
            self.price += (1.0 - DECAY) * (PRIOR_ROW_COST - self.price)
            for match in range(len(PRIOR_RATES)):
                self._count(match, 0, 0)
            return None
        for text, depth in zip(texts, depths):
            recent = array("q", text[-RECENT:])
            guess.add(recent if max(recent) < known else array("q", (min(token, known - 1) for token in recent)), depth)
        return guess

    def _count(self, match: int, right: int, tried: int) -> None:
        prior = (1.0 - DECAY) * PRIOR_WEIGHT
        self.right[match] = DECAY * self.right[match] + prior * PRIOR_RATES[match] + right
        self.tried[match] = DECAY * self.tried[match] + prior + tried

    def learn(self, guess: ChainGuess) -> None:
        """Updates rates and costs from a chain's calls, but the first, which also reads the backlog."""
        size = len(PassStruct._fields)
        for start in range(0, len(guess.passes), size):
            each = PassStruct(*guess.passes[start : start + size])
            if not each.rows:
                break
            match = each.match if start else guess.match
            self._count(match, each.num_correct, each.num_correct + (each.num_correct < each.num_guessed))
            if start:
                self._time(each.rows, each.nanoseconds / 1e9)

    def _time(self, rows: int, seconds: float) -> None:
        """Fits a line through the times of calls over their rows, with recent calls weighted most."""
        weight, x, y, xx, xy = self._sums
        if weight:
            seconds = min(seconds, 3.0 * y / weight)  # a call that waited for another process
        sample = (1.0, rows, seconds, rows * rows, rows * seconds)  # the sums of least squares
        self._sums = weight, x, y, xx, xy = [DECAY * before + now for before, now in zip(self._sums, sample)]
        variance = xx / weight - (x / weight) ** 2
        if weight > 8.0 and variance > MIN_VARIANCE:
            slope = (xy / weight - x * y / weight**2) / variance
            one_row = y / weight - slope * (x / weight - 1.0)
            self.price = max(slope / one_row, 0.01) if one_row > 0.0 else PRIOR_ROW_COST
        elif variance < MIN_VARIANCE / 4:
            self.price = PRIOR_ROW_COST


def can_chain(sequence: RequestState) -> bool:
    """Whether a sequence drafts alone, and samples with temperature, min-p, top-k and top-p only."""
    return sequence.group is None and sequence.constraint is None and not sequence.params.edits


@dataclass(frozen=True, slots=True)
class ChainRunner:
    """Drafts chains with one call of a fused decoder."""

    fused: Fused
    chooser: Chooser
    floor: float
    """A chain ends where the log-probability of all of it falls below this."""
    noise_ids: torch.Tensor
    """The hashed ids that noise is keyed by, one for each output."""
    output_ids: torch.Tensor | None
    """The tokens that the logits are of, int64 ascending; None: the target's vocabulary."""
    feeds_hidden: int
    """Whether a step's input includes the last step's output: ``FEEDS_RAW`` or ``FEEDS_NORMED``; 0: it does not."""
    lookup: ChainLookup | None = None

    @classmethod
    def find(
        cls, fused: Fused | None, attention: Attention, chooser: Chooser, config: StepsConfig, *,
        feeds_hidden: int = 0, output_ids: torch.Tensor | None = None, lookup: ChainLookup | None = None,
        steps: Steps | None = None,
    ) -> ChainRunner | GraphChains | None:  # fmt: skip
        """None if there is no compiled call, or on a GPU no graph of ``steps``, for this drafter and these options."""
        sampler = chooser.sampler
        if steps is not None and not config.branches:
            from forerun.speculate.draft.graph_chain import GraphChains  # needs Triton

            return GraphChains.find(steps, chooser, config, output_ids)
        if fused is None or fused.keeps_state or sampler.compiled is None or config.branches:
            return None
        size = sampler.vocab_size if output_ids is None else len(output_ids)
        if fused.vocab_size != size or not isinstance(attention, KernelAttention):
            return None
        noise_ids = sampler.compiled.ids
        if output_ids is not None:
            noise_ids = noise_ids[output_ids].contiguous()
        return cls(fused, chooser, config.floor, noise_ids, output_ids, feeds_hidden, lookup)

    @property
    def branches(self) -> bool:
        """Whether a chain that ends for low confidence gets the second-best token beside its last one."""
        return self.floor > -inf and self.chooser.rule.trees and not self.chooser.rule.needs_q

    def draft(
        self, sequences: Requests, ready: Sequence[int], budgets: Sequence[int], batch: Batch, attention: Attention,
        embeds: torch.Tensor | None = None, texts: Sequence[Sequence[int]] = (),
    ) -> list[Draft]:  # fmt: skip
        """Drafts a chain for each sequence in ``ready``, at most its budget long; the others get empty drafts.

        Args:
            sequences: all sequences of the round.
            ready: indices of those that draft.
            budgets: the greatest depth of each sequence's draft.
            batch: the tokens to prefill. The spans that ask for logits, one row each, belong to ``ready``, in order.
            attention: over the drafter's cache, whose pages have room for all but the last drafted tokens.
            embeds: input rows in place of token embeddings.
            texts: for each of ``ready``, the tokens that it has read after ``batch``, for lookup; empty: none.
        """
        assert isinstance(attention, KernelAttention)
        chosen, depths = [sequences[i] for i in ready], array("q", [budgets[i] for i in ready])
        count, longest = len(chosen), max(depths)
        with_logits = [i for i, span in enumerate(batch.spans) if span.logits]
        if not len(with_logits) == count or self.noise_ids.numel() < self.fused.vocab_size:
            raise ValueError(f"{len(with_logits)} spans that ask for logits for {count} sequences")
        # Structs hold bare addresses, so all of these arrays live in local names until the call returns.
        starts = array("q", [batch.spans[i].end for i in with_logits])
        guess = None
        if self.lookup is not None and texts:
            guess = self.lookup.begin(texts, depths, self.fused.num_ids)
        if guess is not None:
            # Guesses are read like a prompt's tokens; those that the model would not have drafted are cut afterwards.
            batch = _append(batch, dict(zip(with_logits, guess.first)))
        wide = 0 if guess is None else len(guess.first) * (1 + max(guess.counts))  # the most rows of one call
        prepared = self.fused.prepare(batch, attention, embeds, ahead=longest, wide=wide)
        options = restrictions([self.chooser.row(sequence) for sequence in chosen])
        temperatures, thresholds, top_ks = array("f", options[0]), array("f", options[1]), array("q", options[2])
        tables = array("q", [prepared.plan.table_starts[i] for i in with_logits])
        width = self.fused.vocab_size if self.output_ids is None else self.chooser.sampler.vocab_size
        samples = any(temperatures)
        q = torch.empty(longest * count, width) if samples else None  # step s of chain i: row s * count + i
        keys, quantiles = self._keys(chosen, longest) if samples else (array("Q"), array("d"))
        tokens = array("q", bytes(8 * longest * count))
        siblings = array("q", [NO_TOKEN]) * count
        chains = structs.Chains(
            sequences=count, max_depth=longest, depths=structs.address(depths), starts=structs.address(starts),
            tables=structs.address(tables), temperatures=structs.address(temperatures),
            thresholds=structs.address(thresholds), top_ks=structs.address(top_ks), noise_ids=self.noise_ids.data_ptr(),
            output_ids=0 if self.output_ids is None else self.output_ids.data_ptr(), keys=structs.address(keys),
            quantiles=structs.address(quantiles), tokens=structs.address(tokens), num_ids=width,
            q=0 if q is None else q.data_ptr(), floor=structs.number(floor_of(chosen[0], self.floor)),
            feeds_hidden=self.feeds_hidden, siblings=structs.address(siblings) if self.branches else 0,
        )  # fmt: skip
        call = array("q", chains if guess is None else chains._replace(**guess.fields))
        self.fused.draft(*self.fused.addresses, prepared.address, structs.address(call))
        if self.lookup is not None and guess is not None:
            self.lookup.learn(guess)
        attention.finish(prepared.plan)
        drafts = [Draft() for _ in sequences]
        for i, (index, depth, start) in enumerate(zip(ready, depths, starts)):
            chain = [token for token in tokens[i : depth * count : count] if token != NO_TOKEN]
            fed = max(0, len(chain) - 1)  # the last drafted token was chosen, not read: it has no entry
            attention.pool.advance(batch.spans[with_logits[i]].key, start + fed)
            rows = range(i, longest * count, count) if temperatures[i] else [POINT_MASS] * longest
            drafts[index] = Draft.chain(chain, q, rows)
            if siblings[i] != NO_TOKEN:
                drafts[index].add(siblings[i], len(chain) - 2, rows[len(chain) - 1])
        return drafts

    def _keys(self, sequences: Requests, longest: int) -> tuple[array[int], array[float]]:
        """The randomness of each step and sequence: keys of the target's own noise at that position or, under rules
        that compare p and q, uniform draws of its own. One of the two is empty."""
        # With the target's own noise, draft and target choose the same token where their distributions agree. Rules
        # that test p / q need draws that do not depend on it.
        chooser, keys, quantiles = self.chooser, array("Q"), array("d")
        for step in range(longest):
            for sequence in sequences:
                root = len(sequence.tokens)
                if not chooser.rule.needs_q:
                    keys.append(target_key(sequence.seed, root + step))
                else:
                    quantiles.append(uniform(node_key(chooser.purpose, Row(sequence, range(step)), root, step - 1)))
        return keys, quantiles


def _append(batch: Batch, tokens: Mapping[int, list[int]]) -> Batch:
    """The batch with ``tokens`` appended to spans, by their index, and logits asked for at the appended rows."""
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
    draft_window: int | None = None
    """For long contexts: the draft's attention sees this many last tokens and the first four, at their positions in
    the text (StreamingLLM, arXiv 2309.17453). Drafts may be other ones, the tokens stay the same. None: it sees all."""
    limits: ClassVar = {"prefill_chunk": COUNT, "draft_window": COUNT}

    def shares(self, missing: Sequence[int]) -> list[int]:
        """How many of its ``missing`` tokens each sequence reads this round.

        The few tokens that a round leaves behind are always read whole, and do not count: no drafting sequence waits
        for a long prompt. The others share ``prefill_chunk``, the shortest first.
        """
        few, remaining = self.num_speculative_tokens + 1, self.prefill_chunk
        counts = list(missing)
        for index in sorted((i for i, count in enumerate(missing) if count > few), key=missing.__getitem__):
            counts[index] = min(missing[index], remaining)
            remaining -= counts[index]
        return counts
