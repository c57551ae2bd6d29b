"""A datastore of texts from which drafts are retrieved.

REST (He et al. 2024, arXiv 2311.08252) finds the longest match of the text's end with a suffix array, and drafts what
followed there. Here the suffix array is of the reversed texts, so that one search finds the longest match. It is sorted
by ``REACH`` tokens only, the longest match.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forerun.core.errors import ConfigError, ForerunError
from forerun.core.folders import expanded, keep, let_read, read_kept

REACH = 32
MAX_OCCURRENCES = 64
"""If a match has more occurrences, this many, evenly spaced, are counted."""
FORMAT = "forerun_datastore"
SUFFIX = ".safetensors"
"""Ending of files that ``save`` writes; other files are text."""
LARGE = 100_000
"""A datastore with more tokens caches its suffix array in the cache folder."""
DIGEST = 32
"""Bytes of the hash at the beginning of a cached suffix array."""
WIDTH = 4
"""Bytes of a token, most significant first, so that bytes sort as tokens do. Tokens are stored + 1; 0 ends a text."""


class Datastore:
    """Token ids of ``texts``, and their positions sorted by the tokens before each, the nearest token first."""

    def __init__(self, texts: Sequence[ArrayLike], cached: bool = True) -> None:
        """``cached``: whether a large suffix array is cached."""
        parts = [np.append(np.asarray(text, np.int64) + 1, 0) for text in texts]
        tokens = np.concatenate([*parts, np.zeros(0, np.int64)])
        end = np.zeros(REACH, np.int64)
        backwards = np.append(tokens[::-1], end)
        order = _cached_order(backwards) if cached and len(tokens) > LARGE else _suffix_array(backwards)
        self.tokens = np.append(tokens, end).astype(np.int32).data
        self._order = (len(tokens) - order[order < len(tokens)]).astype(np.int32).data
        self._backwards = backwards.astype(">u4").tobytes()
        self._bytes = WIDTH * len(tokens)

    @classmethod
    def load(cls, path: Path, vocab_size: int, tokenizer: Any) -> Datastore:
        """Loads a text file, or what ``save`` wrote. Raises ConfigError for anything else, text without a tokenizer, no
        text, and for tokens outside the model's ``vocab_size``."""
        try:
            full = expanded(path)
            texts = read(full) if path.suffix == SUFFIX else [_encoded(full, tokenizer)]
        except ForerunError:
            raise
        except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"cannot read the datastore {path}: {error}") from error
        if not any(text.size for text in texts):
            raise ConfigError(f"the datastore {path} has no text to look anything up in")
        if any(text.size and not 0 <= int(text.min()) <= int(text.max()) < vocab_size for text in texts):
            raise ConfigError(f"the datastore {path} has tokens that are not among the model's {vocab_size}")
        return cls(texts)

    def match(self, text: Sequence[int], reach: int) -> DatastoreMatch:
        """The longest match of the end of ``text``, of at most ``reach`` tokens; length 0 if there is none."""
        nearest = text[-1 : -1 - min(reach, REACH, len(text)) : -1]
        query = b"".join([(token + 1).to_bytes(WIDTH) for token in nearest])
        index = bisect_left(self._order, query, key=self._before(len(query)))
        return self.widen(query, index, index)

    def widen(self, query: bytes, first: int, last: int) -> DatastoreMatch:
        """The longest match of ``query`` with more occurrences than ``first`` to ``last`` of the suffix array."""
        size = max(self._common(query, first - 1), self._common(query, last))
        if not size:
            return DatastoreMatch(self, query, 0, 0, 0, [])
        before, text = self._before(size), query[:size]
        first = bisect_left(self._order, text, 0, first, key=before)
        last = bisect_right(self._order, text, last, len(self._order), key=before)
        step = -(-(last - first) // MAX_OCCURRENCES)
        return DatastoreMatch(self, query, first, last, size // WIDTH, self._order[first:last:step].tolist())

    def _before(self, size: int) -> Callable[[int], bytes]:
        """Returns a function from a position to the ``size`` bytes of the tokens before it, the nearest first."""
        data, end = self._backwards, self._bytes
        return lambda position: data[end - WIDTH * position : end - WIDTH * position + size]

    def _common(self, query: bytes, index: int) -> int:
        """Length in bytes of the longest common prefix, in whole tokens, of ``query`` and the tokens before entry
        ``index`` of the suffix array."""
        if not 0 <= index < len(self._order):
            return 0
        text = self._before(len(query))(self._order[index])
        starts = range(0, len(query), WIDTH)
        return next((i for i in starts if query[i : i + WIDTH] != text[i : i + WIDTH]), len(query))


class DatastoreMatch(NamedTuple):
    """A match of ``length`` tokens: entries ``first`` to ``last`` of the suffix array. ``state`` holds the positions
    after the counted occurrences."""

    store: Datastore
    query: bytes
    first: int
    last: int
    length: int
    state: list[int]
    source: None = None

    def continuations(self, state: list[int]) -> Iterator[tuple[int, float, list[int]]]:
        """Yields (token, log of its relative frequency, the positions after it), the most frequent first."""
        tokens, following = self.store.tokens, dict[int, list[int]]()
        for position in state:
            following.setdefault(tokens[position], []).append(position + 1)
        # The text's own end is an occurrence without a continuation.
        count = self.last - self.first
        total = len(state) * (count + 1) / count if state is self.state else len(state)
        for token, positions in sorted(following.items(), key=lambda each: -len(each[1])):
            if token:
                yield token - 1, log(len(positions) / total), positions

    def shorter(self) -> DatastoreMatch:
        """The longest shorter match with more occurrences; length 0 if there is none."""
        return self.store.widen(self.query, self.first, self.last)


def _cached_order(tokens: np.ndarray) -> np.ndarray:
    """``_suffix_array``, cached in the cache folder: it takes half a second for a million tokens."""
    name = Path("orders", hashlib.sha256(tokens.tobytes()).hexdigest()[:24])
    data = read_kept(name) or b""
    if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST]:
        return np.frombuffer(data, np.int32, offset=DIGEST)
    order = _suffix_array(tokens).astype(np.int32)
    data = order.tobytes()
    keep(name, hashlib.sha256(data).digest() + data)
    return order


def _suffix_array(tokens: np.ndarray) -> np.ndarray:
    """All positions, sorted by the ``REACH`` tokens from there on. Each pass doubles the number of tokens in the key
    (Manber and Myers 1990); the first key holds as many as fit 64 bits."""
    key, known, bits = tokens.astype(np.uint64), 1, max(1, int(tokens.max()).bit_length())
    while 2 * known * bits <= 64 and known < REACH:
        key = (key << np.uint64(known * bits)) | _shifted(key, known)
        known *= 2
    while True:
        order = np.argsort(key)
        if known >= REACH:
            return order
        ordered = key[order]
        rank = np.empty(len(key), np.int64)
        rank[order] = np.cumsum(np.append(False, ordered[1:] != ordered[:-1]))
        key = rank * len(rank) + _shifted(rank, known)
        known *= 2


def _shifted(values: np.ndarray, count: int) -> np.ndarray:
    return np.append(values[count:], np.zeros(count, values.dtype))


def _encoded(path: Path, tokenizer: Any) -> np.ndarray:
    text = path.read_text(encoding="utf-8")
    if tokenizer is None:
        raise ConfigError(f"the datastore {path} is text, and there is no tokenizer: give token ids ({SUFFIX})")
    return np.array(tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int64)


def read(path: Path) -> list[np.ndarray]:
    """The token ids of each text that ``save`` wrote. Raises ConfigError for another file, and safetensors' errors."""
    with safe_open(path, framework="numpy") as file:
        if (file.metadata() or {}).get("format") != FORMAT:
            raise ConfigError(f"{path} is not a datastore: run forerun tune")
        tokens, lengths = (file.get_tensor(name) for name in ("tokens", "lengths"))
    try:
        return split(tokens, lengths)
    except ValueError as error:
        raise ConfigError(f"the datastore {path} is damaged: {error}") from error


def split(tokens: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The texts that ``flat`` joined. Raises ValueError for anything else."""
    if {tokens.dtype.kind, lengths.dtype.kind} - {"i", "u"} or {tokens.ndim, lengths.ndim} != {1}:
        raise ValueError("it holds no lists of whole numbers")
    if not 0 <= lengths.min(initial=0) <= lengths.max(initial=0) <= len(tokens) or lengths.sum() != len(tokens):
        raise ValueError("its lengths are not those of its texts")
    return np.split(tokens, np.cumsum(lengths)[:-1])


def flat(texts: Sequence[ArrayLike]) -> dict[str, np.ndarray]:
    """The token ids of all texts, and the length of each."""
    parts = [np.asarray(text, np.int64) for text in texts]
    tokens = np.concatenate([*parts, np.zeros(0, np.int64)])
    kind = np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32
    return {"tokens": tokens.astype(kind), "lengths": np.array([len(part) for part in parts], np.int32)}


def save(path: Path, texts: Sequence[ArrayLike]) -> None:
    """Writes the token ids of each text for ``Datastore.load``."""
    save_file(flat(texts), path, metadata={"format": FORMAT})
    let_read(path)
