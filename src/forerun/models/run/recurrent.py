"""Mixers of recurrent layers: they keep a state in place of keys and values, and update it token by token in one order.

A row is computed from the records of its own path, in sums whose shapes do not depend on the number of rows, so that
its bits are the same whatever is fed with it. ``KernelMixer`` runs on ``kernels/recurrent.cpp``, which reads a
sequence's state once for all its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from forerun import kernels
from forerun.cache.states import NONE, Replay, Run, States
from forerun.kernels import structs
from forerun.models.architectures.spec import MixerSpec
from forerun.models.formats.compiled import address
from forerun.models.run import activations

UNIT_EPS = 1e-6
"""Added to the squared norms of keys and queries, which are made unit vectors."""


class Mixer(Protocol):
    """Maps the outputs [rows, numbers] of a layer's input projection to inputs of its output projection."""

    def __call__(self, inputs: torch.Tensor, states: States, replay: Any) -> torch.Tensor: ...

    def norms(self) -> Iterator[object]:
        """Its norms."""


class Convolution:
    """A causal depthwise convolution over a row's record and those before it, oldest first."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [channels, 1, columns + 1]"""
        self.weight = weight[:, 0].float().T.contiguous()
        self.bias = None if bias is None else bias.float()

    def __call__(self, records: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        """Float32 [nodes, channels]. ``taps`` [nodes, columns + 1] are the indices of what each node reads in
        ``records`` [records, channels or more]."""
        channels = self.weight.shape[1]
        total = records[taps[:, 0], :channels].float() * self.weight[0]
        for column, weight in enumerate(self.weight[1:], 1):
            total += records[taps[:, column], :channels].float() * weight
        return total if self.bias is None else total + self.bias


def remember(records: torch.Tensor, layer: int, states: States, replay: Replay) -> torch.Tensor:
    """Store the rows' records [rows, width]. Returns them and, after them, the earlier ones that they read."""
    ring = states.records[layer]
    flat = ring.view(-1, ring.shape[-1])
    every = torch.cat([records, flat[replay.read]])
    flat[replay.written] = records[replay.kept]
    return every


class ShortConv:
    """LFM2's short convolution: C * conv(B * x) of [B, C, x]."""

    def __init__(self, layer: int, sizes: MixerSpec, conv: Convolution, dtype: torch.dtype) -> None:
        self.layer, self.sizes, self.conv, self.dtype = layer, sizes, conv, dtype

    def __call__(self, inputs: torch.Tensor, states: States, replay: Replay) -> torch.Tensor:
        before, after, x = inputs.chunk(3, -1)
        records = remember(before * x, self.layer, states, replay)
        return self.conv(records, replay.taps[replay.fed]).to(self.dtype).mul_(after)

    def norms(self) -> Iterator[object]:
        yield from ()


@dataclass(eq=False)
class Recurrent(ABC):
    """A state [heads, key_dim, value_dim] that each row decays and adds to. A row of ``inputs`` has its record (what
    the convolution reads, then ``gates`` numbers), and after it the output's gate."""

    layer: int
    sizes: MixerSpec
    conv: Convolution
    norm: Any
    dtype: torch.dtype
    """The rows' dtype."""
    decay: torch.Tensor
    """[heads] float32: A, which multiplies a time step."""
    step: torch.Tensor
    """[heads] float32: the time step's bias."""

    def __call__(self, inputs: torch.Tensor, states: States, replay: Replay) -> torch.Tensor:
        channels, numbers = self.sizes.channels, states.checkpoints[self.layer]
        width = channels + self.sizes.gates
        records = remember(inputs[:, :width], self.layer, states, replay)
        mixed = activations.silu(self.conv(records, replay.taps))
        gates = records[replay.taps[:, -1], channels:].float()
        out = torch.empty(len(inputs), self.sizes.inner, device=inputs.device)
        rows = self.prepare(mixed.to(self.dtype).float(), gates)
        for run in replay.runs:
            self._run(run, numbers, rows, out)
        return self.gate(out.to(self.dtype), inputs[:, width:])

    def _run(self, run: Run, numbers: torch.Tensor, rows: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Compute one sequence's nodes one by one, each from its parent's state."""
        checkpoint, copies = numbers[run.slot], dict(run.copies)
        states, last_use = {NONE: checkpoint}, {parent: run.first + i for i, parent in enumerate(run.before)}
        for node, (parent, row) in enumerate(zip(run.before, run.rows), run.first):
            states[node], output = self.advance(states[parent], *(each[node] for each in rows))
            if row != NONE:
                out[row] = output.flatten()
            if last_use[parent] == node:
                del states[parent]
            if node == run.settled:
                checkpoint.copy_(states[node])
            if node in copies:
                numbers[copies[node]] = states[node]

    @abstractmethod
    def prepare(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The arguments of ``advance`` for every node; ``mixed`` [nodes, channels] are the convolution's outputs."""

    @abstractmethod
    def advance(self, state: torch.Tensor, *row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new state, and the row's output [heads, value_dim]."""

    @abstractmethod
    def gate(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Outputs [rows, inner], normed and gated."""

    def spread(self, side: torch.Tensor) -> torch.Tensor:
        """A row's numbers by head [heads, key_dim], from those by group."""
        times = self.sizes.heads // self.sizes.groups
        return side.repeat(times, 1) if self.sizes.tiled else side.repeat_interleave(times, 0)

    def norms(self) -> Iterator[object]:
        yield from () if self.norm is None else (self.norm,)


class DeltaNet(Recurrent):
    """S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, with unit keys and queries (Yang et al. 2024,
    arXiv 2412.06464, equation 10)."""

    def prepare(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = self.sizes
        keys = sizes.groups * sizes.key_dim
        q, k, v = mixed.split_with_sizes((keys, keys, sizes.inner), 1)
        beta, a = gates.chunk(2, 1)
        decay = torch.exp(self.decay * activations.softplus(a + self.step))
        q, k = (side.unflatten(1, (sizes.groups, sizes.key_dim)) for side in (q, k))
        return q, k, v.unflatten(1, (sizes.heads, sizes.value_dim)), activations.sigmoid(beta), decay

    def advance(self, state: torch.Tensor, *row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, beta, decay = row
        q, k = (side * torch.rsqrt((side * side).sum(-1, keepdim=True) + UNIT_EPS) for side in (q, k))
        q, k = (self.spread(side)[:, :, None] for side in (q, k))
        state = state * decay[:, None, None]
        added = (v - (state * k).sum(1)) * beta[:, None]
        state = state + k * added[:, None]
        return state, (state * (q / self.sizes.key_dim**0.5)).sum(1)

    def gate(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = self.norm(out.unflatten(1, (self.sizes.heads, self.sizes.value_dim))).flatten(1)
        gated: torch.Tensor = normed * activations.silu(gate.float())
        return gated.to(self.dtype)


@dataclass(eq=False)
class Mamba2(Recurrent):
    """S <- exp(dt A) S + dt B x^T; y = S^T C + D x (Dao and Gu 2024, arXiv 2405.21060, section 2)."""

    skip: torch.Tensor
    """D: [heads] float32."""

    def prepare(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = self.sizes
        keys = sizes.groups * sizes.key_dim
        x, b, c = mixed.split_with_sizes((sizes.inner, keys, keys), 1)
        step = activations.softplus(gates + self.step)
        b, c = (side.unflatten(1, (sizes.groups, sizes.key_dim)) for side in (b, c))
        return x.unflatten(1, (sizes.heads, sizes.value_dim)), b, c, step, torch.exp(step * self.decay)

    def advance(self, state: torch.Tensor, *row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, b, c, step, decay = row
        b, c = self.spread(b), self.spread(c)
        state = state * decay[:, None, None] + (b * step[:, None])[:, :, None] * x[:, None]
        return state, (state * c[:, :, None]).sum(1) + self.skip[:, None] * x

    def gate(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = (out.float() * activations.silu(gate.float())).to(self.dtype)
        if self.norm is None:
            return gated
        if self.sizes.groups > 1:
            gated = gated.unflatten(1, (self.sizes.groups, -1))
        normed: torch.Tensor = self.norm(gated)
        return normed.flatten(1)


class NormedMixer:
    """A mixer and a norm of its output."""

    def __init__(self, mixer: Mixer, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.mixer, self.norm = mixer, norm

    def __call__(self, inputs: torch.Tensor, states: States, replay: Any) -> torch.Tensor:
        return self.norm(self.mixer(inputs, states, replay))

    def norms(self) -> Iterator[object]:
        yield self.norm


@dataclass(slots=True)
class CompiledReplay:
    """A ``Replay`` as the kernel reads it: a ``structs.ReplayStruct`` at ``address``."""

    address: int
    rows: int
    kept: tuple[Any, ...]
    """Everything that it points to."""


def lay_out(replay: Replay, states: States, rows: int) -> CompiledReplay:
    """The ``replay`` of a batch of ``rows`` rows for the kernel."""
    runs, before, own, copies = array("q"), array("q"), array("q"), array("q")
    for run in replay.runs:
        settled = run.settled if run.settled >= run.first else NONE
        runs.extend(structs.RunStruct(slot=run.slot, first=run.first, nodes=len(run.before), checkpoint=settled))
        before.extend(run.before)
        own.extend(run.rows)
        slots = dict(run.copies)
        copies.extend(slots.get(node, NONE) for node in range(run.first, run.first + len(run.before)))
    count = states.count + states.max_kept
    taps, read, written = replay.taps.contiguous(), replay.read.contiguous(), replay.written.contiguous()
    kept = replay.kept.contiguous()
    fields = array("q", structs.ReplayStruct(
        runs=structs.address(runs), num_runs=len(replay.runs), nodes=len(before), parents=structs.address(before),
        rows=structs.address(own), copies=structs.address(copies), taps=taps.data_ptr(), columns=taps.shape[1] - 1,
        read=read.data_ptr(), num_read=len(read), written=written.data_ptr(), written_rows=kept.data_ptr(),
        num_written=len(written), slots=count, records=count * states.ring,
    ))  # fmt: skip
    lists = fields, runs, before, own, copies, taps, read, written, kept
    return CompiledReplay(fields.buffer_info()[0], rows, lists)


class KernelMixer:
    """A mixer on the kernel: the same results within rounding."""

    def __init__(self, mixer: ShortConv | Recurrent) -> None:
        self.mixer, self.layer, self.dtype = mixer, mixer.layer, mixer.dtype
        sizes, conv = mixer.sizes, mixer.conv
        kind = "mamba" if isinstance(mixer, Mamba2) else "delta" if isinstance(mixer, DeltaNet) else "conv"
        vectors = (getattr(mixer, name, None) for name in ("decay", "step", "skip"))
        decay, step, skip = (None if vector is None else vector.contiguous() for vector in vectors)
        norm = None if isinstance(mixer, ShortConv) else mixer.norm
        self.kept = decay, step, skip, norm
        own = structs.MixerStruct(
            kind=structs.MIXERS.index(kind), channels=sizes.channels, columns=sizes.columns, d_inner=sizes.inner,
            gates=sizes.gates, heads=sizes.heads, groups=sizes.groups, key_dim=sizes.key_dim,
            value_dim=sizes.value_dim, tiled=sizes.tiled, conv=conv.weight.data_ptr(), bias=address(conv.bias) or 0,
            ssm_a=address(decay) or 0, dt_bias=address(step) or 0, ssm_d=address(skip) or 0,
            norm=0 if norm is None else norm.pointer, eps=structs.number(0.0 if norm is None else norm.eps),
        )  # fmt: skip
        self.inputs = 3 * sizes.inner if kind == "conv" else sizes.channels + sizes.gates + sizes.inner
        self.fields = array("q", own)
        self.address = self.fields.buffer_info()[0]
        self.call = kernels.kernel("recur", self.dtype)

    def __call__(self, inputs: torch.Tensor, states: States, replay: CompiledReplay) -> torch.Tensor:
        """As ``Mixer``; it changes ``inputs``. Raises ValueError for rows and states that the kernel would misread."""
        records, numbers = states.records.get(self.layer), states.checkpoints.get(self.layer)
        shape = torch.Size((replay.rows, self.inputs))
        if inputs.shape != shape or inputs.dtype is not self.dtype or not inputs.is_cpu:
            raise ValueError(f"inputs {inputs.dtype} {[*inputs.shape]} where {self.dtype} {[*shape]} on cpu are needed")
        if records is None or records.dtype is not self.dtype:
            raise ValueError(f"records of layer {self.layer} are not {self.dtype}")
        inputs, out = inputs.contiguous(), inputs.new_empty(replay.rows, self.mixer.sizes.inner)
        self.call(
            self.address, replay.address, inputs.data_ptr(), records.data_ptr(), address(numbers), out.data_ptr(),
            replay.rows, kernels.threads(),
        )  # fmt: skip
        return out

    def norms(self) -> Iterator[object]:
        return self.mixer.norms()
