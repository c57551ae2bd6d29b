"""The processes that share a model's layers, as one of them sees them: all that they tell each other, and the layers of
which each has a part.

Every rank gets every rank's part and adds the parts up itself, number by number, in the order of the ranks, in float32.
So a row's sums depend on nothing but the row and how many ranks there are; a library's reduction has an order of its
own.
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
from forerun.core.batch import Batch, Span
from forerun.core.errors import RankError
from forerun.models.base import LoadRequest, Tiles
from forerun.models.formats.base import Linear
from forerun.models.layout import Embedding

TIMEOUT = timedelta(seconds=60)
"""How long the others may take to come to the same place of a forward."""


class Team:
    """``rank`` of ``size`` processes. What fails between them raises RankError."""

    leads = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        self._apart = False

    def connect(self, folder: Path, device: torch.device) -> None:
        """Meet the others in ``folder``; returns once all are there."""
        try:
            store = dist.FileStore(str(folder / "store"), self.size)
            self._group = _group(store, self.rank, self.size, device)
        except RuntimeError as error:
            self._failed(error)

    def shards(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``shard``, which has one shape and dtype on all of them, in their order."""
        if self._apart or not shard.numel():
            return [shard] * self.size
        mine = shard.contiguous()
        result = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._group.allgather([[_bytes(each) for each in result]], [_bytes(mine)]).wait()
        except RuntimeError as error:
            self._failed(error)
        return result

    def sum(self, shard: torch.Tensor) -> torch.Tensor:
        """All parts added up, in float32."""
        first, *rest = self.shards(shard)
        total = first.to(torch.float32, copy=True)
        for each in rest:
            total += each
        return total

    def join(self, shard: torch.Tensor) -> torch.Tensor:
        """All parts end to end along the last dimension."""
        return torch.cat(self.shards(shard), -1)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this rank run layers by itself, as if the others had the same parts: to see which calls agree in their
        bits, not for results."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def feeding(
        self, batch: Batch, attention: Attention, tiles: Tiles | None, *, invariant: bool
    ) -> AbstractContextManager[None]:
        """Around a forward, whose entries have been reserved: rank 0 tells the others."""
        return nullcontext()

    def calling(self, name: str, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Around another method of the model."""
        return nullcontext()

    def _failed(self, error: RuntimeError) -> NoReturn:
        raise RankError(f"rank {self.rank} has lost the others") from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every library moves bytes; not every one moves every kind of number."""
    return tensor.view(-1).view(torch.uint8)


def _group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """A group of this model's alone: a process may have several models."""
    library: Any = dist
    if device.type == "cuda":
        torch.cuda.set_device(device)
        wishes = library.ProcessGroupNCCL.Options()
        wishes._timeout = TIMEOUT
        return library.ProcessGroupNCCL(store, rank, size, wishes)
    options = library.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [library.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # nobody else is to connect
    return library.ProcessGroupGloo(store, rank, size, options)


UP, READY, FAILED = "up", "ready", "failed"
"""What a rank answers while it starts; FAILED with a reason."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What to load, and where to meet."""

    rank: int
    size: int
    folder: Path
    wanted: LoadRequest


@dataclass(frozen=True, slots=True)
class StatesFeed:
    """What layers keep of a forward's sequences (``cache/states.py``): how much room there is, where each one is, how
    many entries it covers, what is to be stored, and what happened since the last forward."""

    count: int
    kept: int
    depth: int
    slots: dict[int, int]
    lengths: dict[int, int]
    marks: dict[int, dict[int, int]]
    changes: list[tuple[str, Any]]

    @classmethod
    def of(cls, states: States, keys: Sequence[int]) -> StatesFeed:
        slots, lengths = ({key: held[key] for key in keys} for held in (states.slots, states.lengths))
        marks = {key: dict(states.to_store[key]) for key in keys if key in states.to_store}
        return cls(states.count, states.max_kept, states.depth, slots, lengths, marks, states.changes or [])


@dataclass(frozen=True, slots=True)
class Feed:
    """One forward: the rows, where their entries go in the cache ``pool``, and what happened to that since its last
    forward; ``gone`` are caches that are no more."""

    pool: int
    pages: int
    page_size: int
    changes: list[Change]
    tables: dict[int, list[int]]
    gone: list[int]
    spans: list[Span]
    hidden: tuple[int, ...]
    layers: tuple[int, ...] | None
    embeds: torch.Tensor | None
    embed_rows: list[int] | None
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
    """A linear layer whose inputs are split: each rank's part of the sums, in the rows' dtype, added up in float32."""

    def __init__(self, linear: Linear, team: Team) -> None:
        self.linear, self.team = linear, team
        self.kind, self.nbytes, self.exact = linear.kind, linear.nbytes, linear.exact

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        total = self.team.sum(self.linear(x))
        return (total if add is None else total.add_(add)).to(x.dtype)


class Gathered:
    """An output layer whose outputs are split, ``outputs`` of them in all."""

    def __init__(self, linear: Linear, team: Team, outputs: int) -> None:
        self.linear, self.team, self.outputs = linear, team, outputs
        self.kind, self.nbytes, self.exact = linear.kind, linear.nbytes, linear.exact

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        result = self.team.join(self.linear(x))[:, : self.outputs]
        return result if add is None else result + add


class SplitEmbedding(Embedding):
    """An embedding of ``count`` tokens of which each rank has as many, one after the other's."""

    def __init__(self, embedding: Embedding, team: Team, count: int) -> None:
        super().__init__(embedding.rows, embedding.dtype, shared=embedding.shared, scale=embedding.scale)
        self.team, self.each, self.count = team, self.count, count

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.flatten()
        mine = super().__call__((flat - self.team.rank * self.each).clamp_(0, self.each - 1))
        result = torch.stack(self.team.shards(mine))[flat // self.each, torch.arange(len(flat), device=flat.device)]
        return result.view(*ids.shape, self.width)

    def fields(self) -> None:
        return None


class OverAll:
    """A norm over the heads of all ranks together; each gives its own rows' numbers and takes them back."""

    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor], team: Team) -> None:
        self.norm, self.team = norm, team

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.norm(self.team.join(x))
        return whole.chunk(self.team.size, -1)[self.team.rank].contiguous()
