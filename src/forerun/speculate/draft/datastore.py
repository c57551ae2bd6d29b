"""Texts that are known beforehand, and what follows in them: a datastore to retrieve drafts from.

REST (He et al. 2024, arXiv 2311.08252) drafts what followed the longest match of the text's end in a datastore, found
in a suffix array. Here that is one of the texts read backwards, so that one search finds the longest match, and sorted
by ``REACH`` tokens alone, which bound matches.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forerun.core.errors import ConfigError, ForerunError
from forerun.core.folders import cache_folder, distrust, expanded, let_read, make_folder, replace_with

REACH = 32
COUNTED = 64
"""Occurrences that are looked at where a match has more: evenly chosen."""
FORMAT = "forerun_datastore"
SUFFIX = ".safetensors"
"""Of a file that ``save`` wrote; others are text."""
LARGE = 100_000
"""Tokens of a datastore whose order is kept in the cache folder."""
DIGEST = 32
"""Bytes of the hash that a kept order begins with."""
WIDTH = 4
"""Bytes of a token, most significant first, so that texts compare as bytes do. 0 ends a text; tokens are one more."""


class Datastore:
    """Token ids of ``texts``, each at least 0. Places in them, sorted by the tokens before each, the nearest first."""

    def __init__(self, texts: Sequence[ArrayLike]) -> None:
        parts = [np.append(np.asarray(text, np.int64) + 1, 0) for text in texts]
        tokens = np.concatenate([*parts, np.zeros(0, np.int64)])
        end = np.zeros(REACH, np.int64)
        backwards = np.append(tokens[::-1], end)
        order = _kept_order(backwards) if len(tokens) > LARGE else _order(backwards)
        self.tokens = np.append(tokens, end).astype(np.int32).data
        self._order = (len(tokens) - order[order < len(tokens)]).astype(np.int32).data
        self._backwards = backwards.astype(">u4").tobytes()
        self._bytes = WIDTH * len(tokens)

    @classmethod
    def load(cls, path: Path, vocab_size: int, tokenizer: Any) -> Datastore:
        """A file of text, or what ``save`` wrote. Raises ConfigError for anything else, for text without a tokenizer,
        for no text at all, and for tokens that are not among the model's ``vocab_size``."""
        try:
            index = expanded(path)
            texts = read(index) if path.suffix == SUFFIX else [_encoded(index, tokenizer)]
        except ForerunError:
            raise
        except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"cannot read the datastore {path}: {error}") from error
        if not any(text.size for text in texts):
            raise ConfigError(f"the datastore {path} has no text to look anything up in")
        if any(text.size and not 0 <= int(text.min()) <= int(text.max()) < vocab_size for text in texts):
            raise ConfigError(f"the datastore {path} has tokens that are not among the model's {vocab_size}")
        return cls(texts)

    def match(self, text: Sequence[int], reach: int) -> Retrieved:
        """The longest match of the end of ``text``, of at most ``reach`` tokens; length 0 if there is none."""
        nearest = text[-1 : -1 - min(reach, REACH, len(text)) : -1]
        requested = b"".join([(token + 1).to_bytes(WIDTH) for token in nearest])
        index = bisect_left(self._order, requested, key=self._before(len(requested)))
        return self.matched(requested, index, index)

    def matched(self, requested: bytes, first: int, last: int) -> Retrieved:
        """The longest match around the places ``first`` to ``last`` that the ones beside them have."""
        size = max(self._alike(requested, first - 1), self._alike(requested, last))
        if not size:
            return Retrieved(self, requested, 0, 0, 0, [])
        before, text = self._before(size), requested[:size]
        first = bisect_left(self._order, text, 0, first, key=before)
        last = bisect_right(self._order, text, last, len(self._order), key=before)
        step = -(-(last - first) // COUNTED)
        return Retrieved(self, requested, first, last, size // WIDTH, self._order[first:last:step].tolist())

    def _before(self, size: int) -> Callable[[int], bytes]:
        """What gives as many bytes of the tokens before a place."""
        data, end = self._backwards, self._bytes
        return lambda index: data[end - WIDTH * index : end - WIDTH * index + size]

    def _alike(self, requested: bytes, index: int) -> int:
        """Bytes of whole tokens at which ``requested`` and what is before a place are the same."""
        if not 0 <= index < len(self._order):
            return 0
        result = self._before(len(requested))(self._order[index])
        pairs = zip(range(0, len(requested), WIDTH), range(WIDTH, len(requested) + 1, WIDTH))
        return next((start for start, end in pairs if requested[start:end] != result[start:end]), len(requested))


class Retrieved(NamedTuple):
    """A match in a datastore, of ``length`` tokens: the places ``first`` to ``last`` of its order, of which ``state``
    are those that are counted."""

    store: Datastore
    wanted: bytes
    first: int
    last: int
    length: int
    state: list[int]
    source: None = None

    def continuations(self, state: list[int]) -> Iterator[tuple[int, float, list[int]]]:
        """(token, log of its share, the places behind it), the commonest first."""
        tokens, result = self.store.tokens, dict[int, list[int]]()
        for index in state:
            result.setdefault(tokens[index], []).append(index + 1)
        # The text itself is an occurrence behind which nothing is known yet.
        count = self.last - self.first
        total = len(state) * (count + 1) / count if state is self.state else len(state)
        for token, indices in sorted(result.items(), key=lambda each: -len(each[1])):
            if token:
                yield token - 1, log(len(indices) / total), indices

    def shorter(self) -> Retrieved:
        """The longest shorter match that occurs more often; length 0 if there is none."""
        return self.store.matched(self.wanted, self.first, self.last)


def _kept_order(tokens: np.ndarray) -> np.ndarray:
    """``_order``, as an earlier start left it in the cache folder: half a second for a million tokens."""
    name = hashlib.sha256(tokens.tobytes()).hexdigest()[:24]
    path: Path | None = None
    try:
        path = cache_folder() / "orders" / name
        if distrust(path) is None:
            data = path.read_bytes()
            if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST]:
                return np.frombuffer(data, np.int32, offset=DIGEST)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError):  # RuntimeError: there is no cache folder
        path = None
    order = _order(tokens).astype(np.int32)
    if path is not None:
        data = order.tobytes()
        with suppress(OSError):
            make_folder(path.parent)
            replace_with(path, lambda made: made.write_bytes(hashlib.sha256(data).digest() + data))
    return order


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
        result = key[order]
        rank = np.empty(len(key), np.int64)
        rank[order] = np.cumsum(np.append(False, result[1:] != result[:-1]))
        key = rank * len(rank) + _behind(rank, known)
        known *= 2


