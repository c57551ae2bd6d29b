"""Checkpoints with weights in 4 or 8 bits: AWQ, GPTQ, compressed-tensors, FP8 and MXFP4.

4-bit levels become ``q4_0`` if all zero points are in the middle, else ``q4_1``, whose minimum (scale times zero point)
is rounded to float16. 8-bit levels become ``q8_0``, or ``int8_rows`` with a scale per output. Others are expanded to
numbers: groups whose size is no multiple of 32, groups of inputs that are not consecutive (g_idx), and FP8.
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

AWQ_SHIFTS = tuple(4 * index for index in (0, 4, 1, 5, 2, 6, 3, 7))
"""Bit offsets of eight outputs' levels in AWQ's 32-bit words."""
SHIFTS = {4: tuple(range(0, 32, 4)), 8: tuple(range(0, 32, 8))}
MIDDLE = {4: 8, 8: 128}
"""The zero point where a checkpoint has none."""
BLOCK = 32
INDICES = (torch.int32, torch.int64)
NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
PART_TYPES: Mapping[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), ((torch.int32,), (2,))),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), (INDICES, (1,))),
    **dict.fromkeys(("weight_scale", "weight_scale_inv"), (NUMBERS, (0, 1, 2))),
    "mxfp4_blocks": ((torch.uint8,), (3,)), "mxfp4_scales": ((torch.uint8,), (2,)), "scales": (NUMBERS, (2,)),
    "weight": (BYTES, (2,)), "weight_zero_point": ((*INDICES, torch.int8), (0, 1, 2)),
}  # fmt: skip
"""The dtypes and numbers of dimensions that the tensors of a layer may have."""
Tensors = Mapping[str, torch.Tensor]
"""A layer's tensors, by the suffixes of their names."""
LevelsAndZeros = tuple[torch.Tensor, torch.Tensor]
"""Levels uint8 [outputs, inputs], and zero points [outputs, groups]."""


