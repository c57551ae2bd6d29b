"""The training loop of everything that is trained: optimizers, checkpoints, evaluation, progress, pauses.

A run depends on its settings alone: a step's sequences are a function of the tokens consumed before it. A run that was
stopped therefore continues from its checkpoint with the same result.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forerun.core.errors import ConfigError, ForerunError
from forerun.core.folders import replace_with
from forerun_lab.tune.config import LoopSettings, Stopped
from forerun_lab.tune.progress import progress

CHECKPOINT = "checkpoint.pt"
UNFIT = (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, UnpicklingError)
"""Errors of restoring a damaged checkpoint, or one of another model."""
LOG = "log.jsonl"


class Batches(Protocol):
    """Training sequences as a function of the tokens consumed so far."""

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Token ids, int64 [rows, length + 1]."""
        ...


LossFunction = Callable[[nn.Module, Tensor], Tensor]
"""(model, token ids [rows, length + 1]) -> mean loss of these rows, a scalar with a gradient."""

Evaluation = Callable[[nn.Module], Mapping[str, Any]]
"""Returns a model's figures for the log, such as its held-out loss: numbers, or lists of them by position."""


@dataclass(frozen=True)
class LossLabel:
    """How a loss is shown and logged: its unit, and the sum of its terms' weights, by which it is divided."""

    text: str = "nats per token"
    weight: float = 1.0


@dataclass
class State:
    """Progress of a run, as its checkpoint stores it."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # time spent in steps, without pauses and evaluations
    plans: list[list[int]] = field(default_factory=list)  # [tokens consumed, tokens of the whole run from then on]
    figures: Mapping[str, Any] = field(default_factory=dict)  # of the weights at the end, if they were evaluated then


def run(
    model: nn.Module,
    batches: Batches,
    loss_function: LossFunction,
    settings: LoopSettings,
    evaluate: Evaluation | None = None,
    label: LossLabel = LossLabel(),
) -> State:
    """Train the parameters of `model` that require gradients until `settings.tokens` tokens are consumed or
    `settings.seconds` are over. Ctrl-C ends the run after the current step; Stopped is raised once that is saved."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    settings.out.mkdir(parents=True, exist_ok=True)
    optimizers = make_optimizers(model, settings)
    state = State()
    if settings.resume and (settings.out / CHECKPOINT).exists():
        state = load_checkpoint(settings.out / CHECKPOINT, model, optimizers)
    settings = settings.planned(state.tokens, state.seconds)
    if not state.plans or state.plans[-1][1] != settings.tokens:
        state.plans.append([state.tokens, settings.tokens])
    _try_batches(batches, settings, state)
    log = settings.out / LOG
    if not state.steps:
        log.write_text("", encoding="utf-8")
    last_save, last_evaluation = time.monotonic(), state.tokens
    figures: Mapping[str, Any] = {}
    unit, total = ("seconds", round(settings.seconds)) if settings.seconds else ("tokens", settings.tokens)
    with Interrupt() as interrupt, progress(f"training, {unit}", total, settings.progress) as bar:
        bar.say(f"loss: {label.text}")
        while state.tokens < settings.tokens and not interrupt.requested:
            wait_while_paused(settings.pause_file, interrupt)
            loss, norm = _step(model, batches, loss_function, optimizers, settings, state)
            settings = settings.planned(state.tokens, state.seconds)
            loss /= label.weight
            _log(log, step=state.steps, tokens=state.tokens, loss=loss, norm=norm, seconds=state.seconds)
            done = round(state.seconds) if settings.seconds else state.tokens
            bar.update(done, f"loss {loss:.3f}, {state.tokens / state.seconds:.0f} tokens/s")
            if evaluate and (state.tokens - last_evaluation >= settings.eval_tokens or state.tokens >= settings.tokens):
                last_evaluation = state.tokens
                figures = evaluated(evaluate, model)
                _log(log, step=state.steps, tokens=state.tokens, seconds=state.seconds, **figures)
                bar.say(f"held-out text after {state.tokens:,} tokens: {shown(figures)}")
            if time.monotonic() - last_save > settings.checkpoint_seconds:
                save_checkpoint(settings.out / CHECKPOINT, model, optimizers, state)
                last_save = time.monotonic()
        save_checkpoint(settings.out / CHECKPOINT, model, optimizers, state)
    if state.tokens < settings.tokens:
        raise Stopped(
            f"stopped after {state.tokens:,} of {settings.tokens:,} tokens, saved in {settings.out}: the same "
            "command resumes"
        )
    state.figures = figures  # after the last checkpoint: a run that goes on from it has other weights
    return state


