"""``speculative_config="auto"``: who drafts for a model where nobody says, and what was learnt about it before."""

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
"""Bytes of a target for which what was learnt is kept: a smaller one is learnt about in a moment."""


def choose(
    model: str, given: Mapping[str, Any] | None = None, lora: Sequence[str] | str | None = None
) -> dict[str, Any]:
    """The ``speculative_config`` for ``model`` with such adapters, where ``given`` says the rest but no drafter: the
    bundled draft model for the bundled target; what comes with Forerun for a model (``tuned``); a known draft of this
    model that is on disk; the layer for multi-token prediction in its own files; else ``suffix``, which drafts from the
    text itself. Drafts go as far as they pay (``adaptive``) where that changes no token."""
    rest = dict(given or {})
    same = rules[rest.get("accept", "coupled")].identity
    if same:
        rest.setdefault("length", "adaptive")
    lookup = {*KEYS["ngram"].split(), *KEYS["prompt_lookup"].split()} & set(rest)
    if lookup:
        return {"method": "ngram", **rest}
    if model.startswith("forerun:"):
        return {"method": "draft_model", **rest}
    if same and not lora and tuned.has_bundled(model):
        return {**tuned.load(True, model), **rest}
    draft = known_draft(model)
    if draft is not None:
        return {"method": "draft_model", "model": str(draft), **rest}
    suffix = set(rest) & {*KEYS["suffix"].split()} - {*KEYS["mtp"].split()}
    return {"method": "mtp" if same and not lora and not suffix and brings_mtp(model) else "suffix", **rest}


def remember(engine: Engine) -> None:
    """Let the engine's length policy begin with what an earlier engine of this kind learnt on this machine, and keep
    what it learns when the engine is closed or the process ends."""
    policy, info = engine.policy, engine.model.info
    if type(policy) is not Adaptive or info.weight_bytes < LARGE:
        return
    drafts = [(model.info.path, model.info.weight_bytes) for model in engine.router.models()]
    what = repr((info.architecture, info.path, info.weight_bytes, drafts, engine.speculative, torch.get_num_threads()))
    record = Record("lengths", what, *environment())
    policy.restore(record.read())
    engine.on_close.append(weakref.finalize(engine, _keep, policy, record))


def _keep(policy: Adaptive, record: Record) -> None:
    if (state := policy.state()) is not None:
        record.write(state)
