"""``mtp``: the layer for multi-token prediction that a checkpoint brings along (DeepSeek-V3, arXiv 2412.19437,
section 2.2).

Entry t of its own cache combines the target's last hidden state of token t with the embedding of token t + 1, and
predicts token t + 2: [norm(embedding), norm(hidden)] go through one matrix, a decoder layer and a norm into the
target's output layer. Deeper tokens use the layer's own normed output instead of the hidden state, as in vLLM and
transformers. If a checkpoint has several such layers, only the first one is used.

It reads Qwen 3.5's and Qwen3-Next's ``mtp.*``, DeepSeek's and GLM's ``model.layers.N.{enorm,hnorm,eh_proj,...}``,
MiMo's ``model.mtp_layers.0.*`` and GGUF's ``blk.N.nextn.*``, out of the target's own files or a file beside them. Where
the target has latent attention, so has the layer, in the same absorbed form (``models/run/layer.py``).
Gemma 4's assistant, another kind of drafter under the same method, is in ``assistant.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from forerun.cache.pool import KVShape
from forerun.core.config import COUNT
from forerun.core.errors import ConfigError, ModelError
from forerun.models.architectures.description import LatentAttention
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import LatentSpec, Routing, bind, refusal
from forerun.models.files.checkpoint import CONFIG, read_object
from forerun.models.files.gguf import is_gguf
from forerun.models.files.open import open_files, read_config, resolve
from forerun.models.formats import choose, make_linear
from forerun.models.formats.plain import Plain
from forerun.models.run.base import Model
from forerun.models.run.experts import Expert, Experts
from forerun.models.run.layer import LatentHeads, PerHead
from forerun.models.run.parts import make_gate
from forerun.models.run.rotary import Rotary
from forerun.models.weights.transform import deinterleaved
from forerun.speculate.draft.base import DraftContext, Drafter, drafters
from forerun.speculate.draft.heads.eagle import Eagle, EagleConfig
from forerun.speculate.draft.heads.gguf_files import LAYER
from forerun.speculate.draft.heads.head import (
    FORMAT,
    FeedForward,
    Guess,
    Head,
    Norm,
    Sizes,
    TrainingBatch,
    rotate,
    rotate_by,
)
from forerun.speculate.draft.model import most_common

DEFAULTS = {
    "heads": 4, "kv_heads": 2, "width": 16, "inner_size": 64, "theta": 10000.0, "eps": 1e-6, "turned": None,
    "gated": False, "norms": True, "biases": (), "experts": None, "latent": None,
}  # fmt: skip
LARGE_VOCABULARY, REDUCED_VOCABULARY = 65536, 32768
"""By default, a vocabulary larger than the first is reduced to the second, because the output layer is most of a step
(FastMTP, arXiv 2509.18362)."""
MAX_DEPTH = 16
RENAMED = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm", "shared_head.norm": "norm",
    "shared_head_norm": "norm", "post_attention_norm": "post_attention_layernorm", "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm", "attn_q_b": "q_b_proj", "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm", "attn_k_b": "k_b_proj", "attn_v_b": "v_b_proj", "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.exp_probs_b", "ffn_gate_exps": "mlp.gate_exps", "ffn_up_exps": "mlp.up_exps",
    "ffn_down_exps": "mlp.down_exps", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj", **LAYER,
}  # fmt: skip
PATTERNS = (
    r"(?:model\.)?(?:language_model\.)?mtp\.(?:layers\.0\.)?(.*)", r"(?:model\.)?mtp_layers\.0\.(.*)",
    r"(?:model\.)?(?:language_model\.)?layers\.{n}\.(.*)", r"blk\.{n}\.(?:nextn\.)?(.*)",
)  # fmt: skip
"""Patterns of the layer's tensor names; ``{n}`` is the number of the target's own layers."""
IGNORED = ("embed_tokens.weight", "shared_head.head.weight", "shared_head_head.weight", "rotary_emb.inv_freq")
"""Copies of the target's embedding and output layer."""
FURTHER_LAYERS = re.compile(r"layers\.\d+\.")
LATENT_SIZES = ("rank", "query_rank", "plain", "turned", "value")
"""Names in a head's file of the first fields of ``LatentSpec``."""
LATENT = "kv_a_proj_with_mqa.weight"
"""A weight that only latent attention has."""


