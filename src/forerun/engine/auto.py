"""``speculative_config="auto"``: chooses a drafter for a model, and keeps what the length policy learns about it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forerun.core.folders import Record
from forerun.core.tiles import environment
from forerun.engine import tuned
from forerun.engine.drafter_files import brings_mtp
from forerun.engine.engine import Engine
from forerun.models.inventory import known_draft
from forerun.speculate.length.adaptive import Adaptive
from forerun.speculate.names import KEYS, rules

AUTO = "auto"
LARGE = 64 << 20
"""Bytes of the smallest target for which this is kept: for smaller ones the policy learns in a moment."""


def choose(
    model: str, given: Mapping[str, Any] | None = None, lora: Sequence[str] | str | None = None
) -> dict[str, Any]:
    """Completes a ``speculative_config`` that names no drafter. In order of preference:

    - ``ngram``, if ``given`` has keys of it or of ``prompt_lookup``;
    - the bundled draft model, for the bundled target;
    - what ``forerun tune`` found for a model that Forerun knows;
    - a known draft of this model on disk;
    - the model's own layer for multi-token prediction;
    - ``suffix``, which drafts from the text itself.

    The length policy is ``adaptive`` where that changes no token. ``lora``: the target's adapters.
    """
    config = dict(given or {})
    identity = rules[config.get("accept", "coupled")].identity
    if identity:
        config.setdefault("length", "adaptive")
    if {*KEYS["ngram"].split(), *KEYS["prompt_lookup"].split()} & set(config):
        return {"method": "ngram", **config}
    if model.startswith("forerun:"):
        return {"method": "draft_model", **config}
    if identity and not lora and tuned.has_bundled(model):
        return {**tuned.load(True, model), **config}
    draft = known_draft(model)
    if draft is not None:
        return {"method": "draft_model", "model": str(draft), **config}
    suffix_only = set(config) & {*KEYS["suffix"].split()} - {*KEYS["mtp"].split()}
    return {"method": "mtp" if identity and not lora and not suffix_only and brings_mtp(model) else "suffix", **config}


def remember(engine: Engine) -> None:
    """Restores what the length policy learnt in an earlier engine of this kind on this machine, and saves it when the
    engine is closed or the process ends."""
    policy, info = engine.policy, engine.model.info
    if type(policy) is not Adaptive or info.weight_bytes < LARGE:
        return
    drafts = [(model.info.path, model.info.weight_bytes) for model in engine.router.models()]
    key = repr((info.architecture, info.path, info.weight_bytes, drafts, engine.speculative, torch.get_num_threads()))
    record = Record("lengths", key, *environment())
    policy.restore(record.read())
    engine.on_close.append(weakref.finalize(engine, _save, policy, record))


def _save(policy: Adaptive, record: Record) -> None:
    if (state := policy.state()) is not None:
        record.write(state)
