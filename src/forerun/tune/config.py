"""Configurations of ``tune`` and of its training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.core.config import COUNT, NOT_NEGATIVE, POSITIVE, Within, check_within, option
from forerun.core.errors import ConfigError
from forerun.core.folders import expanded
from forerun.models.kinds import UNQUANTIZED

SHARES = {"write": 0.4, "train": 0.35, "choose": 0.15}
"""Fractions of the time budget; the rest is for loading and checking. Without training, its time is for writing."""

TEXTS = "text.safetensors"
"""The model's own text, in a tuned folder."""

TRAINED = ("eagle", "medusa", "parallel", "dflash", "draft_model")
NOTHING = ("none",)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """One run of ``tune``. The command's flags are made from these fields."""

    model: str
    out: Path
    hours: float = option(0.75, "Time limit of the whole run, in hours.")
    data: Path | None = option(None, "Your prompts, chats or texts: a JSONL or text file, or a folder of them.")
    text: Path | None = option(None, "Train on this text of an earlier run (text.safetensors) instead of generating.")
    quantization: str | None = option(
        None, "Quantization of the target's weights, as they will be served: int8_rows or none."
    )
    train: tuple[str, ...] = option(("eagle",), "Head to train: eagle, medusa, parallel, dflash, draft_model, or none.")
    cpu_minutes: float | None = option(None, "CPU time for training each head. Default: a share of --hours.")
    rows: int = option(8192, "Vocabulary size of the head: this many of the commonest tokens.")
    min_tokens: int = option(20_000, "Train nothing with fewer tokens of text than this.")
    max_tokens: int = option(2_000_000, "Maximum number of tokens of training text to generate.")
    answer: int = option(256, "Maximum tokens per generated answer.")
    probe: int = option(16, "Number of held-out prompts for comparing methods.")
    probe_tokens: int = option(48, "Tokens per answer in the comparison.")
    seed: int = option(0, "Random seed.")
    threads: int = option(0, "CPU threads. 0: torch's default.")
    progress: bool = option(True, "Show progress bars.")

    def __post_init__(self) -> None:
        kinds = tuple(dict.fromkeys(self.train))
        object.__setattr__(self, "train", () if kinds == NOTHING else kinds)
        unknown = [name for name in self.train if name not in TRAINED]
        if unknown:
            raise ConfigError(
                f"unknown head {unknown[0]!r} in --train: choose from {', '.join(TRAINED)}, or none alone"
            )
        if self.quantization == UNQUANTIZED:
            object.__setattr__(self, "quantization", None)
        if self.text is not None and not self.text.is_file():
            raise ConfigError(f"there is no text in {self.text}")
        if self.text is not None and self.text.resolve() == (self.out / TEXTS).resolve():
            raise ConfigError(f"{self.text} would be overwritten by --out {self.out}: choose another --out")
        if self.text is not None and self.data is not None:
            raise ConfigError("--data has no effect with --text: remove one")
        if self.text is not None and not self.train:
            raise ConfigError("--text has no effect with --train none: remove one")
        if self.cpu_minutes is not None and not self.train:
            raise ConfigError("--cpu-minutes has no effect with --train none: remove one")
        check_within(self, {
            "hours cpu_minutes": POSITIVE,
            "rows min_tokens max_tokens answer probe probe_tokens": Within(least=2, whole=True),
        })  # fmt: skip

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def writing(self) -> float:
        """Fraction of the time in which the model writes, or reads at most, if a text is given."""
        return SHARES["write"] + (0.0 if self.train else SHARES["train"])

    @property
    def learning(self) -> float:
        """Fraction of the time in which drafts are trained and, if a text is given, the model reads it."""
        return SHARES["train"] + (SHARES["write"] if self.text is not None else 0.0) if self.train else 0.0


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """One search for the fastest settings of a draft. The flags that need ``--draft`` are made from these fields."""

    model: str
    draft: str
    """kept as an absolute path if it is one, so that it is found wherever the result is used"""
    minutes: float = option(10.0, "Time limit of --draft, in minutes.")
    temperatures: Sequence[float] = option(
        (0.0, 0.7), "Temperatures of your requests, comma-separated.", commas="temperature"
    )
    concurrency: Sequence[int] = option(
        (1,), "Numbers of requests decoded together, comma-separated.", commas="concurrency"
    )
    quantization: str | None = None
    answer: int = 64
    seed: int = 0
    threads: int = 0
    progress: bool = True

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
