"""Other implementations on the same checkpoint, prompts, token counts, threads and dtype."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM
from forerun.measure.config import PEERS
from forerun.measure.rounds import Contender
from forerun_lab.peers.outside import outside_contenders
from forerun_lab.peers.transformers import transformers_contenders

TOGETHER = ("llama-cpp", "vllm")
"""Peers that decode several requests together; the others are left out of such rows."""


def peer_contenders(names: Sequence[str], llm: LLM, draft: str | None, sequences: int, context: int) -> list[Contender]:
    """The peers' rows: ``NAME``, or ``NAME=PYTHON`` for one installed for another interpreter; of ``llama-server`` a
    program and its options. ``draft`` is the assistant's checkpoint; ``sequences`` of at most ``context`` tokens are
    answered together. Raises ConfigError for an unknown or missing peer, and for a model with adapters."""
    if names and llm.model.info.lora:
        raise ConfigError("peers do not support adapters: remove lora or peers")
    result: list[Contender] = []
    for entry in names:
        name, _, runs = entry.partition("=")
        if name not in PEERS:
            raise ConfigError(f"unknown peer {name!r}: choose one of {', '.join(PEERS)}")
        if sequences > 1 and name not in TOGETHER:
            continue
        if name == "transformers":
            result += transformers_contenders(llm, draft)
        else:
            result += outside_contenders(name, runs or None, llm, sequences, context)
    return result
