"""What heads are trained with: batches, guesses and losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from forerun.models.formats import ON_CPU, choose, make_linear
from forerun.models.kinds import BLOCKS
from forerun.models.run import parts
from forerun.speculate.draft.heads.head import Head, Sizes

DEPTH_DECAY = 0.8


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


def _lazy(make: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer that is packed at its first call. If the head runs in one compiled call, most never are."""
    layer = cache(make)
    return lambda x: layer()(x)


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


class TrainedHead(nn.Module, Head):
    """A head as a module, which can be trained."""

    first_token: ClassVar[int] = 1
    """Depth of the first token that it predicts."""

    def __init__(self, sizes: Sizes) -> None:
        nn.Module.__init__(self)
        Head.__init__(self, sizes)
        self.lm_head: nn.Linear | None = None
        """An output layer of its own, over ``token_ids``; None: the target's."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Its weights by name, which share its memory."""
        return dict(self.state_dict())

    @classmethod
    def example(cls, sizes: Sizes) -> Head:
        return cls(sizes)

    @classmethod
    def requested(cls, sizes: Sizes) -> dict[str, list[int]]:
        with torch.device("meta"):  # takes no memory, whatever the sizes are
            return {name: list(part.shape) for name, part in cls(sizes).state_dict().items()}

    @classmethod
    def made(cls, sizes: Sizes, weights: dict[str, torch.Tensor]) -> Head:
        head = cls(sizes)
        head.load_state_dict(weights)
        return head

    def make_lm_head(self, own: bool = False) -> None:
        """Makes an output layer of its own: of ``draft_vocab_size`` rows, if that option is set, where row i stands for
        token i + d2t[i] (EAGLE-3's file format); else of all tokens if ``own``."""
        rows, sizes = self.sizes.options.get("draft_vocab_size"), self.sizes
        self.lm_head = nn.Linear(sizes.hidden_size, rows or sizes.vocab_size, bias=False) if own or rows else None
        if rows:
            self.register_buffer("d2t", torch.zeros(rows, dtype=torch.long))

    def hold(self) -> None:
        """Adds the weights that only the engine computes with, under its names."""
        for name, shape in self.shapes().items():
            if name not in self.state_dict():
                module: nn.Module = self
                *path, last = name.split(".")
                for part in path:
                    if not hasattr(module, part):
                        module.add_module(part, nn.Module())
                    module = module.get_submodule(part)
                module.register_parameter(last, nn.Parameter(torch.randn(shape) * 0.1))

    def pack(self) -> None:
        """Runs linear layers from packed copies of their weights, and norms on kernels, where this machine has them.
        Call it again after the weights change."""
        super().pack()
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


def weights(depth: int) -> list[float]:
    """Weights of the tokens ahead in a head's loss: 0.8^(n - 1) for the n-th (Medusa's choice)."""
    return [DEPTH_DECAY**position for position in range(depth)]


def overlap(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """Acceptance rate alpha per position: sum over x of min(p(x), q(x))."""
    return torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)


def feed_forward(mlp: FeedForward, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate x) * up x)."""
    result: torch.Tensor = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return result


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., positions, heads, width] in the halves convention, at positions int64 [..., n] and
    ``frequencies`` float32 [width / 2], radians per position."""
    angle = positions[..., None].float() * frequencies.to(x.device)
    cos, sin = torch.cos(angle)[..., None, :].to(x.dtype), torch.sin(angle)[..., None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
