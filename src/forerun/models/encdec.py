"""Encoder-decoders that ``architectures/seq2seq.py`` describes: T5 and BART, without modules.

The encoder reads each request's source once, all new sources of a forward side by side; what the decoder attends to
across is kept with the cache (``cache/sources.py``). The decoder's rows are those of any other model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from forerun.models import checkpoint, formats, tiling
from forerun.models.architectures import seq2seq
from forerun.models.architectures.seq2seq import ACTIVATIONS, SPARE, LayerStack, Seq2Seq
from forerun.models.base import EncoderInfo, LoadRequest, ModelInfo, Tiles
from forerun.models.formats import choose, describe
from forerun.models.formats.base import Linear, Rows, size
from forerun.models.hf import read_module
from forerun.models.layout import Embedding, Maker
from forerun.models.parts import make_gate, make_norm

TOGETHER = 4096
"""Tokens that the encoder reads in one go, or one source's."""


@dataclass(slots=True)
class EncoderDecoderBlock:
    """An attention or an MLP and its norm."""

    weights: Any
    """Queries, keys and values; across, queries alone; or the inner layer, its gate before it."""
    out: Any
    norm: Any
    memory: Any = None
    """Keys and values across."""


@dataclass(slots=True)
class Side:
    """The encoder or the decoder."""

    stack: LayerStack
    embedding: Embedding
    attention: list[EncoderDecoderBlock] = field(default_factory=list)
    cross: list[EncoderDecoderBlock] = field(default_factory=list)
    mlp: list[EncoderDecoderBlock] = field(default_factory=list)
    norm_embedding: Any = None
    norm: Any = None
    positions: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    """[heads, distances] float32: in the decoder as ``Query.bias``, in the encoder from the farthest key before a row
    to the farthest behind it."""

    def linears(self) -> Iterator[Any]:
        for block in (*self.attention, *self.cross, *self.mlp):
            yield from (block.weights, block.out)
            if block.memory is not None:
                yield block.memory

    def norms(self) -> Iterator[Any]:
        every = (*(block.norm for block in (*self.attention, *self.cross, *self.mlp)), self.norm_embedding, self.norm)
        yield from (norm for norm in every if norm is not None)


