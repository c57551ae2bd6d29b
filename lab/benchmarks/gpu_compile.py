"""Compiles the kernels of GPUs without a GPU: ``python gpu_compile.py [quick] [CAPABILITY ...]``, 80 and 90 by default.

Triton's interpreter accepts programs that its compiler refuses. Each kernel is called here as the engine calls it, with
the shapes of ``gpu_check.py``, and Triton compiles what it would launch, with ptxas. Nothing runs. For each kernel a
line has the most shared memory, registers, and bytes of stack (into which registers spill). It fails where one takes
more shared memory than the GPU has, and where forms of one sum have different orders: a chain's and a tree's attention,
or one matrix's products of few and of many rows, and with other tiles. ``quick``: a tenth of them.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
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

QUICK = "quick" in sys.argv
CAPABILITIES = [int(each) for each in sys.argv[1:] if each != "quick"] or [80, 90]
SHARED = {80: 163, 87: 163, 90: 227, 100: 227}
"""KB of shared memory that a program may use, where it is not 99."""
LAYERS = ((3072, 2048, True, "", False), (2048, 2048, False, "", True), (16384, 2048, True, "silu", False),
          (2048, 8192, False, "", True), (128256, 2048, False, "", False))  # fmt: skip
"""Outputs, inputs, norm, gate and residual of Llama-3.2-1B's layers."""
run, group, made, orders, failures = JITFunction.run, "", {}, defaultdict(set), []


class NoGPU:
    """Stands for the driver of a GPU, whose number is its capability."""

    capability = 0

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def shared_memory(self):
        return SHARED.get(self.capability, 99) << 10


def compile_only(kernel, *arguments, grid, warmup=False, **options):
    on = driver.active
    compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
    made[compiled.hash] = f"{kernel.__name__} on {on.capability}", compiled
    if compiled.metadata.shared > on.shared_memory():
        failures.append(f"{kernel.__name__} takes {compiled.metadata.shared} bytes of shared memory on {on.capability}")
    orders[kernel.__name__, group or compiled.hash, on.capability].add(order(compiled.asm["ttgir"]))


def order(text):
    """How products and sums of floats are laid out over threads: as much of it as their order depends on."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    sums = re.findall(r"arith\.addf.*\n.*\n\s*\}\) : \((tensor<.*?>)\) ->", text)
    products = re.findall(r"(?:tt\.dot|warp_group_dot) .* : (tensor<.*)", text)

    def written(kind, along):
        for _ in range(3):
            kind = re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), kind)
        kind = re.sub(r"loc\(.*|tensor<[\dx]*", "", kind)
        return re.sub(r"warpsPerCTA = \[\d+, (\d+)\]", along, kind)

    return frozenset([*(written(each, r"warps \1") for each in sums), *(written(each, "") for each in products)])


def multiply(dtype):
    global group
    weight = torch.zeros(96, 768, dtype=dtype)
    six = Blocks("q6_k", np.zeros((96, 3 * 210), np.uint8), 768)
    layers = [make(weight, None), linears.kept(six, None, dtype, torch.device("cpu"))]
    for number, layer in enumerate([*layers, *(quantized(weight, None, name=name) for name in TRITON_KINDS)]):
        group = f"kind {number} {dtype}"
        for rows in (5, 70):
            layer(torch.zeros(rows, 768, dtype=dtype))
        group = f"{group} with norm"
        layer.absorb(TritonNorm(torch.ones(768), 1e-5, dtype), "silu")
        layer(torch.zeros(5, 768, dtype=dtype), torch.zeros(5, 48, dtype=dtype))
        group = ""
        if layer.numbers is None and layer.weight.kind != linears.OUTPUTS:
            layer.rows(torch.tensor([1]), dtype)


def multiply_large(dtype=torch.bfloat16):
    """Every tile of a large model's layers. Their weights are not there: nothing reads them."""
    global group
    for outputs, inputs, norm, gate, add in LAYERS[:1] if QUICK else LAYERS:
        few = torch.zeros(64, inputs, dtype=dtype)
        for number, layer in enumerate([make(few, None), *([] if QUICK else [quantized(few, None, name="q4_0")])]):
            group = f"{outputs} x {inputs} {number}"
            layer.weight = replace(layer.weight, outputs=outputs)
            if not layer.absorb(TritonNorm(torch.ones(inputs), 1e-5, dtype) if norm else None, gate):
                layer._plan()
            for tile in layer.usable_tiles():
                layer.tile = tile
                for rows in (5, 70):
                    residual = torch.zeros(rows, layer.outputs, dtype=dtype) if add else None
                    layer(torch.zeros(rows, inputs, dtype=dtype), residual)
    group = ""


