"""Texts that are known beforehand, and what follows in them: a datastore to retrieve drafts from.

REST (He et al. 2024, arXiv 2311.08252) drafts what followed the longest match of the text's end in a datastore, found
in a suffix array. Here that is sorted by the first ``REACH`` tokens alone, which bound match and draft together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forerun.core.errors import ConfigError, ForerunError

REACH = 32
COUNTED = 256
"""Occurrences that are looked at where a match has more: evenly chosen."""
FORMAT = "forerun_datastore"
SUFFIX = ".safetensors"
"""Of a file that ``save`` wrote; others are text."""
WIDTH = 4
"""Bytes of a token, most significant first, so that texts compare as bytes do. 0 ends a text; tokens are one more."""


class State(NamedTuple):
    """Places ``first`` to ``last`` of the sorted suffixes, which all begin with ``text``."""

    text: bytes
    first: int
    last: int


class Datastore:
    """Token ids of ``texts``, each at least 0, sorted by what they begin with."""

    def __init__(self, texts: Seq[ArrayLike]) -> None:
        parts = [np.append(np.asarray(text, np.int64) + 1, 0) for text in texts]
        tokens = np.concatenate([*parts, np.zeros(REACH, np.int64)])
        order = _order(tokens)
        self.order = order[order < len(tokens) - REACH].astype(np.int32)
        self.tokens = tokens.astype(np.int32)
        self._bytes = tokens.astype(">u4").tobytes()
        self._places = self.order.data
        first = self.tokens[self.order]
        self._begins = np.searchsorted(first, np.arange(first.max(initial=0) + 2)).tolist()
        """Where the suffixes lie that begin with each token, one more than its id."""

    @classmethod
    def load(cls, path: Path, vocab_size: int, tokenizer: Any) -> Datastore:
        """A file of text, or what ``save`` wrote. Raises ConfigError for anything else, for text without a tokenizer,
        and for tokens that are not among the model's ``vocab_size``."""
        try:
            place = path.expanduser()
            texts = _read(place) if path.suffix == SUFFIX else [_encoded(place, tokenizer)]
        except ForerunError:
            raise
        except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"cannot read the datastore {path}: {error}") from error
        if any(text.size and not 0 <= int(text.min()) <= int(text.max()) < vocab_size for text in texts):
            raise ConfigError(f"the datastore {path} has tokens that are not among the model's {vocab_size}")
        return cls(texts)

    def match(self, text: Seq[int], reach: int) -> Retrieved:
        """The longest match of the end of ``text``, of at most ``reach`` tokens; length 0 if there is none."""
        found: list[State] = []
        wanted = b""
        for length in range(1, min(len(text), reach, REACH) + 1):
            first = text[-length] + 1
            wanted = first.to_bytes(WIDTH) + wanted
            if first + 1 >= len(self._begins):
                break
            state = self.narrowed(State(wanted, *self._begins[first : first + 2]))
            if state.first == state.last:
                break
            found.append(state)
        return Retrieved(self, found, len(found))

    def narrowed(self, state: State) -> State:
        """Those of its places that do begin with its text."""
        text, data = state.text, self._bytes
        size = len(text)

        def beginning(place: int) -> bytes:
            return data[WIDTH * place : WIDTH * place + size]

        first = bisect_left(self._places, text, state.first, state.last, key=beginning)
        return State(text, first, bisect_right(self._places, text, first, state.last, key=beginning))

    def continuations(self, state: State) -> Iterator[tuple[int, float, State]]:
        """(token, log of its share, what begins so), the commonest first."""
        length = len(state.text) // WIDTH
        if length >= REACH:
            return
        count = state.last - state.first
        step = -(-count // COUNTED)
        some = self.tokens[self.order[state.first : state.last : step] + length]
        tokens, counts = np.unique(some, return_counts=True)
        for place in np.argsort(-counts, kind="stable").tolist():
            token = int(tokens[place])
            if token:
                within = State(state.text + token.to_bytes(WIDTH), state.first, state.last)
                yield token - 1, log(counts[place] / len(some)), self.narrowed(within)


class Retrieved(NamedTuple):
    """A match in a datastore, of ``length`` tokens; those shorter than it are ``states``' others."""

    store: Datastore
    states: list[State]
    length: int
    source: None = None

    @property
    def state(self) -> State:
        return self.states[self.length - 1]

    def continuations(self, state: State) -> Iterator[tuple[int, float, State]]:
        # The text itself is an occurrence behind which nothing is known yet.
        count = state.last - state.first
        shift = log(count / (count + 1)) if state is self.state else 0.0
        for token, log_q, after in self.store.continuations(state):
            yield token, log_q + shift, after

    def shorter(self) -> Retrieved:
        """The longest shorter match that occurs more often; length 0 if there is none."""
        most, length = self.state.last - self.state.first, self.length - 1
        while length and self.states[length - 1].last - self.states[length - 1].first <= most:
            length -= 1
        return self._replace(length=length)


def _order(tokens: np.ndarray) -> np.ndarray:
    """All places, sorted by the ``REACH`` tokens that they begin: by twice as many from pass to pass (Manber and Myers
    1990), as many at first as a number holds."""
    key, known, bits = tokens.astype(np.uint64), 1, max(1, int(tokens.max()).bit_length())
    while 2 * known * bits <= 64 and known < REACH:
        key = (key << np.uint64(known * bits)) | _behind(key, known)
        known *= 2
    while True:
        order = np.argsort(key)
        if known >= REACH:
            return order
        found = key[order]
        rank = np.empty(len(key), np.int64)
        rank[order] = np.cumsum(np.append(False, found[1:] != found[:-1]))
        key = rank * len(rank) + _behind(rank, known)
        known *= 2


def _behind(values: np.ndarray, places: int) -> np.ndarray:
    return np.append(values[places:], np.zeros(places, values.dtype))


def _encoded(path: Path, tokenizer: Any) -> np.ndarray:
    text = path.read_text(encoding="utf-8")
    if tokenizer is None:
        raise ConfigError(f"the datastore {path} is text, and there is no tokenizer: give token ids ({SUFFIX})")
    return np.array(tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int64)


def _read(path: Path) -> list[np.ndarray]:
    with safe_open(path, framework="numpy") as file:
        if (file.metadata() or {}).get("format") != FORMAT:
            raise ConfigError(f"{path} is no datastore: forerun tune writes one")
        tokens, lengths = (file.get_tensor(name) for name in ("tokens", "lengths"))
    if {tokens.dtype.kind, lengths.dtype.kind} - {"i", "u"} or {tokens.ndim, lengths.ndim} != {1}:
        raise ConfigError(f"the datastore {path} is damaged: it holds no lists of whole numbers")
    if not 0 <= lengths.min(initial=0) <= lengths.max(initial=0) <= len(tokens) or lengths.sum() != len(tokens):
        raise ConfigError(f"the datastore {path} is damaged: its lengths are not those of its texts")
    return np.split(tokens, np.cumsum(lengths)[:-1])


def save(path: Path, texts: Seq[ArrayLike]) -> None:
    """Writes token ids for ``Datastore.load``."""
    parts = [np.asarray(text, np.int64) for text in texts]
    tokens = np.concatenate([*parts, np.zeros(0, np.int64)])
    kind = np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32
    lengths = np.array([len(part) for part in parts], np.int32)
    save_file({"tokens": tokens.astype(kind), "lengths": lengths}, path, metadata={"format": FORMAT})
