"""Compiles the kernels of GPUs without a GPU: ``python gpu_compile.py [CAPABILITY ...]``, such as 80 90 (the default).

Triton's interpreter accepts programs that its compiler refuses. Each kernel is called here as the engine calls it, and
what would be launched is compiled by Triton and ptxas instead. Nothing runs. The last lines name the shared memory that
each kernel takes at most; one that takes more than the GPU has is refused.
"""

import os
import sys
from math import inf
from types import SimpleNamespace
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from forerun.attention.base import Query
from forerun.attention.triton import Sizes, TritonAttention
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span
from forerun.kernels import gpu
from forerun.models.formats import triton as linears
from forerun.models.formats.blocks import Blocks
from forerun.models.formats.triton import make, quantized
from forerun.models.kinds import TRITON_KINDS
from forerun.models.run.rows import TritonNorm, rotate
from forerun.sampling import triton as sampling
from forerun.speculate.draft.graph_chain import Bucket

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
         torch.uint8: "u8", torch.int8: "i8"}  # fmt: skip
CAPABILITIES = [int(each) for each in sys.argv[1:]] or [80, 90]
SHARED = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may use."""
done = {}


def kind(value):
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    return {bool: "i1", int: "i32", float: "fp32"}[type(value)]


def compile_instead(self, *arguments, grid, warmup=False, **options):
    settings = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    given = {**dict(zip(self.arg_names, arguments)), **options}
    ones = {each.name for each in self.params if not each.do_not_specialize and type(given[each.name]) is int}
    constants = {
        each.name: given[each.name]
        for each in self.params
        if each.is_constexpr or (each.name in ones and given[each.name] == 1)
    }  # as Triton has it
    types = {name: "constexpr" if name in constants else kind(given[name]) for name in self.arg_names}
    for capability in CAPABILITIES:
        key = (self.__name__, capability, *types.values(), *constants.items(), *settings.items())
        if key in done:
            continue
        made = compile(ASTSource(self, types, constants), target=GPUTarget("cuda", capability, 32), options=settings)
        done[key] = made.metadata.shared
        if made.metadata.shared > SHARED.get(capability, 96 << 10):
            raise SystemExit(
                f"{self.__name__} takes {made.metadata.shared} bytes of shared memory on {capability}: {key}"
            )


def multiply(dtype):
    weight = torch.zeros(96, 768, dtype=dtype)
    six = Blocks("q6_k", np.zeros((96, 3 * 210), np.uint8), 768)
    layers = [make(weight, None), linears.kept([six], None, dtype, torch.device("cpu"))]
    for layer in [*layers, *(quantized(weight, None, name=name) for name in TRITON_KINDS)]:
        for rows in (5, 70):
            layer(torch.zeros(rows, 768, dtype=dtype))
        layer.absorb(TritonNorm(torch.ones(768), 1e-5, dtype), "silu")
        layer(torch.zeros(5, 768, dtype=dtype), torch.zeros(5, 48, dtype=dtype))
        if layer.numbers is None and layer.weight.kind != linears.OUTPUTS:
            layer.rows(torch.tensor([1]), dtype)


def attend(dtype, heads, kv_heads, width, parents, options, page_size=64):
    attention = TritonAttention(Pool([KVShape(kv_heads, width, width)], 8, page_size, dtype))
    tables = attention.begin(batch := Batch([Span(0, 0, [1, 2, 3, 4], parents)]))
    q, k = (torch.zeros(4, count, width, dtype=dtype) for count in (heads, kv_heads))
    attention.run(Query(0, q, k, k.clone(), 0.1, **options), tables)
    norm = torch.ones(heads, width), 1e-5, dtype
    TritonNorm(*norm, layer_norm=parents is None, bias=None if parents else norm[0])(q, q)
    rotate(q, torch.zeros(16, 1, width // 2, dtype=torch.complex64), batch.positions)


def draft(reduced, floor):
    graphs = SimpleNamespace(enabled=True)
    ids = torch.arange(100, dtype=torch.int32)
    runner = SimpleNamespace(most=1 if reduced else 3, steps=SimpleNamespace(size=100, graphs=graphs), floor=floor,
                             words=ids, ids=ids if reduced else None)  # fmt: skip
    bucket = Bucket(runner, Sizes(8, 8, 64, 0), torch.device("cpu"), None)
    with patch.object(sampling, "choose_rows", lambda scores, *_: torch.zeros(len(scores), 2, dtype=torch.int32)):
        bucket._choose(bucket.logits)


def main():
    with patch.object(JITFunction, "run", compile_instead), patch.object(gpu, "serves", lambda device: True):
        for dtype in (torch.bfloat16, torch.float32):
            multiply(dtype)
        attend(torch.bfloat16, 8, 2, 64, None, {})
        attend(torch.bfloat16, 8, 2, 128, [-1, -1, 0, 1], {"softcap": 3.0, "sinks": torch.zeros(8), "window": 9})
        attend(torch.float32, 3, 1, 64, [-1, -1, 0, 1], {})
        attend(torch.bfloat16, 2, 1, 64, [-1, -1, -1, -1], {"window": 1, "sink_tokens": 1}, page_size=1)
        for width in (256, 512):  # Gemma's
            attend(torch.bfloat16, 8, 1, width, [-1, -1, 0, 1], {})
        scores, words = torch.zeros(2, 10000), torch.zeros(10048, dtype=torch.int32)
        sampling.restrict(scores, [1.0, 0.5], [0.1, 0.9, 0, 1], [5, 0])
        sampling.TritonSampling(words).choose(scores, [1, None])
        draft(True, 0.0)
        draft(False, -inf)
    for name, capability in sorted({key[:2] for key in done}):
        most = max(size for key, size in done.items() if key[:2] == (name, capability))
        print(f"{name} on {capability}: at most {most:,} bytes of shared memory")
    print(f"{len(done)} kernels compiled for {', '.join(map(str, CAPABILITIES))}")


if __name__ == "__main__":
    main()
