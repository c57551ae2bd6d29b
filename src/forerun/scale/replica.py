"""One engine, as a replica, and what goes between it and the server in front: token ids, never text."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from forerun import __version__
from forerun.core.errors import ConfigError, ForerunError
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.client import ClosedError, Delta, EngineFacts
from forerun.engine.jobs import TokenLogprobs
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics, Snapshot
from forerun.models.open import fingerprint, resolve
from forerun.sampling.params import Params, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Facts(EngineFacts):
    """What a replica is. Replicas with the same ``weights`` give the same tokens."""

    checkpoint: str
    """The version of Forerun and a fingerprint of the checkpoint: what ``weights`` begin with."""
    weights: str
    """The same, and a fingerprint of what else decides about tokens."""
    tokenizer: str


@dataclass(frozen=True)
class Request:
    """One answer to one prompt, from behind ``committed`` on, or a beam search, whose answers end together."""

    prompt: Sequence[int]
    params: Params
    choices: Mapping[str, Any] = field(default_factory=dict)
    committed: tuple[int, ...] = ()
    session: str | None = None
    weights: str = ""
    """What the answering replica's name of its weights begins with: the checkpoint's, and all of it once there is
    something to go on with."""
    misfits: int = 0
    """Replicas that have refused it for their weights."""


@dataclass(frozen=True)
class Begun:
    """The replica has taken the request."""

    weights: str


@dataclass(frozen=True)
class News:
    """Deltas, without text. The last ones come with metrics, the first ones with the prompt's probabilities if those
    were asked for."""

    deltas: list[Delta]
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class Refused:
    """The request cannot be run, or has failed for a reason of its own."""

    error: Exception


Message = Begun | News | Refused


LINGER = 1.0
"""Seconds without any answer after which a front need not listen any more: it asks again when there is one."""

KEPT = 60.0
"""Seconds after which what no front takes any more is let go of."""

Entry = tuple[int, Message | None]
"""Which answer, by the front's number, and what it says; None: nothing more."""


@dataclass(frozen=True)
class Line:
    """A front listens to a replica, both by their names."""

    replica: str
    front: str


class Outbox:
    """What a replica's answers to one front have said, and it has not been given yet."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._answers = 0
        self.listeners = 0
        self._changed = asyncio.Event()

    @property
    def used(self) -> bool:
        """Whether there are answers, or a front that listens."""
        return bool(self._answers or self.listeners)

    def begin(self) -> None:
        """There is an answer more."""
        self._answers += 1
        self._changed.set()

    def put(self, number: int, message: Message | None) -> None:
        self._entries.append((number, message))
        self._changed.set()

    def end(self) -> None:
        """There is an answer less."""
        self._answers -= 1
        self._changed.set()

    async def taken(self) -> list[Entry]:
        """All that was said since the last time; nothing once there has been no answer for ``LINGER`` seconds."""
        while not self._entries:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), None if self._answers else LINGER)
            except TimeoutError:
                if not self._answers:
                    break
        entries, self._entries = self._entries, []
        return entries


DECIDES = ("dtype", "device", "invariant", "model_path", "weights", "quantization", "tokenizer", "logprobs_mode")
"""Options on which tokens depend."""

GATHER = 0.025
"""Seconds: short rounds' tokens go to the front together, because a message of Ray's costs as much as such a round."""


class OtherModelError(ForerunError):
    """A replica has other weights, or another version, than an answer needs."""


class Replica:
    """Answers requests in token ids. ``engine`` are ``LLM``'s options, ``speculative`` its ``speculative_config``."""

    def __init__(self, engine: Mapping[str, Any], speculative: Any = None, *, max_queue: int = 1024) -> None:
        llm = LLM(**engine, speculative_config=speculative)
        self.engine = AsyncEngine(llm.engine, max_queue=max_queue, max_delay=GATHER)
        self.engine.tokenizer = None  # text is made in front
        self.facts = facts_of(llm)

    def snapshot(self) -> Snapshot:
        return self.engine.snapshot()

    async def answer(self, request: Request) -> AsyncGenerator[Message]:
        """The messages of one request. Raises ClosedError where this replica ends before the request does."""
        if not self.facts.weights.startswith(request.weights):
            wrong = f"replicas have other weights ({self.facts.weights}) than this answer needs ({request.weights})"
            yield Refused(OtherModelError(f"{wrong}: deploy one version and one checkpoint"))
            return
        params, choices = request.params, dict(request.choices)
        sampled = params if isinstance(params, SamplingParams) else None
        try:
            if sampled is not None and sampled.grammar is not None:
                await asyncio.to_thread(self.engine.compile, sampled.grammar)
            stream = await self.engine.submit(request.prompt, params, committed=request.committed, **choices)
        except ClosedError:
            raise
        except ForerunError as error:
            yield Refused(error)
            return
        job = stream.jobs[0]
        try:
            yield Begun(self.facts.weights)
            asked = sampled is not None and sampled.prompt_logprobs is not None and not request.committed
            while deltas := await stream.read():
                ended = deltas[-1].finish is not None
                yield News(deltas, job.metrics if ended else None, job.prompt_logprobs if asked else None)
                asked = False
        finally:
            stream.abort()

    def close(self) -> None:
        self.engine.close()


def facts_of(llm: LLM) -> Facts:
    config = llm.config
    checkpoint = f"{__version__}-{fingerprint(resolve(config.model))}"
    return Facts(
        **vars(EngineFacts.of(llm.engine)),
        checkpoint=checkpoint,
        weights=f"{checkpoint}-{numerics_of(llm)}",
        tokenizer=str(config.tokenizer or config.model),
    )


def numerics_of(llm: LLM) -> str:
    """A name that two engines on one checkpoint share only if the same seed gives the same tokens in both: of what is
    made of it, and of the processor's kind."""
    config = llm.config
    decides = {item.name: str(getattr(config, item.name)) for item in fields(config) if item.name in DECIDES}
    decides |= {"rule": type(llm.engine.rule).__name__, "processor": torch.backends.cpu.get_cpu_capability()}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]


def alike(checkpoints: Iterable[str]) -> None:
    """Raise ConfigError unless all replicas have one checkpoint and one version."""
    count = Counter(checkpoints)
    if len(count) > 1:
        reported = ", ".join(f"{number} of {name}" for name, number in sorted(count.items()))
        raise ConfigError(f"the replicas differ in version or checkpoint ({reported}): give every machine the same")
