"""Trained heads: their weights, and their file format. forerun-lab trains them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.torch import save_file

from forerun.core.config import POSITIVE, Within
from forerun.core.errors import ModelError, one_line, shown
from forerun.core.folders import let_read
from forerun.models.architectures.shapes import Shape, random_weights
from forerun.models.files.checkpoint import CONFIG, read_object, read_tensors
from forerun.models.files.gguf import is_gguf
from forerun.models.formats import ON_CPU, choose, make_linear
from forerun.models.formats.base import Linear
from forerun.models.kinds import BLOCKS
from forerun.models.run.parts import make_norm

FORMAT = "forerun_head"
PACKED = "packed"
OUTPUT = "lm_head.weight"
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


class Head:
    """A trained head: its options, and its weights by name. Saved as ``config.json`` and ``model.safetensors``.
    forerun-lab has modules with the same weights, and trains them."""

    method: ClassVar[str]
    options_known: ClassVar[frozenset[str]] = frozenset()
    """Permitted keys of ``Sizes.options``."""
    quantizes: ClassVar[bool] = False
    """Whether ``quantization`` applies to all linear layers; False: only to an output layer of its own."""
    options: dict[str, Any]
    """``Sizes.options`` with the method's defaults."""
    tensors: dict[str, torch.Tensor]

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.record: dict[str, Any] = {}
        """Further entries of its file: how it was trained, and with which target."""
        self.packed = 0
        """How many times ``pack`` was called."""
        self.quantization: str | None = None
        """The format that ``pack`` gives its weights."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that it reads."""
        layers = self.sizes.options.get("layers")
        return self.default_layers(self.sizes.num_layers) if layers is None else tuple(layers)

    def default_layers(self, last: int) -> tuple[int, ...]:
        """``layers`` for a target of ``last`` layers, unless an option sets them."""
        return (last,)

    def shapes(self) -> dict[str, Shape]:
        """The shape of each of its weights."""
        raise TypeError(f"{type(self).__name__} must define shapes")

    def output_shapes(self) -> dict[str, Shape]:
        """Those of an output layer of its own: of ``draft_vocab_size`` rows, if that option is set, where row i stands
        for token i + d2t[i] (EAGLE-3's file format); else of all tokens with ``own_head``."""
        rows, sizes = self.sizes.options.get("draft_vocab_size"), self.sizes
        if not rows and not self.sizes.options.get("own_head"):
            return {}
        return {OUTPUT: (rows or sizes.vocab_size, sizes.hidden_size)} | ({"d2t": (rows,)} if rows else {})

    def token_ids(self) -> torch.Tensor | None:
        """The tokens of a reduced vocabulary, int64 [n]; None: the target's vocabulary."""
        d2t = self.tensors.get("d2t")
        return None if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t

    def to(self, *, device: torch.device, dtype: torch.dtype) -> Head:
        """Moves its weights."""
        numbers = {name: part for name, part in self.tensors.items() if part.is_floating_point()}
        self.tensors = {name: part.to(device) for name, part in self.tensors.items()}
        self.tensors |= {name: part.to(device, dtype) for name, part in numbers.items()}
        return self

    def pack(self) -> None:
        """Makes its layers of its weights. Call it again after these change."""
        self.packed += 1

    def linear_of(self, name: str) -> Linear:
        """A layer between the target's states and its own decoder layers. They differ too much in size for one scale
        per row, so that only block formats quantize it."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        if self.quantizes and self.quantization in BLOCKS:
            return ON_CPU[self.quantization].make(weight, bias)
        return make_linear(weight, bias, choose(weight.dtype, weight.device, "auto"))

    def norm_of(self, name: str) -> Any:
        """An RMS norm of states; None if it has none of that name."""
        if (weight := self.tensors.get(f"{name}.weight")) is None:
            return None
        how = choose(weight.dtype, weight.device, "auto")
        return make_norm(weight, self.options["eps"], weight.dtype, kernels=how == "streamed")

    @classmethod
    def example(cls, sizes: Sizes) -> Head:
        """A head with random weights."""
        head = cls(sizes)
        head.tensors = random_weights(head.shapes())
        return head

    def save(self, folder: Path, record: dict[str, Any] | None = None, *, packed: bool = False) -> None:
        """Writes ``config.json`` and ``model.safetensors`` in bfloat16. With ``packed``, matrices are in GGUF's Q4_0
        where it divides their rows; a head quantized to ``q4_0`` drafts the same from either."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {FORMAT: self.method, **vars(self.sizes), **({PACKED: Q4_0.name} if packed else {}), **(record or {})}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf8")
        weights = {}
        for name, tensor in self.tensors.items():
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
            requested = cls.requested(sizes)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} holds no readable head: {one_line(error)}") from error
        present = {name: list(part.shape) for name, part in weights.items()}
        for name in sorted({*requested, *present}):
            if requested.get(name) != present.get(name):
                raise ModelError(
                    f"{folder}: the weights do not fit their config: {name} has shape {present.get(name)}, "
                    f"not {requested.get(name)}"
                )
        return cls.made(sizes, {n: t.float() if t.is_floating_point() else t for n, t in weights.items()})

    @classmethod
    def requested(cls, sizes: Sizes) -> dict[str, list[int]]:
        """The shapes that its file must have."""
        return {name: list(shape) for name, shape in cls(sizes).shapes().items()}

    @classmethod
    def made(cls, sizes: Sizes, weights: dict[str, torch.Tensor]) -> Head:
        """A head with these weights."""
        head = cls(sizes)
        head.tensors = weights
        return head


def _unpacked(part: torch.Tensor) -> torch.Tensor:
    if part.dtype != torch.uint8 or part.dim() != 2 or part.shape[1] % GGML_QUANT_SIZES[Q4_0][1]:
        return part
    return torch.from_numpy(quants.dequantize(part.numpy(), Q4_0))