def _behind(values: np.ndarray, indices: int) -> np.ndarray:
    return np.append(values[indices:], np.zeros(indices, values.dtype))


def _encoded(path: Path, tokenizer: Any) -> np.ndarray:
    text = path.read_text(encoding="utf-8")
    if tokenizer is None:
        raise ConfigError(f"the datastore {path} is text, and there is no tokenizer: give token ids ({SUFFIX})")
    return np.array(tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int64)


def read(path: Path) -> list[np.ndarray]:
    """Token ids of the texts that ``save`` wrote. Raises ConfigError for another file, and what safetensors raises."""
    with safe_open(path, framework="numpy") as file:
        if (file.metadata() or {}).get("format") != FORMAT:
            raise ConfigError(f"{path} is no datastore: forerun tune writes one")
        tokens, lengths = (file.get_tensor(name) for name in ("tokens", "lengths"))
    if {tokens.dtype.kind, lengths.dtype.kind} - {"i", "u"} or {tokens.ndim, lengths.ndim} != {1}:
        raise ConfigError(f"the datastore {path} is damaged: it holds no lists of whole numbers")
    if not 0 <= lengths.min(initial=0) <= lengths.max(initial=0) <= len(tokens) or lengths.sum() != len(tokens):
        raise ConfigError(f"the datastore {path} is damaged: its lengths are not those of its texts")
    return np.split(tokens, np.cumsum(lengths)[:-1])


def save(path: Path, texts: Sequence[ArrayLike]) -> None:
    """Writes token ids for ``Datastore.load``."""
    parts = [np.asarray(text, np.int64) for text in texts]
    tokens = np.concatenate([*parts, np.zeros(0, np.int64)])
    kind = np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32
    lengths = np.array([len(part) for part in parts], np.int32)
    save_file({"tokens": tokens.astype(kind), "lengths": lengths}, path, metadata={"format": FORMAT})
    let_read(path)
