"""Tensor parallelism as one rank sees it: collective operations, messages, and the layers that are split.

For a sum, every rank gathers all ranks' parts and adds them up itself, in the order of the ranks, in float32. So a
row's bits depend on the row and the number of ranks alone; a library's reduction has an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from forerun.attention.base import Attention
from forerun.cache.pool import Change
from forerun.cache.states import States
from forerun.core.batch import Batch
from forerun.core.errors import RankError
from forerun.models.formats.base import Linear
from forerun.models.run.base import LoadRequest, Tiles
from forerun.models.weights.layout import Embedding

TIMEOUT = timedelta(seconds=60)
"""How long the others may take to reach the same operation."""


class Team:
    """Rank ``rank`` of ``size`` processes. Failures between them raise RankError."""

    leads = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        self._apart = False

    def connect(self, folder: Path, device: torch.device) -> None:
        """Meet the others in ``folder``; returns once all are there."""
        try:
            self._group = _group(dist.FileStore(str(folder / "store"), self.size), self.rank, self.size, device)
        except RuntimeError as error:
            self._failed(error)

    def shards(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``shard`` in the order of ranks. All have the same shape and dtype."""
        if self._apart or not shard.numel():
            return [shard] * self.size
        shard = shard.contiguous()
        result = [torch.empty_like(shard) for _ in range(self.size)]
        try:
            self._group.allgather([[_bytes(each) for each in result]], [_bytes(shard)]).wait()
        except RuntimeError as error:
            self._failed(error)
        return result

    def sum(self, shard: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' shards, in float32."""
        first, *rest = self.shards(shard)
        total = first.to(torch.float32, copy=True)
        for each in rest:
            total += each
        return total

    def join(self, shard: torch.Tensor) -> torch.Tensor:
        """All ranks' shards, joined along the last dimension."""
        return torch.cat(self.shards(shard), -1)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run layers on this rank alone, as if the others had the same shards. Results are meaningless, but show which
        calls agree in their bits."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def feeding(
        self, batch: Batch, attention: Attention, tiles: Tiles | None, *, invariant: bool
    ) -> AbstractContextManager[None]:
        """Wraps a forward whose cache entries are reserved: rank 0 sends it to the others."""
        return nullcontext()

    def calling(self, name: str, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Wraps another method of the model in the same way."""
        return nullcontext()

    def _failed(self, error: RuntimeError) -> NoReturn:
        raise RankError(f"rank {self.rank} has lost the others") from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every library moves bytes; not every one moves every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """A process group for this model: a process may have several models."""
    library: Any = dist
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = library.ProcessGroupNCCL.Options()
        nccl._timeout = TIMEOUT
        return library.ProcessGroupNCCL(store, rank, size, nccl)
    options = library.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [library.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # nobody else is to connect
    return library.ProcessGroupGloo(store, rank, size, options)


UP, READY, FAILED = "up", "ready", "failed"
"""A rank's answers while it starts; FAILED comes with a reason."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message to a rank: what to load, and the folder in which ranks meet."""

    rank: int
    size: int
    folder: Path
    requested: LoadRequest


@dataclass(frozen=True, slots=True)
class StatesFeed:
    """The states of a forward's sequences (``cache/states.py``), and their changes since the last forward."""

    count: int
    max_kept: int
    depth: int
    slots: dict[int, int]
    lengths: dict[int, int]
    to_store: dict[int, dict[int, int]]
    changes: list[Change]

    @classmethod
    def of(cls, states: States, keys: Sequence[int]) -> StatesFeed:
        slots, lengths = ({key: values[key] for key in keys} for values in (states.slots, states.lengths))
        to_store = {key: dict(states.to_store[key]) for key in keys if key in states.to_store}
        return cls(states.count, states.max_kept, states.depth, slots, lengths, to_store, states.changes or [])


@dataclass(frozen=True, slots=True)
class Feed:
    """One forward, the cache ``pool`` that it uses with the changes since its last forward, and pools that are gone."""

    pool: int
    num_pages: int
    page_size: int
    changes: list[Change]
    block_tables: dict[int, list[int]]
    gone: list[int]
    batch: Batch
    tiles: Tiles | None
    invariant: bool
    threads: int
    states: StatesFeed | None


@dataclass(frozen=True, slots=True)
class RankCall:
    """Another method of the model, ``embed`` or ``lm_head``."""

    name: str
    rows: torch.Tensor


class Summed:
    """A linear layer whose inputs are split. The ranks' outputs, in the rows' dtype, are added up in float32."""

    def __init__(self, linear: Linear, team: Team) -> None:
        self.linear, self.team = linear, team
        self.kind, self.nbytes, self.exact = linear.kind, linear.nbytes, linear.exact

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        total = self.team.sum(self.linear(x))
        return (total if add is None else total.add_(add)).to(x.dtype)


class Gathered:
    """An output layer whose ``outputs`` are split."""

    def __init__(self, linear: Linear, team: Team, outputs: int) -> None:
        self.linear, self.team, self.outputs = linear, team, outputs
        self.kind, self.nbytes, self.exact = linear.kind, linear.nbytes, linear.exact

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        result = self.team.join(self.linear(x))[:, : self.outputs]
        return result if add is None else result + add


class SplitEmbedding(Embedding):
    """An embedding of ``count`` tokens, of which each rank has equally many in the order of ranks."""

    def __init__(self, embedding: Embedding, team: Team, count: int) -> None:
        super().__init__(embedding.rows, embedding.dtype, shared=embedding.shared, scale=embedding.scale)
        self.team, self.each, self.count = team, self.count, count

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.flatten()
        rows = super().__call__((flat - self.team.rank * self.each).clamp_(0, self.each - 1))
        result = torch.stack(self.team.shards(rows))[flat // self.each, torch.arange(len(flat), device=flat.device)]
        return result.view(*ids.shape, self.width)

    def fields(self) -> None:
        return None


class OverAll:
    """A norm over the heads of all ranks together."""

    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor], team: Team) -> None:
        self.norm, self.team = norm, team

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.team.join(x)).chunk(self.team.size, -1)[self.team.rank].contiguous()
