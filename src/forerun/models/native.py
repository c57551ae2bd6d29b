"""The Llama family without modules: Llama, Mistral, Qwen2, Qwen3, SmolLM and SmolLM3.

Same arithmetic as transformers up to rounding: query, key and value are one matrix, gate and up another; rotary
tables are computed once; nothing in the loop is an ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel

from forerun.attention.base import Attention, Query
from forerun.attention.streamed import StreamedAttention, can_attend
from forerun.cache.pool import KVShape
from forerun.core import tiles
from forerun.core.batch import Batch, Output
from forerun.core.errors import ModelError
from forerun.core.inference import inference
from forerun.models import activations, quantize, tiling
from forerun.models.base import ModelInfo, Tiles, pad_rows
from forerun.models.formats.base import Linear, size
from forerun.models.fused import Decoder, Fused, Layer
from forerun.models.linear import choose, describe
from forerun.models.rotary import ROPE_TYPES, Rotary
from forerun.models.streamed import Norm, SiluTimes
from forerun.models.weights import Maker, ModuleWeights, Weights

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def applies(config: PretrainedConfig) -> str | None:
    """None if the native path runs such a checkpoint, otherwise the reason why it does not."""
    kind = config.model_type
    if kind not in FAMILIES:
        return f"{kind} is not of the Llama family"
    if FAMILIES[kind] not in (config.architectures or [FAMILIES[kind]]):
        return f"{', '.join(config.architectures or [])} is not {FAMILIES[kind]}"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r}"
    if getattr(config, "quantization_config", None) is not None:
        return "a quantized checkpoint"
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"rope type {rope.get('rope_type')!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, dict) for value in rope.values()):
        return "partial or per-layer rotary embeddings"
    return None


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    __slots__ = ("dtype", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        width = weight.shape[-1]
        self.dtype = dtype
        self.weight = weight.float() * width**0.5
        self.eps = torch.tensor([eps * width], device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        half = self.dtype is not torch.float32
        wide = x.float() if half else x
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        wide = (wide * torch.addcmul(self.eps, norm, norm).rsqrt_()).mul_(self.weight)
        return wide.to(self.dtype) if half else wide


class _SiluTimes:
    """silu(gate) * up of rows [gate, up]."""

    __slots__ = ("silu",)

    def __init__(self, *, invariant: bool) -> None:
        self.silu = activations.silu if invariant else F.silu

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.silu(gate).mul_(up)


class NativeModel:
    """A decoder of the Llama family behind the engine's protocol. Takes over the weights of ``module``, emptying it, or
    takes ``tensors`` to ``device``; then the module says what there is."""

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        name: str,
        eos_ids: frozenset[int],
        invariant: bool,
        weights: str = "auto",
        quantization: str | None = None,
        tensors: Weights | None = None,
        device: torch.device | None = None,
    ) -> None:
        config = module.config
        reason = applies(config)
        if reason is not None:
            raise ModelError(f"the native path does not run this checkpoint: {reason}; use the transformers path")
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.scale = self.width**-0.5
        self.dtype, self.device = module.dtype, device or module.device
        self.invariant = invariant
        self._how = choose(self.dtype, self.device, weights)
        streamed = self._how == "streamed"
        self._make_norm: type[RMSNorm | Norm] = Norm if streamed else RMSNorm
        self._silu_times = SiluTimes(self.dtype) if streamed else _SiluTimes(invariant=invariant)
        form = None
        if quantization is not None:
            form = quantize.check(quantization, self.device, self.dtype, invariant=invariant)
        tensors = tensors or ModuleWeights(module)
        maker = Maker(tensors, self.dtype, self.device, self._how, form)
        self._rotary = Rotary(config, self.width, self.device, self.dtype)
        eps = config.rms_norm_eps
        with torch.inference_mode():
            backbone: Any = module.model
            self._layers = [self._layer(layer, index, maker, config) for index, layer in enumerate(backbone.layers)]
            self._norm = self._make_norm(maker.numbers("model.norm.weight"), eps, self.dtype)
            tied = "lm_head.weight" not in tensors
            self._head = maker.linear("model.embed_tokens" if tied else "lm_head")
            self._words = maker.words("model.embed_tokens", self._head if tied else None)
            tensors.taken()
        self._sizes = (self.heads, self.kv_heads, self.kv_heads)
        self.tiles: Tiles | None = None
        self.info = self._describe(module, name, eos_ids, quantization)
        sizes = self.heads, self.kv_heads, self.width
        decoder = Decoder(*sizes, self._words, self._layers, self._norm, self._head, self._rotary)
        self.fused = Fused(decoder) if decoder.can_fuse() else None
        """All layers in one call, where every part has a kernel."""
        if invariant and not (self.fused and can_attend(self.dtype, self.device, self.info.kv_shapes)):
            self.tiles = tiling.find(self)

    def _describe(
        self, module: PreTrainedModel, name: str, eos_ids: frozenset[int], quantization: str | None
    ) -> ModelInfo:
        layers, shape = list(self.linears()), KVShape(self.kv_heads, self.width, self.width)
        held = size(layers)
        return ModelInfo(
            name=name,
            architecture=type(module).__name__,
            path=f"native, {describe(layers, self.dtype)}",
            vocab_size=self._words.count,
            hidden_size=module.config.hidden_size,
            num_layers=len(self._layers),
            max_len=int(module.config.max_position_embeddings),
            kv_shapes=(shape,) * len(self._layers),
            dtype=self.dtype,
            device=self.device,
            eos_ids=eos_ids,
            weight_bytes=held + self._words.nbytes,
            token_bytes=held,
            quantization=quantization,
        )

    def _layer(self, module: Any, index: int, maker: Maker, config: PretrainedConfig) -> Layer:
        attention, at, eps = module.self_attn, f"model.layers.{index}", config.rms_norm_eps
        window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
        norm_qk = None
        if hasattr(attention, "q_norm"):
            query, key = (maker.numbers(f"{at}.self_attn.{name}_norm.weight") for name in "qk")
            stacked = torch.cat([query.expand(self.heads, -1), key.expand(self.kv_heads, -1)])
            norm_qk = self._make_norm(self._rotary.arrange(stacked), eps, self.dtype)

        def turned(rows: torch.Tensor) -> torch.Tensor:
            return self._rotary.arrange_rows(rows, len(rows) // self.width)

        def norm(name: str) -> RMSNorm | Norm:
            return self._make_norm(maker.numbers(f"{at}.{name}.weight"), eps, self.dtype)

        projections = (f"{at}.self_attn.{name}_proj" for name in "qkv")
        return Layer(
            qkv=maker.linear(*projections, order=(turned, turned, None)),
            out=maker.linear(f"{at}.self_attn.o_proj"),
            gate_up=maker.linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
            down=maker.linear(f"{at}.mlp.down_proj"),
            norm_attention=norm("input_layernorm"),
            norm_mlp=norm("post_attention_layernorm"),
            norm_qk=norm_qk,
            rope=bool(getattr(attention, "use_rope", True)),
            window=window,
        )

    def linears(self) -> Iterable[Linear]:
        for layer in self._layers:
            yield from layer.linears()
        yield self._head

    @inference
    def forward(self, batch: Batch, cache: Attention) -> Output:
        if self.fused is not None and isinstance(cache, StreamedAttention):
            return self.fused(batch, cache)
        if self.tiles is None:
            return self.feed(batch, cache)
        if self.tiles.threads != torch.get_num_threads():
            self.tiles = tiling.find(self)
        return self.tiles.forward(self.feed, batch, cache)

    @property
    def row_multiple(self) -> int:
        return 1 if self.tiles is None else self.tiles.rows[0]

    def feed(self, batch: Batch, cache: Attention) -> Output:
        """Layer by layer; padded to a call's size where there are such."""
        cache.begin(batch)
        x = self._inputs(batch)
        angles = self._rotary.angles(batch)
        rows, normed = self._logit_rows(batch), len(self._layers) in batch.hidden
        hidden: dict[int, torch.Tensor] = {}
        layers = range(len(self._layers)) if batch.layers is None else batch.layers
        for index in layers:
            if index in batch.hidden:
                hidden[index] = x[: batch.num_rows]
            only = rows if index == layers[-1] and not normed else None
            x = self._run(self._layers[index], index, x, angles, only, batch, cache)
        cache.finish(batch)
        if normed:
            x = self._norm(x)
            hidden[len(self._layers)] = x[: batch.num_rows]
            x = x if rows is None else x.index_select(0, rows)
        if not batch.num_logits:
            return Output(x.new_zeros(0, self.info.vocab_size, dtype=torch.float32), hidden)
        x = (x if normed else self._norm(x))[: batch.num_logits]
        logits = self._head(self._pad_logits(x))
        return Output(logits[: batch.num_logits].float(), hidden)

    def _inputs(self, batch: Batch) -> torch.Tensor:
        if batch.num_rows == 1 and batch.embeds is None and 0 not in batch.hidden:
            return self._pad(self._words.one(batch.spans[0].tokens[0]))
        x = self._words(batch.input_ids)
        if batch.embeds is not None:
            x[batch.embed_rows] = batch.embeds.to(x.dtype)
        return self._pad(x)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.tiles is None else pad_rows(x, tiles.fit(x.shape[0], self.tiles.rows))

    def _pad_logits(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.tiles is None else pad_rows(x, tiles.fit(x.shape[0], self.tiles.logits))

    def _logit_rows(self, batch: Batch) -> torch.Tensor | None:
        """The padded batch's rows whose logits are wanted; None: all of them."""
        if all(len(span.logits) == span.count for span in batch.spans):
            return None
        rows = batch.logit_rows
        return rows if not len(rows) else self._pad(rows[:, None])[:, 0]

    def _run(
        self,
        layer: Layer,
        index: int,
        x: torch.Tensor,
        angles: torch.Tensor,
        only: torch.Tensor | None,
        batch: Batch,
        cache: Attention,
    ) -> torch.Tensor:
        """One layer; ``only`` names the rows that go on behind its attention."""
        qkv = layer.qkv(layer.norm_attention(x))
        if x.shape[0] != batch.num_rows:
            qkv = qkv[: batch.num_rows]
        out = cache.run(Query(index, *self._heads(layer, qkv, angles), self.scale, layer.window), batch)
        if only is not None:
            x, out = x.index_select(0, only), out.index_select(0, only)
        elif x.shape[0] != batch.num_rows:
            out = self._pad(out)
        x = layer.out(out, x)
        return layer.down(self._silu_times(layer.gate_up(layer.norm_mlp(x))), x)

    def _heads(
        self, layer: Layer, qkv: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [rows, heads, width]."""
        sizes = self._sizes
        heads = qkv.view(qkv.shape[0], sum(sizes), self.width)
        turned = sizes[0] + sizes[1]
        if layer.norm_qk is None:
            q, k, v = (self._rotary.turn(heads, angles, turned) if layer.rope else heads).split_with_sizes(sizes, 1)
            return q, k, v
        qk, v = heads.split_with_sizes((turned, sizes[2]), 1)
        qk = layer.norm_qk(qk)
        q, k = (self._rotary.turn(qk, angles, turned) if layer.rope else qk).split_with_sizes(sizes[:2], 1)
        return q, k, v

    @inference
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._words(ids)

    @inference
    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden.to(self.dtype)).float()

    def signature(self) -> str:
        sizes = self.heads, self.kv_heads, self.width, self.info.hidden_size, self.info.vocab_size
        parts = {(linear.kind, linear.nbytes) for linear in self.linears()}
        return repr((self.info.architecture, self.info.path, self.dtype, self.device.type, sizes, sorted(parts)))

    def kinds(self) -> list[tuple[int, ...] | None]:
        """Layers that stand for all: one for each choice of shapes, formats and parts."""
        found: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            parts = [(linear.kind, linear.nbytes) for linear in layer.linears()]
            found.setdefault(repr((parts, layer.norm_qk is None, layer.rope, layer.window)), index)
        return [(index,) for index in found.values()]
