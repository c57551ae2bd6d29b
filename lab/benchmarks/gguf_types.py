"""One row's share of the read bandwidth, and what several rows cost over one, for layers of each type of GGUF files.

python lab/benchmarks/gguf_types.py [--types iq4_xs,mxfp4] [--rows 5,8,16] [--turns 9] [--threads 1]

The layers of a type are 2,048 by 4,096 random weights, again and again in ``BYTES`` of memory. Types and rows
take turns; a ratio is of neighbours in one turn. Interval: 95 %, of the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import copy
from statistics import median
from time import perf_counter

import numpy as np
import torch

from forerun.measure.environment import processor, read_bandwidth
from forerun.models.formats import prefetch
from forerun.models.formats.blocks import Blocked, Blocks
from forerun.models.formats.compiled import arena
from forerun.models.formats.gguf_types import PACKED, bits_per_weight, sizes
from forerun_lab.intervals import shown

INPUTS, OUTPUTS = 2048, 4096
BYTES = 1 << 27


def layers(kind: str) -> list[Blocked]:
    of, size = sizes(kind)
    raw = np.random.default_rng(0).integers(0, 256, (OUTPUTS, INPUTS // of, size), np.uint8)
    if kind == "mxfp4":
        raw[..., 0] = 120  # numbers that are not denormal
    result = [Blocked(Blocks(kind, raw.reshape(OUTPUTS, -1), INPUTS), None)]
    while len(result) * result[0].nbytes < BYTES:
        copied = copy.copy(result[0])
        copied.tiles = arena.allocate(copied.nbytes)
        copied.tiles.copy_(result[0].tiles)
        copied.pointers = copied.tiles.data_ptr(), *result[0].pointers[1:]
        result.append(copied)
    return result


def seconds(parts: list[Blocked], x: torch.Tensor) -> float:
    began = perf_counter()
    for part in parts:
        part(x)
    return perf_counter() - began


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(PACKED))
    parser.add_argument("--rows", default="5,8,16")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    counts = [1, *map(int, given.rows.split(","))]
    x = torch.randn(counts[-1], INPUTS).bfloat16()
    kinds = {kind: layers(kind) for kind in given.types.split(",")}
    for parts in kinds.values():
        prefetch.autotune(parts, torch.bfloat16)
    bandwidth = read_bandwidth(torch.device("cpu"))
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(given.turns):
        for kind, parts in kinds.items():
            for count in counts:
                taken.setdefault((kind, count), []).append(seconds(parts, x[:count]))
    print(f"{processor()}, {given.threads} thread(s), {bandwidth / 1e9:.1f} GB/s")
    print(f"| type | bits a weight | of the bandwidth | {' | '.join(map(str, counts[1:]))} |")
    for kind, parts in kinds.items():
        one = taken[kind, 1]
        cells = [
            f"{bits_per_weight(kind)[1]:.3g}",
            f"{sum(part.nbytes for part in parts) / median(one) / bandwidth:.2f}",
        ]
        for count in counts[1:]:
            ratios = [some / each for some, each in zip(taken[kind, count], one, strict=True)]
            cells.append(shown(ratios))
        print(f"| {kind.upper()} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
