"""Weights that a checkpoint holds in 4 or 8 bits: AWQ, GPTQ, compressed-tensors, FP8 and MXFP4.

Levels in 4 bits become ``q4_0`` where every zero is in the middle, else ``q4_1``, whose minimum (scale times zero) is
rounded to float16; 8 bits become ``q8_0``, or ``int8_rows`` with a scale per output. What these cannot hold (groups of
other sizes than multiples of 32, inputs in another order than their groups, FP8) is expanded to numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from forerun.core.errors import ModelError, shown
from forerun.models.formats.base import LazyRows, Rows
from forerun.models.formats.blocks import Blocks, LazyBytes
from forerun.models.formats.int8 import Levels

AWQ_SHIFTS = tuple(4 * place for place in (0, 4, 1, 5, 2, 6, 3, 7))
"""Where the levels of eight outputs lie in 32 bits, as AWQ's kernels want them."""
SHIFTS = {4: tuple(range(0, 32, 4)), 8: tuple(range(0, 32, 8))}
MIDDLE = {4: 8, 8: 128}
"""The level that stands for 0 where there are no zeros of their own."""
BLOCK = 32
INDICES = (torch.int32, torch.int64)
NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
HELD: Mapping[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), ((torch.int32,), (2,))),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), (INDICES, (1,))),
    **dict.fromkeys(("weight_scale", "weight_scale_inv"), (NUMBERS, (0, 1, 2))),
    "mxfp4_blocks": ((torch.uint8,), (3,)), "mxfp4_scales": ((torch.uint8,), (2,)), "scales": (NUMBERS, (2,)),
    "weight": (BYTES, (2,)), "weight_zero_point": ((*INDICES, torch.int8), (0, 1, 2)),
}  # fmt: skip
"""What the parts of a layer are held in, and how many dimensions they have."""
Tensors = Mapping[str, torch.Tensor]
"""Of one layer, by the ends of their names."""


