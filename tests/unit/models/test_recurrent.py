"""Layers that keep a state, compiled, against their recurrences in float64 from a sequence's first token on, path by
path; and their bits, whatever is fed together, for every number of threads."""

from array import array

import pytest
import torch
from torch.nn.functional import silu, softplus

from forerun import kernels
from forerun.cache.states import States
from forerun.core.batch import Batch, Span
from forerun.kernels import KernelError, structs
from forerun.models.architectures.spec import MixerSpec
from forerun.models.run.parts import KernelNorm
from forerun.models.run.recurrent import Convolution, DeltaNet, KernelMixer, Mamba2, ShortConv, lay_out
from refusals import refused

CPU, EPS, DEPTH = torch.device("cpu"), 1e-5, 12
SIZES = {
    "conv": {"channels": 37, "columns": 2},
    "conv-wide": {"channels": 128, "columns": 4},
    "delta": {"heads": 4, "groups": 2, "key_dim": 5, "value_dim": 37},
    "delta-tiled": {"heads": 6, "groups": 3, "key_dim": 32, "value_dim": 64, "tiled": True},
    "mamba": {"heads": 4, "groups": 2, "key_dim": 7, "value_dim": 20},
    "mamba-one": {"heads": 3, "groups": 1, "key_dim": 128, "value_dim": 32},
}  # fmt: skip


