"""Past answers that outlive the process, in a private file, for drafters that look up."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from forerun.core.errors import ConfigError, one_line
from forerun.core.folders import distrust, expanded, lock, open_private, replace_with
from forerun.speculate.draft.datastore import Datastore, flat, split

log = logging.getLogger("forerun")
LEAST, MOST = 8, 1 << 30
"""Tokens of the shortest answer that is kept, and bytes of the largest file that is read."""
EVERY, PATIENCE = 60.0, 5.0
"""Seconds between two times that it is saved, and how long the last one waits for another process."""
WIDTH = 4
"""Bytes of a token in memory."""


class Memory:
    """The answers in a file, and those of this process. Processes may share the file: each adds to what is there when
    it saves, and drafts from what was there when it started.

    Args:
        model: the fingerprint of the model whose tokens they are.
        size: bytes of tokens that are kept; the oldest answers are dropped first.

    Raises ConfigError for a file that others can read or write, that is damaged, or of another model.
    """

    def __init__(self, path: str, model: str, vocab_size: int, size: int) -> None:
        self.path, self.model, self.vocab_size = expanded(path).absolute(), model, vocab_size
        self.size = min(size, MOST // 2)
        self._fresh: dict[bytes, None] = {}
        """Answers that are not in the file yet, the oldest first."""
        self._saved = monotonic()
        try:
            with self._open() as file:
                self._start = self._read(file)
        except ConfigError:
            raise
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: no path
            raise ConfigError(f"memory: {self.path} cannot be used ({one_line(error)}): name another file") from error

    @cached_property
    def store(self) -> Datastore | None:
        """The answers of earlier processes."""
        texts = [np.frombuffer(text, np.int32) for text in self._start]
        return Datastore(texts, cached=False) if texts else None

    @property
    def used(self) -> bool:
        """Whether a drafter asked for the store."""
        return "store" in vars(self)

    def add(self, tokens: Sequence[int]) -> None:
        """Keeps an answer; of one larger than ``size``, its end."""
        if len(tokens) < LEAST:
            return
        _append(self._fresh, np.array(tokens[-max(1, self.size // WIDTH) :], np.int32).tobytes())
        _bound(self._fresh, self.size)
        if monotonic() - self._saved > EVERY:
            self.save()

    def save(self, patience: float = 0.0) -> None:
        """Adds the new answers to the file. If that cannot be done, a warning says why, and they are kept for the next
        time. While another process saves, it waits up to ``patience`` seconds; without patience, the next time will do.
        """
        self._saved = monotonic()
        if not self._fresh:
            return
        try:
            with self._locked(patience) as file:
                texts = dict.fromkeys(self._read(file))
                for text in self._fresh:
                    _append(texts, text)
                _bound(texts, self.size)
                replace_with(self.path, lambda made: self._write(made, texts))
        except BlockingIOError:
            if patience:
                log.warning("memory: another process holds %s, so the new answers are not kept", self.path)
        except (OSError, ConfigError) as error:
            log.warning("memory: the new answers are not kept: %s", one_line(error))
        else:
            self._fresh.clear()

    @contextmanager
    def _open(self) -> Iterator[int]:
        if (reason := distrust(self.path.parent)) is not None:
            raise PermissionError(reason)
        file = open_private(self.path)
        try:
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _locked(self, patience: float) -> Iterator[int]:
        """The open file, locked. Another process may have replaced it before that: then the new one is opened."""
        end = monotonic() + patience
        while True:
            with self._open() as file:
                try:
                    lock(file)
                except BlockingIOError:
                    if monotonic() > end:
                        raise
                    sleep(0.02)
                    continue
                if os.path.samestat(os.fstat(file), self.path.lstat()):
                    yield file
                    return

    def _read(self, file: int) -> list[bytes]:
        """The answers in an open file, the oldest first. Raises ConfigError."""
        if os.fstat(file).st_size > MOST:
            raise ConfigError(f"memory: {self.path} is larger than {MOST} bytes: name another file")
        with os.fdopen(os.dup(file), "rb") as opened:
            content = opened.read(MOST)
        if not content:
            return []
        try:
            tensors = load(content)
            model = tensors["model"].tobytes().decode("ascii")
            texts = split(tensors["tokens"], tensors["lengths"])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"memory: {self.path} is damaged, or no memory: remove it, or name another") from error
        if model != self.model:
            raise ConfigError(f"memory: {self.path} belongs to another model: name another file")
        if any(text.size and not 0 <= int(text.min()) <= int(text.max()) < self.vocab_size for text in texts):
            raise ConfigError(f"memory: {self.path} is damaged: it has tokens that the model lacks; remove it")
        return [text.astype(np.int32).tobytes() for text in texts if text.size]

    def _write(self, path: Path, texts: dict[bytes, None]) -> None:
        tensors = flat([np.frombuffer(text, np.int32) for text in texts])
        content = save({**tensors, "model": np.frombuffer(self.model.encode("ascii"), np.uint8)})
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR), "wb") as file:
            file.write(content)


def _append(texts: dict[bytes, None], text: bytes) -> None:
    """Makes it the newest, also if it is known."""
    texts.pop(text, None)
    texts[text] = None


def _bound(texts: dict[bytes, None], size: int) -> None:
    """Drops the oldest."""
    total = sum(map(len, texts))
    while total > size:
        oldest = next(iter(texts))
        total -= len(oldest)
        del texts[oldest]
