"""Initialises an EAGLE-3 head from its target's weights and by least squares, before any gradient step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.heads.training import overlap
from forerun_lab.tune.features import Features

RIDGE = 0.01
"""Ridge of the least squares, a fraction of every input's mean square."""
LOGIT_SCALES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
"""Factors of the logits that are tried."""
CALIBRATION_TOKENS = 8_000
"""Tokens on which they are compared."""
FEATURE_RIDGE = 0.03
"""Weight that keeps features close to hidden states, whose place they take while drafting."""


def eagle_options(config: Any, layers: list[int], rows: int) -> dict[str, Any]:
    """Options of an EAGLE-3 head whose decoder layer has the sizes of a Llama target's."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "heads": heads,
        "kv_heads": config.num_key_value_heads,
        "width": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "inner_size": config.intermediate_size,
        "theta": float(rope.get("rope_theta", 10000.0)),
        "eps": config.rms_norm_eps,
        "layers": layers,
        "draft_vocab_size": rows,
        "mixed": True,
    }


def factor_of(module: Any) -> Tensor:
    """The factor of a target's RMS norm, or its matrix, float32. Gemma's norms store it less one."""
    weight: Tensor = module.weight.float()
    less_one = type(module).__name__.startswith("Gemma") and weight.dim() == 1
    return weight + 1 if less_one else weight


class LeastSquares:
    """Ridge regression from sums over batches; ``solve`` returns weights [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.left = torch.zeros(inputs, inputs, device=device)
        self.right = torch.zeros(inputs, outputs, device=device)

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        self.left += inputs.T @ inputs
        self.right += inputs.T @ outputs

    def solve(self, some: Tensor | slice = slice(None)) -> Tensor:
        """The weights of the inputs ``some``. The ridge treats every input as if its mean square were 1."""
        left, right = self.left[some][:, some], self.right[some]
        size = left.diagonal().sqrt().clamp_min(1e-6)
        left = left / size / size[:, None] + RIDGE * torch.eye(len(size), device=size.device)
        solved: Tensor = torch.linalg.solve(left, right / size[:, None])
        return (solved / size[:, None]).T


@torch.no_grad()
def fit_eagle(head: TrainedEagle, target: PreTrainedModel, ids: Tensor, features: Features, tokens: int) -> Tensor:
    """Initialise ``head`` without gradients.

    Its feature and its output are the target's last hidden state before the final norm's weights, for this and for the
    next token; the target's output rows ``ids`` read it. Its attention and MLP start as the target's last layer. The
    matrices that mix inputs, ``o_proj`` and ``down_proj`` are fitted to that output, one after another, on ``tokens``
    tokens of ``features``.

    Returns:
        Root mean square of every input of ``fc``, float32 [inputs].
    """
    body: Any = target.get_decoder()
    output: Any = target.get_output_embeddings()
    embedding: Any = target.get_input_embeddings()
    norm = factor_of(body.norm)
    head.reduce_vocabulary(ids, output.weight[ids])
    head.norm.weight.copy_(norm)
    copy_layer(head, (head.hidden_norm, head.post_attention_layernorm), body.layers[-1])
    texts = _Texts(features, embedding.weight.float(), norm, tokens)
    sizes = _fit_input(head, texts)
    second = LeastSquares(head.o_proj.in_features, len(norm), norm.device)
    for states, embedded, answer in texts:
        stream, attended = _attended(head, states, embedded)
        second.add(attended[-len(answer) :], answer - stream[-len(answer) :])
    head.o_proj.weight.copy_(second.solve())
    third = LeastSquares(head.mlp.down_proj.in_features, len(norm), norm.device)
    for states, embedded, answer in texts:
        stream, attended = _attended(head, states, embedded)
        x = stream + head.o_proj(attended)
        normed = head.post_attention_layernorm(x)
        inner = functional.silu(head.mlp.gate_proj(normed)) * head.mlp.up_proj(normed)
        third.add(inner[-len(answer) :], answer - x[-len(answer) :])
    head.mlp.down_proj.weight.copy_(third.solve())
    head.norm.weight.mul_(_best_logit_scale(head, replace(texts, tokens=CALIBRATION_TOKENS)))
    return sizes


def copy_layer(draft: Any, norms: tuple[Any, Any], layer: Any) -> None:
    """Copy the target's ``layer`` into ``draft`` where shapes agree; ``o_proj`` and ``down_proj`` become zero.
    ``norms`` are the draft's, before attention and MLP."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    pairs = [(getattr(draft, part), getattr(attention, part, None)) for part in ("q_proj", "k_proj", "v_proj")]
    pairs += [(getattr(draft.mlp, part), getattr(mlp, part, None)) for part in ("gate_proj", "up_proj")]
    names = ("input_layernorm", "post_attention_layernorm")
    pairs += [(norm, getattr(layer, name, None)) for norm, name in zip(norms, names, strict=True)]
    for to, source in pairs:
        if source is not None and source.weight.shape == to.weight.shape:
            to.weight.copy_(factor_of(source))
    draft.o_proj.weight.zero_()
    draft.mlp.down_proj.weight.zero_()


def _fit_input(head: TrainedEagle, texts: _Texts) -> Tensor:
    """Fit ``mix`` and ``fc``. While drafting, the head's output is its next feature, so ``mix`` is fitted to last
    hidden states, and ``fc`` adds what the other features contribute."""
    assert head.mix is not None
    size, inputs = head.fc.out_features, head.fc.in_features
    device = texts.norm.device
    fit, squares, count = LeastSquares(size + inputs, size, device), torch.zeros(inputs, device=device), 0
    for states, embedded, answer in texts:
        fit.add(torch.cat([embedded, states], dim=-1)[-len(answer) :], answer)
        squares += states.square().sum(0)
        count += len(states)
    last = torch.cat([torch.arange(size), torch.arange(inputs, inputs + size)])
    short, long = fit.solve(last), fit.solve()
    mixed = short[:, size:] * texts.norm
    head.mix.weight.copy_(torch.cat([long[:, :size], mixed], dim=-1))
    keep = torch.zeros(size, inputs, device=device)
    keep[:, -size:] = torch.diag(1 / texts.norm)
    ridge = FEATURE_RIDGE * mixed.square().sum() / size * torch.eye(size, device=device)
    residual = long[:, size:] - mixed @ keep
    head.fc.weight.copy_(keep + torch.linalg.solve(mixed.T @ mixed + ridge, mixed.T @ residual))
    return (squares / max(1, count)).sqrt()


def _best_logit_scale(head: TrainedEagle, texts: _Texts) -> float:
    """The factor of the head's logits with the highest acceptance at temperature 1."""
    assert head.lm_head is not None
    accepted, count = torch.zeros(len(LOGIT_SCALES), device=texts.norm.device), 0
    for states, embedded, answer in texts:
        stream, attended = _attended(head, states, embedded)
        logits = head.lm_head(head.norm(head.finish(stream, attended)[-len(answer) :]))
        target_logits = head.lm_head(answer * texts.norm)
        accepted += torch.stack([overlap(target_logits, factor * logits).sum() for factor in LOGIT_SCALES])
        count += len(answer)
    return LOGIT_SCALES[int(accepted.argmax())] if count else 1.0


@dataclass(frozen=True)
class _Texts:
    """Iterates over conversations of ``tokens`` tokens in all. Yields features [n, inputs], embeddings of the tokens
    after them, and for the last of them, which are the answer's, the next tokens' hidden states before ``norm``."""

    features: Features
    embedding: Tensor
    norm: Tensor
    tokens: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for part, start, length, prompt in self.features.sample(self.tokens):
            states = part["hidden"][start : start + length].float()
            ids = part["tokens"][start : start + length].long()
            answer = states[max(1, prompt - 1) : -1, -len(self.norm) :] / self.norm
            if len(answer):
                yield states[:-2], self.embedding[ids[1:-1]], answer


def _attended(head: TrainedEagle, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """A conversation's residual stream before the layer [n, hidden size], and its attention output before ``o_proj``
    [n, heads * width]."""
    stream = head.enter(embedded, head.feature(states))
    q, k, v = head.qkv(embedded, stream, torch.arange(len(embedded), device=embedded.device))
    groups = head.heads // head.kv_heads
    k, v = k.repeat_interleave(groups, dim=-2), v.repeat_interleave(groups, dim=-2)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return stream, out[0].transpose(0, 1).flatten(-2)


class InputScaled(nn.Module):
    """A parametrization: the weight is learned as if its inputs had root mean square 1 instead of ``size``."""

    def __init__(self, size: Tensor) -> None:
        super().__init__()
        self.size: Tensor
        self.register_buffer("size", size.clamp_min(1e-3))

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.size

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.size