def unpacked(words: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """int32 [a, b] -> uint8 [a, b levels of each]: the levels of a word side by side."""
    mask = 0xF if len(shifts) == 8 else 0xFF
    parts = torch.empty(*words.shape, len(shifts), dtype=torch.uint8)
    for place, shift in enumerate(shifts):
        parts[..., place] = words >> shift & mask
    return parts.flatten(-2)


@dataclass(frozen=True)
class Unpacked:
    """Levels uint8 [outputs, inputs] and zeros [outputs, groups]."""

    levels: torch.Tensor
    zeros: torch.Tensor


class Grouped:
    """scale * (level - zero) by groups of inputs. ``open`` brings levels and zeros when they are needed; ``scales``
    [outputs, groups]; ``groups`` says to which group each input belongs, None: so many inputs after each other."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        open: Callable[[], Unpacked],
        scales: torch.Tensor,
        groups: torch.Tensor | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.bits, self.nbytes = bits, self.shape.numel() * bits // 8
        self.open = open
        self.scales = scales.float()
        self.size = shape[1] // scales.shape[1]
        usual = torch.arange(shape[1]) // self.size
        self.groups = usual if groups is None else groups.long()
        self.ordered = torch.equal(self.groups, usual)

    @cached_property
    def held(self) -> Unpacked:
        return self.open()

    def close(self) -> None:
        """Forget what was opened."""
        self.__dict__.pop("held", None)

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        result = self.held
        zeros, scales = result.zeros[rows].float()[:, self.groups], self.scales[rows][:, self.groups]
        return (result.levels[rows].float() - zeros) * scales

    def blocks(self) -> Blocks | Levels | None:
        result, middle = self.held, MIDDLE[self.bits]
        centred = bool((result.zeros == middle).all())
        if self.bits == 8 and centred and self.scales.shape[1] == 1:
            return Levels((result.levels.short() - middle).to(torch.int8), self.scales[:, 0].contiguous())
        scales = self.scales.half()
        lost = ~scales.isfinite() | ((scales == 0) != (self.scales == 0))
        if not self.ordered or self.size % BLOCK or bool(lost.any()) or (self.bits == 8 and not centred):
            return None
        levels = result.levels.view(len(result.levels), -1, BLOCK).numpy()
        heads = [self._by_blocks(scales)]
        if self.bits == 8:
            return _packed("q8_0", heads, levels ^ 128, self.shape[1])
        if not centred:
            heads.append(self._by_blocks((-self.scales * result.zeros.float()).half()))
        nibbles = levels[..., :16] | levels[..., 16:] << 4
        return _packed("q4_0" if centred else "q4_1", heads, nibbles, self.shape[1])

    def _by_blocks(self, numbers: torch.Tensor) -> np.ndarray:
        """float16 [outputs, groups] as bytes [outputs, blocks, 2]."""
        repeated = numbers.repeat_interleave(self.size // BLOCK, dim=1).numpy()
        return repeated.view(np.uint8).reshape(*repeated.shape, 2)


def _packed(kind: str, heads: list[np.ndarray], levels: np.ndarray, inputs: int) -> Blocks:
    return Blocks(kind, np.concatenate([*heads, levels], axis=-1).reshape(len(levels), -1), inputs)


def _scaled(numbers: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int]) -> Rows:
    """Numbers in 8 bits times scales of tiles of them: [rows of tiles, columns of tiles], or one."""
    scales = scales.float()
    down, along = (torch.arange(count) // size for count, size in zip(numbers.shape, tile))

    def make(rows: slice | torch.Tensor) -> torch.Tensor:
        return numbers[rows].float() * scales[down[rows]][:, along]

    return LazyRows(numbers.shape, make, numbers.nbytes)


def _awq(result: Tensors, config: Mapping[str, Any]) -> Rows:
    words, zeros, scales = result["qweight"], result["qzeros"], result["scales"]
    inputs, outputs = words.shape[0], words.shape[1] * 8
    _fits(scales, (None, outputs), inputs)
    _fits(zeros, (scales.shape[0], outputs // 8))

    def open() -> Unpacked:
        return Unpacked(unpacked(words, AWQ_SHIFTS).T.contiguous(), unpacked(zeros, AWQ_SHIFTS).T)

    return Grouped((outputs, inputs), 4, open, scales.T)


def _gptq(result: Tensors, config: Mapping[str, Any]) -> Rows:
    words, zeros, scales = result["qweight"], result["qzeros"], result["scales"]
    inputs, outputs = words.shape[0] * 8, words.shape[1]
    _fits(scales, (None, outputs), inputs)
    _fits(zeros, (scales.shape[0], outputs // 8))
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1  # the first version holds zeros less one
    groups = _groups(result.get("g_idx"), inputs, scales.shape[0])

    def open() -> Unpacked:
        return Unpacked(unpacked(words.T, SHIFTS[4]), (unpacked(zeros, SHIFTS[4]) + less & 15).T)

    return Grouped((outputs, inputs), 4, open, scales.T, groups)


def _compressed(result: Tensors, config: Mapping[str, Any]) -> Rows:
    scales = result["weight_scale"]
    if "weight_packed" not in result:
        return _whole(result["weight"], scales, result.get("weight_zero_point"))
    bits = _bits(config)
    _fits(result["weight_shape"], (2,))
    outputs, inputs = (int(size) for size in result["weight_shape"].tolist())
    words, zeros = result["weight_packed"], result.get("weight_zero_point")
    _fits(words, (outputs, -(-inputs * bits // 32)))
    _fits(scales, (outputs, None), inputs)
    if zeros is not None:
        _fits(zeros, (-(-outputs * bits // 32), scales.shape[1]))

    def open() -> Unpacked:
        levels = unpacked(words, SHIFTS[bits])[:, :inputs].contiguous()
        if zeros is None:
            return Unpacked(levels, torch.full(scales.shape, MIDDLE[bits]))
        return Unpacked(levels, unpacked(zeros.T, SHIFTS[bits]).T[:outputs])

    return Grouped((outputs, inputs), bits, open, scales, _groups(result.get("weight_g_idx"), inputs, scales.shape[1]))


def _whole(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Rows:
    """Weights in bytes, integers or FP8."""
    outputs, inputs = weight.shape
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
    scales = scales[:, None] if scales.dim() == 1 else scales
    if weight.dtype is not torch.int8:
        if outputs % scales.shape[0] or inputs % scales.shape[1]:
            raise ValueError(f"its scales are {[*scales.shape]}")
        return _scaled(weight, scales, (outputs // scales.shape[0], inputs // scales.shape[1]))
    scales = scales.expand(outputs, -1) if len(scales) == 1 else scales
    _fits(scales, (outputs, None), inputs)
    if zeros is not None:
        zeros = zeros.reshape(-1, 1) if zeros.numel() in (1, outputs) else zeros
        if zeros.shape != scales.shape and zeros.shape[1:] != (1,):
            raise ValueError(f"its zeros are {[*zeros.shape]}")
        zeros = zeros.expand(scales.shape).short() + MIDDLE[8]

    def open() -> Unpacked:
        middle = torch.full(scales.shape, MIDDLE[8]) if zeros is None else zeros
        return Unpacked((weight.short() + MIDDLE[8]).to(torch.uint8), middle)

    return Grouped((outputs, inputs), 8, open, scales)


def _fp8(result: Tensors, config: Mapping[str, Any]) -> Rows:
    weight = result["weight"]
    scales = result["weight_scale_inv"] if "weight_scale_inv" in result else result["weight_scale"]
    tile = config.get("weight_block_size")
    if not isinstance(tile, (list, tuple)):
        return _whole(weight, scales, None)
    if len(tile) != 2 or not all(type(size) is int and size > 0 for size in tile):
        raise ValueError(f"weight_block_size is {shown(tile)}, not two sizes")
    rows, columns = tile
    _fits(scales, (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)))
    return _scaled(weight, scales, (rows, columns))


def _bits(config: Mapping[str, Any]) -> int:
    groups = config.get("config_groups")
    weights = [
        group.get("weights") if isinstance(group, Mapping) else None
        for group in (groups.values() if isinstance(groups, Mapping) else ())
    ]
    result = [part.get("num_bits") if isinstance(part, Mapping) else None for part in weights]
    if not result or result[0] not in (4, 8) or any(bits != result[0] for bits in result):
        raise ValueError(f"weights of {shown(result)} bits; 4 or 8 in all layers are read")
    return int(result[0])


def _groups(groups: torch.Tensor | None, inputs: int, count: int) -> torch.Tensor | None:
    """To which of so many groups each input belongs, where that is given."""
    if groups is not None:
        _fits(groups, (inputs,))
        if not bool(((groups >= 0) & (groups < count)).all()):
            raise ValueError("it names groups (g_idx) that there are not")
    return groups


def _held(parts: Tensors) -> None:
    """Raise ValueError for a part that is empty, or is not held as such parts are."""
    for end, part in parts.items():
        kinds, dimensions = HELD.get(end, ((part.dtype,), (part.dim(),)))
        if not part.numel() or part.dtype not in kinds or part.dim() not in dimensions:
            raise ValueError(f"its {end} is {[*part.shape]} of {str(part.dtype).removeprefix('torch.')}")


def _fits(tensor: torch.Tensor, shape: tuple[int | None, ...], inputs: int | None = None) -> None:
    """Raise ValueError unless a tensor has such a shape, and, where it says how many groups there are, ``inputs`` fall
    into so many."""
    if len(tensor.shape) != len(shape) or any(size not in (None, own) for own, size in zip(tensor.shape, shape)):
        raise ValueError(f"a part of it is {[*tensor.shape]}")
    groups = next((own for own, size in zip(tensor.shape, shape) if size is None), 1)
    if inputs is not None and (not groups or inputs % groups):
        raise ValueError(f"{inputs} inputs in {groups} groups")


@dataclass(frozen=True)
class Scheme:
    """``marks``: the ends of names, one of which every such weight has; ``parts``: of those that belong to it."""

    name: str
    make: Callable[[Tensors, Mapping[str, Any]], Rows]
    marks: tuple[str, ...]
    parts: tuple[str, ...]


def _mxfp4(result: Tensors, config: Mapping[str, Any]) -> Rows:
    """Numbers in 4 bits (E2M1) by blocks of 32 that share a power of two (OCP MX 1.0): blocks uint8 [outputs, blocks,
    16], neighbours in a byte, and scales uint8 [outputs, blocks]. GGUF's bytes hold two numbers half a block apart."""
    blocks, scales = result["mxfp4_blocks"], result["mxfp4_scales"]
    _fits(blocks, (*scales.shape, 16))

    def make(rows: Any) -> np.ndarray:
        levels = blocks[rows]
        each = torch.stack([levels & 15, levels >> 4], -1).flatten(-2)
        together = torch.cat([scales[rows][..., None], each[..., :16] | each[..., 16:] << 4], -1)
        return together.flatten(1).numpy()

    return Blocks("mxfp4", LazyBytes(len(blocks), make), blocks.shape[1] * BLOCK)


_GPTQ = Scheme("GPTQ", _gptq, ("qweight",), ("qweight", "qzeros", "scales", "g_idx"))
_FP8 = Scheme(
    "FP8", _fp8, ("weight_scale_inv", "weight_scale"),
    ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
)  # fmt: skip
_COMPRESSED = Scheme(
    "compressed-tensors", _compressed, ("weight_packed", "weight_scale"),
    ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
     "input_zero_point", "output_scale"),
)  # fmt: skip
SCHEMES = {
    "awq": Scheme("AWQ", _awq, ("qweight",), ("qweight", "qzeros", "scales")), "gptq": _GPTQ, "fp8": _FP8,
    "fbgemm_fp8": _FP8, "compressed-tensors": _COMPRESSED,
    "mxfp4": Scheme("MXFP4", _mxfp4, ("mxfp4_blocks",), ("mxfp4_blocks", "mxfp4_scales")),
}  # fmt: skip
"""By ``quant_method`` in configs."""
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Of compressed-tensors."""


def refusal(config: Any) -> str | None:
    """Why weights of such a ``quantization_config`` are not read; None: they are."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str) or method not in SCHEMES:
        return "which forerun does not read"
    if method in ("awq", "gptq") and config.get("bits", config.get("w_bit", 4)) != 4:
        return "of which only 4 bits are read"
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        return f"of version {shown(config['version'])}, of which only gemm is read"
    if method == "gptq" and config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        return f"in the format {shown(config['checkpoint_format'])}, which forerun does not read"
    if method == "compressed-tensors":
        sparse = config.get("sparsity_config")
        if config.get("format") not in FORMATS or config.get("transform_config"):
            return f"in the format {shown(config.get('format'))}, which forerun does not read"
        if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
            return "and sparse, which forerun does not read"
    return None


