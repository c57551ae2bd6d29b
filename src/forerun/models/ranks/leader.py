"""Rank 0: starts the others, tells them what to run, and says in one line which of them failed."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch

from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.core.batch import Batch
from forerun.core.errors import RankError
from forerun.models.base import LoadRequest, Tiles
from forerun.models.ranks.team import FAILED, READY, TIMEOUT, UP, Feed, Hello, RankCall, StatesFeed, Team

START = 600.0
"""Seconds that the others have to come up, and again to load their parts."""
LAST_WORDS = 2.0
"""Seconds to wait for a process that has closed its connection to end."""
COMMAND = "from forerun.models.ranks.worker import main; main()"


class Rank:
    """One of the other processes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        package = str(Path(__file__).parents[3])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt of the terminal is rank 0's to answer
            )

    def ended(self, seconds: float) -> str | None:
        """How the process ended, in words; None: it has not, in that time."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


class Leader(Team):
    """Rank 0 of ``size``; the others load their parts of ``wanted``. They end when this object or process does."""

    leads = True

    def __init__(self, size: int, requested: LoadRequest, device: torch.device) -> None:
        super().__init__(0, size)
        self._broken: str | None = None
        self._numbers: weakref.WeakKeyDictionary[Pool, int] = weakref.WeakKeyDictionary()
        self._gone: list[int] = []
        self._count = itertools.count()
        folder = Path(tempfile.mkdtemp(prefix="forerun-ranks-"))
        self.others: list[Rank] = []
        self._end = weakref.finalize(self, _end, self.others, folder)
        self.others.extend(Rank(rank) for rank in range(1, size))
        for other in self.others:
            self._send(pickle.dumps(Hello(other.rank, size, folder, requested)), other)
        self._await(UP)
        self.connect(folder, device)

    def ready(self) -> None:
        """Wait until the others have loaded their parts. Raises RankError."""
        self._await(READY)

    def _await(self, word: str) -> None:
        until = monotonic() + START
        for other in self.others:
            try:
                if not other.pipe.poll(max(0.0, until - monotonic())):
                    self._fail(f"rank {other.rank} of {self.size} did not come up within {START:.0f} s")
                said, *reason = pickle.loads(other.pipe.recv_bytes())
            except (EOFError, OSError):
                self._lost()
            if said != word:
                self._fail(f"rank {other.rank} of {self.size}: {reason[0] if said == FAILED else said}")

    @contextmanager
    def feeding(self, batch: Batch, attention: Attention, tiles: Tiles | None, *, invariant: bool) -> Iterator[None]:
        if self._apart:
            yield
            return
        pool, gone, number = attention.pool, list(self._gone), self._number(attention.pool)
        states = None if pool.states is None else StatesFeed.of(pool.states, [span.key for span in batch.spans])
        message = Feed(
            number, pool.num_pages, pool.page_size, pool.changes or [],
            {span.key: pool.block_tables[span.key] for span in batch.spans}, gone, batch.spans, batch.hidden,
            batch.layers, batch.embeds, batch.embed_rows, tiles, invariant, torch.get_num_threads(),
            states,
        )  # fmt: skip
        with self._telling(message):
            self._note(pool)
            del self._gone[: len(gone)]
            yield

    @contextmanager
    def calling(self, name: str, rows: torch.Tensor) -> Iterator[None]:
        with self._telling(RankCall(name, rows)):
            yield

    @contextmanager
    def _telling(self, message: Feed | RankCall) -> Iterator[None]:
        if self._broken is not None:
            raise RankError(self._broken)
        said = pickle.dumps(message)
        for other in self.others:
            self._send(said, other)
        try:
            yield
        except RankError:
            raise
        except BaseException as error:  # the others are somewhere within the forward
            self._stop(f"rank 0 of {self.size} failed in a forward ({type(error).__name__})")
            raise

    def _send(self, said: bytes, other: Rank) -> None:
        try:
            other.pipe.send_bytes(said)
        except OSError:
            self._lost()

    def _number(self, pool: Pool) -> int:
        """The pool's; changes to it are noted from its first forward on."""
        result = self._numbers.get(pool)
        if result is None:
            result = self._numbers[pool] = next(self._count)
            self._note(pool)
            weakref.finalize(pool, self._gone.append, result).atexit = False
        return result

    def _note(self, pool: Pool) -> None:
        """From now on, note what happens between forwards."""
        pool.changes = []
        if pool.states is not None:
            pool.states.changes = []

    def _failed(self, error: RuntimeError) -> NoReturn:
        self._lost(error)

    def _lost(self, error: RuntimeError | None = None) -> NoReturn:
        """Say who ended, or that somebody does not answer."""
        until = monotonic() + LAST_WORDS
        while monotonic() < until:
            for other in self.others:
                how = other.ended(0.05)
                if how is not None:
                    self._fail(f"rank {other.rank} of {self.size} {how}", error)
        self._fail(f"another rank of {self.size} did not answer within {TIMEOUT.total_seconds():.0f} s", error)

    def _fail(self, reason: str, error: RuntimeError | None = None) -> NoReturn:
        self._stop(reason)
        raise RankError(self._broken) from error

    def _stop(self, reason: str) -> None:
        self._broken = f"{reason}: this engine has ended, load the model again"
        self._end()


def _end(others: list[Rank], folder: Path) -> None:
    """Close the connections, at which the others end; kill those that are within a forward."""
    pipes: list[Connection] = [other.pipe for other in others]
    for pipe in pipes:
        pipe.close()
    for other in others:
        if other.ended(LAST_WORDS) is None:
            other.process.kill()
            other.process.wait()
    shutil.rmtree(folder, ignore_errors=True)
