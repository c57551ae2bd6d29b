"""Other implementations on the same checkpoint, prompts, token counts, threads and dtype."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.bench.config import PEERS
from forerun.bench.contenders import Contender
from forerun.bench.peers.llama_cpp import llama_cpp_contender
from forerun.bench.peers.transformers import transformers_contenders
from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM


def peer_contenders(names: Seq[str], llm: LLM, draft: str | None) -> list[Contender]:
    """The peers' rows. ``draft`` is the assistant's checkpoint. Raises ConfigError for an unknown peer."""
    found: list[Contender] = []
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"unknown peer {name!r}: choose one of {', '.join(PEERS)}")
        found += transformers_contenders(llm, draft) if name == "transformers" else [llama_cpp_contender(llm)]
    return found
