"""Options of ``forerun plan`` for a load. Imports no library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.core.config import option
from forerun.core.errors import ConfigError
from forerun_lab.load.arrivals import KEYS, Load, SyntheticLoad, read_trace

ROUTERS = ("affine", "random")
MOST = 10_000
"""Replicas that are considered."""


@dataclass(frozen=True)
class LoadOptions:
    """Each is a flag of ``forerun plan``."""

    load: Path | None = option(None, f"Trace file: JSON lines with {', '.join(KEYS[:3])} (docs/plan.md).")
    rate: float | None = option(
        None, "Random requests per second, of --prompt-tokens and --max-tokens, instead of a trace."
    )
    spread: float = option(0.5, "Coefficient of variation of the lengths of --rate.")
    shared_prefix: float = option(0.0, "Share of prompt tokens that belong to a shared prefix.")
    prefixes: int = option(16, "Number of shared prefixes.")
    replicas: int | None = option(None, "Predict this many replicas. Default: find the number that the load needs.")
    router: str = option("affine", "Routing of requests: affine (as forerun serve) or random.")
    ttft_p95: float | None = option(None, "Limit of the 95th percentile of time to first token, in seconds.")
    tpot_p95: float | None = option(None, "Limit of the 95th percentile of time per further token, in seconds.")
    latency_p95: float | None = option(None, "Limit of the 95th percentile of time to the last token, in seconds.")
    costs: Path | None = option(None, "Take costs from an earlier plan's --json output instead of measuring.")
    outside: float | None = option(None, "Seconds that a request spends outside the engine.")
    request_overhead: float | None = option(None, "Host seconds per active request and step.")

    def __post_init__(self) -> None:
        if self.load is not None and self.rate is not None:
            raise ConfigError("--load is a trace and --rate a load without one: give one of them")
        if self.router not in ROUTERS:
            raise ConfigError(f"--router must be one of {', '.join(ROUTERS)}, not {self.router!r}")
        if self.replicas is not None and not 1 <= self.replicas <= MOST:
            raise ConfigError(f"--replicas must be from 1 to {MOST}, not {self.replicas}")
        for name in ("ttft_p95", "tpot_p95", "latency_p95"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be seconds above 0, not {value!r}")
        for name in ("outside", "request_overhead"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"--{name} must be seconds, 0 or more, not {value!r}")
        if self.replicas is None and (self.ttft_p95, self.tpot_p95, self.latency_p95) == (None, None, None):
            raise ConfigError("say what is to be kept (--ttft-p95, --tpot-p95, --latency-p95), or how many --replicas")

    def made(self, prompt_tokens: int, max_tokens: int, seed: int) -> Load:
        """Raises ConfigError for a trace that is none."""
        if self.load is not None:
            return read_trace(self.load, seed)
        if self.rate is None:
            raise ConfigError("there is no load: give a trace (--load) or a --rate")
        shape = self.spread, self.shared_prefix, self.prefixes
        return SyntheticLoad(self.rate, prompt_tokens, max_tokens, *shape, seed=seed)