class Layer:
    """A compiled layer with random numbers, and rooms for two sequences."""

    def __init__(self, name, dtype=torch.float32):
        generator = torch.Generator().manual_seed(sorted(SIZES).index(name))

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.kind, sizes = name.split("-")[0], dict(SIZES[name])
        if self.kind != "conv":
            inner = sizes["heads"] * sizes["value_dim"]
            channels = inner + 2 * sizes["groups"] * sizes["key_dim"]
            gates = sizes["heads"] * (2 if self.kind == "delta" else 1)
            sizes |= {"channels": channels, "columns": 3, "inner": inner, "gates": gates}
        self.sizes = MixerSpec(**{"inner": sizes["channels"], **sizes})
        taps, channels, heads = self.sizes.columns + 1, self.sizes.channels, self.sizes.heads
        self.weight, self.bias = 0.5 * random(channels, 1, taps), random(channels)
        conv = Convolution(self.weight, self.bias)
        self.decay, self.step, self.skip = random(heads), random(heads), random(heads)
        self.norm = 1 + 0.1 * random(self.sizes.value_dim if self.kind == "delta" else self.sizes.inner)
        weight = self.norm.view(self.sizes.groups, -1) if self.kind == "mamba" else self.norm
        if self.kind == "conv":
            mixer = ShortConv(0, self.sizes, conv, dtype)
        else:
            arguments = (0, self.sizes, conv, KernelNorm(weight, EPS, dtype), dtype, -torch.exp(self.decay), self.step)
            mixer = DeltaNet(*arguments) if self.kind == "delta" else Mamba2(*arguments, self.skip)
        self.mixer, self.generator, self.dtype = KernelMixer(mixer), generator, dtype
        self.width = self.mixer.inputs
        self.states = States([self.sizes.shape], 2, DEPTH, dtype, CPU, kept=1)
        for key in (0, 1):
            self.states.allocate(key)

    def inputs(self, count):
        return torch.randn(count, self.width, generator=self.generator).to(self.dtype)

    def feed(self, rows, *spans, threads=1):
        replay = self.states.plan(Batch(list(spans)))
        with kernels.on_threads(threads):
            out = self.mixer(rows.clone(), self.states, lay_out(replay, self.states, len(rows)))
        self.states.commit(replay)
        return out

    def expected(self, path):
        """The last row's output [inner] of a sequence of inputs, in float64."""
        sizes, path = self.sizes, path.double()
        if self.kind == "conv":
            before, after, x = path.chunk(3, 1)
            return self.convolved((before * x).to(self.dtype).double())[-1] * after[-1]
        channels, heads, keys = sizes.channels, sizes.heads, sizes.groups * sizes.key_dim
        mixed = silu(self.convolved(path[:, :channels]))
        state = torch.zeros(heads, sizes.key_dim, sizes.value_dim, dtype=torch.float64)
        groups = [h % sizes.groups if sizes.tiled else h * sizes.groups // heads for h in range(heads)]
        for row, gates in zip(mixed, path[:, channels : channels + sizes.gates]):
            if self.kind == "delta":
                beta, a = torch.sigmoid(gates[:heads]), gates[heads:]
                decay = torch.exp(-self.decay.double().exp() * softplus(a + self.step))
                q, k = (side.view(sizes.groups, -1) for side in row[: 2 * keys].chunk(2))
                q, k = ((s / (s.square().sum(-1, keepdim=True) + 1e-6).sqrt())[groups] for s in (q, k))
                v = row[2 * keys :].view(heads, -1)
                state = state * decay[:, None, None]
                added = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
                state = state + k[:, :, None] * added[:, None]
                out = torch.einsum("hkv,hk->hv", state, q) / sizes.key_dim**0.5
            else:
                x = row[: sizes.inner].view(heads, -1)
                b, c = (side.view(sizes.groups, -1)[groups] for side in row[sizes.inner :].chunk(2))
                step = softplus(gates + self.step)
                state = state * torch.exp(-step * self.decay.double().exp())[:, None, None]
                state = state + (step[:, None] * b)[:, :, None] * x[:, None]
                out = torch.einsum("hkv,hk->hv", state, c) + self.skip.double()[:, None] * x
        gate = silu(path[-1, channels + sizes.gates :])
        if self.kind == "delta":
            return (normed(out) * self.norm).flatten() * gate
        return normed((out.flatten() * gate).view(sizes.groups, -1)).flatten() * self.norm

    def convolved(self, rows):
        padded = torch.cat([rows.new_zeros(self.sizes.columns, rows.shape[1]), rows])
        weight = self.weight[:, 0].double().T
        return sum(padded[i : i + len(rows)] * tap for i, tap in enumerate(weight)) + self.bias.double()


def normed(rows):
    return rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt()


TREE, PARENTS = [1] * 7, [-1, 0, 0, 1, 2, 2, 5]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("name", SIZES)
def test_every_path_in_float64(name, dtype, bound):
    """Prompts in chunks beside each other, a draft that is taken back, a tree whose accepted path stays."""
    layer = Layer(name, dtype)
    ours, others = layer.inputs(20), layer.inputs(9)

    def check(got, paths):
        expected = torch.stack([layer.expected(path) for path in paths])
        assert (got - expected).abs().max() < bound * expected.abs().max()

    batch = torch.cat([ours[:13], others[:5]])
    got = layer.feed(batch, Span(0, 0, [1] * 13, settled=13), Span(1, 0, [1] * 5, settled=4))
    check(got, [ours[: i + 1] for i in range(13)] + [others[: i + 1] for i in range(5)])
    got = layer.feed(ours[13:18], Span(0, 13, [1] * 5, settled=14))
    check(got, [ours[: i + 1] for i in range(13, 18)])
    nodes = layer.inputs(7)  # instead of the last two of them
    got = layer.feed(torch.cat([others[5:7], nodes]), Span(1, 5, [1] * 2), Span(0, 16, TREE, PARENTS, settled=17))
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 2, 5, 6]]
    check(got, [others[:6], others[:7], *(torch.cat([ours[:16], nodes[path]]) for path in paths)])
    layer.states.move(0, [18, 21, 22], [17, 18, 19])
    path = torch.cat([ours[:16], nodes[[0, 2, 5, 6]], ours[18:19]])
    check(layer.feed(path[-1:], Span(0, 20, [1], settled=21)), [path])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_bits_do_not_depend_on_what_is_fed_together(name, dtype):
    rows = Layer(name, dtype).inputs(40)
    alone = Layer(name, dtype)
    requested = torch.cat([alone.feed(rows[i : i + 1], Span(0, i, [1], settled=i + 1)) for i in range(40)])
    for size in (2, 7, 33, 40):
        for threads in (1, 2, 3):
            layer, got = Layer(name, dtype), []
            mates = layer.inputs(3)
            for start in range(0, 40, size):
                chunk = rows[start : start + size]
                span, mate = Span(0, start, [1] * len(chunk)), Span(1, 0, [1] * 3, settled=0)
                got.append(layer.feed(torch.cat([mates, chunk]), mate, span, threads=threads)[3:])
            assert torch.equal(torch.cat(got), requested)
            if size > 1:
                settled = layer.states.lengths[0]
                again = Layer(name, dtype)
                again.feed(rows[:settled], Span(0, 0, [1] * settled, settled=settled))
                for index, one in layer.states.checkpoints.items():
                    other = again.states.checkpoints[index]
                    assert torch.equal(one[layer.states.slots[0]], other[again.states.slots[0]])


