"""Trained heads: their weights as modules, and their file format. forerun-lab trains them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.torch import save_file
from torch import nn

from forerun.core.config import POSITIVE, Within
from forerun.core.errors import ModelError, one_line, shown
from forerun.core.folders import let_read
from forerun.models.files.checkpoint import CONFIG, read_object, read_tensors
from forerun.models.files.gguf import is_gguf
from forerun.models.formats import ON_CPU, choose, make_linear
from forerun.models.kinds import BLOCKS
from forerun.models.run import parts

FORMAT = "forerun_head"
PACKED = "packed"
Q4_0 = GGMLQuantizationType.Q4_0
SIZE = Within(least=1, most=2**31 - 1, whole=True)
COUNTS = ("heads", "kv_heads", "width", "inner_size", "blocks", "window", "draft_vocab_size")
NUMBERS = ("theta", "eps")
"""Options that are counts, and options that are other positive numbers."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the target that a head was trained for, and of the head itself."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    """Decoder layers of the target; hidden state ``num_layers`` is the one after the final norm."""
    depth: int = 5
    """How many tokens ahead it was trained to predict."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ModelError for impossible sizes."""
        if not isinstance(self.options, dict):
            raise ModelError(f"a head's options are an object, not {shown(self.options)}")
        counts = {name: getattr(self, name) for name in ("hidden_size", "vocab_size", "depth")}
        counts |= {name: value for name, value in self.options.items() if name in COUNTS and value is not None}
        for name, value in counts.items():
            if not SIZE.permits(value):
                raise ModelError(f"a head's {name} is an integer of at least 1, not {shown(value)}")
        for name in NUMBERS:
            if not POSITIVE.permits(value := self.options.get(name, 1.0)):
                raise ModelError(f"a head's {name} is a number above 0, not {shown(value)}")
        layers, last = self.options.get("layers", []), self.num_layers
        if not Within(least=0, whole=True).permits(last):
            raise ModelError(f"a head's num_layers is the depth of its target, not {shown(last)}")
        if not isinstance(layers, list | tuple) or not all(type(x) is int and 0 <= x <= last for x in layers):
            raise ModelError(f"a head's layers are some of its target's, 0 to {last}, not {shown(layers)}")
        heads, kv_heads, width = (self.options.get(name) or 1 for name in ("heads", "kv_heads", "width"))
        if heads % kv_heads or ("width" in self.options and width % 2):
            raise ModelError(f"a head has {heads} heads of width {width} for {kv_heads} kv_heads: no multiple, or odd")


