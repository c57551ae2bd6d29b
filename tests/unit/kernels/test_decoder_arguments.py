"""Decoders and layers that do not fit are refused at the border of compiled code, and the process lives on."""

import ctypes
from array import array
from contextlib import ExitStack, contextmanager

import pytest
import torch

from border import ALL_KERNELS, NOWHERE, call, with_each
from forerun import kernels
from forerun.core.batch import Batch, Span
from forerun.kernels import KernelError, structs
from forerun.models.formats.tiled import TiledLinear
from forerun.models.load import load_model
from forerun.models.run.base import new_attention
from forerun.models.run.parts import KernelEach
from refusals import refused

pytestmark = ALL_KERNELS


@pytest.fixture(scope="module")
def model(tiny_target):
    return load_model(tiny_target)


def decoding(model, **changes):
    """A decoder call's arguments, some of the fields of ``structs.Call`` changed."""
    attention = new_attention(model, max_seqs=2, max_len=32)
    batch = Batch([Span(0, 0, [5, 6, 7], logits=[0, 2])])
    fused = model.fused
    prepared = fused.prepare(batch, attention)
    call, *_ = prepared.kept
    for name, value in changes.items():
        call[structs.Call._fields.index(name)] = value
    return lambda: fused.call(*fused.addresses, prepared.address), prepared, batch, attention


BAD_CALLS = [
    {"rows": 0}, {"rows": -1}, {"rows": 4}, {"threads": 0}, {"ids": 0}, {"positions": 0}, {"angles": 0},
    {"num_angles": 2}, {"layer_ids": 0}, {"num_layer_ids": -1}, {"num_layer_ids": 1 << 40}, {"hidden_out": 0},
    {"logit_rows": 0}, {"num_logits": -1}, {"num_logits": 4}, {"workspace": 0}, {"workspace_size": 10}, {"logits": 0},
    {"kv": 0}, {"pools": 0}, {"plan": 0},
]  # fmt: skip


@pytest.mark.parametrize("change", BAD_CALLS, ids=str)
def test_a_decoder_refuses_what_it_would_misread(model, change):
    run, *_ = decoding(model)
    run()
    run, prepared, *_ = decoding(model, **change)
    refused(KernelError, None, run)
    assert prepared.logits.shape == (2, 98)


@pytest.mark.parametrize(
    ("which", "value"), [(0, -1), (0, 98), (1, -1), (1, 1 << 40), (2, -1), (2, 2), (4, 3), (4, -1)]
)
def test_a_decoder_refuses_ids_positions_layers_and_rows_out_of_range(model, which, value):
    run, prepared, *_ = decoding(model)
    run()
    with changed(prepared.kept[-1][which], 0, value), pytest.raises(KernelError):  # the list of layers is the model's
        run()


@pytest.fixture(scope="module")
def mixture(described):
    return load_model(described("mixtral"))


@contextmanager
def changed(fields, at, value):
    kept, fields[at] = fields[at], value
    try:
        yield
    finally:
        fields[at] = kept


def parts_of(fields, start, end):
    """Where in ``fields`` the linear layers from ``start`` to ``end`` have their fields, and which those are."""
    names = structs.LinearStruct._fields
    return [(at, names[(at - start) % len(names)]) for at in range(start, end)]


def refuses(run, cases):
    """Each is a list of fields, a place there, and a value that does not fit."""
    for fields, at, value in cases:
        with changed(fields, at, value), pytest.raises(KernelError):
            run()


