"""A process of ranks 1 and up: it loads its shard of a model and runs what rank 0 sends, until rank 0 hangs up."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.cache.states import States
from forerun.core.errors import ForerunError, RankError
from forerun.models.files.open import Checkpoint
from forerun.models.load import load_shard, of_rank
from forerun.models.ranks.team import FAILED, READY, UP, Feed, Hello, StatesFeed, Team
from forerun.models.run.base import attention_over
from forerun.models.run.native import NativeModel


class Mirror(Pool):
    """This rank's KV cache, whose pages rank 0 allocates."""

    def try_reserve(self, key: int, length: int) -> bool:
        return True


class RankWorker:
    """Runs forwards over copies of rank 0's caches."""

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self.caches: dict[int, Attention] = {}

    def feed(self, message: Feed) -> None:
        for number in message.gone:
            self.caches.pop(number, None)
        if torch.get_num_threads() != message.threads:
            torch.set_num_threads(message.threads)
        self.model.tiles, self.model.invariant = message.tiles, message.invariant
        attention, info = self.caches.get(message.pool), self.model.info
        if attention is None or attention.pool.num_pages != message.num_pages:  # it was resized while it was empty
            pool = Mirror(info.kv_shapes, message.num_pages, message.page_size, info.dtype, info.device)
            attention = self.caches[message.pool] = attention_over(self.model, pool)
        for change in message.changes:
            attention.pool.redo(*change)
        attention.pool.block_tables, attention.pool.lengths = message.block_tables, {}
        if message.states is not None:
            self._update_states(attention.pool, message.states)
        self.model.feed(replace(message.batch, device=self.model.device), attention)

    def _update_states(self, pool: Pool, new: StatesFeed) -> None:
        states, info, sizes = pool.states, self.model.info, (new.count, new.max_kept, new.depth)
        if states is None or (states.count, states.max_kept, states.depth) != sizes:
            states = States(info.state_shapes, new.count, new.depth, info.dtype, info.device, new.max_kept)
            pool.states = states
        for change in new.changes:
            states.redo(*change)
        states.slots, states.lengths, states.to_store = new.slots, new.lengths, new.to_store


def main() -> None:
    """The process. Its argument is the file descriptor of its connection to rank 0."""
    pipe = Connection(int(sys.argv[1]))
    try:
        _serve(pipe)
    except (EOFError, ConnectionError, RankError):  # rank 0 has ended, or reports what failed
        pipe.close()
    sys.stderr.flush()
    os._exit(0)  # an orderly exit takes seconds, for which rank 0 would wait


def _serve(pipe: Connection) -> None:
    hello: Hello = pickle.loads(pipe.recv_bytes())
    _send(pipe, UP)
    team = Team(hello.rank, hello.size)
    try:
        requested = of_rank(hello.requested, hello.rank)
        team.connect(hello.folder, requested.device)
        model = load_shard(requested, Checkpoint.at(requested.folder), team)
    except ForerunError as error:
        _send(pipe, FAILED, str(error))
        return
    _send(pipe, READY)
    worker = RankWorker(model)
    with torch.inference_mode():
        while True:
            message = pickle.loads(pipe.recv_bytes())
            if isinstance(message, Feed):
                worker.feed(message)
            else:
                getattr(model, message.name)(message.rows.to(model.device))


def _send(pipe: Connection, *answer: Any) -> None:
    pipe.send_bytes(pickle.dumps(answer))
