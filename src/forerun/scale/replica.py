"""One engine, as a replica."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from forerun import __version__
from forerun.core.errors import ConfigError, ForerunError
from forerun.engine.answering import ClosedError, EngineFacts
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.llm import LLM
from forerun.engine.metrics import Snapshot
from forerun.models.open import fingerprint, resolve
from forerun.sampling.params import SamplingParams
from forerun.scale.messages import Begun, Facts, Message, News, Refused, Request

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
