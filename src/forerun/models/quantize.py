"""Weights in 8 bits.

On CPU weights have one scale per output, activations are quantized on the fly; through our own kernels
(``streamed.py``), or where they cannot be had through FBGEMM's.

``int8``: a row's result may depend on the rows beside it (FBGEMM has one activation scale per call). For drafts: any q
is legal as long as it is the one that was sampled from.

``int8_rows``: one activation scale per row. With FBGEMM a row is scaled to the integers by itself, and two constant
columns with zero weights pin the layer's own scale to 1; sums of integers are exact, so a row's bits depend on nothing
else.

On GPU, through torchao: ``int8`` and ``fp8`` weights, activations as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from forerun.core.errors import ConfigError
from forerun.models.kinds import CPU_KINDS, GPU_KINDS, KINDS, UNQUANTIZED
from forerun.models.linear import Linear, Plain
from forerun.models.streamed import DTYPES, StreamedInt8, can_stream

LEAST_SIDE, LEAST_WEIGHTS = 256, 1 << 18
"""Without kernels of ours a layer is worth 8 bits if both its sides, or else its weights, are at least so many: an int8
call has some 10 us of fixed cost."""


def check(kind: str, device: torch.device, dtype: torch.dtype, *, invariant: bool) -> None:
    """Raise ConfigError if ``kind`` cannot be honoured here."""
    kinds = CPU_KINDS if device.type == "cpu" else GPU_KINDS
    if kind not in kinds:
        raise ConfigError(
            f"quantization {kind!r} is not one of {', '.join(kinds)} (or {UNQUANTIZED}), which {device.type} has"
        )
    if device.type == "cpu" and not ours(device, dtype) and "fbgemm" not in torch.backends.quantized.supported_engines:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"quantization {kind!r} in {name} needs FBGEMM, which this torch lacks; leave it out")
    if kind == "int8" and invariant and device.type == "cpu":
        raise ConfigError(
            "quantization 'int8' makes a row depend on the rows beside it, so it cannot be invariant; "
            "use 'int8_rows' or invariant=False"
        )


def ours(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of ours run 8-bit layers of a model in ``dtype`` there."""
    return device.type == "cpu" and dtype in DTYPES and can_stream(torch.int8)


def pays(weight: torch.Tensor) -> bool:
    return ours(weight.device, weight.dtype) or min(weight.shape) >= LEAST_SIDE or weight.numel() >= LEAST_WEIGHTS


def quantize(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> Linear:
    """The layer for ``weight`` [outputs, inputs] in 8 bits."""
    if weight.device.type != "cpu":
        return _torchao(weight, bias, kind)
    if ours(weight.device, weight.dtype):
        return StreamedInt8(weight, bias, KINDS[kind])
    return (Int8Rows if kind == "int8_rows" else Int8)(weight, bias)


def _levels() -> int:
    """Largest activation level. Without VNNI, FBGEMM adds products in 16 bits and needs a bit of room."""
    return 127 if torch.cpu._is_vnni_supported() else 63


def _prepack(weight: torch.Tensor, bias: torch.Tensor | None) -> object:
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp(min=1e-30).double() / 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are on their way out of torch; the packed layers are not
        zeros = torch.zeros(len(scales), dtype=torch.long)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.float())


class Int8:
    """int8 weights, activations scaled per call."""

    __slots__ = ("call", "dtype", "exact", "kind", "nbytes", "packed", "reduced")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = _prepack(weight, bias)
        self.dtype = weight.dtype
        self.kind = KINDS["int8"]
        self.nbytes = weight.numel() + 4 * weight.shape[0]
        self.exact = False
        self.reduced = _levels() < 127
        self.call = torch.ops.quantized.linear_dynamic.default

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y = self.call(x.float(), self.packed, self.reduced).to(self.dtype)
        return y if add is None else y.add_(add)


class Int8Rows:
    """int8 weights, activations scaled per row."""

    __slots__ = ("bias", "call", "dtype", "ends", "exact", "kind", "nbytes", "packed", "reduced", "step")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = _prepack(torch.cat([weight, weight.new_zeros(weight.shape[0], 2)], dim=1), None)
        self.bias = None if bias is None else bias.float()
        self.dtype = weight.dtype
        self.kind = KINDS["int8_rows"]
        self.nbytes = weight.numel() + 4 * weight.shape[0]
        self.exact = True
        levels = _levels()
        self.reduced = levels < 127
        self.step = torch.tensor([1 / levels])
        self.ends = torch.tensor([[-levels - 1.0, float(levels)]])
        self.call = torch.ops.quantized.linear_dynamic.default

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        x = x.float()
        scale = torch.linalg.vector_norm(x, float("inf"), -1, True).mul_(self.step).clamp_(min=1e-30)
        levels = torch.cat([x / scale, self.ends.expand(x.shape[0], -1)], dim=1)
        y = self.call(levels, self.packed, self.reduced).mul_(scale)
        if self.bias is not None:
            y.add_(self.bias)
        y = y.to(self.dtype)
        return y if add is None else y.add_(add)


def _torchao(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> Linear:
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(f"quantization {kind!r} on GPU needs torchao: pip install 'forerun[gpu]'") from error
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(module, Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())
    layer = Plain(module.weight, bias)
    layer.kind = f"{kind} weights"
    layer.nbytes = weight.numel() + 4 * weight.shape[0]
    return layer


def size(layers: Iterable[Linear]) -> int:
    """Bytes of the layers' weights."""
    return sum(layer.nbytes for layer in layers)


def error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Relative error of logits, |got - wanted| / |wanted|, each row's mean taken out: softmax does not see it."""
    wanted = wanted - wanted.mean(dim=-1, keepdim=True)
    got = got - got.mean(dim=-1, keepdim=True)
    return float((got - wanted).norm() / wanted.norm())
