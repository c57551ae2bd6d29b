"""What the server needs of whoever answers: the engine in this process, or replicas of it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from forerun.engine.metrics import Snapshot
from forerun.engine.stream import Delta, Stream
from forerun.sampling.params import BeamSearchParams, SamplingParams, StructuredOutputsParams


class Answering(Protocol):
    """``AsyncEngine``'s side that the server sees; its members' documentation is there."""

    tokenizer: Any
    on_deltas: Callable[[Stream, Sequence[Delta]], None] | None
    on_forget: Callable[[Stream], None] | None
    draining: bool

    @property
    def ready(self) -> bool: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def drafters(self) -> Mapping[str, int]: ...

    @property
    def identity(self) -> bool: ...

    @property
    def reasoning_parser(self) -> str | None: ...

    def check_length(self, prompt: Sequence[int]) -> None: ...

    def prompt_tokens_computed(self, prompt: Sequence[int]) -> int: ...

    def compile(self, requested: StructuredOutputsParams) -> None: ...

    def snapshot(self) -> Snapshot: ...

    async def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        timeout: float | None = None,
        session: str | None = None,
        **choices: Any,
    ) -> Stream: ...

    async def drain(self, seconds: float) -> None: ...

    def close(self) -> None: ...
