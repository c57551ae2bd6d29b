"""Rank 0: starts the other ranks, sends them every forward, and reports which one failed."""

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
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch

from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.core.batch import Batch
from forerun.core.errors import RankError
from forerun.models.ranks.team import FAILED, READY, TIMEOUT, UP, Feed, Hello, RankCall, StatesFeed, Team
from forerun.models.run.base import LoadRequest, Tiles

START = 600.0
"""Seconds that the others have to start, and again to load their shards."""
LAST_WORDS = 2.0
"""Seconds to wait until a process ends that has closed its connection."""
_kept: list[object] = []
COMMAND = "from forerun.models.ranks.worker import main; main()"


class Rank:
    """Another rank's process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pipe, other_end = Pipe()
        package = str(Path(__file__).parents[3])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with other_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, str(other_end.fileno())],
                pass_fds=[other_end.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt of the terminal is rank 0's to answer
            )

    def ended(self, seconds: float) -> str | None:
        """How the process ended; None if it is still running after this many seconds."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


class Leader(Team):
    """Rank 0 of ``size``. The others load their shards of ``requested``; they end with this object or process."""

    leads = True

    def __init__(self, size: int, requested: LoadRequest, device: torch.device) -> None:
        super().__init__(0, size)
        self._broken: str | None = None
        self._numbers: weakref.WeakKeyDictionary[Pool, int] = weakref.WeakKeyDictionary()
        self._gone: list[int] = []
        self._count = itertools.count()
        folder = Path(tempfile.mkdtemp(prefix="forerun-ranks-"))
        self.others: list[Rank] = []
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end, self.others, folder, self._process)
        self.others.extend(Rank(rank) for rank in range(1, size))
        for other in self.others:
            self._send(pickle.dumps(Hello(other.rank, size, folder, requested)), other)
        self._await(UP)
        self.connect(folder, device)

    def __del__(self) -> None:
        if self._process != os.getpid():
            _kept.append(self._group)  # a child process would wait for its threads, which stayed with the parent

    def ready(self) -> None:
        """Wait until the others have loaded their shards. Raises RankError."""
        self._await(READY)

    def _await(self, word: str) -> None:
        until = monotonic() + START
        for other in self.others:
            try:
                if not other.pipe.poll(max(0.0, until - monotonic())):
                    self._fail(f"rank {other.rank} of {self.size} did not come up within {START:.0f} s")
                answer, *reason = pickle.loads(other.pipe.recv_bytes())
            except (EOFError, OSError):
                self._failed()
            if answer != word:
                self._fail(f"rank {other.rank} of {self.size}: {reason[0] if answer == FAILED else answer}")

    @contextmanager
    def feeding(self, batch: Batch, attention: Attention, tiles: Tiles | None, *, invariant: bool) -> Iterator[None]:
        if self._apart:
            yield
            return
        pool, gone, number = attention.pool, list(self._gone), self._number(attention.pool)
        states = None if pool.states is None else StatesFeed.of(pool.states, [span.key for span in batch.spans])
        message = Feed(
            number, pool.num_pages, pool.page_size, pool.changes or [],
            {span.key: pool.block_tables[span.key] for span in batch.spans}, gone, replace(batch), tiles, invariant,
            torch.get_num_threads(), states,
        )  # fmt: skip
        with self._running(message):
            self._record_changes(pool)
            del self._gone[: len(gone)]
            yield

    @contextmanager
    def calling(self, name: str, rows: torch.Tensor) -> Iterator[None]:
        with self._running(RankCall(name, rows)):
            yield

    @contextmanager
    def _running(self, message: Feed | RankCall) -> Iterator[None]:
        """Sends a message to the others; a failure of this rank while they run it ends them."""
        if self._process != os.getpid():
            raise RankError("the other ranks belong to the process that this one was forked from: load the model again")
        if self._broken is not None:
            raise RankError(self._broken)
        data = pickle.dumps(message)
        for other in self.others:
            self._send(data, other)
        try:
            yield
        except RankError:
            raise
        except BaseException as error:  # the others are somewhere within the forward
            self._stop(f"rank 0 of {self.size} failed in a forward ({type(error).__name__})")
            raise

    def _send(self, data: bytes, other: Rank) -> None:
        try:
            other.pipe.send_bytes(data)
        except OSError:
            self._failed()

    def _number(self, pool: Pool) -> int:
        """The pool's number. Its changes are recorded from its first forward on."""
        result = self._numbers.get(pool)
        if result is None:
            result = self._numbers[pool] = next(self._count)
            self._record_changes(pool)
            weakref.finalize(pool, self._gone.append, result).atexit = False
        return result

    def _record_changes(self, pool: Pool) -> None:
        """Start a new list of changes, for the next forward."""
        pool.changes = []
        if pool.states is not None:
            pool.states.changes = []

    def _failed(self, error: RuntimeError | None = None) -> NoReturn:
        """Raise RankError that names the rank which ended, or says that one does not answer."""
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


def _end(others: list[Rank], folder: Path, process: int) -> None:
    """Close the connections, so that others end; kill those inside a forward. In a child of ``process`` they stay."""
    for other in others:
        other.pipe.close()
    if process != os.getpid():
        return
    for other in others:
        if other.ended(LAST_WORDS) is None:
            other.process.kill()
            other.process.wait()
    shutil.rmtree(folder, ignore_errors=True)