class Head(nn.Module):
    """A trained head. Saved as ``config.json`` and ``model.safetensors``."""

    method: ClassVar[str]
    options_known: ClassVar[frozenset[str]] = frozenset()
    """Permitted keys of ``Sizes.options``."""
    quantizes: ClassVar[bool] = False
    """Whether ``quantization`` applies to all linear layers; False: only to an output layer of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.record: dict[str, Any] = {}
        """Further entries of its file: how it was trained, and with which target."""
        self.packed = 0
        """How many times ``pack`` was called."""
        self.quantization: str | None = None
        """The format that ``pack`` gives its weights."""
        self.lm_head: nn.Linear | None = None
        """An output layer of its own, over ``token_ids``; None: the target's."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that it reads."""
        layers = self.sizes.options.get("layers")
        return self.default_layers(self.sizes.num_layers) if layers is None else tuple(layers)

    def default_layers(self, last: int) -> tuple[int, ...]:
        """``layers`` for a target of ``last`` layers, unless an option sets them."""
        return (last,)

    def make_lm_head(self, own: bool = False) -> None:
        """Makes an output layer of its own: of ``draft_vocab_size`` rows, if that option is set, where row i stands for
        token i + d2t[i] (EAGLE-3's file format); else of all tokens if ``own``."""
        rows, sizes = self.sizes.options.get("draft_vocab_size"), self.sizes
        self.lm_head = nn.Linear(sizes.hidden_size, rows or sizes.vocab_size, bias=False) if own or rows else None
        if rows:
            self.register_buffer("d2t", torch.zeros(rows, dtype=torch.long))

    def token_ids(self) -> torch.Tensor | None:
        """The tokens of a reduced vocabulary, int64 [n]; None: the target's vocabulary."""
        d2t = getattr(self, "d2t", None)
        return None if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t

    def pack(self) -> None:
        """Runs linear layers from packed copies of their weights, and norms on kernels, where this machine has them.
        Call it again after the weights change."""
        self.packed += 1
        for module in self.modules():
            if not isinstance(module, nn.Linear | Norm):
                continue
            weight = next(module.parameters()).detach()
            how = choose(weight.dtype, weight.device, "auto")
            if not isinstance(module, nn.Linear):
                if how == "streamed":
                    module.use_kernel()
            else:
                bias = None if module.bias is None else module.bias.detach()
                kind = self.quantization
                if module is not self.lm_head and not (self.quantizes and kind in BLOCKS):
                    kind = None  # the target's states differ too much in size for one scale per row
                make = partial(ON_CPU[kind].make, weight, bias) if kind else partial(make_linear, weight, bias, how)
                module.forward = _lazy(make)  # type: ignore[assignment, method-assign]

    def save(self, folder: Path, record: dict[str, Any] | None = None, *, packed: bool = False) -> None:
        """Writes ``config.json`` and ``model.safetensors`` in bfloat16. With ``packed``, matrices are in GGUF's Q4_0
        where it divides their rows; a head quantized to ``q4_0`` drafts the same from either."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {FORMAT: self.method, **vars(self.sizes), **({PACKED: Q4_0.name} if packed else {}), **(record or {})}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf8")
        weights = {}
        for name, tensor in self.state_dict().items():
            if packed and tensor.dim() == 2 and tensor.shape[1] % GGML_QUANT_SIZES[Q4_0][0] == 0:
                weights[name] = torch.from_numpy(quants.quantize(tensor.float().numpy(), Q4_0))
            else:
                weights[name] = (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        save_file(weights, folder / "model.safetensors")
        let_read(folder / "model.safetensors")

    @classmethod
    def load(cls, folder: Path, num_layers: int = 0) -> Head:
        """Loads a head that ``save`` wrote, or a published one for a target of ``num_layers`` layers, which such files
        do not name. Raises ModelError if it is no head of this method."""
        config = {} if is_gguf(folder) else read_object(folder / CONFIG)
        weights: dict[str, torch.Tensor] | None = None
        if FORMAT not in config:
            arguments, weights = cls.read_public(folder, num_layers)
        elif config[FORMAT] != cls.method:
            raise ModelError(f"{folder} holds {shown(config[FORMAT])}, not a {cls.method!r} head")
        else:
            arguments = {name: config[name] for name in Sizes.__dataclass_fields__ if name in config}
            if lacking := Sizes.__dataclass_fields__.keys() - arguments:
                raise ModelError(f"{folder} holds no readable head: its {CONFIG} lacks {', '.join(sorted(lacking))}")
        try:
            sizes = Sizes(**arguments)
        except ModelError as error:
            raise ModelError(f"{folder} holds no readable head: {error}") from error
        if weights is not None:
            return cls.from_weights(sizes, weights, folder)
        kind = config.get(PACKED)
        if kind not in (None, Q4_0.name):
            raise ModelError(f"{folder} holds a head in {shown(kind)}: heads are packed in {Q4_0.name}")
        weights = read_tensors(folder, packed=kind is not None)
        if kind is not None:
            weights = {name: _unpacked(part) for name, part in weights.items()}
        head = cls.from_weights(sizes, weights, folder)
        head.record = {name: value for name, value in config.items() if name not in (FORMAT, *vars(head.sizes))}
        return head

    @staticmethod
    def read_public(folder: Path, num_layers: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Reads the arguments of ``Sizes`` and weights, under our names, from a published format. Raises ModelError if
        this method has none."""
        raise ModelError(f"{folder} holds no readable head: its {CONFIG} has no {FORMAT}")

    @classmethod
    def from_weights(cls, sizes: Sizes, weights: dict[str, torch.Tensor], folder: Path) -> Head:
        """A head with the weights of ``folder``. Raises ModelError unless names and shapes are exactly its own."""
        try:
            with torch.device("meta"):  # takes no memory, whatever the sizes are
                requested = {name: list(part.shape) for name, part in cls(sizes).state_dict().items()}
        except (RuntimeError, TypeError) as error:
            raise ModelError(f"{folder} holds no readable head: {one_line(error)}") from error
        present = {name: list(part.shape) for name, part in weights.items()}
        for name in sorted({*requested, *present}):
            if requested.get(name) != present.get(name):
                raise ModelError(
                    f"{folder}: the weights do not fit their config: {name} has shape {present.get(name)}, "
                    f"not {requested.get(name)}"
                )
        head = cls(sizes)
        head.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in weights.items()})
        return head


def _lazy(make: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer that is packed at its first call. If the head runs in one compiled call, most never are."""
    layer = cache(make)
    return lambda x: layer()(x)


def _unpacked(part: torch.Tensor) -> torch.Tensor:
    if part.dtype != torch.uint8 or part.dim() != 2 or part.shape[1] % GGML_QUANT_SIZES[Q4_0][1]:
        return part
    return torch.from_numpy(quants.dequantize(part.numpy(), Q4_0))


class Norm(nn.Module):
    """RMS norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)

    def use_kernel(self) -> None:
        """Runs on the CPU kernel from now on."""
        self.forward = parts.KernelNorm(self.weight.detach(), self.eps).__call__  # type: ignore[method-assign]


class FeedForward(nn.Module):
    """Weights of down(silu(gate x) * up x). ``down`` starts at zero, so that a fresh layer changes nothing."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down_proj.weight)