def gather(tensors: dict[str, torch.Tensor], config: Mapping[str, Any], place: str) -> dict[str, Rows]:
    """Tensors by name, with a weight in place of the parts of each quantized one. Raises ModelError for parts that are
    missing or do not fit; ``place`` begins it."""
    scheme = SCHEMES[config["quant_method"]]
    if not any(name.rpartition(".")[2] in scheme.marks for name in tensors):
        raise ModelError(f"{place} holds no {scheme.name} weights, though its config says so")
    stems = {stem for stem, _, end in (name.rpartition(".") for name in tensors) if end in scheme.marks}
    result: dict[str, Rows] = {}
    used: set[str] = set()
    for stem in sorted(stems):
        parts = {end: tensors[name] for end in scheme.parts if (name := f"{stem}.{end}") in tensors}
        used |= {f"{stem}.{end}" for end in parts}
        bias = tensors.get(f"{stem}.bias")
        if bias is not None and "mxfp4_blocks" not in parts and not bool(bias.any()):
            used.add(f"{stem}.bias")  # as some tools write them for layers without one
        try:
            _held(parts)
            result[f"{stem}.weight"] = scheme.make(parts, config)
        except KeyError as error:
            raise ModelError(f"{place} lacks {stem}.{error.args[0]}, a part of a {scheme.name} weight") from error
        except ValueError as error:
            raise ModelError(f"{place}: {stem} is no {scheme.name} weight that can be read: {error}") from error
    return {**{name: tensor for name, tensor in tensors.items() if name not in used}, **result}