class MtpLatent(nn.Module):
    """Multi-head latent attention, with rotary dimensions in halves. ``sizes`` has ``LATENT_SIZES``, the rotary
    ``frequencies`` and their ``factor``, and the ``scale`` of scores."""

    def __init__(self, size: int, heads: int, biases: Collection[str], sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.spec = spec = LatentSpec(*(sizes[name] for name in LATENT_SIZES))
        self.factor, self.frequencies = sizes["factor"], torch.tensor(sizes["frequencies"], device="cpu")
        query, query_rank = heads * spec.query_dim, spec.query_rank

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in biases)

        self.q_proj = None if query_rank else linear("q_proj", size, query)
        self.q_a_proj = linear("q_a_proj", size, query_rank) if query_rank else None
        self.q_a_layernorm = Norm(query_rank, LatentAttention().eps) if query_rank else None
        self.q_b_proj = linear("q_b_proj", query_rank, query) if query_rank else None
        self.kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", size, spec.rank + spec.rope_dim)
        self.kv_a_layernorm = Norm(spec.rank, LatentAttention().eps)
        self.keys = nn.Parameter(torch.randn(heads, spec.nope_dim, spec.rank) * spec.rank**-0.5)
        self.values = nn.Parameter(torch.randn(heads, spec.value_dim, spec.rank) * spec.rank**-0.5)

    @cached_property
    def heads(self) -> LatentHeads:
        """The absorbed form, made from the weights at the first access."""
        q_b: Any = self.q_b_proj
        dtype = self.keys.dtype
        how = choose(dtype, self.keys.device, "auto")
        absorbed = (self.keys.mT.detach(), self.values.detach())
        k_b, v_b = (PerHead([make_linear(weight, None, how) for weight in weights], dtype) for weights in absorbed)
        return LatentHeads(self.spec, q_b, self.q_a_layernorm, self.kv_a_layernorm, k_b, v_b)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [n, heads, entry] and cache entries [n, 1, entry]."""
        first = self.q_proj or self.q_a_proj
        assert first is not None
        frequencies = self.frequencies.to(x.device)

        def apply_rotary(heads: torch.Tensor) -> torch.Tensor:
            return rotate_by(heads, positions, frequencies) * self.factor

        return self.heads.project(torch.cat([first(x), self.kv_a_proj_with_mqa(x)], -1), len(x), apply_rotary)


class MtpExperts(nn.Module):
    """Mixture of experts: the weighted sum of down(silu(gate x) * up x) over the top-k experts, plus shared experts."""

    correction: torch.Tensor | None

    def __init__(self, size: int, experts: Mapping[str, Any]) -> None:
        super().__init__()
        self.options, count, inner = experts, experts["count"], experts["inner_size"]
        self.gate = nn.Linear(size, count, bias=False)
        self.gate_up = nn.Parameter(torch.randn(count, 2 * inner, size) * size**-0.5)
        self.down = nn.Parameter(torch.zeros(count, size, inner))
        self.register_buffer("correction", torch.zeros(count) if experts.get("sigmoid") else None)
        shared = experts.get("shared_size")
        self.shared = FeedForward(size, shared) if shared else None
        self.shared_gate = nn.Linear(size, 1, bias=False) if experts.get("shared_gate") else None

    @cached_property
    def routed(self) -> Experts:
        """The mixture, made from the weights at the first access."""
        options, groups = self.options, self.options.get("groups")
        router: Any = self.gate
        routing = Routing(
            options["chosen"], bool(options.get("normalised")), bool(options.get("sigmoid")),
            options.get("factor", 1.0),
            None if groups is None else (groups[0], groups[1]), eps=1e-20,
        )  # fmt: skip
        experts = [Expert(Plain(gate_up, None), Plain(down, None)) for gate_up, down in zip(self.gate_up, self.down)]
        activation = make_gate("silu", self.down.dtype, kernels=False, invariant=False, gated=True)
        return Experts(router, experts, activation, routing, len(experts), score_bias=self.correction)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.routed(x)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)
        return out


class MtpHead(Head):
    """The layer, the projection of its inputs, and the norms around it.

    Options: sizes, ``turned`` (rotary dimensions of a head; None: all), ``gated`` (queries include a gate of
    attention's output), ``norms`` (of queries and keys), ``biases``, ``experts`` and ``latent``.
    """

    method = "mtp"
    quantizes = True
    options_known = frozenset(DEFAULTS) | {"draft_vocab_size"}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = o = {**DEFAULTS, **sizes.options}
        size = sizes.hidden_size
        self.heads, self.kv_heads, self.width, latent = o["heads"], o["kv_heads"], o["width"], o["latent"]
        self.entry, self.scale = KVShape(self.kv_heads, self.width, self.width), self.width**-0.5
        self.enorm, self.hnorm, self.norm = (Norm(size, o["eps"]) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm, self.post_attention_layernorm = Norm(size, o["eps"]), Norm(size, o["eps"])

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in o["biases"])

        self.latent = None if latent is None else MtpLatent(size, self.heads, o["biases"], latent)
        if latent is None:
            self.q_proj = linear("q_proj", size, self.heads * self.width * (2 if o["gated"] else 1))
            self.k_proj = linear("k_proj", size, self.kv_heads * self.width)
            self.v_proj = linear("v_proj", size, self.kv_heads * self.width)
        else:
            self.entry, self.scale = KVShape(1, self.width, latent["rank"], shared=True), latent["scale"]
        self.o_proj = linear("o_proj", self.heads * (self.width if latent is None else latent["value"]), size)
        self.q_norm = Norm(self.width, o["eps"]) if o["norms"] else None
        self.k_norm = Norm(self.width, o["eps"]) if o["norms"] else None
        self.mlp = FeedForward(size, o["inner_size"]) if o["experts"] is None else MtpExperts(size, o["experts"])
        self.make_lm_head()

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states, unchanged."""
        return hidden

    def step(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """As ``EagleHead.step``; here the next step's features and the output layer's input are the same."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(feature)], dim=-1))
        normed = self.input_layernorm(x)
        if self.latent is not None:
            q, entry = self.latent.project(normed, positions)
            out = self.latent.heads.output(attend(q, entry, entry[..., : self.entry.value_dim])[rows])
            return self._finish(x[rows], out)
        q = self.q_proj(normed).unflatten(-1, (self.heads, -1))
        k, v = (p(normed).unflatten(-1, (self.kv_heads, self.width)) for p in (self.k_proj, self.v_proj))
        gate = None
        if self.options["gated"]:
            q, gate = q.chunk(2, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self._rotate(q, positions), self._rotate(k, positions), v.contiguous())[rows]
        if gate is not None:
            out = out * torch.sigmoid(gate[rows].flatten(1))
        return self._finish(x[rows], out)

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.o_proj(attended)
        x = self.norm(x + self.mlp(self.post_attention_layernorm(x)))
        return x, x

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        size = self.options["turned"]
        if size is None:
            return rotate(x, positions, self.options["theta"])
        return torch.cat([rotate(x[..., :size], positions, self.options["theta"]), x[..., size:]], dim=-1)

    def fuse(self, target: Model) -> None:
        """There is no compiled call for this layer."""

    def guesses(self, batch: TrainingBatch) -> Iterator[Guess]:
        raise ConfigError("layers for multi-token prediction come with their checkpoint and are not trained here")

    @classmethod
    def read(cls, path: Path, config: Any) -> Head:
        """Reads the layer in ``path`` for a target of ``config``, or one that ``save`` wrote. Raises ModelError."""
        saved = path / CONFIG
        if not is_gguf(path) and saved.is_file() and FORMAT in read_object(saved):
            return cls.load(path)
        weights = read_layer(path, config.num_hidden_layers, config)
        options = _options(config, weights)
        sizes = Sizes(config.hidden_size, config.vocab_size, config.num_hidden_layers, MAX_DEPTH, options)
        return cls.from_weights(sizes, weights, path)


def _tensor_names(path: Path, names: Iterable[str], num_layers: int) -> dict[str, str]:
    """Maps the head's names of the layer's weights to the file's names. Raises ModelError if there is no layer."""
    patterns = [re.compile(pattern.replace("{n}", str(num_layers))) for pattern in PATTERNS]
    result: dict[str, str] = {}
    for name in names:
        match = next((found for pattern in patterns if (found := pattern.fullmatch(name))), None)
        if match is None or match[1].endswith(IGNORED) or FURTHER_LAYERS.match(match[1]):
            continue
        stem, _, kind = match[1].removeprefix("mtp_block.").rpartition(".")
        stem = RENAMED.get(stem, stem).removeprefix("self_attn.")
        result[f"{stem}.{kind}" if stem else kind] = name
    if "eh_proj.weight" not in result:
        raise ModelError(
            f"{path} has no layer for multi-token prediction (mtp.*, model.layers.{num_layers}.eh_proj, "
            f"model.mtp_layers.0.* or blk.{num_layers}.nextn.*): name a file that has one as 'model'"
        )
    return result


def has_layer(path: Path, config: Any) -> bool:
    """Whether a target's own files have a supported layer; its weights are not read."""
    try:
        _check(path, config, _tensor_names(path, open_files(path).tensors, config.num_hidden_layers))
    except ModelError:
        return False
    return True


def read_layer(path: Path, num_layers: int, config: Any) -> dict[str, torch.Tensor]:
    """The layer's weights by the head's names. Raises ModelError if ``path`` has no supported layer."""
    files = open_files(path)
    names = _tensor_names(path, files.tensors, num_layers)
    _check(path, config, names)
    weights = {own: files.values(name).float() for own, name in names.items()}
    if any("mtp_layers" in name for name in files.tensors):  # MiMo puts the hidden state first
        weights["eh_proj.weight"] = torch.cat(weights["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    if not is_gguf(path) and str(config.model_type).startswith(("qwen3_5", "qwen3_next")):
        weights = {name: w + 1 if "norm" in name else w for name, w in weights.items()}
    described = ARCHITECTURES.get(config.model_type)
    if is_gguf(path) and described is not None and described.gguf_interleaved:
        for name, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            weights[f"{name}.weight"] = deinterleaved(weights[f"{name}.weight"], heads)
    return _stack_experts(path, _latent_weights(path, config, weights) if LATENT in weights else weights)


def _latent_weights(path: Path, config: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames the weights of latent attention for ``MtpLatent``. Raises ModelError for wrong shapes."""
    spec = bind(config)
    sizes, heads, others = spec.latent, spec.heads, dict(weights)
    assert sizes is not None
    per_head = sizes.nope_dim + sizes.value_dim
    both, keys, values = (others.pop(f"{name}.weight", None) for name in ("kv_b_proj", "k_b_proj", "v_b_proj"))
    if both is not None and both.shape == (heads * per_head, sizes.rank):
        keys, values = both.view(heads, per_head, sizes.rank).split_with_sizes((sizes.nope_dim, sizes.value_dim), 1)
    elif both is not None or keys is None or values is None or keys.dim() != 3:
        shape = None if both is None else [*both.shape]
        raise ModelError(f"{path}: its layer for multi-token prediction has kv_b_proj of {shape}, not "
                         f"{[heads * per_head, sizes.rank]}")  # fmt: skip
    else:
        keys = keys.transpose(1, 2)
    result = {"latent.keys": keys.contiguous(), "latent.values": values.contiguous()}
    for name, weight in others.items():
        is_latent = name.startswith(("q_", "kv_a_"))
        if sizes.interleaved and name.startswith(("q_proj", "q_b_proj", "kv_a_proj")):
            count, before = (1, sizes.rank) if name.startswith("kv_a") else (heads, sizes.nope_dim)
            weight = _halves(weight, count, before)
        result[f"latent.{name}" if is_latent else name] = weight
    return result


def _halves(weight: torch.Tensor, heads: int, before: int) -> torch.Tensor:
    """Reorders each head's rows of a weight or bias, after its first ``before``, from rotary pairs to halves."""
    if weight.shape[0] % heads:
        return weight  # ``Head.from_weights`` checks shapes
    parts = weight.unflatten(0, (heads, -1))
    return torch.cat([parts[:, :before], parts[:, before::2], parts[:, before + 1 :: 2]], 1).flatten(0, 1)


def _stack_experts(path: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks the weights of a mixture's experts. Raises ModelError if some are missing."""
    names = {
        "gate.weight": "gate.weight", "gate.e_score_correction_bias": "correction", "experts.down_proj": "down",
        "experts.gate_up_proj": "gate_up", "shared_expert_gate.weight": "shared_gate.weight",
        "exp_probs_b.bias": "correction", "down_exps.weight": "down",
    }  # fmt: skip
    result: dict[str, torch.Tensor] = {}
    stacked = [name for name in ("mlp.gate_exps.weight", "mlp.up_exps.weight") if name in weights]
    if stacked:  # as GGUF has them
        result["mlp.gate_up"] = torch.cat([weights.pop(name) for name in stacked], 1)
    single: dict[tuple[int, str], torch.Tensor] = {}
    for name, weight in weights.items():
        part = name.removeprefix("mlp.")
        expert = re.fullmatch(r"experts\.(\d+)\.(gate|up|down)_proj\.weight", part)
        if expert is not None:
            single[int(expert[1]), expert[2]] = weight
        elif name.startswith("mlp.") and part in names:
            result[f"mlp.{names[part]}"] = weight
        elif shared := re.fullmatch(r"shared_experts?\.(.*)", part):
            result[f"mlp.shared.{shared[1]}"] = weight
        else:
            result[name] = weight
    if single:
        count = 1 + max(expert for expert, _ in single)
        if len(single) != 3 * count:
            raise ModelError(f"{path}: some of the {count} experts of its layer for multi-token prediction are missing")
        gate_up = [torch.cat([single[e, "gate"], single[e, "up"]]) for e in range(count)]
        result["mlp.gate_up"] = torch.stack(gate_up)
        result["mlp.down"] = torch.stack([single[e, "down"] for e in range(count)])
    return result


def _check(path: Path, config: Any, names: Collection[str]) -> None:
    """Raises ModelError if the layer with these weights is not supported."""
    rope, described = config.rope_parameters or {}, ARCHITECTURES.get(config.model_type)
    latent = described is not None and described.latent is not None
    reason, has_latent = refusal(config) if latent else None, LATENT in names
    if latent != has_latent or reason is not None or (latent and bind(config).query_scaling is not None):
        kind = "latent" if has_latent else "no latent"
        raise ModelError(f"{path}: its layer for multi-token prediction has {kind} attention, "
                         f"its target is {config.model_type}: {reason or 'mtp does not run that'}")  # fmt: skip
    nested = any(isinstance(part, dict) for part in rope.values())
    if not latent and (nested or rope.get("rope_type", "default") != "default"):
        raise ModelError(f"{path}: mtp supports the default RoPE only, not {rope}")
    needed = ("o_proj",) if latent else ("q_proj", "k_proj", "v_proj", "o_proj")
    lacking = [name for name in needed if f"{name}.weight" not in names]
    if lacking:
        raise ModelError(f"{path}: its layer for multi-token prediction lacks {', '.join(lacking)}")
    sigmoid = {"mlp.gate.e_score_correction_bias", "mlp.exp_probs_b.bias"} & {*names}
    if "mlp.gate.weight" in names and (getattr(config, "n_group", None) or 1) > 1 and not sigmoid:
        raise ModelError(f"{path}: mtp chooses among all experts, not within n_group {config.n_group} groups")


def _options(config: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The head's options, from the target's config and the shapes of the weights."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters or {}
    partial = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    down = weights.get("mlp.down_proj.weight")
    latent = _latent_options(config) if "latent.keys" in weights else None
    if latent is not None:
        width = latent["rank"] + latent["turned"]
    options: dict[str, Any] = {
        "heads": heads,
        "kv_heads": 1 if latent is not None else weights["k_proj.weight"].shape[0] // width,
        "width": width,
        "inner_size": config.intermediate_size if down is None else down.shape[1],
        "theta": float(rope.get("rope_theta") or 10000.0),
        "eps": config.rms_norm_eps,
        "turned": None if partial == 1.0 else int(width * partial),
        "gated": latent is None and weights["q_proj.weight"].shape[0] == 2 * heads * width,
        "norms": "q_norm.weight" in weights,
        "biases": tuple(
            stem.removeprefix("latent.")
            for stem, _, kind in (name.rpartition(".") for name in weights)
            if kind == "bias" and stem.endswith(("proj", "proj_with_mqa"))
        ),
        "latent": latent,
    }
    if "mlp.gate.weight" in weights:
        options["experts"] = _experts(config, weights)
    return options


def _latent_options(config: Any) -> dict[str, Any]:
    spec = bind(config)
    assert spec.latent is not None
    rotary = Rotary(config, spec.latent.rope_dim, torch.device("cpu"), torch.float32)
    sizes = dict(zip(LATENT_SIZES, astuple(spec.latent)))
    return {**sizes, "frequencies": rotary.frequencies.tolist(), "factor": rotary.factor, "scale": spec.scale}


def _experts(config: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    sigmoid, shared = "mlp.correction" in weights, weights.get("mlp.shared.down_proj.weight")
    groups, kept = (getattr(config, key, None) or 1 for key in ("n_group", "topk_group"))
    return {
        "count": weights["mlp.gate.weight"].shape[0],
        "inner_size": weights["mlp.down"].shape[2],
        "chosen": config.num_experts_per_tok,
        "sigmoid": sigmoid,
        "groups": (groups, kept) if kept < groups else None,
        "normalised": getattr(config, "norm_topk_prob", True),
        "factor": getattr(config, "routed_scaling_factor", 1.0) if sigmoid else 1.0,
        "shared_size": 0 if shared is None else shared.shape[1],
        "shared_gate": "mlp.shared_gate.weight" in weights,
    }  # fmt: skip


@dataclass(frozen=True)
class MtpConfig(EagleConfig):
    """As eagle's. ``model`` is a file with the layer, if that is not in the target's files, or Gemma 4's assistant."""

    draft_vocab_size: int | None = None
    """How many tokens its output layer predicts, as for a draft model. None: 32,768 of a vocabulary of more than
    65,536, otherwise all tokens."""
    limits: ClassVar = {"draft_vocab_size": COUNT}
    unsupported: ClassVar = {"adapt": "method 'mtp' does not learn"}


@drafters.register("mtp")
class Mtp(Eagle):
    name = "mtp"
    config_class = MtpConfig
    head_class = MtpHead

    @classmethod
    def build(cls, config: Any, context: DraftContext) -> Drafter[Any]:
        from forerun.speculate.draft.heads.assistant import Assistant, is_assistant

        if config.model is not None and is_assistant(resolve(config.model)):
            return Assistant(config, context)
        return cls(config, context)

    def _load(self, config: Any, target: Model) -> Head:
        info = target.info
        own = resolve(info.name)
        head = MtpHead.read(own if config.model is None else resolve(config.model), read_config(own).get_text_config())
        ids = output_ids(config, self.context) if head.lm_head is None else None
        if ids is not None:
            head.reduce_vocabulary(ids, output_rows(own, ids))
        return head


def output_ids(config: MtpConfig, context: DraftContext) -> torch.Tensor | None:
    """The tokens of a reduced output layer, int64 ascending; None: all. Raises ConfigError."""
    info = context.target.info
    size = config.draft_vocab_size or (REDUCED_VOCABULARY if info.vocab_size > LARGE_VOCABULARY else None)
    if size is None:
        return None
    if size > info.vocab_size:
        raise ConfigError(f"draft_vocab_size is {size}, and {info.name} has {info.vocab_size} tokens")
    return most_common(context, size, info.vocab_size)


def output_rows(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` of the output layer of the checkpoint in ``path``, float32 [n, hidden size]."""
    files = open_files(path)
    for end in ("lm_head.weight", "output.weight", "embed_tokens.weight", "token_embd.weight"):
        for name in files.tensors:
            if name.endswith(end) and "mtp" not in name and not re.search(r"\.\d+\.", name):
                return files.values(name).float()[ids]
    raise ModelError(f"{path} has no output layer")
