"""The other ranks' process: it loads its part of a model and runs what rank 0 says, until that hangs up."""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.cache.states import States
from forerun.core.batch import Batch
from forerun.core.errors import ForerunError, RankError
from forerun.models.base import attention_over
from forerun.models.load import load_shard, of_rank
from forerun.models.native import NativeModel
from forerun.models.open import quick_config
from forerun.models.ranks.team import FAILED, READY, UP, Feed, Hello, StatesFeed, Team


class Mirror(Pool):
    """This rank's keys and values on pages that rank 0 has given out."""

    def try_reserve(self, key: int, length: int) -> bool:
        return True


class RankWorker:
    """Runs forwards over caches that are as rank 0's."""

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self.caches: dict[int, Attention] = {}

    def feed(self, message: Feed) -> None:
        for number in message.gone:
            self.caches.pop(number, None)
        if torch.get_num_threads() != message.threads:
            torch.set_num_threads(message.threads)
        self.model.tiles, self.model.invariant = message.tiles, message.invariant
        attention = self._attention(message)
        for change in message.changes:
            attention.pool.redo(change)
        attention.pool.block_tables, attention.pool.lengths = message.tables, {}
        if message.states is not None:
            self._hold(attention.pool, message.states)
        batch = Batch(
            message.spans, self.model.device, hidden=message.hidden, layers=message.layers, embeds=message.embeds,
            embed_rows=message.embed_rows,
        )  # fmt: skip
        self.model.feed(batch, attention)

    def _hold(self, pool: Pool, given: StatesFeed) -> None:
        states, sizes = pool.states, (given.count, given.kept)
        if states is None or (states.count, states.max_kept) != sizes or states.depth != given.depth:
            info = self.model.info
            states = States(info.state_shapes, given.count, given.depth, info.dtype, info.device, given.kept)
            pool.states = states
        for change in given.changes:
            states.redo(*change)
        states.slots, states.lengths, states.to_store = given.slots, given.lengths, given.marks

    def _attention(self, message: Feed) -> Attention:
        attention = self.caches.get(message.pool)
        if attention is None or attention.pool.num_pages != message.pages:  # it was resized while it was empty
            info = self.model.info
            pool = Mirror(info.kv_shapes, message.pages, message.page_size, info.dtype, info.device)
            attention = self.caches[message.pool] = attention_over(self.model, pool)
        return attention


def main() -> None:
    """The process; its argument is the file descriptor of the connection to rank 0."""
    pipe = Connection(int(sys.argv[1]))
    try:
        _serve(pipe)
    except (EOFError, ConnectionError, RankError):  # rank 0 has ended, or has somebody to blame
        pipe.close()
    sys.stderr.flush()
    os._exit(0)  # taking the interpreter down takes seconds, for which rank 0 would wait


def _serve(pipe: Connection) -> None:
    hello: Hello = pickle.loads(pipe.recv_bytes())
    _say(pipe, UP)
    team = Team(hello.rank, hello.size)
    try:
        requested = of_rank(hello.wanted, hello.rank)
        team.connect(hello.folder, requested.device)
        model = load_shard(requested, quick_config(requested.folder), team)
    except ForerunError as error:
        _say(pipe, FAILED, str(error))
        return
    _say(pipe, READY)
    follower = RankWorker(model)
    with torch.inference_mode():
        while True:
            message = pickle.loads(pipe.recv_bytes())
            if isinstance(message, Feed):
                follower.feed(message)
            else:
                getattr(model, message.name)(message.rows.to(model.device))


def _say(pipe: Connection, *words: Any) -> None:
    pipe.send_bytes(pickle.dumps(words))
