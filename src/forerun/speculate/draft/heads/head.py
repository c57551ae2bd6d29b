"""Trained heads as modules with a file format, and the batches and losses that they are trained with."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
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
DEPTH_DECAY = 0.8
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


@dataclass(slots=True)
class TrainingBatch:
    """Texts with the frozen target's hidden states and logits, for training a head.

    ``tokens`` are int64 [rows, length] and ``hidden[layer]`` [rows, length, hidden size]. ``logits`` [rows, length,
    vocabulary] predict the token after each position; None: they are computed where needed, from the last hidden state.
    ``embedding`` and ``head`` are the target's weights [vocabulary, hidden size].
    """

    tokens: torch.Tensor
    hidden: dict[int, torch.Tensor]
    logits: torch.Tensor | None
    embedding: torch.Tensor
    head: torch.Tensor
    target: nn.Module
    segments: torch.Tensor | None = None
    """int64 [rows, length]: the number of each token's text, if rows are packed with several texts."""
    answers: torch.Tensor | None = None
    """bool [rows, length]: the tokens to learn to predict; None: all."""
    reduced_vocabulary: bool = False
    """Whether ``head`` has only the rows of the head's reduced vocabulary."""

    def all_target_logits(self) -> torch.Tensor:
        """The target's logits at all positions."""
        if self.logits is None:
            raise ValueError("this batch computes logits at single positions only")
        return self.logits

    def trainable(self, at: torch.Tensor, first: int, depth: int) -> torch.Tensor | None:
        """bool [rows, n]: which of the positions ``at`` int64 [n] to train at; None: all. Their next ``depth`` tokens,
        from ``first`` ahead on, must be in the same text, and the nearest of them in ``answers``."""
        if self.segments is None or self.answers is None:
            return None
        same_text = self.segments[:, at] == self.segments[:, at + first + depth - 1]
        return same_text & self.answers[:, at + first]

    def target_logits(
        self, at: torch.Tensor, indices: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """The target's logits at the positions ``at``, or at those that ``indices`` selects: bool [rows, n], or rows
        and columns, int64 [m] each."""
        rows = (self.hidden[max(self.hidden)] if self.logits is None else self.logits)[:, at]
        rows = rows if indices is None else rows[indices]
        return F.linear(rows, self.head) if self.logits is None else rows


class Guess(NamedTuple):
    """A head's prediction of one token ahead, at many positions.

    ``logits`` are [..., own vocabulary], the target's ``target_logits`` at the same positions [..., vocabulary].
    ``ids`` are the tokens of a reduced own vocabulary; None: it is the target's.
    """

    logits: torch.Tensor
    target_logits: torch.Tensor
    ids: torch.Tensor | None = None

    def loss(self) -> torch.Tensor:
        """[...]: cross entropy in nats with the target's distribution over the head's own vocabulary."""
        expected = self.target_logits if self.ids is None else self.target_logits[..., self.ids]
        return -(torch.softmax(expected.float(), -1) * torch.log_softmax(self.logits.float(), -1)).sum(-1)


class Head(nn.Module, ABC):
    """A trainable head. Saved as ``config.json`` and ``model.safetensors``."""

    method: ClassVar[str]
    options_known: ClassVar[frozenset[str]] = frozenset()
    """Permitted keys of ``Sizes.options``."""
    quantizes: ClassVar[bool] = False
    """Whether ``quantization`` applies to all linear layers; False: only to an output layer of its own."""
    first_token: ClassVar[int] = 1
    """Depth of the first token that it predicts."""

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

    @torch.no_grad()
    def reduce_vocabulary(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Restricts drafts to the tokens ``ids`` int64 [n], with frozen output weights ``rows`` [n, hidden size]."""
        self.sizes = replace(self.sizes, options={**self.sizes.options, "draft_vocab_size": len(ids)})
        self.make_lm_head()
        assert self.lm_head is not None
        assert isinstance(self.d2t, torch.Tensor)
        self.lm_head.weight.copy_(rows)
        self.lm_head.weight.requires_grad_(False)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.to(ids.device)

    def token_ids(self) -> torch.Tensor | None:
        """The tokens of a reduced vocabulary, int64 [n]; None: the target's vocabulary."""
        d2t = getattr(self, "d2t", None)
        return None if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t

    def guess(self, states: torch.Tensor, batch: TrainingBatch, target_logits: torch.Tensor) -> Guess:
        """Applies the output layer to ``states`` [..., hidden size]."""
        if self.lm_head is None:
            return Guess(F.linear(states, batch.head.to(states.dtype)), target_logits)
        return Guess(self.lm_head(states), target_logits, None if batch.reduced_vocabulary else self.token_ids())

    @abstractmethod
    def guesses(self, batch: TrainingBatch) -> Iterator[Guess]:
        """Yields the guess for every token ahead, the nearest first. All are at the same positions, except that
        training may drop some at deeper tokens."""

    def loss(self, batch: TrainingBatch) -> torch.Tensor:
        """Mean training loss, a scalar: the weighted sum of the cross entropies of all tokens ahead."""
        losses = [guess.loss().mean() for guess in self.guesses(batch)]
        return torch.stack([weight * loss for weight, loss in zip(weights(len(losses)), losses, strict=True)]).sum()

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


def weights(depth: int) -> list[float]:
    """Weights of the tokens ahead in a head's loss: 0.8^(n - 1) for the n-th (Medusa's choice)."""
    return [DEPTH_DECAY**position for position in range(depth)]


def overlap(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """Acceptance rate alpha per position: sum over x of min(p(x), q(x))."""
    return torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)


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
    """Gated: down(silu(gate x) * up x). ``down`` starts at zero, so that a fresh layer changes nothing."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., positions, heads, width] in the halves convention, at positions int64 [..., n] and
    ``frequencies`` float32 [width / 2], radians per position."""
    angle = positions[..., None].float() * frequencies.to(x.device)
    cos, sin = torch.cos(angle)[..., None, :].to(x.dtype), torch.sin(angle)[..., None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
