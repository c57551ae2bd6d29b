"""``suffix``: drafts what followed the longest match of the text's end, in the request's own tokens, in past outputs or
in a datastore.

SuffixDecoding (arXiv 2411.04975) scores continuations by their frequency after the match, and drafts more tokens after
a longer match. SAM-Decoding (arXiv 2411.10666) finds matches with suffix automata at amortised O(1) per token. Option
names are vLLM's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from forerun.core.batch import Scores
from forerun.core.config import COUNT, FRACTION, POSITIVE, Within
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.best_first import Continuations, TreeConfig, likeliest_chain
from forerun.speculate.draft.datastore import Datastore, DatastoreMatch
from forerun.speculate.draft.ngram import HistoryDrafter
from forerun.speculate.verify import Verification

ROOT = 0
MAX_RECOUNT = 32
BRANCH = 3
"""The depth of a second choice's branch."""
SHORTER_MATCHES = 2
"""How many shorter matches, each with more occurrences, are tried after the longest one."""


class Automaton:
    """Suffix automaton (Blumer et al.): one state per set of substrings that end at the same positions.

    It takes amortised O(1) time and at most two states per token. ``counts[state]`` is how often its substrings occur.
    After each token only the ``MAX_RECOUNT`` longest suffixes that occur elsewhere are recounted, so that a run of
    one token costs no more than other text; its short substrings are undercounted.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.counts = [0]
        self.last = ROOT

    def __len__(self) -> int:
        """Number of states."""
        return len(self.next)

    def begin(self) -> None:
        """Starts another token list; no substring spans two lists."""
        self.last = ROOT

    def extend(self, token: int) -> None:
        """Appends a token to the current list."""
        target = self.next[self.last].get(token)
        if target is None:
            self.last = self._append(token)
        elif self.length[target] == self.length[self.last] + 1:
            self.last = target
        else:
            self.last = self._split(self.last, token, target)
        state, counts, link = self.last, self.counts, self.link
        for _ in range(MAX_RECOUNT):
            if state == ROOT:
                break
            counts[state] += 1
            state = link[state]

    def _new(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.counts.append(count)
        return len(self.next) - 1

    def _append(self, token: int) -> int:
        """Adds a state for the whole list so far, which has not occurred before."""
        state = self.last
        fresh = self._new(self.length[state] + 1, {}, ROOT, 0)
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = fresh
            state = self.link[state]
        if state >= 0:
            target = self.next[state][token]
            if self.length[target] != self.length[state] + 1:
                target = self._split(state, token, target)
            self.link[fresh] = target
        return fresh

    def _split(self, state: int, token: int, target: int) -> int:
        """Clones ``target`` for its shorter substrings, those that ``state`` reaches by ``token``."""
        clone = self._new(self.length[state] + 1, dict(self.next[target]), self.link[target], self.counts[target])
        self.link[target] = clone
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def advance(self, state: int, matched: int, tokens: Iterable[int]) -> tuple[int, int]:
        """State and length of the longest match of a text's end after more tokens, given those before them,
        ``state`` and ``matched``."""
        for token in tokens:
            while state != ROOT and token not in self.next[state]:
                state = self.link[state]
                matched = self.length[state]
            after = self.next[state].get(token)
            state, matched = (ROOT, 0) if after is None else (after, matched + 1)
        return state, matched

    def suffix(self) -> tuple[int, int]:
        """State and length of the longest suffix of the current list that also occurs elsewhere."""
        state = self.link[self.last]
        return (ROOT, 0) if state < 0 else (state, self.length[state])

    def continuations(self, state: int) -> Iterator[tuple[int, float, int]]:
        """Continuations of ``state`` as (token, log of its relative frequency, next state), the most frequent first;
        among equally frequent ones the latest first."""
        following = self.next[state]
        if len(following) == 1:
            for token, after in following.items():
                yield token, min(0.0, log(self.counts[after] / self.counts[state])), after
            return
        counts = self.counts
        total = max(counts[state], 1)
        ranked = sorted(((counts[after], after, token) for token, after in following.items()), reverse=True)
        for number, after, token in ranked:
            yield token, min(0.0, log(max(number, 1) / total)), after


@dataclass(frozen=True)
class SuffixConfig(TreeConfig):
    num_speculative_tokens: int = 15
    suffix_decoding_max_tree_depth: int = 24
    """Bound of match and draft: a longer match counts as this long, and a draft is shorter than this."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Past outputs that are kept; 0: only the request's own tokens are searched."""
    suffix_decoding_max_cached_tokens: int = 200_000
    """Tokens of past outputs that are kept, at about 500 bytes each."""
    suffix_decoding_max_spec_factor: float = 1.0
    """A draft is at most this many times as long as its match."""
    suffix_decoding_min_token_prob: float = 0.1
    """Tokens whose path is estimated to be less likely are not drafted."""
    datastore: str | None = None
    """File that is searched too: text, or token ids (``.safetensors``) as ``forerun tune`` writes them."""
    second_choices: int = 0
    """So many of the target's next best tokens at the last position each begin a branch beside the chain, if the text
    goes on with them. They often come one position later (LogitSpec)."""
    unsupported: ClassVar = {"draft_temperature": "method 'suffix' draws nothing from a distribution"}
    limits: ClassVar = {
        "suffix_decoding_max_tree_depth": Within(least=2, whole=True),
        "suffix_decoding_max_cached_requests": Within(least=0, whole=True),
        "suffix_decoding_max_cached_tokens": COUNT,
        "suffix_decoding_max_spec_factor": POSITIVE,
        "suffix_decoding_min_token_prob": FRACTION,
        "second_choices": Within(least=0, most=16, whole=True),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_choices and super().branches:
            raise ConfigError("second_choices are branches beside a chain: remove it, or 'tree' and 'tree_nodes'")

    @property
    def branches(self) -> bool:
        return super().branches or self.second_choices > 0

    def nodes_by_depth(self) -> list[int]:
        return [
            nodes + self.second_choices * min(depth, BRANCH) for depth, nodes in enumerate(super().nodes_by_depth())
        ]


class Match(NamedTuple):
    """A match of the text's last ``length`` tokens in an automaton. ``occurrences`` also counts the text's own end,
    which has no continuation yet."""

    automaton: Automaton
    state: int
    length: int
    occurrences: int
    source: TextBlock | None = None

    def continuations(self, state: int) -> Iterator[tuple[int, float, int]]:
        shift = 0.0 if state != self.state else log(self.automaton.counts[state] / self.occurrences)
        for token, log_q, after in self.automaton.continuations(state):
            yield token, log_q + shift, after

    def shorter(self) -> Match:
        """The longest shorter match with more occurrences; length 0 if there is none."""
        automaton, state = self.automaton, self.automaton.link[self.state]
        extra = self.occurrences - automaton.counts[self.state]
        return Match(automaton, state, automaton.length[state], automaton.counts[state] + extra, self.source)


class Text:
    """Tokens of one request and their automaton."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.automaton = Automaton()

    def update(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.automaton.extend(token)
        self.seen.extend(tokens)

    def match(self, tail: Sequence[int]) -> Match:
        state, length = self.automaton.advance(*self.automaton.suffix(), tail)
        return Match(self.automaton, state, length, max(1, self.automaton.counts[state]))


@dataclass(eq=False)
class TextBlock:
    """Past outputs that are dropped together. ``docs`` maps requests to tokens; ``keys`` are the requests in the order
    added, and ``starts`` the automaton's size before each."""

    automaton: Automaton = field(default_factory=Automaton)
    docs: dict[int, list[int]] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    tokens: int = 0
    cursors: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Per running sequence: how many of its tokens were matched, the state they led to, and the match's length."""

    def add(self, key: int, tokens: list[int]) -> None:
        self.keys.append(key)
        self.starts.append(len(self.automaton))
        self.docs[key] = tokens
        self.tokens += len(tokens)
        self.automaton.begin()
        for token in tokens:
            self.automaton.extend(token)

    def owner(self, state: int) -> int:
        """The request whose tokens added ``state``."""
        return self.keys[bisect_right(self.starts, state) - 1]

    def match(self, key: int, seen: list[int], tail: Sequence[int], reach: int) -> Match:
        """The longest match of the end of ``seen + tail``, at most ``reach`` tokens long."""
        automaton = self.automaton
        num_matched, state, length = self.cursors.get(key, (0, ROOT, 0))
        # New outputs may have split the state: go back to the one that has a substring of this length.
        while state != ROOT and length <= automaton.length[automaton.link[state]]:
            state = automaton.link[state]
        state, length = automaton.advance(state, length, seen[max(num_matched, len(seen) - reach) :])
        self.cursors[key] = (len(seen), state, length)
        state, length = automaton.advance(state, length, tail)
        return Match(automaton, state, length, automaton.counts[state] + 1, self)


class PastOutputs:
    """Past outputs in two blocks. When the newer block is full, the older one is dropped. An output of the older block
    that helped is copied to the newer, so that what is dropped was not used recently."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.blocks: list[TextBlock] = []

    def add(self, key: int, tokens: list[int]) -> None:
        """Adds an output; of one longer than half the capacity, its end."""
        tokens = tokens[-max(1, self.max_tokens // 2) :]
        if not tokens or not self.max_requests:
            return
        newest = self.blocks[0] if self.blocks else None
        if (
            newest is None
            or len(newest.docs) >= max(1, self.max_requests // 2)
            or newest.tokens + len(tokens) > self.max_tokens // 2
        ):
            self.blocks = [newest := TextBlock(), *self.blocks[:1]]
            if self.max_requests == 1:
                self.blocks = self.blocks[:1]
        newest.add(key, tokens)

    def touch(self, block: TextBlock, key: int) -> None:
        """Keeps an output that helped: copies it from the older block to the newer."""
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
        self.past = PastOutputs(config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_cached_tokens)
        self.has_evidence = not config.branches
        self.used: dict[int, tuple[TextBlock, int]] = {}
        self.choices: dict[int, list[int]] = {}
        """By sequence, the target's next best tokens at the last position, best first."""
        self.stores: list[Datastore] = []
        if config.datastore is not None:
            vocab_size = context.target.info.vocab_size
            self.stores.append(Datastore.load(Path(config.datastore), vocab_size, context.tokenizer))
        if context.memory is not None and context.memory.store is not None:
            self.stores.append(context.memory.store)

    def new_index(self) -> Text:
        return Text()

    def draft(self, sequence: RequestState, index: Text, tail: list[int], budget: int) -> Draft:
        best = self._likeliest(sequence, index, tail, budget)
        for token in self.choices.get(sequence.id, ()) if not tail else ():
            match = index.match([token])
            if match.length > 1:  # the last token was followed by it before
                node = best.add(token)
                rest, _ = likeliest_chain(match.continuations, match.state, min(budget, BRANCH) - 1)
                for each in rest.tokens:
                    node = best.add(each, node)
        return best

    def _likeliest(self, sequence: RequestState, index: Text, tail: list[int], budget: int) -> Draft:
        reach = self.config.suffix_decoding_max_tree_depth
        matches: list[Match | DatastoreMatch] = [index.match(tail)]
        matches += [block.match(sequence.id, index.seen, tail, reach) for block in self.past.blocks]
        matches += [store.match([*index.seen[-reach:], *tail], reach) for store in self.stores]
        best, most, chosen = Draft(), 0.0, None
        for match in matches:
            for _ in range(1 + SHORTER_MATCHES):
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

    def _grow(self, match: Match | DatastoreMatch, budget: int) -> tuple[Draft, float]:
        config = self.config
        matched = min(match.length, config.suffix_decoding_max_tree_depth - 1)
        depth = min(budget, max(1, int(matched * config.suffix_decoding_max_spec_factor)))
        depth = min(depth, config.suffix_decoding_max_tree_depth - 1)
        lowest = config.suffix_decoding_min_token_prob
        source: Continuations[Any] = match.continuations
        floor = log(lowest) if lowest else -inf
        if config.second_choices:
            return likeliest_chain(source, match.state, depth, floor)
        return config.grow(source, match.state, depth, floor, match.length)

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            used = self.used.pop(sequence.id, None)
            if used is not None and verdict.accepted:
                self.past.touch(*used)
        if self.config.second_choices:
            self._remember_choices({s.id: v.tokens for s, v in zip(sequences, verdicts)}, result.scores)

    def _remember_choices(self, emitted: Mapping[int, list[int]], scores: Scores) -> None:
        count = self.config.second_choices + 1
        for slot, (sequence, draft) in enumerate(zip(scores.sequences, scores.drafts)):
            tokens = emitted.get(sequence.id)
            if not tokens or sequence.group is not None:
                continue
            node = -1
            for token in tokens[:-1]:
                node = draft.children(node)[token]
            logits, ids = scores.warped[scores.row(slot, node)].topk(min(count, scores.warped.shape[1]))
            possible = [token for logit, token in zip(logits.tolist(), ids.tolist()) if logit > -inf]
            self.choices[sequence.id] = [token for token in possible if token != tokens[-1]][: count - 1]

    def release(self, sequence: RequestState) -> None:
        """A finished request's output becomes a past one; a preempted request has not finished."""
        super().release(sequence)
        self.used.pop(sequence.id, None)
        self.choices.pop(sequence.id, None)
        self.past.forget(sequence.id)
        if sequence.num_computed_tokens:
            self.past.add(sequence.id, sequence.tokens[sequence.num_prompt :])