def attend(dtype, heads, kv_heads, width, options, page_size=64):
    global group
    group = f"attention {dtype} {heads} {kv_heads} {width} {options}"
    for parents in (None, [-1, -1, 0, 1]):
        attention = TritonAttention(Pool([KVShape(kv_heads, width, width)], 8, page_size, dtype))
        tables = attention.begin(batch := Batch([Span(0, 0, [1, 2, 3, 4], parents)]))
        q, k = (torch.zeros(4, count, width, dtype=dtype) for count in (heads, kv_heads))
        attention.run(Query(0, q, k, k.clone(), 0.1, **options), tables)
    group = ""
    norm = torch.ones(heads, width), 1e-5, dtype
    TritonNorm(*norm, layer_norm=not options, bias=None if options else norm[0])(q, q)
    rotate(q, torch.zeros(16, 1, width // 2, dtype=torch.complex64), batch.positions)


def draft(reduced, floor):
    graphs = SimpleNamespace(enabled=True)
    ids = torch.arange(100, dtype=torch.int32)
    runner = SimpleNamespace(most=1 if reduced else 3, steps=SimpleNamespace(size=100, graphs=graphs), floor=floor,
                             words=ids, ids=ids if reduced else None)  # fmt: skip
    bucket = Bucket(runner, Sizes(8, 8, 64, 0), torch.device("cpu"), None)
    with patch.object(sampling, "choose_rows", lambda scores, *_: torch.zeros(len(scores), 2, dtype=torch.int32)):
        bucket._choose(bucket.logits)


def compile_all():
    multiply_large()
    attend(torch.bfloat16, 32, 8, 64, {})
    for size in (100, 10000, 128256):
        scores, words = torch.zeros(2, size), torch.zeros(size, dtype=torch.int32)
        sampling.restrict(scores, [1.0, 0.5], [0.1, 0.9, 0, 1], [5, 0])
        sampling.choose_rows(scores, words, torch.zeros(2, 3, dtype=torch.int32))
    draft(True, 0.0)
    draft(False, -inf)
    if QUICK:
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        multiply(dtype)
        attend(dtype, 4, 2, 64, {})
    attend(torch.bfloat16, 8, 2, 128, {"softcap": 3.0, "sinks": torch.zeros(8), "window": 9})
    attend(torch.float32, 3, 1, 64, {})
    attend(torch.bfloat16, 2, 1, 64, {"window": 1, "sink_tokens": 1}, page_size=1)
    for width in (256, 512):  # Gemma's
        attend(torch.bfloat16, 8, 1, width, {})
        attend(torch.float32, 8, 1, width, {})


def registers(compiled):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", said).groups()]


def main():
    driver.set_active(NoGPU())
    instead = patch.object(linears, "shared_memory", lambda _: driver.active.shared_memory() - linears.RESERVED_SHARED)
    with instead, patch.object(JITFunction, "run", compile_only), patch.object(gpu, "serves", lambda device: True):
        for driver.active.capability in CAPABILITIES:
            compile_all()
    most = defaultdict(list)
    for name, compiled in made.values():
        most[name].append([compiled.metadata.shared, *registers(compiled)])
    for name, each in sorted(most.items()):
        shared, used, stack = map(max, zip(*each))
        print(
            f"{name}: {len(each)} kernels, at most {shared:,} bytes of shared memory, {used} registers, {stack} stack"
        )
    for (name, about, capability), found in orders.items():
        failures.extend([f"{name} on {capability} has sums in {len(found)} orders: {about}"] if len(found) > 1 else [])
    print(f"{len(made)} kernels compiled for {', '.join(map(str, CAPABILITIES))}", *failures, sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