def _try_batches(batches: Batches, settings: LoopSettings, state: State) -> None:
    """Raise ConfigError at the beginning if the texts are too short for the run's sequences."""
    for fraction, length in ((1 - settings.long_share, settings.length), (settings.long_share, settings.long_length)):
        if fraction > 0 and state.tokens < settings.tokens:
            batches.batch(state.tokens, max(1, settings.batch_tokens // length), length)


def evaluated(evaluate: Evaluation, model: nn.Module) -> Mapping[str, Any]:
    """A model's figures, with random numbers of their own: they are reproducible and do not change the run's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return evaluate(model.eval())


def shown(figures: Mapping[str, Any]) -> str:
    """Figures in one line."""
    parts = []
    for name, value in figures.items():
        values = value if isinstance(value, list) else [value]
        parts.append(f"{name.replace('_', ' ')} {' '.join(f'{item:.3f}' for item in values)}")
    return ", ".join(parts)


def _step(
    model: nn.Module,
    batches: Batches,
    loss_function: LossFunction,
    optimizers: list[torch.optim.Optimizer],
    settings: LoopSettings,
    state: State,
) -> tuple[float, float]:
    """One optimizer step, which advances `state`. Returns the mean loss and the gradient's norm."""
    clock = time.process_time if settings.cpu_time else time.monotonic
    started = clock()
    length = settings.length_at(state.tokens)
    rows = max(1, settings.batch_tokens // length)
    portion = max(1, settings.micro_tokens // length)
    model.train()
    torch.manual_seed(zlib.crc32(f"{settings.seed} {state.tokens}".encode()))  # a loss may draw, after a pause too
    total = 0.0
    for part in batches.batch(state.tokens, rows, length).split(portion):
        loss = loss_function(model, part) * (len(part) / rows)
        loss.backward()
        total += loss.item()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = float(nn.utils.clip_grad_norm_(parameters, settings.clip))
    if not (total == total and norm < float("inf")):
        raise ForerunError(f"training diverged at step {state.steps}: loss {total}, gradient norm {norm}; lower the lr")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * settings.scale(state.tokens)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.tokens += rows * length
    state.steps += 1
    state.seconds += clock() - started
    return total, norm


def make_optimizers(model: nn.Module, settings: LoopSettings) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices and AdamW for embeddings, output layers, vectors and scalars. Muon's update is scaled to
    AdamW's root mean square (arXiv 2502.16982), so both rates are of one kind."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: dict[float, list[nn.Parameter]] = {}
    others: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        hidden = parameter.ndim == 2 and id(parameter) not in outer and "lm_head" not in name
        kind = matrices if hidden and settings.matrix_lr > 0 else others
        kind.setdefault(settings.rate(name), []).append(parameter)
    if not matrices and not others:
        raise ConfigError("the model has no trainable parameters")
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        options: dict[str, Any] = {"weight_decay": settings.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        groups = [{"params": result, "peak_lr": settings.matrix_lr * rate} for rate, result in matrices.items()]
        optimizers.append(torch.optim.Muon(groups, **options))
    if others:
        groups = []
        for rate, result in others.items():
            wide, narrow = [p for p in result if p.ndim >= 2], [p for p in result if p.ndim < 2]
            for group, decay in ((wide, settings.weight_decay), (narrow, 0.0)):
                if group:
                    groups.append({"params": group, "weight_decay": decay, "peak_lr": settings.lr * rate})
        optimizers.append(torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True))
    return optimizers


def save_checkpoint(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: State) -> None:
    """Write everything that continues the run, atomically."""
    content = {
        "model": {name: p.detach() for name, p in model.named_parameters() if p.requires_grad},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "state": vars(state),
    }
    replace_with(path, lambda temporary: torch.save(content, temporary))


def load_checkpoint(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> State:
    """Restore model and optimizers in place, except for the learning rates; returns the run's progress."""
    try:
        content = torch.load(path, weights_only=True)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if parameters.keys() != content["model"].keys():
            raise KeyError("other parameters")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(content["model"][name])
        for optimizer, saved in zip(optimizers, content["optimizers"], strict=True):
            rates = [group["peak_lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["peak_lr"] = rate
        return State(**content["state"])
    except UNFIT as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path} does not fit this run ({reason}); use another out folder or resume=False") from error


def wait_while_paused(pause_file: Path | None, interrupt: Interrupt | None = None) -> None:
    """Sleep as long as the file exists and no end is requested."""
    while pause_file is not None and pause_file.exists() and not (interrupt is not None and interrupt.requested):
        time.sleep(1.0)


def _log(path: Path, **figures: Any) -> None:
    """Append a JSON object to a log."""
    rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(rounded) + "\n")


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A block in which the first Ctrl-C (or SIGTERM) sets ``requested``; the second one ends everything at once.
    Signals reach the main thread alone; in another one nothing changes. Ignored signals stay ignored."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._request) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print(
            "stopping when this step is done; again: at once, without what was done since the last save",
            file=sys.stderr,
            flush=True,
        )
