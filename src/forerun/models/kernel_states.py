"""Layers that keep a state, on ``kernels/recurrent.cpp``: it reads a sequence's state once for all its rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from forerun import kernels
from forerun.cache.states import NONE, Replay, States
from forerun.kernels import structs
from forerun.models.formats.compiled import address, kernel
from forerun.models.recurrent import Mamba2, Recurrent, ShortConv


@dataclass(slots=True)
class CompiledReplay:
    """A ``Replay`` as the kernel reads it: a ``structs.ReplayStruct`` at ``address``, and what that points to."""

    address: int
    rows: int
    kept: tuple[Any, ...]


def lay_out(replay: Replay, states: States, rows: int) -> CompiledReplay:
    """For a batch of ``rows`` rows."""
    runs, before, own, copies = array("q"), array("q"), array("q"), array("q")
    for run in replay.runs:
        settled = run.settled if run.settled >= run.first else NONE
        runs.extend(structs.RunStruct(run.slot, run.first, len(run.before), settled))
        before.extend(run.before)
        own.extend(run.rows)
        slots = dict(run.copies)
        copies.extend(slots.get(node, NONE) for node in range(run.first, run.first + len(run.before)))
    at = [numbers.buffer_info()[0] for numbers in (runs, before, own, copies)]
    count = next(len(records) for records in states.records if records is not None)
    taps, read, written = replay.taps.contiguous(), replay.read.contiguous(), replay.written.contiguous()
    columns, kept = taps.shape[1] - 1, replay.kept.contiguous()
    fields = array("q", structs.ReplayStruct(
        at[0], len(replay.runs), len(before), at[1], at[2], at[3], taps.data_ptr(), columns, read.data_ptr(),
        len(read), written.data_ptr(), kept.data_ptr(), len(written), count, count * states.ring,
    ))  # fmt: skip
    lists = fields, runs, before, own, copies, taps, read, written, kept
    return CompiledReplay(fields.buffer_info()[0], rows, lists)


def addresses(states: States) -> array[int]:
    """Of every layer's records and checkpoints, 0 where it has none."""
    pairs = zip(states.records, states.numbers)
    return array("q", (0 if side is None else side.data_ptr() for pair in pairs for side in pair))


class KernelMixer:
    """What a mixer of ``recurrent.py`` computes, within rounding."""

    def __init__(self, mixer: ShortConv | Recurrent) -> None:
        self.mixer, self.layer, self.dtype = mixer, mixer.layer, mixer.dtype
        conv = mixer.conv
        taps, channels = conv.weight.shape
        at, bias = conv.weight.data_ptr(), address(conv.bias) or 0
        self.kept: tuple[Any, ...] = ()
        if isinstance(mixer, ShortConv):
            sizes = (structs.MIXERS.index("conv"), channels, taps - 1, channels, 0, 0, 0, 0, 0, 0)
            own = structs.MixerStruct(*sizes, at, bias, 0, 0, 0, 0, 0)
            self.inner, self.inputs = channels, 3 * channels
        else:
            spec, norm = mixer.sizes, mixer.norm
            kind = structs.MIXERS.index("mamba" if isinstance(mixer, Mamba2) else "delta")
            skip = mixer.skip.contiguous() if isinstance(mixer, Mamba2) else None
            decay, step = mixer.decay.contiguous(), mixer.step.contiguous()
            self.kept = decay, step, skip, norm
            own = structs.MixerStruct(
                kind, channels, taps - 1, spec.inner, spec.gates, spec.heads, spec.groups, spec.key_dim,
                spec.value_dim, int(spec.tiled), at, bias, decay.data_ptr(), step.data_ptr(), address(skip) or 0,
                0 if norm is None else norm.pointer, structs.number(0.0 if norm is None else norm.eps),
            )  # fmt: skip
            self.inner, self.inputs = spec.inner, channels + spec.gates + spec.inner
        self.fields = array("q", own)
        self.address = self.fields.buffer_info()[0]
        self.call = kernel("recur", self.dtype)

    def __call__(self, inputs: torch.Tensor, states: States, replay: CompiledReplay) -> torch.Tensor:
        """As ``Mixer``; ``inputs`` change. Raises ValueError for rows and states that the kernel would misread."""
        records, numbers = states.records[self.layer], states.numbers[self.layer]
        shape = torch.Size((replay.rows, self.inputs))
        if inputs.shape != shape or inputs.dtype is not self.dtype or not inputs.is_cpu:
            raise ValueError(f"inputs {inputs.dtype} {[*inputs.shape]} where {self.dtype} {[*shape]} on cpu are needed")
        if records is None or records.dtype is not self.dtype:
            raise ValueError(f"records of layer {self.layer} are not {self.dtype}")
        inputs, out = inputs.contiguous(), inputs.new_empty(replay.rows, self.inner)
        self.call(
            self.address, replay.address, inputs.data_ptr(), records.data_ptr(), address(numbers), out.data_ptr(),
            replay.rows, kernels.threads(),
        )  # fmt: skip
        return out

    def norms(self) -> Iterator[object]:
        return self.mixer.norms()