def test_a_model_whose_parts_do_not_fit(model):
    run, *_ = decoding(model)
    run()
    layers = model.fused.layers
    cases = [(model.fused.model, at, value) for at, value in enumerate((3, 31, 63, 0, 0, 0, 0))]
    for at, name in parts_of(layers, len(structs.LayerStruct._fields), len(layers) // 2):
        if name in ("outputs", "inputs") or (name == "weight" and layers[at]):
            cases.append((layers, at, NOWHERE if name == "weight" else layers[at] - 1))
    refuses(run, cases)


BAD_LAYERS = [
    {"rotary": -2}, {"rotary": 1}, {"window": -1}, {"sink_tokens": -1}, {"norm_attention": 0, "norm_token": 1},
    {"width": 15}, {"width": 0}, {"kv_heads": 0}, {"kv_heads": 3}, {"has_kv": 2}, {"has_kv": 0}, {"kv_source": -1},
    {"kv_source": 1},
]  # fmt: skip
BAD_MODELS = [
    {"rotaries": -1}, {"rotaries": 0}, {"rotaries": 99}, {"activation": -1}, {"activation": 2},
    {"intermediate": 63}, {"norm_embedding": 1}, {"norm_given": 1},
]  # fmt: skip


def test_a_layer_whose_parts_do_not_fit(model):
    fused = model.fused
    cases = [(fused.model, structs.ModelStruct, BAD_MODELS), (fused.layers, structs.LayerStruct, BAD_LAYERS)]
    run, *_ = decoding(model)
    run()
    for fields, kind, changes in cases:
        for change in changes:
            run, *_ = decoding(model)
            with ExitStack() as stack:
                for name, value in change.items():
                    stack.enter_context(changed(fields, kind._fields.index(name), value))
                refused(KernelError, None, run)
    run, prepared, *_ = decoding(model)
    prepared.kept[-1][5][0] = NOWHERE  # a table of angles
    refused(KernelError, "null", run)


BAD_PER_LAYER = [
    {"per_layer_size": -1}, {"per_layer_size": 0}, {"per_layer_size": 9}, {"per_layer_norm": NOWHERE},
    {"per_layer_table": NOWHERE},
]  # fmt: skip
BAD_SHARES = [
    {"kv_source": 6}, {"kv_source": 2}, {"kv_source": -1}, {"has_kv": 1}, {"width": 16}, {"kv_heads": 1},
    {"norm_key": 1}, {"qk_norm_heads": 5}, {"qk_norm_heads": -1},
]  # fmt: skip


def test_layers_that_read_others_and_embeddings_that_do_not_fit(described):
    """The sixth layer reads the keys of the fourth."""
    model = load_model(described("gemma4"))
    fused, size = model.fused, len(model.fused.layers) // 6
    run, *_ = decoding(model)
    run()
    cases = [(fused.model, structs.ModelStruct, 0, BAD_PER_LAYER), (fused.layers, structs.LayerStruct, 5, BAD_SHARES)]
    bad = []
    for fields, kind, layer, changes in cases:
        items = [item for change in changes for item in change.items()]
        bad += [(fields, layer * size + kind._fields.index(name), value) for name, value in items]
    # It would read what nobody has stored, beside layers that store.
    bad.append((fused.layers, 5 * size + structs.LayerStruct._fields.index("kv_source"), 5))
    # No linear layer of the sixth fits any more.
    for at, name in parts_of(fused.layers, 5 * size + len(structs.LayerStruct._fields), 6 * size):
        if name in ("outputs", "inputs"):
            bad.append((fused.layers, at, fused.layers[at] - 1))
    refuses(run, bad)
    run()


def test_a_model_without_ends(model):
    """Its rows are given, its logits not asked for; its sums are the caller's, and may fail."""
    fused, line = model.fused, len(structs.LinearStruct._fields)
    head = len(structs.ModelStruct._fields)
    embedding = structs.ModelStruct._fields.index("embedding")
    x = torch.randn(3, fused.hidden)
    failing = kernels.ALL_REDUCE(lambda *_: 1)

    def run(**changes):
        attempt, *_ = decoding(model, **{"inputs_embeds": x.data_ptr(), "logits": 0, **changes})
        attempt()

    with ExitStack() as stack:
        stack.enter_context(changed(fused.model, embedding, NOWHERE))
        for at in range(head, head + line):
            stack.enter_context(changed(fused.model, at, 0))
        run()
        for change in ({"inputs_embeds": 0}, {"logits": x.data_ptr()}):
            refused(KernelError, "null", run, **change)
        refused(KernelError, "an all-reduce failed", run, all_reduce=ctypes.cast(failing, ctypes.c_void_p).value)
        outputs = head + structs.LinearStruct._fields.index("outputs")
        with changed(fused.model, outputs, 5), pytest.raises(KernelError, match="out of range"):
            run()
        token = structs.LayerStruct._fields.index("norm_token")
        with changed(fused.layers, token, x.data_ptr()), pytest.raises(KernelError, match="null"):
            run()
        mix = head + 2 * line + structs.LinearStruct._fields.index("weight")
        with changed(fused.model, mix, x.data_ptr()), pytest.raises(KernelError, match="null"):
            run()


BAD_EXPERTS = [
    {"size": 0}, {"size": 4}, {"size": 6}, {"size": -1}, {"first": -1}, {"first": 1}, {"first": 1 << 62},
    {"num_local": -1}, {"num_local": 6}, {"num_local": 1 << 62}, {"top_k": 0}, {"top_k": 6}, {"activation": -1},
    {"activation": 2}, {"layers": 0}, {"sigmoid": 2}, {"sigmoid": -1}, {"score_bias": 64}, {"groups": 0},
    {"groups": 2}, {"top_groups": 0}, {"top_groups": 2}, {"group_top_k": 0}, {"group_top_k": 6},
]  # fmt: skip


def test_experts_that_do_not_fit(mixture):
    """By themselves and within a decoder."""
    experts = mixture._layers[0].experts.compiled
    layers = experts.kept[2]
    router = len(structs.ExpertsStruct._fields)
    bad = [(experts.fields, structs.ExpertsStruct._fields.index(name), value)
           for change in BAD_EXPERTS for name, value in change.items()]  # fmt: skip
    for name, values in {"weight": [NOWHERE], "inputs": [0, -1, 1 << 40], "outputs": [0, 3, 1 << 40]}.items():
        at = structs.LinearStruct._fields.index(name)
        bad += [(experts.fields, router + at, value) for value in values]
        bad += [(layers, index + at, value) for index in range(0, len(layers), len(structs.LinearStruct._fields))
                for value in values]  # fmt: skip
    x = torch.randn(3, experts.inputs)
    run, *_ = decoding(mixture)
    run()
    assert experts(x)[0].isfinite().all()
    for fields, at, value in bad:
        with changed(fields, at, value):
            for attempt in (run, lambda: experts(x)):
                refused(KernelError, None, attempt)
    name = "moe_float32"
    to = torch.empty_like(x)
    read = array("q", [0])
    good = experts.address, x.data_ptr(), x.data_ptr(), to.data_ptr(), 3, 1, read.buffer_info()[0]
    call(name, *good)
    bad = {0: [None], 1: [None], 2: [None], 3: [None], 4: [-1, 1 << 40], 5: [0, 1 << 20], 6: [None]}
    for arguments in with_each(good, bad):
        refused(KernelError, None, call, name, *arguments)
    refused(ValueError, "64 inputs", experts, torch.randn(3, 63))
    refused(TypeError, "float64", experts, x.double())


def test_layers_of_heads_that_do_not_fit():
    layers = [TiledLinear(torch.randn(6, 4), None) for _ in range(3)]
    each, wide = KernelEach(layers, torch.float32), torch.randn(5, 3, 7)
    x = wide[:, :, 2:6]
    for rows in (x, x.contiguous(), x[:1]):
        parts = [layer(rows[:, i].contiguous()) for i, layer in enumerate(layers)]
        assert torch.equal(each(rows), torch.stack(parts, 1))
    to = torch.empty(5, 3, 6)
    good = each.fields.buffer_info()[0], 3, x.data_ptr(), 21, 7, to.data_ptr(), 18, 6, 5, 1
    call("project_each_float32", *good)
    unlike = {0: [None], 1: [0, -1, 1 << 40], 2: [None], 3: [-1], 4: [-1], 5: [None], 6: [5, -1], 7: [-1],
              8: [-1, 1 << 40], 9: [0, 1 << 20]}  # fmt: skip
    for arguments in with_each(good, unlike):
        refused(KernelError, None, call, "project_each_float32", *arguments)
    line = len(structs.LinearStruct._fields)
    for name, values in {"weight": [NOWHERE], "inputs": [0, 5], "outputs": [0, 7], "kind": [-1, 99]}.items():
        at = line + structs.LinearStruct._fields.index(name)
        refuses(lambda: each(x), [(each.fields, at, value) for value in values])
    for rows, error in ((x.double(), TypeError), (x[:, :2], ValueError), (x[:, :, :3], ValueError)):
        refused(error, "layers", each, rows)
    refused(ValueError, "not of one size", KernelEach, [*layers, TiledLinear(torch.randn(5, 4), None)], torch.float32)


BAD_LATENTS = [
    {"kv_lora_rank": 22}, {"kv_lora_rank": 0}, {"kv_lora_rank": 1 << 40}, {"q_lora_rank": 19}, {"q_lora_rank": -1},
    {"q_lora_rank": 0}, {"nope_dim": 13}, {"rope_dim": 6}, {"v_dim": 11}, {"kv_a_norm": 0}, {"q_a_norm": 0},
    {"k_b": 0}, {"v_b": 0},
]  # fmt: skip


def test_latents_that_do_not_fit(described):
    model = load_model(described("deepseek_v3"))
    run, _, _, attention = decoding(model)
    run()
    own, line = model.fused.extra_fields[1][1], structs.LinearStruct._fields
    bad = [(own, structs.LatentStruct._fields.index(name), value) for change in BAD_LATENTS
           for name, value in change.items()]  # fmt: skip
    up, heads = len(structs.LatentStruct._fields), model._layers[1].latent.k_b.compiled.fields
    bad += [(own, up + line.index("outputs"), 79), (own, up + line.index("weight"), NOWHERE)]
    bad += [
        (heads, 3 * len(line) + line.index(name), value) for name, value in {"inputs": 13, "weight": NOWHERE}.items()
    ]
    for name in ("gated", "norm_qk", "norm_token"):
        at = len(model.fused.layers) // len(model._layers)  # the second layer
        bad.append((model.fused.layers, at + structs.LayerStruct._fields.index(name), 1))
    sizes = {"width": 30, "value_width": 22, "kv_heads": 2}
    bad += [(attention._shapes, structs.PoolStruct._fields.index(name), value) for name, value in sizes.items()]
    refuses(run, bad)
    run()


def test_layers_with_state_that_do_not_fit(described):
    model = load_model(described("qwen3_5"))
    fused, mixer = model.fused, model._layers[0].mixer
    run, prepared, _, attention = decoding(model)
    run()
    for change in ({"replay": 0}, {"states": 0}):
        attempt, *_ = decoding(model, **change)
        refused(KernelError, "null", attempt)
    held = prepared.kept[-2]
    for at in (0, 1):  # records and checkpoints of the first layer; attention has neither
        with changed(held, at, NOWHERE), pytest.raises(KernelError, match="null"):
            run()
    own = [
        (mixer.fields, structs.MixerStruct._fields.index(name), value) for name, value in (("heads", 1), ("columns", 2))
    ]
    layers = [
        (fused.layers, structs.LayerStruct._fields.index(name), value) for name, value in (("gated", 1), ("mixer", 0))
    ]
    refuses(run, own + layers)
    chains = array("q", [0] * len(structs.Chains._fields))
    refused(KernelError, "unknown kind", fused.draft, *fused.addresses, prepared.address, chains.buffer_info()[0])
    attention.pool.states = None
    refused(ValueError, "states are not those of these layers", fused.prepare, Batch([Span(0, 0, [5])]), attention)
