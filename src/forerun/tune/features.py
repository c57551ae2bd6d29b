"""What a target saw in its own text while it wrote it, kept on disk: hidden states of a few layers in bfloat16."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from forerun.core.errors import ConfigError
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import TrainingBatch, overlap


@dataclass(frozen=True)
class Talk:
    """A conversation: where it lies, its tokens, and how many of them are the prompt's."""

    part: int
    start: int
    length: int
    prompt: int


class Features:
    """The files that ``text.Writer`` wrote into a folder, read from disk as they are needed, or held on a GPU; more
    may come."""

    def __init__(self, folder: Path, seed: int = 0, device: str | torch.device = "cpu") -> None:
        self.folder, self.seed, self.device = folder, seed, torch.device(device)
        self.parts: list[dict[str, Any]] = []
        self.talks: list[Talk] = []
        self.names: set[str] = set()
        self.look()

    def look(self) -> None:
        """Take in the files that are new."""
        for path in sorted(self.folder.glob("*.pt")):
            if path.name in self.names:
                continue
            part = torch.load(path, mmap=True, weights_only=True)
            part |= {name: part[name].to(self.device) for name in ("tokens", "hidden")}
            if self.parts and part["layers"] != self.parts[0]["layers"]:
                raise ConfigError(f"{path} holds other layers than the files before it")
            at = 0
            for length, prompt in zip(part["lengths"].tolist(), part["prompts"].tolist()):
                self.talks.append(Talk(len(self.parts), at, length, prompt))
                at += length
            self.parts.append(part)
            self.names.add(path.name)

    @property
    def layers(self) -> list[int]:
        return list(self.parts[0]["layers"])

    def counts(self, vocabulary: int) -> Tensor:
        """How often each token is in an answer, int64 [vocabulary]."""
        total = torch.zeros(vocabulary, dtype=torch.long, device=self.device)
        for tokens in self.answers():
            total += torch.bincount(tokens.long(), minlength=vocabulary)
        return total

    def answers(self) -> Iterator[Tensor]:
        """Token ids of each conversation's last answer."""
        for talk in self.talks:
            yield self.parts[talk.part]["tokens"][talk.start + talk.prompt : talk.start + talk.length]

    def sample(self, tokens: int) -> Iterator[tuple[dict[str, Any], int, int, int]]:
        """Conversations of ``tokens`` tokens together: the file, and where in it, how long, and how much is prompt."""
        for talk in self.talks:
            if tokens <= 0:
                return
            tokens -= talk.length
            yield self.parts[talk.part], talk.start, talk.length, talk.prompt

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Conversations drawn at random and laid end to end, int64 [rows, length, 3]: where each token is (part and
        place), and its conversation's number in the row."""
        draw = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {consumed}".encode()))
        if consumed % (8 * rows * length) == 0:
            self.look()
        out = torch.empty(rows, length, 3, dtype=torch.long)
        for row in range(rows):
            at, number = 0, 0
            while at < length:
                talk = self.talks[int(torch.randint(len(self.talks), (), generator=draw))]
                # of a long prompt, the end: what comes before it is in the features
                skip = max(0, talk.prompt - 128)
                count = min(talk.length - skip, length - at)
                out[row, at : at + count, 0] = talk.part
                out[row, at : at + count, 1] = torch.arange(count) + talk.start + skip
                out[row, at : at + count, 2] = number * (1 << 20) + talk.prompt - skip
                at, number = at + count, number + 1
        return out

    def lesson(
        self, indices: Tensor, target: PreTrainedModel, embedding: Tensor, head: Tensor, narrow: bool
    ) -> TrainingBatch:
        """What a draft learns from at ``indices`` (``batch``); ``head`` reads hidden states, of the drafted tokens
        alone where it is ``narrow``."""
        indices = indices.to(self.device)
        rows, length, _ = indices.shape
        tokens = indices.new_empty(rows * length)
        wide = tokens.new_empty(rows * length, self.parts[0]["hidden"].shape[1], dtype=torch.bfloat16)
        flat = indices.view(-1, 3)
        for part in flat[:, 0].unique().tolist():
            mine = flat[:, 0] == part
            at = flat[mine, 1]
            tokens[mine] = self.parts[part]["tokens"][at].long()
            wide[mine] = self.parts[part]["hidden"][at]
        states = wide.view(rows, length, -1).float().chunk(len(self.layers), dim=-1)
        segment = indices[..., 2] >> 20
        prompt = indices[..., 2] & ((1 << 20) - 1)
        inside = torch.arange(length, device=self.device) - _starts(segment)
        return TrainingBatch(
            tokens=tokens.view(rows, length),
            hidden=dict(zip(self.layers, states)),
            logits=None,
            embedding=embedding,
            head=head,
            target=target,
            segments=segment,
            answers=inside >= prompt,
            reduced_vocabulary=narrow,
        )


