"""Trains heads while they serve, on the target's own distributions (online speculative decoding, Liu et al., arXiv
2310.07177).

Windows of the target's hidden states, prompts included, are kept in a bounded buffer; its output layer turns them into
distributions. Before drafting, after the last round has been published, the head takes a training step on some of them.
The target does not change, so neither do the tokens; only the acceptance rate does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import nn

from forerun import kernels
from forerun.core.batch import HiddenStates
from forerun.core.config import COUNT, POSITIVE, POSITIVE_FRACTION, check_types, check_within
from forerun.core.errors import ConfigError
from forerun.core.folders import expanded
from forerun.core.request import RequestState
from forerun.models.run.base import Model
from forerun.speculate.draft.heads.dflash import DFlashHead
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Head
from forerun_lab.heads.dflash import TrainedDFlash
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.heads.training import TrainedHead, TrainingBatch
from forerun_lab.overwrite import refuse_models

MAX_DUE = 4
"""Training steps that may be due at most; others are skipped."""


@dataclass(frozen=True)
class Adaptation:
    """Options of ``adapt``. Memory: ``buffer_tokens`` hidden states per layer that the head reads, three float32 copies
    of the head (master weights and AdamW's moments), and a copy of the target's embedding and output layer."""

    every: int = 64
    """Verified tokens per training step."""
    share: float | None = 0.1
    """Most of the time since the first round that training may take, not counting the first step. None: no bound, so
    that the same requests always give the same head."""
    window: int = 32
    """Tokens of a training window; shorter requests are not used."""
    batch: int = 8
    """Windows per step."""
    buffer_tokens: int = 4096
    """How many of the newest tokens are kept; steps draw from all of them."""
    lr: float = 1e-3
    save: str | None = None
    """Folder for the trained head, written when the engine closes; name it as ``model`` next time."""

    def __post_init__(self) -> None:
        check_within(self, {"every window batch": COUNT, "share": POSITIVE_FRACTION, "lr": POSITIVE}, "adapt: ")
        if self.buffer_tokens < self.window:
            raise ConfigError(f"adapt: buffer_tokens ({self.buffer_tokens}) must hold a window ({self.window})")

    @classmethod
    def parse(cls, given: Any) -> Adaptation | None:
        """Parses true (the defaults), a mapping of options, or nothing. Raises ConfigError."""
        if given is None or given is False or isinstance(given, Adaptation):
            return given or None
        options = {} if given is True else given
        names = [field.name for field in fields(cls)]
        if not isinstance(options, Mapping):
            raise ConfigError(f"adapt must be true or a mapping of {', '.join(names)}, not {given!r}")
        for key in options:
            if key not in names:
                raise ConfigError(f"adapt has no option {key!r}; it has {', '.join(names)}")
        check_types(cls, options)
        return cls(**options)


TRAINED: dict[type[Head], type[TrainedHead]] = {EagleHead: TrainedEagle, DFlashHead: TrainedDFlash}


def trained(head: Head) -> TrainedHead:
    """A copy of a served head that can be trained."""
    if isinstance(head, TrainedHead):
        return deepcopy(head)
    result = TRAINED[type(head)](head.sizes)
    result.load_state_dict(head.tensors)
    return result.to(next(iter(head.tensors.values())).device)


class Learner:
    """Trains a head while it serves."""

    def __init__(
        self, head: Head, target: Model, options: Adaptation, clock: Callable[[], float] = perf_counter
    ) -> None:
        depth = head.sizes.depth + 1
        if options.window <= depth:
            raise ConfigError(f"adapt: window must be above {depth} for a head that guesses {depth - 1} tokens ahead")
        if options.save is not None:
            refuse_models(expanded(options.save))
        self.head, self.target, self.options, self.clock = head, target, options, clock
        self.master = trained(head).float().train()
        """Float32: small steps would vanish in the head's own dtype."""
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0)
        self.layers = tuple(sorted({*head.layers, head.sizes.num_layers}))
        """Indices of the hidden states that are kept; the last one gives the target's distributions."""
        size, info = head.sizes.hidden_size, target.info
        windows = options.buffer_tokens // options.window
        self.tokens = torch.zeros(windows, options.window, dtype=torch.long, device=info.device)
        shape = (windows, options.window, len(self.layers), size)
        self.states = torch.zeros(shape, dtype=info.dtype, device=info.device)
        self.filled = self.next = 0
        self.partial: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        """Per sequence: the tokens and states [n, layers, size] of its unfinished window."""
        self.due_tokens = self.steps = self.seen = 0
        self.spent = self.longest = 0.0
        self.began: float | None = None
        with torch.no_grad():
            every = torch.arange(info.vocab_size, device=info.device)
            self.embedding = target.embed(every).clone()
            unit = torch.eye(size, dtype=info.dtype, device=info.device)
            bias = target.lm_head(torch.zeros_like(unit[:1]))  # what the output layer adds to any state
            self.output = (target.lm_head(unit) - bias).T.to(info.dtype).contiguous()

    def watch(self, sequence: RequestState, hidden: HiddenStates) -> None:
        """Adds the states, ``hidden[layer]`` [n, size], of the last n tokens that the target has read."""
        if self.began is None:
            self.began = self.clock()
        rows = torch.stack([hidden[layer] for layer in self.layers], dim=1)
        count, window = rows.shape[0], self.options.window
        tokens, states = self.partial.pop(sequence.id, ([], []))
        tokens = tokens + sequence.tokens[sequence.num_computed_tokens - count : sequence.num_computed_tokens]
        rows = torch.cat([*states, rows]) if states else rows.clone()
        while len(tokens) >= window:
            self.tokens[self.next] = torch.tensor(tokens[:window])
            self.states[self.next] = rows[:window]
            tokens, rows = tokens[window:], rows[window:]
            self.next = (self.next + 1) % len(self.tokens)
            self.filled = min(self.filled + 1, len(self.tokens))
        self.partial[sequence.id] = (tokens, [rows.clone()])
        self.seen += count
        self.due_tokens = min(self.due_tokens + count, MAX_DUE * self.options.every)

    def forget(self, sequence: RequestState) -> None:
        self.partial.pop(sequence.id, None)

    def learn(self) -> None:
        """Takes one training step, if one is due and its time permitted."""
        if not self.filled or self.due_tokens < self.options.every or not self._has_time():
            return
        self.due_tokens -= self.options.every
        began = self.clock()
        with kernels.all_torch_threads(), torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([]):
            torch.manual_seed(self.steps)
            self._step()
        self.steps += 1
        seconds = self.clock() - began
        self.spent += seconds
        self.longest = max(self.longest, seconds)

    def _has_time(self) -> bool:
        """Whether another step, as long as the longest so far, stays within the share of time."""
        if self.options.share is None:
            return True
        assert self.began is not None
        return self.spent + self.longest <= self.options.share * (self.clock() - self.began) or not self.steps

    def _step(self) -> None:
        chosen = torch.randint(self.filled, (min(self.options.batch, self.filled),))
        states = self.states[chosen].float()
        hidden = {layer: states[:, :, index] for index, layer in enumerate(self.layers)}
        last = self.states[chosen][:, :, -1]
        logits = self.target.lm_head(last.flatten(0, 1)).clone().unflatten(0, last.shape[:2])
        batch = TrainingBatch(self.tokens[chosen], hidden, logits, self.embedding, self.output, nn.Identity())
        self.master.loss(batch).backward()
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            live = self.head.tensors
            for name, trained in self.master.named_parameters():
                live[name].copy_(trained)
            self.head.pack()

    def save(self, folder: Path) -> None:
        """Saves the current head; each file is replaced atomically. Raises ConfigError if it cannot be written."""
        record = {**self.head.record, "adapted_tokens": self.seen, "adapted_steps": self.steps}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder) as temporary:
                self.master.save(Path(temporary), record)
                for file in sorted(Path(temporary).iterdir()):
                    os.replace(file, folder / file.name)
        except OSError as error:
            raise ConfigError(f"adapt: the head cannot be saved in {folder}: {error.strerror}") from error
