"""Encoder-decoders that ``architectures/seq2seq.py`` describes (T5 and BART), without modules.

The encoder reads each request's source once, all new sources of a forward together. Keys and values of cross-attention
are kept with the cache (``cache/sources.py``). The decoder's rows are those of any other model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from forerun.attention.base import Attention, Query
from forerun.cache.pool import KVShape
from forerun.cache.sources import Source
from forerun.core.batch import Batch, Output
from forerun.core.errors import ConfigError, ModelError, shown
from forerun.core.inference import inference
from forerun.core.loading import watch
from forerun.models import formats
from forerun.models.architectures.seq2seq import ACTIVATIONS, SEQ2SEQ, SPARE, BlockNames, Seq2Seq, StackNames
from forerun.models.files.open import Checkpoint
from forerun.models.formats import choose, describe
from forerun.models.formats.base import Linear, size
from forerun.models.run.base import EncoderInfo, LoadRequest, ModelInfo, Tiles
from forerun.models.run.hf import read_module
from forerun.models.run.parts import make_gate, make_norm
from forerun.models.weights import tiling
from forerun.models.weights.layout import Embedding, Maker
from forerun.models.weights.transform import TensorWeights

TOGETHER = 4096
"""The most tokens that the encoder reads in one call, except for a longer source."""


@dataclass(slots=True)
class EncoderDecoderBlock:
    """An attention or an MLP, with its norm."""

    in_proj: Any
    """Queries, keys and values; queries alone in cross-attention; in an MLP the inner layer, after its gate."""
    out_proj: Any
    norm: Any
    memory: Any = None
    """Keys and values of cross-attention."""


class EncoderDecoderStack:
    """The encoder or the decoder; with ``kernels``, norms are on our own kernels too."""

    def __init__(
        self, names: StackNames, spec: Seq2Seq, maker: Maker, head: Linear | None, embedding: Embedding | None = None,
        *, kernels: bool,
    ) -> None:  # fmt: skip
        self.spec, self.maker, self.kernels = spec, maker, kernels
        self.embedding = embedding or maker.embedding(names.embedding, head, spec.embedding_scale)
        self.attention: list[EncoderDecoderBlock] = []
        self.cross: list[EncoderDecoderBlock] = []
        self.mlp: list[EncoderDecoderBlock] = []
        for index in range(names.count):  # made in the order of their use, so that they are so in memory
            layer = f"{names.layers}.{index}"
            self.attention.append(self._block(layer, names.attention))
            if names.cross is not None:
                self.cross.append(self._block(layer, names.cross, cross=True))
            self.mlp.append(self._block(layer, names.mlp))
        self.embedding_norm = None if names.embedding_norm is None else self._norm(names.embedding_norm)
        self.norm = None if names.norm is None else self._norm(names.norm)
        self.positions: torch.Tensor | None = None
        """Learned position embeddings."""
        if names.positions is not None:
            table = maker.numbers(f"{names.positions}.weight")[spec.skipped_positions :]
            self.positions = table.to(maker.dtype).clone()
        self.bias: torch.Tensor | None = None
        """Position biases [heads, distances] float32: in the decoder as ``Query.bias``, in the encoder from the
        farthest key before a row to the farthest after it."""
        if names.bias is not None:
            reach = spec.max_len + (SPARE if self.cross else 0)
            self.bias = _by_distance(maker.numbers(f"{names.bias}.weight"), spec, reach, both_sides=not self.cross)

    def _block(self, layer: str, names: BlockNames, *, cross: bool = False) -> EncoderDecoderBlock:
        first = [f"{layer}.{name}" for name in names.in_proj]
        own, memory = (first[:1], first[1:]) if cross else (first, [])
        return EncoderDecoderBlock(
            self.maker.linear(*own), self.maker.linear(f"{layer}.{names.out_proj}"),
            self._norm(f"{layer}.{names.norm}"), self.maker.linear(*memory) if memory else None,
        )  # fmt: skip

    def _norm(self, name: str) -> Any:
        weight, layer_norm = self.maker.numbers(f"{name}.weight"), not self.spec.rms
        bias = self.maker.numbers(f"{name}.bias") if layer_norm else None
        return make_norm(
            weight, self.spec.eps, self.maker.dtype, kernels=self.kernels, layer_norm=layer_norm, bias=bias
        )

    def _blocks(self) -> Iterator[EncoderDecoderBlock]:
        yield from (*self.attention, *self.cross, *self.mlp)

    def linears(self) -> Iterator[Any]:
        for block in self._blocks():
            yield from (part for part in (block.in_proj, block.out_proj, block.memory) if part is not None)

    def norms(self) -> Iterator[Any]:
        norms = (*(block.norm for block in self._blocks()), self.embedding_norm, self.norm)
        yield from (norm for norm in norms if norm is not None)

    def inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions[positions]
        return x if self.embedding_norm is None else self.embedding_norm(x)


class EncoderDecoder:
    """A described encoder-decoder behind the engine's protocol, of transformers' ``module``. ``start``: the decoder's
    first tokens unless a request has its own. Raises ConfigError if ``invariant`` is asked for and cannot be."""

    tiles: Tiles | None = None
    row_multiple = 1
    fused: None = None

    def __init__(self, module: PreTrainedModel, spec: Seq2Seq, requested: LoadRequest, start: tuple[int, ...]) -> None:
        self.spec, self.dtype, self.device = spec, module.dtype, module.device
        how, invariant = choose(self.dtype, self.device, requested.weights), requested.invariant
        form = formats.check(requested.quantization, self.device, self.dtype, invariant=bool(invariant))
        bias: Any = getattr(module, "final_logits_bias", None)
        self._logits_bias = bias.float() if isinstance(bias, torch.Tensor) and bool(bias.any()) else None
        """Added to all logits."""
        tensors, embedding = ModuleWeights(module), spec.decoder.embedding
        tied = tensors.same("lm_head.weight", f"{embedding}.weight")
        same = tensors.same(f"{spec.encoder.embedding}.weight", f"{embedding}.weight")
        with torch.inference_mode(), watch.get()(requested.name, tensors.nbytes) as advance:
            maker = Maker(tensors, self.dtype, self.device, how, form, advance)
            stack = partial(EncoderDecoderStack, spec=spec, maker=maker, kernels=how == "streamed")
            self._head = maker.linear(embedding if tied else "lm_head")
            self._decoder = stack(spec.decoder, head=self._head if tied else None)
            self._encoder = stack(spec.encoder, head=None, embedding=self._decoder.embedding if same else None)
        gated = len(spec.decoder.mlp.in_proj) == 2
        self._activation = make_gate(
            ACTIVATIONS[spec.activation], self.dtype, kernels=False, invariant=True, gated=gated
        )
        self.info = self._describe(requested, start)
        self.invariant = invariant is not False and self._exact()
        if invariant and not self.invariant:
            raise ConfigError(
                "an encoder-decoder's logits are bit-equal only where our kernels compute all of its layers (a CPU "
                "with AVX2 or ARM64, and a C++ compiler): remove invariant"
            )

    def _exact(self) -> bool:
        """Whether our kernels compute every sum, and torch's functions round alike at every index."""
        norms = [*self._encoder.norms(), *self._decoder.norms()]
        return tiling.ordered(self.info, self.linears(), norms) and tiling.steady()

    def _describe(self, requested: LoadRequest, start: tuple[int, ...]) -> ModelInfo:
        spec, layers = self.spec, list(self.linears())
        shapes = (KVShape(spec.decoder.heads, spec.head_dim, spec.head_dim),) * spec.decoder.count
        embeddings = {id(stack.embedding): stack.embedding.nbytes for stack in (self._encoder, self._decoder)}
        across = [block.memory for block in self._decoder.cross]
        return ModelInfo(
            name=requested.name,
            architecture=spec.causal,
            path=f"native, {describe(layers, self.dtype)}",
            vocab_size=self._decoder.embedding.count,
            hidden_size=spec.hidden,
            num_layers=spec.decoder.count,
            max_len=spec.max_len,
            kv_shapes=shapes,
            dtype=self.dtype,
            device=self.device,
            eos_ids=requested.eos_ids,
            weight_bytes=size(layers) + sum(embeddings.values()),
            token_bytes=size([*self._decoder.linears(), self._head]) - size(across),
            quantization=requested.quantization,
            encoder=EncoderInfo(start, spec.max_len, shapes),
        )

    def linears(self) -> Iterable[Linear]:
        yield from self._encoder.linears()
        yield from self._decoder.linears()
        yield self._head

    @inference
    def forward(self, batch: Batch, attention: Attention) -> Output:
        """As ``Model.forward``. Sources that the encoder has not read yet are read first."""
        if batch.hidden or batch.layers is not None:
            raise ConfigError("an encoder-decoder's layers are not run, or looked at, one by one")
        assert attention.pool.sources is not None
        attention.pool.sources.prepare(batch.spans, self._encode)
        metadata = attention.begin(batch)
        decoder, spec, heads = self._decoder, self.spec, self.spec.decoder.heads
        x = decoder.inputs(batch.input_ids, batch.positions)
        for layer, (block, cross, mlp) in enumerate(zip(decoder.attention, decoder.cross, decoder.mlp)):
            qkv = self._project(block, x).view(-1, 3 * heads, spec.head_dim)
            q, k, v = qkv.split_with_sizes((heads, heads, heads), 1)
            x = self._add(block, attention.run(Query(layer, q, k, v, spec.scale, bias=decoder.bias), metadata), x)
            q = self._project(cross, x).view(-1, heads, spec.head_dim)
            x = self._add(cross, attention.cross(layer, q, spec.scale, metadata), x)
            x = self._mlp(mlp, x)
        attention.finish(metadata)
        if not batch.num_logits:
            return Output(x.new_zeros(0, self.info.vocab_size, dtype=torch.float32))
        if batch.num_logits < batch.num_rows:
            x = x.index_select(0, batch.logit_rows)
        return Output(self.lm_head(x if decoder.norm is None else decoder.norm(x)))

    def _project(self, block: EncoderDecoderBlock, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = block.in_proj(block.norm(x) if self.spec.norm_first else x)
        return result

    def _add(self, block: EncoderDecoderBlock, inner: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = block.out_proj(inner, x)
        return x if self.spec.norm_first else block.norm(x)

    def _mlp(self, block: EncoderDecoderBlock, x: torch.Tensor) -> torch.Tensor:
        return self._add(block, self._activation(self._project(block, x)), x)

    def _encode(self, sources: list[Source]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [tokens, heads, head_dim] of every layer's cross-attention, source after source."""
        results = [self._encode_together(chunk) for chunk in _chunks(sources)]
        if len(results) == 1:
            return results[0]
        return [(torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer])) for layer in zip(*results)]

    def _encode_together(self, sources: list[Source]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        encoder, spec = self._encoder, self.spec
        lengths = [len(source) for source in sources]
        ids = torch.tensor([token for source in sources for token in source], device=self.device)
        x = encoder.inputs(ids, torch.cat([torch.arange(length, device=self.device) for length in lengths]))
        bias = encoder.bias
        biases = [None if bias is None else _by_pair(bias, length).to(self.dtype) for length in lengths]
        for block, mlp in zip(encoder.attention, encoder.mlp):
            qkv = self._project(block, x).view(-1, 3, spec.encoder.heads, spec.head_dim)
            attended = [_attend(rows, bias, spec.scale) for rows, bias in zip(qkv.split(lengths), biases)]
            x = self._add(block, torch.cat(attended), x)
            x = self._mlp(mlp, x)
        x = x if encoder.norm is None else encoder.norm(x)
        heads = spec.decoder.heads
        result = [block.memory(x).view(-1, 2 * heads, spec.head_dim) for block in self._decoder.cross]
        return [(kv[:, :heads], kv[:, heads:]) for kv in result]

    @inference
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embedding(ids)

    @inference
    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(self.dtype)
        logits = self._head(hidden if self.spec.head_scale == 1.0 else hidden * self.spec.head_scale).float()
        return logits if self._logits_bias is None else logits.add_(self._logits_bias)


def _by_distance(weights: torch.Tensor, spec: Seq2Seq, reach: int, *, both_sides: bool) -> torch.Tensor:
    """Biases by distance, from those of buckets [buckets, heads] (Raffel et al. 2020, section 2.1).

    Returns:
        [heads, distances] float32, for keys from ``reach`` - 1 before a row to its own position, or with ``both_sides``
        to as many after it.
    """
    offsets = torch.arange(1 - reach, reach if both_sides else 1, device=weights.device)
    buckets, first = spec.buckets, torch.zeros_like(offsets)
    if both_sides:
        buckets //= 2
        first = torch.where(offsets > 0, buckets, 0)
    distances, exact = offsets.abs(), buckets // 2
    far = (distances.float() / exact).log() / math.log(spec.farthest / exact) * (buckets - exact)
    far = (exact + far.clamp_(min=0).long()).clamp_(max=buckets - 1)
    return weights.float()[first + torch.where(distances < exact, distances, far)].T.contiguous()


def _by_pair(bias: torch.Tensor, length: int) -> torch.Tensor:
    """Biases [heads, rows, keys] of a source of ``length`` tokens, from those by distance."""
    indices = torch.arange(length, device=bias.device)
    return bias[:, indices - indices[:, None] + bias.shape[1] // 2]


def _attend(qkv: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention of a source's rows [rows, 3, heads, head_dim] over all of them: [rows, heads * head_dim]. Each source
    has a call of its own on new tensors, so that its bits depend on no other source."""
    q, k, v = qkv.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], None if bias is None else bias[None], scale=scale)
    return out[0].transpose(0, 1).flatten(1)


def _chunks(sources: list[Source]) -> Iterator[list[Source]]:
    chunk: list[Source] = []
    for source in sources:
        if chunk and sum(map(len, chunk)) + len(source) > TOGETHER:
            yield chunk
            chunk = []
        chunk.append(source)
    yield chunk


class ModuleWeights(TensorWeights):
    """A module's parameters; a tied one has several names."""

    tensors: Mapping[str, torch.Tensor]

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__({name: part.detach() for name, part in module.named_parameters(remove_duplicate=False)})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in {part.data_ptr(): part for part in self.tensors.values()}.values())

    def same(self, one: str, other: str) -> bool:
        """Whether two names are of one tensor."""
        return self.tensors[one].data_ptr() == self.tensors[other].data_ptr()


def load_encoder_decoder(requested: LoadRequest, opened: Checkpoint, *, model_path: str, ranks: int) -> EncoderDecoder:
    """Load an encoder-decoder. With ``invariant`` None logits are bit-equal on CPU if possible, otherwise a warning
    says so; True raises ConfigError instead. Raises ConfigError for options that do not apply, and ModelError."""
    folder, on_cpu = opened.path, requested.device.type == "cpu"
    if model_path == "hf":
        raise ConfigError(f"{folder} is an encoder-decoder, which only the native path supports: remove model_path")
    if requested.lora:
        raise ConfigError(f"{folder} is an encoder-decoder: adapters (lora) are merged into decoders")
    if ranks != 1:
        raise ConfigError(
            f"tensor_parallel_size {ranks} splits decoders: encoder-decoders such as {folder} run in one process"
        )
    kind = opened.config.model_type
    if requested.dtype is torch.float16 and kind != "bart":
        raise ConfigError(f"{kind} overflows float16: use float32 or bfloat16")
    module: Any = read_module(opened, requested.dtype, attention="sdpa")
    invariant = False if requested.invariant is None and not on_cpu else requested.invariant
    spec, start = SEQ2SEQ[kind](module.config, requested.max_model_len), _start(opened, module.config)
    model = EncoderDecoder(module.to(requested.device), spec, replace(requested, invariant=invariant), start)
    if invariant is None and not model.invariant:
        warnings.warn(
            f"invariant mode is off: the bits of {model.info.architecture}'s logits depend on the rows beside them "
            "where our kernels do not compute all of its layers",
            RuntimeWarning,
            stacklevel=3,
        )
    return model


def _start(opened: Checkpoint, config: Any) -> tuple[int, ...]:
    """The tokens with which transformers' ``generate`` starts an answer: the start token and a forced one after it,
    from the generation config or else the config."""

    def token_id(name: str) -> Any:
        value = opened.generation.get(name)
        return getattr(config, name, None) if value is None else value

    first, forced = token_id("decoder_start_token_id"), token_id("forced_bos_token_id")
    tokens = [token_id("bos_token_id") if first is None else first, *([] if forced is None else [forced])]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
            raise ModelError(f"{opened.path} does not say what its decoder begins with: token id {shown(token)}")
    return tuple(tokens)
