"""One engine as a replica, and the messages between it and the front, which answers HTTP: token ids, never text."""

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
from forerun.engine.metrics import RequestMetrics
from forerun.models.files.open import Checkpoint
from forerun.sampling.params import Params, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Facts(EngineFacts):
    """Facts of a replica. Replicas with the same ``weights`` give the same tokens."""

    checkpoint: str
    """The version of Forerun and a fingerprint of the checkpoint."""
    weights: str
    """``checkpoint``, followed by a fingerprint of all else that tokens depend on."""
    tokenizer: str


@dataclass(frozen=True)
class Request:
    """One answer to one prompt, which continues the tokens ``committed``, or a beam search."""

    prompt: Sequence[int]
    params: Params
    choices: Mapping[str, Any] = field(default_factory=dict)
    committed: tuple[int, ...] = ()
    session: str | None = None
    weights: str = ""
    """A prefix of the ``weights`` of the replicas that may answer: the checkpoint, and all once there are tokens."""
    rejections: int = 0
    """Replicas that rejected it because their weights are others."""


@dataclass(frozen=True)
class Started:
    """The replica has accepted the request."""

    weights: str


@dataclass(frozen=True)
class Progress:
    """Deltas, without text. The last have metrics, the first the prompt's log-probabilities if those were requested."""

    deltas: list[Delta]
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class Rejected:
    """The request cannot be run, or has failed for a reason of its own."""

    error: Exception


Message = Started | Progress | Rejected


LINGER = 1.0
"""Seconds without an answer in progress after which a front's subscription ends; it renews it for the next answer."""

Entry = tuple[int, Message | None]
"""The front's number of an answer, and a message of it; None: it has ended."""


@dataclass(frozen=True)
class Subscription:
    """A front's to the messages of a replica, both by their names."""

    replica: str
    front: str


class Outbox:
    """The messages of a replica's answers to one front that were not sent yet.

    They go to the front in one stream: a message of Ray's for each round of each answer would cost too much.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._answers = 0
        self.listeners = 0
        self._changed = asyncio.Event()

    @property
    def used(self) -> bool:
        """Whether answers are in progress, or the front listens."""
        return bool(self._answers or self.listeners)

    def begin(self) -> None:
        self._answers += 1
        self._changed.set()

    def put(self, number: int, message: Message | None) -> None:
        self._entries.append((number, message))
        self._changed.set()

    def end(self) -> None:
        self._answers -= 1
        self._changed.set()

    async def take(self) -> list[Entry]:
        """Returns the messages since the last call; none if there was no answer for ``LINGER`` seconds."""
        while not self._entries:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), None if self._answers else LINGER)
            except TimeoutError:
                if not self._answers:
                    break
        entries, self._entries = self._entries, []
        return entries


DECISIVE = ("dtype", "device", "invariant", "model_path", "weights", "quantization", "tokenizer", "logprobs_mode")
"""The engine's options on which tokens depend."""

GATHER = 0.025
"""Seconds for which tokens are gathered: a message of Ray's costs as much as a short round."""


class OtherModelError(ForerunError):
    """A replica has other weights or another version than an answer needs."""


class Replica:
    """Answers requests in token ids. ``engine`` are ``LLM``'s options, ``speculative`` its ``speculative_config``."""

    def __init__(self, engine: Mapping[str, Any], speculative: Any = None, *, max_queue: int = 1024) -> None:
        llm = LLM(**engine, speculative_config=speculative)
        self.engine = AsyncEngine(llm.engine, max_queue=max_queue, max_delay=GATHER)
        self.engine.tokenizer = None  # text is made in front
        self.facts = facts_of(llm)

    async def answer(self, request: Request) -> AsyncGenerator[Message]:
        """Yields the messages of one request. Raises ClosedError if this replica ends before the request does."""
        if not self.facts.weights.startswith(request.weights):
            wrong = f"replicas have other weights ({self.facts.weights}) than this answer needs ({request.weights})"
            yield Rejected(OtherModelError(f"{wrong}: deploy one version and one checkpoint"))
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
            yield Rejected(error)
            return
        job = stream.jobs[0]
        try:
            yield Started(self.facts.weights)
            with_prompt = sampled is not None and sampled.prompt_logprobs is not None and not request.committed
            while deltas := await stream.read():
                ended = deltas[-1].finish is not None
                yield Progress(deltas, job.metrics if ended else None, job.prompt_logprobs if with_prompt else None)
                with_prompt = False
        finally:
            stream.abort()


def facts_of(llm: LLM) -> Facts:
    config = llm.config
    checkpoint = f"{__version__}-{Checkpoint.open(config.model).fingerprint()}"
    return Facts(
        **vars(EngineFacts.of(llm.engine)),
        checkpoint=checkpoint,
        weights=f"{checkpoint}-{numerics_of(llm)}",
        tokenizer=str(config.tokenizer or config.model),
    )


def numerics_of(llm: LLM) -> str:
    """A fingerprint that engines on one checkpoint share only if the same seed gives the same tokens in both."""
    config = llm.config
    options = {item.name: str(getattr(config, item.name)) for item in fields(config) if item.name in DECISIVE}
    options |= {"rule": type(llm.engine.rule).__name__, "processor": torch.backends.cpu.get_cpu_capability()}
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]


def check_same(checkpoints: Iterable[str]) -> None:
    """Raises ConfigError unless all replicas have one checkpoint and one version."""
    count = Counter(checkpoints)
    if len(count) > 1:
        reported = ", ".join(f"{number} of {name}" for name, number in sorted(count.items()))
        raise ConfigError(f"the replicas differ in version or checkpoint ({reported}): give every machine the same")