def unpack_words(words: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """int32 [a, b] -> uint8 [a, b * levels in a word]."""
    mask = 0xF if len(shifts) == 8 else 0xFF
    levels = torch.empty(*words.shape, len(shifts), dtype=torch.uint8)
    for index, shift in enumerate(shifts):
        levels[..., index] = words >> shift & mask
    return levels.flatten(-2)


class Grouped:
    """scale * (level - zero point) by groups of inputs. ``unpack`` is called when levels are needed. ``scales`` are
    [outputs, groups]. ``groups`` has each input's group; None: groups are consecutive inputs."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        unpack: Callable[[], LevelsAndZeros],
        scales: torch.Tensor,
        groups: torch.Tensor | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.bits, self.nbytes = bits, self.shape.numel() * bits // 8
        self.unpack = unpack
        self.scales = scales.float()
        self.size = shape[1] // scales.shape[1]
        consecutive = torch.arange(shape[1]) // self.size
        self.groups = consecutive if groups is None else groups.long()
        self.is_consecutive = torch.equal(self.groups, consecutive)

    @cached_property
    def unpacked(self) -> LevelsAndZeros:
        return self.unpack()

    def close(self) -> None:
        """Free the unpacked levels."""
        self.__dict__.pop("unpacked", None)

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        levels, zeros = (part[rows].float() for part in self.unpacked)
        return (levels - zeros[:, self.groups]) * self.scales[rows][:, self.groups]

    def blocks(self) -> Blocks | Levels | None:
        """The weight without loss in a format of ours; None: no format holds it."""
        (levels, zeros), middle = self.unpacked, MIDDLE[self.bits]
        centred = bool((zeros == middle).all())
        if self.bits == 8 and centred and self.scales.shape[1] == 1:
            return Levels((levels.short() - middle).to(torch.int8), self.scales[:, 0].contiguous())
        scales = self.scales.half()
        lost = ~scales.isfinite() | ((scales == 0) != (self.scales == 0))
        if not self.is_consecutive or self.size % BLOCK or bool(lost.any()) or (self.bits == 8 and not centred):
            return None
        blocks = levels.view(len(levels), -1, BLOCK).numpy()
        heads = [self._by_blocks(scales)]
        if self.bits == 8:
            return self._joined("q8_0", heads, blocks ^ 128)
        if not centred:
            heads.append(self._by_blocks((-self.scales * zeros.float()).half()))
        return self._joined("q4_0" if centred else "q4_1", heads, blocks[..., :16] | blocks[..., 16:] << 4)

    def _by_blocks(self, numbers: torch.Tensor) -> np.ndarray:
        """float16 [outputs, groups] as bytes [outputs, blocks, 2]."""
        repeated = numbers.repeat_interleave(self.size // BLOCK, dim=1).numpy()
        return repeated.view(np.uint8).reshape(*repeated.shape, 2)

    def _joined(self, kind: str, heads: list[np.ndarray], levels: np.ndarray) -> Blocks:
        return Blocks(kind, np.concatenate([*heads, levels], axis=-1).reshape(len(levels), -1), self.shape[1])


def _scaled(levels: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int]) -> Rows:
    """8-bit levels times scales of tiles [rows of tiles, columns of tiles]."""
    scales = scales.float()
    tile_rows, tile_columns = (torch.arange(count) // size for count, size in zip(levels.shape, tile))

    def make(rows: slice | torch.Tensor) -> torch.Tensor:
        return levels[rows].float() * scales[tile_rows[rows]][:, tile_columns]

    return LazyRows(levels.shape, make, levels.nbytes)


def _awq(parts: Tensors, config: Mapping[str, Any]) -> Rows:
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    inputs, outputs = words.shape[0], words.shape[1] * 8
    _check_shape(scales, (None, outputs), inputs)
    _check_shape(zeros, (scales.shape[0], outputs // 8))

    def unpack() -> LevelsAndZeros:
        return unpack_words(words, AWQ_SHIFTS).T.contiguous(), unpack_words(zeros, AWQ_SHIFTS).T

    return Grouped((outputs, inputs), 4, unpack, scales.T)


def _gptq(parts: Tensors, config: Mapping[str, Any]) -> Rows:
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    inputs, outputs = words.shape[0] * 8, words.shape[1]
    _check_shape(scales, (None, outputs), inputs)
    _check_shape(zeros, (scales.shape[0], outputs // 8))
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1  # the first version holds zero points minus one
    groups = _check_groups(parts.get("g_idx"), inputs, scales.shape[0])

    def unpack() -> LevelsAndZeros:
        return unpack_words(words.T, SHIFTS[4]), (unpack_words(zeros, SHIFTS[4]) + offset & 15).T

    return Grouped((outputs, inputs), 4, unpack, scales.T, groups)


def _compressed(parts: Tensors, config: Mapping[str, Any]) -> Rows:
    scales = parts["weight_scale"]
    if "weight_packed" not in parts:
        return _in_bytes(parts["weight"], scales, parts.get("weight_zero_point"))
    bits = _bits(config)
    _check_shape(parts["weight_shape"], (2,))
    outputs, inputs = (int(size) for size in parts["weight_shape"].tolist())
    words, zeros = parts["weight_packed"], parts.get("weight_zero_point")
    _check_shape(words, (outputs, -(-inputs * bits // 32)))
    _check_shape(scales, (outputs, None), inputs)
    if zeros is not None:
        _check_shape(zeros, (-(-outputs * bits // 32), scales.shape[1]))
    groups = _check_groups(parts.get("weight_g_idx"), inputs, scales.shape[1])

    def unpack() -> LevelsAndZeros:
        levels = unpack_words(words, SHIFTS[bits])[:, :inputs].contiguous()
        if zeros is None:
            return levels, torch.full(scales.shape, MIDDLE[bits])
        return levels, unpack_words(zeros.T, SHIFTS[bits]).T[:outputs]

    return Grouped((outputs, inputs), bits, unpack, scales, groups)


def _in_bytes(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Rows:
    """Weights as int8 or FP8."""
    outputs, inputs = weight.shape
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
    scales = scales[:, None] if scales.dim() == 1 else scales
    if weight.dtype is not torch.int8:
        if outputs % scales.shape[0] or inputs % scales.shape[1]:
            raise ValueError(f"its scales are {[*scales.shape]}")
        return _scaled(weight, scales, (outputs // scales.shape[0], inputs // scales.shape[1]))
    scales = scales.expand(outputs, -1) if len(scales) == 1 else scales
    _check_shape(scales, (outputs, None), inputs)
    points = torch.full(scales.shape, MIDDLE[8])
    if zeros is not None:
        zeros = zeros.reshape(-1, 1) if zeros.numel() in (1, outputs) else zeros
        if zeros.shape != scales.shape and zeros.shape[1:] != (1,):
            raise ValueError(f"its zeros are {[*zeros.shape]}")
        points = zeros.expand(scales.shape).short() + MIDDLE[8]
    return Grouped((outputs, inputs), 8, lambda: ((weight.short() + MIDDLE[8]).to(torch.uint8), points), scales)


def _fp8(parts: Tensors, config: Mapping[str, Any]) -> Rows:
    weight = parts["weight"]
    scales = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    tile = config.get("weight_block_size")
    if not isinstance(tile, (list, tuple)):
        return _in_bytes(weight, scales, None)
    if len(tile) != 2 or not all(type(size) is int and size > 0 for size in tile):
        raise ValueError(f"weight_block_size is {shown(tile)}, not two sizes")
    rows, columns = tile
    _check_shape(scales, (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)))
    return _scaled(weight, scales, (rows, columns))


def _bits(config: Mapping[str, Any]) -> int:
    """Bits of a weight, by compressed-tensors' config. Raises ValueError unless all groups have the same 4 or 8."""
    groups = config.get("config_groups")
    bits = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits.append(weights.get("num_bits") if isinstance(weights, Mapping) else None)
    if not bits or bits[0] not in (4, 8) or any(each != bits[0] for each in bits):
        raise ValueError(f"weights of {shown(bits)} bits; 4 or 8 in all layers are read")
    return int(bits[0])


def _check_groups(groups: torch.Tensor | None, inputs: int, count: int) -> torch.Tensor | None:
    """Each input's group, if given. Raises ValueError unless they are below ``count``."""
    if groups is not None:
        _check_shape(groups, (inputs,))
        if not bool(((groups >= 0) & (groups < count)).all()):
            raise ValueError("it names groups (g_idx) that there are not")
    return groups


def _check_types(parts: Tensors) -> None:
    """Raise ValueError for a tensor that is empty or not of ``PART_TYPES``."""
    for suffix, part in parts.items():
        dtypes, dimensions = PART_TYPES.get(suffix, ((part.dtype,), (part.dim(),)))
        if not part.numel() or part.dtype not in dtypes or part.dim() not in dimensions:
            raise ValueError(f"its {suffix} is {[*part.shape]} of {str(part.dtype).removeprefix('torch.')}")


def _check_shape(tensor: torch.Tensor, shape: tuple[int | None, ...], inputs: int | None = None) -> None:
    """Raise ValueError unless a tensor has this shape. None is the number of groups, which must divide ``inputs``."""
    if len(tensor.shape) != len(shape) or any(size not in (None, own) for own, size in zip(tensor.shape, shape)):
        raise ValueError(f"a part of it is {[*tensor.shape]}")
    groups = next((own for own, size in zip(tensor.shape, shape) if size is None), 1)
    if inputs is not None and (not groups or inputs % groups):
        raise ValueError(f"{inputs} inputs in {groups} groups")


@dataclass(frozen=True)
class Scheme:
    """A way of quantizing. ``parts`` are the suffixes of a weight's tensors; each weight has one of ``marks``."""

    name: str
    make: Callable[[Tensors, Mapping[str, Any]], Rows]
    marks: tuple[str, ...]
    parts: tuple[str, ...]


def _mxfp4(parts: Tensors, config: Mapping[str, Any]) -> Rows:
    """4-bit floats (E2M1) in blocks of 32 with a common power of two (OCP MX 1.0): blocks uint8 [outputs, blocks, 16],
    scales uint8 [outputs, blocks]. A byte holds two neighbours here, and in GGUF two numbers half a block apart."""
    blocks, scales = parts["mxfp4_blocks"], parts["mxfp4_scales"]
    _check_shape(blocks, (*scales.shape, 16))

    def make(rows: Any) -> np.ndarray:
        pairs = blocks[rows]
        levels = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
        return torch.cat([scales[rows][..., None], levels[..., :16] | levels[..., 16:] << 4], -1).flatten(1).numpy()

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
"""By ``quant_method``."""
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Of compressed-tensors, those that are read."""


def refusal(config: Any) -> str | None:
    """Why weights with this ``quantization_config`` are not read; None: they are."""
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


def gather(tensors: dict[str, torch.Tensor], config: Mapping[str, Any], where: str) -> dict[str, Rows]:
    """Tensors by name, those of each quantized weight replaced by one weight. Raises ModelError, which begins with
    ``where``, for tensors that are missing or do not fit each other."""
    scheme = SCHEMES[config["quant_method"]]
    layers = {layer for layer, _, suffix in (name.rpartition(".") for name in tensors) if suffix in scheme.marks}
    if not layers:
        raise ModelError(f"{where} holds no {scheme.name} weights, though its config says so")
    result: dict[str, Rows] = {}
    used: set[str] = set()
    for layer in sorted(layers):
        parts = {suffix: tensors[name] for suffix in scheme.parts if (name := f"{layer}.{suffix}") in tensors}
        used |= {f"{layer}.{suffix}" for suffix in parts}
        bias = tensors.get(f"{layer}.bias")
        if bias is not None and "mxfp4_blocks" not in parts and not bool(bias.any()):
            used.add(f"{layer}.bias")  # some tools write zeros for layers without a bias
        try:
            _check_types(parts)
            result[f"{layer}.weight"] = scheme.make(parts, config)
        except KeyError as error:
            raise ModelError(f"{where} lacks {layer}.{error.args[0]}, a part of a {scheme.name} weight") from error
        except ValueError as error:
            raise ModelError(f"{where}: {layer} is no {scheme.name} weight that can be read: {error}") from error
    return {**{name: tensor for name, tensor in tensors.items() if name not in used}, **result}