@pytest.mark.parametrize("name", SIZES)
def test_a_state_is_stored_behind_an_entry_as_well(name):
    """And a sequence that begins with it goes on as the first one did."""
    rows = Layer(name).inputs(12)
    for settled in (12, 5):
        layer = Layer(name)
        slot = layer.states.allocate_kept()
        assert slot is not None
        layer.states.store_at(0, 5, slot)
        got = layer.feed(rows, Span(0, 0, [1] * 12, settled=settled), threads=2)
        assert layer.states.pop_stored(0) == [(5, slot)]
        layer.states.release(1)
        layer.states.start_from(1, slot, 5)
        layer.states.allocate(1)
        assert torch.equal(layer.feed(rows[5:], Span(1, 5, [1] * 7)), got[5:])


BAD_MIXERS = [
    {"kind": -1}, {"kind": 3}, {"columns": 0}, {"columns": 16}, {"columns": 2}, {"channels": 0}, {"channels": 1 << 40},
    {"conv": 0}, {"d_inner": 1}, {"heads": 0}, {"heads": 3}, {"groups": 0}, {"groups": 3}, {"key_dim": 0},
    {"key_dim": 6}, {"value_dim": -1}, {"gates": 1}, {"ssm_a": 0}, {"dt_bias": 0}, {"norm": 0},
]  # fmt: skip
BAD_REPLAYS = [
    {"runs": 0}, {"num_runs": 0}, {"num_runs": 1 << 40}, {"nodes": 2}, {"nodes": 4}, {"parents": 0}, {"rows": 0},
    {"copies": 0}, {"taps": 0}, {"columns": 2}, {"num_read": 0}, {"read": 0}, {"num_written": -1}, {"written": 0},
    {"written_rows": 0}, {"slots": 0}, {"records": 0}, {"records": 5},
]  # fmt: skip
BAD_LISTS = [
    (1, 0, 3), (1, 0, -1), (1, 1, 1), (1, 2, 4), (1, 2, -1), (1, 3, 3), (1, 3, -2), (2, 0, 0), (2, 1, -2), (2, 2, 2),
    (3, 0, 3), (3, 2, -2), (4, 0, 3), (4, 2, -2),
]  # fmt: skip
"""Which list, where in it, and a value that reaches elsewhere."""


def test_arguments_that_reach_elsewhere_are_refused():
    layer = Layer("delta")
    rows, out = layer.inputs(3), torch.empty(3, layer.sizes.inner)
    records, numbers = layer.states.records[0], layer.states.checkpoints[0]

    def run(**more):
        laid = lay_out(layer.states.plan(Batch([Span(0, 0, [1] * 3)])), layer.states, 3)
        kept, (name, changes) = laid.kept, more.get("change", ("", {}))
        mixer = array("q", layer.mixer.fields)
        for fields, kind in ((mixer, structs.MixerStruct), (kept[0], structs.ReplayStruct)):
            for field, value in changes.items() if name == kind.__name__ else ():
                fields[kind._fields.index(field)] = value
        if "at" in more:
            which, place, value = more["at"]
            kept[which][place] = value
        tensors = {"rows": rows, "records": records, "numbers": numbers, "out": out}
        at = {each: 0 if more.get("without") == each else tensor.data_ptr() for each, tensor in tensors.items()}
        layer.mixer.call(
            mixer.buffer_info()[0], laid.address, at["rows"], at["records"], at["numbers"], at["out"],
            more.get("count", 3), more.get("threads", 1),
        )  # fmt: skip

    run()
    cases = [{"change": ("MixerStruct", change)} for change in BAD_MIXERS]
    cases += [{"change": ("ReplayStruct", change)} for change in BAD_REPLAYS]
    cases += [{"at": each} for each in BAD_LISTS]
    cases += [{"without": each} for each in ("rows", "records", "numbers", "out")]
    cases += [{"count": 2}, {"count": 0}, {"count": -1}, {"threads": 0}]
    for case in cases:
        refused(KernelError, None, run, **case)
    refused(ValueError, "are needed", layer.feed, rows[:, 1:], Span(0, 0, [1] * 3))