class EncoderDecoder:
    """A described encoder-decoder behind the engine's protocol, of a ``module`` of transformers'. ``start`` is what a
    decoder begins with where a request says nothing. Raises ConfigError where it cannot be invariant, and must be."""

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
            builder = _Builder(spec, maker, how == "streamed")
            self._head = maker.linear(embedding if tied else "lm_head")
            self._decoder = builder.side(spec.decoder, self._head if tied else None)
            self._encoder = builder.side(spec.encoder, None, self._decoder.embedding if same else None)
        gated = len(spec.decoder.mlp.weights) == 2
        activation = ACTIVATIONS[spec.activation]
        self._activation = make_gate(activation, self.dtype, kernels=False, invariant=True, gated=gated)
        self.info = self._describe(requested, start)
        self.invariant = invariant is not False and self._exact()
        if invariant and not self.invariant:
            raise ConfigError(
                "an encoder-decoder's logits are bit-equal only where our kernels compute all of its layers (a CPU "
                "with AVX2 or ARM64, and a C++ compiler): leave invariant out"
            )

    def _exact(self) -> bool:
        """Whether kernels of ours compute all that has an order of additions, and torch rounds alike at every place."""
        norms = [*self._encoder.norms(), *self._decoder.norms()]
        return tiling.ordered(self.info, self.linears(), norms) and tiling.steady()

    def _describe(self, requested: LoadRequest, start: tuple[int, ...]) -> ModelInfo:
        spec, layers = self.spec, list(self.linears())
        shapes = (KVShape(spec.decoder.heads, spec.width, spec.width),) * spec.decoder.count
        embeddings = {id(side.embedding): side.embedding.nbytes for side in (self._encoder, self._decoder)}
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
        """Rows whose spans' sources have not been read yet have them read first."""
        if batch.hidden or batch.layers is not None:
            raise ConfigError("an encoder-decoder's layers are not run, or looked at, one by one")
        assert attention.pool.sources is not None
        attention.pool.sources.prepare(batch.spans, self._encode)
        metadata = attention.begin(batch)
        side, spec = self._decoder, self.spec
        x = self._inputs(side, batch.input_ids, batch.positions)
        heads = spec.decoder.heads
        for layer, (block, cross, mlp) in enumerate(zip(side.attention, side.cross, side.mlp)):
            qkv = block.weights(self._before(block, x)).view(-1, 3 * heads, spec.width)
            q, k, v = qkv.split_with_sizes((heads, heads, heads), 1)
            x = self._add(block, attention.run(Query(layer, q, k, v, spec.scale, bias=side.bias), metadata), x)
            q = cross.weights(self._before(cross, x)).view(-1, heads, spec.width)
            x = self._add(cross, attention.cross(layer, q, spec.scale, metadata), x)
            x = self._mlp(mlp, x)
        attention.finish(metadata)
        if not batch.num_logits:
            return Output(x.new_zeros(0, self.info.vocab_size, dtype=torch.float32))
        if batch.num_logits < batch.num_rows:
            x = x.index_select(0, batch.logit_rows)
        return Output(self.lm_head(x if side.norm is None else side.norm(x)))

    def _inputs(self, side: Side, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = side.embedding(ids)
        if side.positions is not None:
            x = x + side.positions[positions]
        return x if side.norm_embedding is None else side.norm_embedding(x)

    def _before(self, block: EncoderDecoderBlock, x: torch.Tensor) -> torch.Tensor:
        return block.norm(x) if self.spec.norm_first else x

    def _add(self, block: EncoderDecoderBlock, made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = block.out(made, x)
        return x if self.spec.norm_first else block.norm(x)

    def _mlp(self, block: EncoderDecoderBlock, x: torch.Tensor) -> torch.Tensor:
        return self._add(block, self._activation(block.weights(self._before(block, x))), x)

    def _encode(self, sources: list[Source]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values across [tokens, heads, width] of every decoder layer, source after source."""
        made = [self._encode_together(part) for part in _parts(sources)]
        if len(made) == 1:
            return made[0]
        return [(torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer])) for layer in zip(*made)]

    def _encode_together(self, sources: list[Source]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        side, spec = self._encoder, self.spec
        lengths = [len(source) for source in sources]
        ids = torch.tensor([token for source in sources for token in source], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        x = self._inputs(side, ids, positions)
        biases = [None if side.bias is None else _spread(side.bias, length).to(self.dtype) for length in lengths]
        for block, mlp in zip(side.attention, side.mlp):
            qkv = block.weights(self._before(block, x)).view(-1, 3, spec.encoder.heads, spec.width)
            parts = [_attend(rows, bias, spec.scale) for rows, bias in zip(qkv.split(lengths), biases)]
            x = self._add(block, torch.cat(parts), x)
            x = self._mlp(mlp, x)
        x = x if side.norm is None else side.norm(x)
        heads = spec.decoder.heads
        result = [block.memory(x).view(-1, 2 * heads, spec.width) for block in self._decoder.cross]
        return [(kv[:, :heads], kv[:, heads:]) for kv in result]

    @inference
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embedding(ids)

    @inference
    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(self.dtype)
        logits = self._head(hidden if self.spec.head_scale == 1.0 else hidden * self.spec.head_scale).float()
        return logits if self._logits_bias is None else logits.add_(self._logits_bias)


@dataclass(slots=True)
class _Builder:
    """Makes stacks of a maker's layers; with ``kernels``, norms are ours as well."""

    spec: Seq2Seq
    maker: Maker
    kernels: bool

    def side(self, stack: LayerStack, head: Linear | None, embedding: Embedding | None = None) -> Side:
        spec, maker = self.spec, self.maker
        made = Side(stack, embedding or maker.embedding(stack.embedding, head, spec.embedding_scale))
        for layer in range(stack.count):
            at = f"{stack.layers}.{layer}"
            every = [f"{at}.{name}" for name in stack.attention.weights]
            made.attention.append(self._block(at, stack.attention, maker.linear(*every)))
            if stack.cross is not None:
                query, *memory = [f"{at}.{name}" for name in stack.cross.weights]
                made.cross.append(self._block(at, stack.cross, maker.linear(query), maker.linear(*memory)))
            inner = [f"{at}.{name}" for name in stack.mlp.weights]
            made.mlp.append(self._block(at, stack.mlp, maker.linear(*inner)))
        made.norm_embedding = None if stack.norm_embedding is None else self._norm(stack.norm_embedding)
        made.norm = None if stack.norm is None else self._norm(stack.norm)
        if stack.positions is not None:
            table = maker.numbers(f"{stack.positions}.weight")[spec.skipped_positions :]
            made.positions = table.to(maker.dtype).clone()
        if stack.bias is not None:
            reach = spec.max_len + (SPARE if stack.cross is not None else 0)
            made.bias = _by_distance(maker.numbers(f"{stack.bias}.weight"), spec, reach, both=stack.cross is None)
        return made

    def _block(self, at: str, part: Any, weights: Linear, memory: Linear | None = None) -> EncoderDecoderBlock:
        return EncoderDecoderBlock(
            weights, self.maker.linear(f"{at}.{part.out}"), self._norm(f"{at}.{part.norm}"), memory
        )

    def _norm(self, name: str) -> Any:
        weight, layer_norm = self.maker.numbers(f"{name}.weight"), not self.spec.rms
        bias = self.maker.numbers(f"{name}.bias") if layer_norm else None
        return make_norm(
            weight, self.spec.eps, self.maker.dtype, kernels=self.kernels, layer_norm=layer_norm, bias=bias
        )


def _by_distance(weights: torch.Tensor, spec: Seq2Seq, reach: int, *, both: bool) -> torch.Tensor:
    """Biases [heads, distances] float32 of keys from ``reach`` - 1 before a row on to its own position, or, with
    ``both``, to as many behind it, from those of buckets [buckets, heads] (Raffel et al. 2020, section 2.1)."""
    behind = torch.arange(1 - reach, reach if both else 1, device=weights.device)
    buckets, first = spec.buckets, torch.zeros_like(behind)
    if both:
        buckets //= 2
        first = torch.where(behind > 0, buckets, 0)
    distances, exact = behind.abs(), buckets // 2
    far = (distances.float() / exact).log() / math.log(spec.farthest / exact) * (buckets - exact)
    far = (exact + far.clamp_(min=0).long()).clamp_(max=buckets - 1)
    return weights.float()[first + torch.where(distances < exact, distances, far)].T.contiguous()


def _spread(bias: torch.Tensor, length: int) -> torch.Tensor:
    """[heads, rows, keys] of a source of so many tokens, from those of distances."""
    indices = torch.arange(length, device=bias.device)
    return bias[:, indices - indices[:, None] + bias.shape[1] // 2]


def _attend(qkv: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Every row [3, heads, width] of a source over all of them -> [rows, heads * width]. Each source is a call of its
    own on fresh tensors, so that its bits depend on nothing beside it."""
    q, k, v = qkv.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], None if bias is None else bias[None], scale=scale)
    return out[0].transpose(0, 1).flatten(1)


def _parts(sources: list[Source]) -> Iterator[list[Source]]:
    part: list[Source] = []
    for source in sources:
        if part and sum(map(len, part)) + len(source) > TOGETHER:
            yield part
            part = []
        part.append(source)
    yield part


class ModuleWeights:
    """A module's parameters by their names, tied ones under each of theirs; ``transform.Weights``."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.found = {name: part.detach() for name, part in module.named_parameters(remove_duplicate=False)}

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def values(self, name: str) -> Rows:
        return self.found[name]

    def blocks(self, name: str) -> None:
        return None

    def release(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in {part.data_ptr(): part for part in self.found.values()}.values())

    def same(self, one: str, other: str) -> bool:
        """Whether two names are one tensor's."""
        return self.found[one].data_ptr() == self.found[other].data_ptr()


def load_encoder_decoder(requested: LoadRequest, config: Any, *, model_path: str, ranks: int) -> EncoderDecoder:
    """``invariant`` None: bit-equal logits on CPU where they can be had, and a warning where they cannot; True raises
    ConfigError instead. Raises ConfigError for what cannot be had of an encoder-decoder, and ModelError."""
    folder, on_cpu = requested.folder, requested.device.type == "cpu"
    if model_path == "hf":
        raise ConfigError(f"{folder} is an encoder-decoder, which the native path alone runs: leave model_path out")
    if requested.lora:
        raise ConfigError(f"{folder} is an encoder-decoder: adapters (lora) are merged into decoders")
    if ranks != 1:
        raise ConfigError(
            f"tensor_parallel_size {ranks} splits decoders: encoder-decoders such as {folder} run in one process"
        )
    if requested.dtype is torch.float16 and config.model_type != "bart":
        raise ConfigError(f"{config.model_type} overflows float16: use float32 or bfloat16")
    module: Any = read_module(folder, config, requested.dtype, attention="sdpa")
    wish = False if requested.invariant is None and not on_cpu else requested.invariant
    spec, start = seq2seq.bind(module.config, requested.max_model_len), _start(folder, module.config)
    model = EncoderDecoder(module.to(requested.device), spec, replace(requested, invariant=wish), start)
    if wish is None and not model.invariant:
        warnings.warn(
            f"invariant mode is off: the bits of {model.info.architecture}'s logits depend on the rows beside them "
            "where our kernels do not compute all of its layers",
            RuntimeWarning,
            stacklevel=3,
        )
    return model


def _start(folder: Path, config: Any) -> tuple[int, ...]:
    """What transformers' ``generate`` begins an answer with: the start token, and one that is forced behind it, of the
    generation config, or else of the config."""
    path = folder / "generation_config.json"
    given = checkpoint.read_object(path) if path.is_file() else {}
    result: dict[str, Any] = {}
    for name in ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id"):
        value = given.get(name)
        result[name] = value if value is not None else getattr(config, name, None)
    begins = result["decoder_start_token_id"]
    begins = begins if begins is not None else result["bos_token_id"]
    tokens = [begins] if result["forced_bos_token_id"] is None else [begins, result["forced_bos_token_id"]]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
            raise ModelError(f"{folder} does not say what its decoder begins with: token id {shown(token)}")
    return tuple(tokens)
