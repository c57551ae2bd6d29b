"""``suffix``: continue the longest match of the text's end, in the request's own tokens, in past outputs or in a
datastore.

SuffixDecoding (arXiv 2411.04975) scores continuations by how often they followed the match and drafts further the
longer the match is; SAM-Decoding (arXiv 2411.10666) finds matches with suffix automata at amortised O(1) per token.
Option names are vLLM's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.draft.automaton import ROOT, Automaton
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.best_first import Continuations, TreeConfig
from forerun.speculate.draft.datastore import Datastore, Retrieved
from forerun.speculate.draft.history import HistoryDrafter
from forerun.speculate.verify.score import Verification

SHORTER = 2
"""How many shorter matches, each with more occurrences, are tried behind the longest one."""


@dataclass(frozen=True)
class SuffixConfig(TreeConfig):
    num_speculative_tokens: int = 15
    suffix_decoding_max_tree_depth: int = 24
    """Bounds match and draft together: a longer match counts as this long, and a draft is shorter than this."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Past outputs that are kept; 0: only the request's own tokens are searched."""
    suffix_decoding_max_cached_tokens: int = 200_000
    """Tokens of past outputs that are kept, at about 500 bytes each."""
    suffix_decoding_max_spec_factor: float = 1.0
    """A draft is at most this many times as long as its match."""
    suffix_decoding_min_token_prob: float = 0.1
    """Tokens whose path is estimated to be less likely are not drafted."""
    datastore: str | None = None
    """File that is searched, too: text, or token ids (``.safetensors``), as ``forerun tune`` writes the model's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_temperature is not None:
            raise ConfigError("method 'suffix' draws nothing from a distribution; remove 'draft_temperature'")
        for name, low in (("max_tree_depth", 2), ("max_cached_requests", 0), ("max_cached_tokens", 1)):
            value = getattr(self, f"suffix_decoding_{name}")
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"suffix_decoding_{name} must be an integer of at least {low}, not {value!r}")
        if not self.suffix_decoding_max_spec_factor > 0:
            raise ConfigError("suffix_decoding_max_spec_factor must be above 0")
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            raise ConfigError("suffix_decoding_min_token_prob must be from 0 to 1")


class Match(NamedTuple):
    """A place in an automaton that continues the text, and how many of the text's last tokens lead to it.
    ``occurrences`` counts those behind which nothing is known yet, too."""

    automaton: Automaton
    state: int
    length: int
    occurrences: int
    source: Block | None = None

    def continuations(self, state: int) -> Iterator[tuple[int, float, int]]:
        shift = 0.0 if state != self.state else log(self.automaton.counts[state] / self.occurrences)
        for token, log_q, after in self.automaton.continuations(state):
            yield token, log_q + shift, after

    def shorter(self) -> Match:
        """The longest shorter match that occurs more often; length 0 if there is none."""
        automaton, state = self.automaton, self.automaton.link[self.state]
        extra = self.occurrences - automaton.counts[self.state]
        return Match(automaton, state, automaton.length[state], automaton.counts[state] + extra, self.source)


class Text:
    """One request's tokens and their automaton."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.automaton = Automaton()

    def update(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.automaton.extend(token)
        self.seen.extend(tokens)

    def match(self, tail: Sequence[int]) -> Match:
        state, length = self.automaton.suffix()
        for token in tail:
            state, length = self.automaton.advance(state, length, token)
        return Match(self.automaton, state, length, max(1, self.automaton.counts[state]))


@dataclass(eq=False)
class Block:
    """Past outputs that are forgotten together. ``docs`` holds each request's tokens; ``keys`` are the requests and
    ``starts`` the automaton's size before each, in the order added."""

    automaton: Automaton = field(default_factory=Automaton)
    docs: dict[int, list[int]] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    tokens: int = 0
    cursors: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Per running sequence: how many of its tokens were followed, the state they led to, and the match's length."""

    def add(self, key: int, tokens: list[int]) -> None:
        self.keys.append(key)
        self.starts.append(len(self.automaton))
        self.docs[key] = tokens
        self.tokens += len(tokens)
        self.automaton.begin()
        for token in tokens:
            self.automaton.extend(token)

    def owner(self, state: int) -> int:
        """The request whose tokens made ``state``."""
        return self.keys[bisect_right(self.starts, state) - 1]

    def match(self, key: int, seen: list[int], tail: Sequence[int], reach: int) -> Match:
        """The longest match of the end of ``seen + tail``; only its last ``reach`` tokens are looked at."""
        automaton = self.automaton
        followed, state, length = self.cursors.get(key, (0, ROOT, 0))
        # States are split as outputs are added: go back to the one that holds a substring of this length.
        while state != ROOT and length <= automaton.length[automaton.link[state]]:
            state = automaton.link[state]
        for token in seen[max(followed, len(seen) - reach) :]:
            state, length = automaton.advance(state, length, token)
        self.cursors[key] = (len(seen), state, length)
        for token in tail:
            state, length = automaton.advance(state, length, token)
        return Match(automaton, state, length, automaton.counts[state] + 1, self)


class Past:
    """Past outputs in two blocks: when the newer is full, the older is dropped. An output of the older block that
    proves useful moves to the newer, so what is dropped was not used recently."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.blocks: list[Block] = []

    def add(self, key: int, tokens: list[int]) -> None:
        """Remember an output; of one longer than half the room, its end."""
        tokens = tokens[-max(1, self.max_tokens // 2) :]
        if not tokens or not self.max_requests:
            return
        newest = self.blocks[0] if self.blocks else None
        if (
            newest is None
            or len(newest.docs) >= max(1, self.max_requests // 2)
            or newest.tokens + len(tokens) > self.max_tokens // 2
        ):
            self.blocks = [newest := Block(), *self.blocks[:1]]
            if self.max_requests == 1:
                self.blocks = self.blocks[:1]
        newest.add(key, tokens)

    def touch(self, block: Block, key: int) -> None:
        """An output helped: keep it for another turn."""
        if len(self.blocks) == 2 and block is self.blocks[1] and key not in self.blocks[0].docs:
            self.add(key, block.docs[key])

    def forget(self, key: int) -> None:
        """A running sequence ended."""
        for block in self.blocks:
            block.cursors.pop(key, None)


@drafters.register("suffix")
class Suffix(HistoryDrafter[SuffixConfig, Text]):
    name = "suffix"
    config_class = SuffixConfig

    def __init__(self, config: SuffixConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.past = Past(config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_cached_tokens)
        self.used: dict[int, tuple[Block, int]] = {}
        self.store: Datastore | None = None
        if config.datastore is not None:
            vocab_size = context.target.info.vocab_size
            self.store = Datastore.load(Path(config.datastore), vocab_size, context.tokenizer)

    def new_index(self) -> Text:
        return Text()

    def draft(self, sequence: RequestState, index: Text, tail: list[int], budget: int) -> Draft:
        reach = self.config.suffix_decoding_max_tree_depth
        matches: list[Match | Retrieved] = [index.match(tail)]
        matches += [block.match(sequence.id, index.seen, tail, reach) for block in self.past.blocks]
        if self.store is not None:
            matches.append(self.store.match([*index.seen[-reach:], *tail], reach))
        best, most, chosen = Draft(), 0.0, None
        for match in matches:
            for _ in range(1 + SHORTER):
                if match.length < 1:
                    break
                draft, expected = self._grow(match, budget)
                if expected > most:
                    best, most, chosen = draft, expected, match
                match = match.shorter()
        self.used.pop(sequence.id, None)
        if chosen is not None:
            best.confidence = min(1.0, most / best.depth)
            if chosen.source is not None:
                self.used[sequence.id] = (chosen.source, chosen.source.owner(chosen.state))
        return best

    def _grow(self, match: Match | Retrieved, budget: int) -> tuple[Draft, float]:
        config = self.config
        matched = min(match.length, config.suffix_decoding_max_tree_depth - 1)
        depth = min(budget, max(1, int(matched * config.suffix_decoding_max_spec_factor)))
        depth = min(depth, config.suffix_decoding_max_tree_depth - 1)
        lowest = config.suffix_decoding_min_token_prob
        source: Continuations[Any] = match.continuations
        return config.grow(source, match.state, depth, log(lowest) if lowest else float("-inf"))

    def observe(
        self,
        sequences: Sequence[RequestState],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        result: Verification,
    ) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            used = self.used.pop(sequence.id, None)
            if used is not None and verdict.accepted:
                self.past.touch(*used)

    def release(self, sequence: RequestState) -> None:
        """A finished request's output becomes a past one; a preempted request has not finished."""
        super().release(sequence)
        self.used.pop(sequence.id, None)
        self.past.forget(sequence.id)
        if sequence.cached:
            self.past.add(sequence.id, sequence.tokens[sequence.num_prompt :])
