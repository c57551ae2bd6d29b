"""The settings of ``forerun tune`` without ``--draft``, and of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from forerun.core.config import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE, Within, check_within, option
from forerun.core.errors import ConfigError, ForerunError
from forerun.models.kinds import UNQUANTIZED
from forerun.tune.config import TuneOptions

SHARES = {"write": 0.4, "train": 0.35, "choose": 0.15}
"""Fractions of the time budget; the rest is for loading and checking. Without training, its time is for writing."""

TEXTS = "text.safetensors"
"""The model's own text, in a tuned folder."""

TRAINED = ("eagle", "medusa", "parallel", "dflash", "draft_model")
NOTHING = ("none",)


@dataclass(frozen=True, kw_only=True)
class TuneConfig(TuneOptions):
    """One run of ``tune`` without ``--draft``."""

    out: Path
    hours: float = option(0.75, "Time limit of the whole run, in hours.")
    data: Path | None = option(None, "Your prompts, chats or texts: a JSONL or text file, or a folder of them.")
    text: Path | None = option(None, "Train on this text of an earlier run (text.safetensors) instead of generating.")
    train: tuple[str, ...] = option(("eagle",), "Head to train: eagle, medusa, parallel, dflash, draft_model, or none.")
    cpu_minutes: float | None = option(None, "CPU time for training each head. Default: a share of --hours.")
    rows: int = option(8192, "Vocabulary size of the head: this many of the commonest tokens.")
    min_tokens: int = option(20_000, "Train nothing with fewer tokens of text than this.")
    max_tokens: int = option(2_000_000, "Maximum number of tokens of training text to generate.")
    answer: int = option(256, "Maximum tokens per generated answer.")
    probe: int = option(16, "Number of held-out prompts for comparing methods.")
    probe_tokens: int = option(48, "Tokens per answer in the comparison.")

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


class Stopped(ForerunError):
    """A run was stopped on request, and its progress is saved."""


@dataclass(frozen=True)
class LoopSettings:
    """Length, learning rates and batches of a training run. Lengths are in tokens; ``seconds``, if given, limits the
    run instead."""

    out: Path  # folder of the checkpoint and of the log
    tokens: int  # tokens of the whole run; on resume a smaller number starts the decay earlier
    seconds: float = 0.0  # time of all steps; tokens are then as many as that allows. 0: tokens say
    cpu_time: bool = False  # seconds are the processor's
    batch_tokens: int = 8192  # tokens of one optimizer step
    micro_tokens: int = 4096  # tokens of one forward and backward pass
    length: int = 512  # tokens of a training sequence
    long_length: int = 2048  # tokens of a sequence in the last part of the run
    long_share: float = 0.1  # share of the run's tokens that comes in long sequences
    matrix_lr: float = 0.01  # peak learning rate of Muon, for hidden matrices; 0 gives them to AdamW
    lr: float = 3e-3  # peak learning rate of AdamW, for everything else
    rates: Mapping[str, float] = field(default_factory=dict)  # factor of both rates, by how a parameter's name begins
    weight_decay: float = 0.1
    warmup_share: float = 0.02  # share of the run's tokens over which the learning rate rises
    decay_share: float = 0.65  # share of the run's tokens over which the learning rate falls to zero
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 0
    threads: int = 2  # CPU threads; 0 leaves torch's choice
    resume: bool = True  # go on from a checkpoint in `out` if there is one
    checkpoint_seconds: float = 180.0
    eval_tokens: int = 500_000  # tokens between two evaluations
    pause_file: Path | None = None  # while this file exists the loop sleeps
    progress: bool = True

    def __post_init__(self) -> None:
        check_within(self, {
            "tokens batch_tokens micro_tokens length long_length eval_tokens": COUNT,
            "long_share warmup_share decay_share": FRACTION,
            "seconds matrix_lr lr weight_decay threads": NOT_NEGATIVE,
            "clip": POSITIVE,
        })  # fmt: skip

    def planned(self, tokens: int, seconds: float) -> LoopSettings:
        """The settings after ``tokens`` took ``seconds``: with as many tokens as the run's time allows."""
        if not self.seconds or not seconds:
            return self
        return replace(self, tokens=max(tokens, int(tokens * self.seconds / seconds)))

    def rate(self, name: str) -> float:
        """Factor of the learning rates of the parameter ``name``."""
        return next((factor for start, factor in self.rates.items() if name.startswith(start)), 1.0)

    def scale(self, consumed: int) -> float:
        """Factor of the learning rates after `consumed` tokens: up, flat, down to zero (a trapezium)."""
        warmup = (consumed + self.batch_tokens) / max(1.0, self.warmup_share * self.tokens)
        return max(0.0, min(warmup, (self.tokens - consumed) / max(1.0, self.decay_share * self.tokens), 1.0))

    def length_at(self, consumed: int) -> int:
        """Tokens of the sequences of the step that starts after `consumed` tokens."""
        return self.long_length if consumed >= (1 - self.long_share) * self.tokens else self.length
