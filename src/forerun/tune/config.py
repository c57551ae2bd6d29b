"""Configurations of ``tune``: what every run has, and ``--draft``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.config import COUNT, NOT_NEGATIVE, POSITIVE, Within, check_within, option
from forerun.core.folders import expanded


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options with and without ``--draft``. The command's flags are made from these fields."""

    model: str
    quantization: str | None = option(
        None, "Quantization of the target's weights, as they will be served: int8_rows or none."
    )
    answer: int = option(64, "Maximum tokens per generated answer.")
    seed: int = option(0, "Random seed.")
    threads: int = option(0, "CPU threads. 0: torch's default.")
    progress: bool = option(True, "Show progress bars.")


@dataclass(frozen=True, kw_only=True)
class PairConfig(TuneOptions):
    """One search for the fastest settings of a draft. The flags that need ``--draft`` are made from these fields."""

    draft: str
    """kept as an absolute path if it is one, so that it is found wherever the result is used"""
    minutes: float = option(10.0, "Time limit of --draft, in minutes.")
    temperatures: Sequence[float] = option(
        (0.0, 0.7), "Temperatures of your requests, comma-separated.", commas="temperature"
    )
    concurrency: Sequence[int] = option(
        (1,), "Numbers of requests decoded together, comma-separated.", commas="concurrency"
    )

    def __post_init__(self) -> None:
        path = expanded(self.draft)
        if path.exists():
            object.__setattr__(self, "draft", str(path.absolute()))
        check_within(self, {
            "minutes": POSITIVE, "temperatures": NOT_NEGATIVE, "concurrency": COUNT,
            "answer": Within(least=4, whole=True),
        })  # fmt: skip

    @property
    def workloads(self) -> list[tuple[float, int]]:
        """Temperature and number of sequences decoded together, every combination."""
        return [(temperature, count) for count in self.concurrency for temperature in self.temperatures]