def _starts(segments: Tensor) -> Tensor:
    """Where the conversation of each place begins, int64 [rows, length]."""
    length = segments.shape[1]
    new = torch.ones_like(segments, dtype=torch.bool)
    new[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(new, torch.arange(length, device=new.device), 0).cummax(dim=1).values


RIDGE = 0.01
"""Of every input's mean square."""
SHARPNESS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
"""Factors of the logits that are tried."""
CALIBRATED = 8_000
"""Tokens that they are tried on."""
BACK = 0.03
"""How closely features keep to hidden states, which stand in for them while drafting."""


def options(config: Any, layers: list[int], rows: int) -> dict[str, Any]:
    """Options of an EAGLE-3 head whose layer is one of a Llama target's."""
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


def scale(module: Any) -> Tensor:
    """What a target's RMS norm or matrix multiplies by, float32: Gemma's norms hold that less one."""
    weight: Tensor = module.weight.float()
    less_one = type(module).__name__.startswith("Gemma") and weight.dim() == 1
    return weight + 1 if less_one else weight


def vocabulary(counts: Tensor, rows: int, always: list[int]) -> Tensor:
    """The ``rows`` commonest tokens of ``counts`` int64 [vocabulary] in ascending order, ``always`` among them."""
    requested = counts.clone()
    requested[always] = int(counts.max()) + 1
    return requested.topk(rows).indices.sort().values


class Fit:
    """Least squares with a ridge, of sums that are added up batch by batch: weights [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.left = torch.zeros(inputs, inputs, device=device)
        self.right = torch.zeros(inputs, outputs, device=device)

    def add(self, known: Tensor, requested: Tensor) -> None:
        self.left += known.T @ known
        self.right += known.T @ requested

    def solve(self, some: Tensor | slice = slice(None)) -> Tensor:
        """The weights of the inputs ``some``; every input counts as if its mean square were 1."""
        left, right = self.left[some][:, some], self.right[some]
        size = left.diagonal().sqrt().clamp_min(1e-6)
        left = left / size / size[:, None] + RIDGE * torch.eye(len(size), device=size.device)
        return (torch.linalg.solve(left, right / size[:, None]) / size[:, None]).T


@torch.no_grad()
def start(head: EagleHead, target: PreTrainedModel, ids: Tensor, features: Features, tokens: int) -> Tensor:
    """Gives ``head`` what needs no gradient. Its feature is the target's last hidden state before the final norm's
    weights, and so is its output, for the next token; rows of the target's output layer, ``ids``, read it. Matrices
    are fitted to that, one after another, by least squares: of feature and embedding, of what the layer's attention
    finds and of what its MLP makes of both, with the target's last layer's weights before them. Returns the size of
    every input of ``fc``, a root mean square, float32 [inputs]."""
    body: Any = target.get_decoder()
    output: Any = target.get_output_embeddings()
    embedding: Any = target.get_input_embeddings()
    norm = scale(body.norm)
    head.reduce_vocabulary(ids, output.weight[ids])
    head.norm.weight.copy_(norm)
    take(head, (head.hidden_norm, head.post_attention_layernorm), body.layers[-1])
    known = _Talks(features, embedding.weight.float(), norm, tokens)
    sizes = _fit_input(head, known)
    second = Fit(head.o_proj.in_features, len(norm), norm.device)
    for states, said, requested in known:
        stream, attended = _attended(head, states, said)
        second.add(attended[-len(requested) :], requested - stream[-len(requested) :])
    head.o_proj.weight.copy_(second.solve())
    third = Fit(head.mlp.down_proj.in_features, len(norm), norm.device)
    for states, said, requested in known:
        stream, attended = _attended(head, states, said)
        x = stream + head.o_proj(attended)
        normed = head.post_attention_layernorm(x)
        inner = functional.silu(head.mlp.gate_proj(normed)) * head.mlp.up_proj(normed)
        third.add(inner[-len(requested) :], requested - x[-len(requested) :])
    head.mlp.down_proj.weight.copy_(third.solve())
    head.norm.weight.mul_(_sharpness(head, replace(known, tokens=CALIBRATED)))
    return sizes


def take(own: Any, norms: tuple[Any, Any], layer: Any) -> None:
    """What the target's ``layer`` looks for, where it has matrices of ``own``'s shapes, with its ``norms`` before
    attention and MLP, nothing of what it says."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    pairs = [(getattr(own, part), getattr(attention, part, None)) for part in ("q_proj", "k_proj", "v_proj")]
    pairs += [(getattr(own.mlp, part), getattr(mlp, part, None)) for part in ("gate_proj", "up_proj")]
    named = ("input_layernorm", "post_attention_layernorm")
    pairs += [(norm, getattr(layer, name, None)) for norm, name in zip(norms, named, strict=True)]
    for mine, theirs in pairs:
        if theirs is not None and theirs.weight.shape == mine.weight.shape:
            mine.weight.copy_(scale(theirs))
    own.o_proj.weight.zero_()
    own.mlp.down_proj.weight.zero_()


def _fit_input(head: EagleHead, known: _Talks) -> Tensor:
    """Fits ``mix`` and ``fc``. While drafting, the head's output is its next feature, so ``mix`` is fitted to last
    hidden states, and ``fc`` adds to those what the other features say."""
    assert head.mix is not None
    size, inputs = head.fc.out_features, head.fc.in_features
    device = known.norm.device
    fit, squares, count = Fit(size + inputs, size, device), torch.zeros(inputs, device=device), 0
    for states, said, requested in known:
        fit.add(torch.cat([said, states], dim=-1)[-len(requested) :], requested)
        squares += states.square().sum(0)
        count += len(states)
    last = torch.cat([torch.arange(size), torch.arange(inputs, inputs + size)])
    short, long = fit.solve(last), fit.solve()
    mixed = short[:, size:] * known.norm
    head.mix.weight.copy_(torch.cat([long[:, :size], mixed], dim=-1))
    keep = torch.zeros(size, inputs, device=device)
    keep[:, -size:] = torch.diag(1 / known.norm)
    close = BACK * mixed.square().sum() / size
    lack = long[:, size:] - mixed @ keep
    near = close * torch.eye(size, device=device)
    head.fc.weight.copy_(keep + torch.linalg.solve(mixed.T @ mixed + near, mixed.T @ lack))
    return (squares / max(1, count)).sqrt()


def _sharpness(head: EagleHead, known: _Talks) -> float:
    """The factor of its logits with which most of its drafts are kept at temperature 1."""
    assert head.lm_head is not None
    kept, count = torch.zeros(len(SHARPNESS), device=known.norm.device), 0
    for states, said, requested in known:
        stream, attended = _attended(head, states, said)
        logits = head.lm_head(head.norm(head.finish(stream, attended)[-len(requested) :]))
        theirs = head.lm_head(requested * known.norm)
        kept += torch.stack([overlap(theirs, factor * logits).sum() for factor in SHARPNESS])
        count += len(requested)
    return SHARPNESS[int(kept.argmax())] if count else 1.0


@dataclass(frozen=True)
class _Talks:
    """Of each conversation, ``tokens`` tokens together, the features [n, inputs], the embeddings of the tokens behind
    them, and, for the last of them, where the answer is, the next tokens' hidden states before ``norm``."""

    features: Features
    embedding: Tensor
    norm: Tensor
    tokens: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for part, index, length, prompt in self.features.sample(self.tokens):
            states = part["hidden"][index : index + length].float()
            ids = part["tokens"][index : index + length].long()
            answer = states[max(1, prompt - 1) : -1, -len(self.norm) :] / self.norm
            if len(answer):
                yield states[:-2], self.embedding[ids[1:-1]], answer


def _attended(head: EagleHead, states: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """A conversation's stream before the layer [n, hidden size], and what its attention finds [n, heads * width]."""
    stream = head.enter(said, head.feature(states))
    q, k, v = head.qkv(said, stream, torch.arange(len(said), device=said.device))
    groups = head.heads // head.kv_heads
    k, v = k.repeat_interleave(groups, dim=-2), v.repeat_interleave(groups, dim=-2)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return stream, out[0].transpose(0, 1).flatten(-2)


class Scaled(nn.Module):
    """A weight as it is learnt: for inputs of size 1, whatever theirs are."""

    def __init__(self, size: Tensor) -> None:
        super().__init__()
        self.size: Tensor
        self.register_buffer("size", size.clamp_min(1e-3))

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.size

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.size
