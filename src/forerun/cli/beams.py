"""``forerun generate --beams``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ConfigError
from forerun.sampling.beams import BeamSearchParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM, RequestOutput

TAKEN = ("max_tokens", "ignore_eos", "include_stop_str_in_output", "temperature")
"""Sampling options that beams have, too."""
EARLY: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
PAGE_SIZE = 16


def search_params(
    beams: int, length_penalty: float | None, early_stopping: str | None, sampling: Mapping[str, Any]
) -> BeamSearchParams:
    """What the flags ask for; ``n`` is how many beams are shown. Raises ConfigError for options of sampling."""
    given = dict(sampling)
    shown = given.pop("n", None)
    given.pop("seed", None)
    for name in given:
        if name not in TAKEN:
            raise ConfigError(f"beams are not sampled: leave --{name.replace('_', '-')} out, or --beams")
    if early_stopping is not None and early_stopping not in EARLY:
        raise ConfigError(f"--early-stopping is true, false or never, not {early_stopping!r}")
    return BeamSearchParams(
        beams,
        given.pop("max_tokens", 128),
        length_penalty=1.0 if length_penalty is None else length_penalty,
        early_stopping=EARLY[early_stopping or "false"],
        num_return_sequences=shown,
        **given,
    )


def with_room(engine: Mapping[str, Any], beams: int) -> dict[str, Any]:
    """Engine options under which so many beams run together and share pages, unless the user has said otherwise."""
    return {"page_size": PAGE_SIZE, "max_num_seqs": max(8, beams), **engine}


def facts(llm: LLM, answer: RequestOutput) -> dict[str, str]:
    """The figures of a search: each of its steps adds a token to every beam."""
    metrics, rate = answer.metrics, answer.metrics.tokens_per_second
    result = {"speed": f"{metrics.decode_tokens} beam steps" + (f", {rate:.0f} steps/s" if rate else "")}
    if llm.speculative.drafter is not None:
        steps, drafted = metrics.tokens_per_round, metrics.num_draft_tokens
        rounds = f"{metrics.rounds} rounds" + ("" if steps is None else f", {steps:.2f} beam steps a round")
        result["speculation"] = f"{llm.speculative.method}, {rounds}, {drafted} drafted tokens"
    return result
