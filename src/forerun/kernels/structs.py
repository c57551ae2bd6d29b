"""What crosses into the kernels as arrays of int64, a field each: ``structs.h`` names the same fields in the same
order, and says what they mean; ``library`` compares the names. Other things go behind: a ``LayerStruct`` is followed by
the ``LinearStruct`` of qkv, out, enter, leave, gate_up, down, to_inputs and from_inputs, ``ExpertsStruct`` by the
router's, ``LatentStruct`` by that of queries, a ``ModelStruct`` by those of the head, the embedding, the mix, the table
and the projection to its rows. Pointers are addresses, 0 for null; numbers that are not whole go through ``number``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class SpanStruct(NamedTuple):
    first: int
    rows: int
    base: int
    before: int
    table: int
    paths: int


class Plan(NamedTuple):
    spans: int
    num_spans: int
    tables: int
    num_tables: int
    paths: int
    num_paths: int
    entries: int
    num_entries: int


class PoolStruct(NamedTuple):
    pages: int
    page_size: int
    kv_heads: int
    width: int
    value_width: int
    key_page: int
    key_head: int
    key_slot: int
    value_page: int
    value_head: int
    value_slot: int


class Heads(NamedTuple):
    heads: int
    window: int
    q_stride: int
    k_stride: int
    v_stride: int
    bias: int
    reach: int
    sinks: int


class LinearStruct(NamedTuple):
    kind: int
    weight: int
    bias: int
    scales: int
    offsets: int
    outputs: int
    inputs: int
    next: int


class ExpertsStruct(NamedTuple):
    size: int
    first: int
    here: int
    chosen: int
    normalised: int
    sigmoid: int
    correction: int
    factor: int
    eps: int
    groups: int
    kept: int
    best: int
    activation: int
    gated: int
    numbers: int
    layers: int
    scales: int = 0


class LatentStruct(NamedTuple):
    rank: int
    query_rank: int
    plain: int
    turned: int
    value: int
    norm_query: int
    norm: int
    eps: int
    keys: int
    values: int


class MixerStruct(NamedTuple):
    kind: int
    channels: int
    columns: int
    inner: int
    gates: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    tiled: int
    conv: int
    bias: int
    decay: int
    step: int
    skip: int
    norm: int
    eps: int


class RunStruct(NamedTuple):
    slot: int
    first: int
    nodes: int
    settled: int


class ReplayStruct(NamedTuple):
    runs: int
    num_runs: int
    nodes: int
    before: int
    rows: int
    copies: int
    taps: int
    columns: int
    read: int
    num_read: int
    written: int
    kept: int
    num_written: int
    slots: int
    records: int


class LayerStruct(NamedTuple):
    norm_attention: int
    norm_qk: int
    norm_query: int
    norm_key: int
    after_attention: int
    norm_mlp: int
    after_mlp: int
    norm_token: int
    rotary: int
    window: int
    experts: int
    numbers: int
    sinks: int
    gated: int
    mixer: int
    latent: int
    share: int
    width: int
    kv_heads: int
    stores: int
    source: int
    normed: int
    norm_experts: int
    norm_router: int
    after_experts: int
    after_beside: int
    after_inputs: int
    scale: int


class ModelStruct(NamedTuple):
    heads: int
    hidden: int
    inner: int
    layers: int
    known: int
    embedding: int
    norm: int
    rotaries: int
    activation: int
    gated: int
    centred: int
    parallel: int
    norm_rotated: int
    query_reach: int
    inputs: int
    table: int
    norm_inputs: int
    eps: int
    scale: int
    softcap: int
    logits_softcap: int
    embedding_scale: int
    residual_scale: int
    logits_scale: int
    query_growth: int
    table_scale: int


class Call(NamedTuple):
    rows: int
    threads: int
    ids: int
    given: int
    positions: int
    angles: int
    num_angles: int
    which: int
    num_which: int
    keep: int
    rows_out: int
    num_out: int
    workspace: int
    workspace_size: int
    logits: int
    sides: int
    pools: int
    plan: int
    sum: int
    replay: int
    states: int
    experts: int


class Chains(NamedTuple):
    sequences: int
    longest: int
    depths: int
    starts: int
    tables: int
    temperatures: int
    thresholds: int
    top_ks: int
    words: int
    names: int
    keys: int
    quantiles: int
    tokens: int
    q: int
    num_ids: int
    feeds: int
    floor: int


QUANTS = {
    "q4_0": (32, 288), "q4_1": (32, 320), "q4_k": (256, 2368), "q5_0": (32, 544), "q5_1": (32, 576),
    "q5_k": (256, 4416), "q6_k": (256, 4384), "q8_0": (32, 544), "iq4_nl": (32, 288), "iq4_xs": (256, 2208),
    "mxfp4": (32, 272), "q2_k": (256, 1344), "q3_k": (256, 1824), "codes": (256, 2384),
}  # fmt: skip
"""Weights in 2 to 8 bits with scales by blocks: inputs and bytes of a record of 16 outputs; ``quants.h`` says how they
lie."""
KINDS = ("own", "int8", *QUANTS)
"""How a layer's weights lie, by ``LinearStruct.kind``; ``own``: in the dtype of the rows."""
ACTIVATIONS = ("silu", "gelu_tanh", "xielu", "clamped", "sigmoid", "relu2")
MIXERS = ("conv", "delta", "mamba")
NO_LAYER = LinearStruct(*[0] * len(LinearStruct._fields))


def number(value: float) -> int:
    """A field that is a double."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _layout() -> str:
    structs = (
        SpanStruct, Plan, PoolStruct, Heads, LinearStruct, ExpertsStruct, LatentStruct, MixerStruct, RunStruct,
        ReplayStruct, LayerStruct, ModelStruct, Call, Chains,
    )  # fmt: skip
    sizes = (f"{name} {inputs} {size}" for name, (inputs, size) in QUANTS.items())
    lines = [(each.__name__.removesuffix("Struct"), *each._fields) for each in structs]
    words = ("Activations", *ACTIVATIONS), ("Mixers", *MIXERS)
    return "\n".join(map(" ".join, [*lines, ("Kinds own int8", *sizes), *words]))


LAYOUT = _layout()
