"""Options of one request for beams; names and defaults are vLLM's, and what it has not, transformers'."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from forerun.core.config import hold_python
from forerun.core.errors import ConfigError, shown
from forerun.sampling.params import MOST_ANSWERS, SamplingParams

STEEPEST = 10.0
"""The largest length penalty, either way: longest context ** it stays a number."""


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search. Beams do not sample: temperature, top-p, penalties and grammars are not among them.

    ``length_penalty``: finished beams are ranked by log-probability / tokens ** it. ``early_stopping``: True ends the
    search when ``beam_width`` beams have finished; False as soon as the best live beam, at its present length, would
    not be among them; ``never`` when no longer one can be. Raises ConfigError.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    """The end of the text is a token like others."""
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Keep the token that ended a beam."""
    early_stopping: bool | str = False
    num_return_sequences: int | None = None
    """How many of the best beams are returned; None: all ``beam_width``."""

    def __post_init__(self) -> None:
        hold_python(self)
        for name, most in (("beam_width", MOST_ANSWERS), ("max_tokens", None), ("num_return_sequences", None)):
            value = getattr(self, name)
            if value is None and name == "num_return_sequences":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
                bounds = f"from 1 to {most}" if most else "of at least 1"
                raise ConfigError(f"{name} must be an integer {bounds}, not {shown(value)}")
        if self.n > self.beam_width:
            raise ConfigError(f"num_return_sequences is {self.n}; there are {self.beam_width} beams")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {shown(getattr(self, name))}")
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise ConfigError(f"beams are not sampled: temperature must be 0, not {shown(self.temperature)}")
        penalty = self.length_penalty
        good = isinstance(penalty, (int, float)) and not isinstance(penalty, bool) and isfinite(penalty)
        if not good or abs(penalty) > STEEPEST:
            raise ConfigError(
                f"length_penalty must be a number from {-STEEPEST:g} to {STEEPEST:g}, not {shown(penalty)}"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ConfigError(f"early_stopping must be true, false or 'never', not {shown(self.early_stopping)}")

    @property
    def n(self) -> int:
        """How many answers it gives."""
        return self.beam_width if self.num_return_sequences is None else self.num_return_sequences

    @property
    def each(self) -> SamplingParams:
        """What each beam is, to drafters and to the engine: a request that does not sample."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )
