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
from forerun.models.files.inventory import known_draft
from forerun.speculate.length.adaptive import Adaptive
from forerun.speculate.names import KEYS, drafters, rules

AUTO = "auto"
BEHIND = ("draft_model", "eagle", "mtp")
"""Methods that are asked where a look-up found nothing that pays."""
LOOKUP = 15
"""Most tokens that are looked up before another drafter is asked."""
LARGE = 16 << 20
"""Bytes of the smallest target for which this is kept. A process that finds no prices measures them, which takes as
long as 150 plain rounds: longer than an answer."""


def choose(
    model: str, given: Mapping[str, Any] | None = None, lora: Sequence[str] | str | None = None
) -> dict[str, Any]:
    """Completes a ``speculative_config`` that names no drafter. In order of preference:

    - ``ngram``, if ``given`` has keys of it or of ``prompt_lookup``;
    - the bundled draft model, for the bundled target;
    - the head that comes with Forerun for this model;
    - a known draft of this model on disk;
    - the model's own layer for multi-token prediction;
    - ``suffix``, which drafts from the text itself.

    Before a draft, head or layer a look-up is asked (``_after_lookup``), except for the bundled target. The length
    policy is ``adaptive`` where that changes no token. ``lora``: the target's adapters.
    """
    config = dict(given or {})
    identity = rules[config.get("accept", "coupled")].identity
    if identity:
        config.setdefault("length", "adaptive")
    if {*KEYS["ngram"].split(), *KEYS["prompt_lookup"].split()} & set(config):
        return {"method": "ngram", **config}
    known = known_drafter(model, heads=identity and not lora)
    suffix_only = set(config) & {*KEYS["suffix"].split()} - {*KEYS["mtp"].split()}
    if known is None or (known["method"] == "mtp" and suffix_only):
        return {"method": "suffix", **config}
    if model.startswith("forerun:"):
        return {**known, **config}
    return _after_lookup({**known, **config}, given or {})


def known_drafter(model: str, *, heads: bool = True) -> dict[str, Any] | None:
    """The ``speculative_config`` of the drafter that is bundled or known for a model, or that is a layer of it.

    ``heads``: whether a drafter may be one that reads the target's hidden states.
    """
    if model.startswith("forerun:"):
        return {"method": "draft_model"}
    if heads and tuned.bundled(model):
        return tuned.load(True, model)
    draft = known_draft(model)
    if draft is not None:
        return {"method": "draft_model", "model": str(draft)}
    return {"method": "mtp"} if heads and brings_mtp(model) else None


def _after_lookup(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter of ``config`` behind a look-up, where the length policy chooses between them in each round.

    As it is, if the user's own options (``given``) are for this drafter alone.
    """
    shared = {key: config[key] for key in ("accept", "length") if key in config}
    if config.get("length") != "adaptive" or config["method"] not in BEHIND or set(given) - set(shared):
        return dict(config)
    inner = {key: value for key, value in config.items() if key not in shared}
    inner = drafters[inner["method"]].config_class.with_defaults(inner)
    inner.pop("length", None)
    return {"method": "cascade", "drafters": [{"method": "suffix", "num_speculative_tokens": LOOKUP}, inner], **shared}


def remember(engine: Engine) -> None:
    """Restores what the length policy learnt in an earlier engine of this kind here; saves it at close or exit."""
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
