"""What ``forerun tune`` is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from forerun.core.errors import ConfigError
from forerun.models.kinds import UNQUANTIZED

SHARES = {"write": 0.4, "train": 0.35, "choose": 0.15}
"""Of the time: the rest is for loading and checking. Where nothing is trained, that is for writing, too."""

TEXTS = "text.safetensors"
"""What the model wrote, in the folder of a tuning."""

TRAINED = ("eagle", "medusa", "parallel", "draft_model")
NOTHING = ("none",)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """One tuning. The flags of the command are made from these fields."""

    model: str
    out: Path
    hours: float = 0.75  # time for all of it
    data: Path | None = None  # your own prompts, chats or texts: a JSONL or text file, or a folder of them
    text: Path | None = None  # what the model wrote before (a tuned folder's text.safetensors): read, none is written
    quantization: str | None = None  # the model's weights while it is tuned, as they will be served: int8_rows, or none
    train: tuple[str, ...] = ("eagle",)  # learns to draft: eagle, medusa, parallel, draft_model (repeatable), or none
    cpu_minutes: float | None = None  # processor time that each learns for, its start included; none: a share of hours
    rows: int = 8192  # tokens that are learnt, the commonest; heads draft no others
    min_tokens: int = 20_000  # with time to write fewer nothing is trained: history alone is measured
    max_tokens: int = 2_000_000  # text that the model writes at most, in tokens
    answer: int = 256  # tokens of an answer, at most
    probe: int = 16  # held-out prompts that methods are compared on
    probe_tokens: int = 48  # tokens of their answers
    seed: int = 0  # of everything that is drawn
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    progress: bool = True  # show progress bars

    def __post_init__(self) -> None:
        asked = tuple(dict.fromkeys(self.train))
        object.__setattr__(self, "train", () if asked == NOTHING else asked)
        unknown = [name for name in self.train if name not in TRAINED]
        if unknown:
            able = ", ".join(TRAINED)
            raise ConfigError(f"nothing called {unknown[0]!r} is trained: choose among {able}, or none alone")
        if self.quantization == UNQUANTIZED:
            object.__setattr__(self, "quantization", None)
        if self.text is not None and not self.text.is_file():
            raise ConfigError(f"there is no text in {self.text}")
        if self.text is not None and self.text.resolve() == (self.out / TEXTS).resolve():
            raise ConfigError(f"{self.text} is what a tuning into {self.out} writes: choose another --out, or copy it")
        if self.text is not None and self.data is not None:
            raise ConfigError("nothing is written beside a given text, so data has no use: leave one of them out")
        if self.text is not None and not self.train:
            raise ConfigError("text is to be learnt from, and with train none nothing learns: leave one of them out")
        if self.cpu_minutes is not None and not self.train:
            raise ConfigError("cpu_minutes is time to learn, and with train none nothing learns: leave one of them out")
        if self.cpu_minutes is not None and not 0 < self.cpu_minutes < math.inf:
            raise ConfigError(f"cpu_minutes must be above 0, not {self.cpu_minutes}")
        if not 0 < self.hours < math.inf:
            raise ConfigError(f"hours must be above 0, not {self.hours}")
        for name in ("rows", "min_tokens", "max_tokens", "answer", "probe", "probe_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name} must be at least 2, not {getattr(self, name)}")

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def writing(self) -> float:
        """Share of the time in which the model writes; a text that is given is read in no more."""
        return SHARES["write"] + (0.0 if self.train else SHARES["train"])

    @property
    def learning(self) -> float:
        """Share of the time in which drafts learn, and read a text that is given."""
        return SHARES["train"] + (SHARES["write"] if self.text is not None else 0.0) if self.train else 0.0
