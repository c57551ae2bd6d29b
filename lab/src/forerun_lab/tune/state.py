"""The resumable state of a tuning, and the frozen target that drafts are trained for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.core.errors import ConfigError, ModelError
from forerun.core.folders import replace_with
from forerun.models.files.open import Checkpoint
from forerun.models.run.hf import read_module
from forerun.models.text.tokenizer import load_tokenizer
from forerun.tune.run import make_out


class TuneState:
    """``run/state.json`` of a tuned folder: each stage's result and seconds. ``marks`` identify the tuning. Raises
    ConfigError for a folder that another tuning began."""

    def __init__(self, folder: Path, marks: dict[str, Any]) -> None:
        self.path = folder / "state.json"
        self.seconds: dict[str, float] = {}
        """Time spent in each stage."""
        self.results: dict[str, Any] = {}
        make_out(folder)
        if not self.path.exists():
            self.marks = marks
            self._save()
            return
        try:
            result = json.loads(self.path.read_text(encoding="utf-8"))
            self.marks, self.seconds, self.results = result["marks"], result["seconds"], result["results"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.path} cannot be read ({error}): choose another --out or remove it") from error
        if not self.results:  # no stage has ended
            self.marks = marks
        for name, value in marks.items():
            saved = self.marks.get(name)
            if saved != value:
                hashed = name in ("data", "text")  # a hash is of no use in a message
                which = f"another {name}" + ("" if hashed else f": {saved}, not {value}")
                which = f"no {name}" if hashed and saved is None else which
                raise ConfigError(f"{folder.parent} has a tuning with {which}: choose another --out or remove it")

    def _save(self) -> None:
        content = {"marks": self.marks, "seconds": self.seconds, "results": self.results}
        text = json.dumps(content, indent=1) + "\n"
        replace_with(self.path, lambda path: path.write_text(text, encoding="utf-8"))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the block's time, interrupted or not, to a stage's seconds."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            self._save()

    def keep(self, name: str, result: Any) -> Any:
        """Save a stage's result; returns it as it will be read back."""
        self.results[name] = json.loads(json.dumps(result))
        self._save()
        return self.results[name]

    def lacking(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that have not been trained."""
        return [name for name in names if name not in self.results.get("train", {})]

    def trained(self, name: str, result: Any) -> None:
        """Save a trained draft's result and forget what was chosen without it."""
        self.forget("choose", "check")
        self.keep("train", {**self.results.get("train", {}), name: result})

    def forget(self, *names: str) -> None:
        """Drop results, so that their stages run again."""
        for name in names:
            self.results.pop(name, None)


def load_target(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, bfloat16, and its tokenizer, which needs an EOS token between documents. Raises ModelError."""
    opened = Checkpoint.at(folder)
    opened.require_decoder("forerun train")
    target, tokenizer = read_module(opened, torch.bfloat16, attention=None), load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer in {folder} has no EOS token to separate documents with")
    return target.eval().requires_grad_(False), tokenizer
