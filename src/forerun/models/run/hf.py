"""Runs transformers' modules over ragged batches, where they use the library's attention interface.

An attention function is registered under the name ``forerun``. The stock model is called with ``input_ids`` [1, rows],
``position_ids`` [1, rows], and the forward's context as a keyword, which reaches that function unchanged. transformers
never builds a mask: rows see what the batch says, in the window that the mask would have had. This module takes as long
to import as torch, so ``load`` imports it only for models that need it.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers import __version__ as VERSION
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as hf_logging

from forerun.attention.base import Attention, Metadata, Query
from forerun.cache.pool import KVShape
from forerun.core.batch import Batch, Output
from forerun.core.errors import ModelError
from forerun.core.inference import inference
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import TILED_HEADS
from forerun.models.files import checkpoint
from forerun.models.files.open import Checkpoint, quiet
from forerun.models.formats import choose, describe, make_linear
from forerun.models.formats.base import Linear
from forerun.models.formats.plain import Plain
from forerun.models.run import activations
from forerun.models.run.base import LoadRequest, ModelInfo
from forerun.models.weights import lora as adapter
from forerun.models.weights import sanity
from forerun.models.weights.tiling import TiledModel
from forerun.models.weights.transform import GGUFWeights

NAME = "forerun"
NAMES = ("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id")
"""Config keys that do not shape the computation."""

IGNORED_KEYWORDS = frozenset(
    {
        "dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
        "return_dict", "position_embeddings", "cache", "past_key_values", "past_key_value", "logits_to_keep",
        "training", "layer_idx", "output_router_logits", "labels", "num_items_in_batch", "input_ids",
        "cos", "sin", "rotary_pos_emb", "head_mask", "encoder_hidden_states", "inputs_embeds",
        "mm_token_type_ids", "token_type_ids", "per_layer_inputs",
    }
)  # fmt: skip


@dataclass(slots=True)
class _HFContext:
    """What a forward passes to every attention layer."""

    attention: Attention
    metadata: Metadata


class _MaskProbe:
    """A stand-in for the context that learns each layer's KV shape. Its attention does not mix rows: it returns zeros,
    or NaN for a row with NaN. So NaN in other rows shows that something else mixes them."""

    rows, marked = 7, 3
    """The number of rows, and the one whose embedding is set to NaN."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.shapes[layer] = KVShape(key.shape[1], key.shape[3], value.shape[3])
        queries, keys, values = (side.isnan().any(3).any(1) for side in (query, key, value))
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        return out.masked_fill_((queries | keys | values)[:, :, None, None], math.nan)

    @classmethod
    def spread(cls, result: Any) -> bool:
        """Whether rows other than the marked one have NaN. Rows are the first dimension of that size."""
        if isinstance(result, torch.Tensor):
            if not result.is_floating_point() or cls.rows not in result.shape:
                return False
            lost = result.isnan().movedim(result.shape.index(cls.rows), 0).flatten(1).any(1)
            return bool(lost.sum() > lost[cls.marked].sum())
        parts = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else ()
        return any(cls.spread(part) for part in parts)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | int | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    forerun: _HFContext | _MaskProbe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query [1, heads, rows, width]."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if isinstance(attention_mask, int):
        sliding_window, attention_mask = attention_mask, None
    if attention_mask is not None or not causal:
        kind = "a mask of its own" if attention_mask is not None else "attention to later tokens"
        raise ModelError(f"{type(module).__name__} uses {kind}; forerun runs causal decoders")
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in IGNORED_KEYWORDS)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which forerun does not implement"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = getattr(module, "layer_idx", None)
    if layer is None or forerun is None:
        raise ModelError(f"{type(module).__name__} does not pass its layer or its keywords on to attention")
    if isinstance(forerun, _MaskProbe):
        if layer in forerun.shapes:
            raise ModelError(f"{type(module).__name__} attends more than once in layer {layer}; forerun cannot run it")
        return forerun.attend(layer, query, key, value), None
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    out = forerun.attention.run(Query(layer, q, k, v, scale, sliding_window, softcap), forerun.metadata)
    return out.view(1, query.shape[2], query.shape[1], -1), None


def _window(*args: Any, local_size: int | None = None, **kwargs: Any) -> int | None:
    """Returns the window instead of a mask: some models pass it nowhere else."""
    return local_size


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _window)


def _settings(layer: torch.nn.Module) -> str:
    """A text that is equal for layers that compute alike: classes, shapes and options, but not weights."""
    simple = (bool, int, float, str, type(None))
    parts = []
    for name, part in layer.named_modules():
        options = {key: value for key, value in vars(part).items() if isinstance(value, simple) and key != "layer_idx"}
        shapes = [(key, tuple(value.shape), value.dtype) for key, value in part.named_parameters(recurse=False)]
        parts.append((name, type(part).__name__, sorted(options.items()), shapes))
    return repr(parts)


@torch.no_grad()
def replace_linears(module: torch.nn.Module, parts: Sequence[torch.nn.Linear], how: str) -> list[Linear]:
    """Replace linear layers of a module by streamed or packed ones, and free weights that nothing else uses. Returns
    the new layers; ``plain`` replaces none."""
    users = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    made = []
    for part in parts if how != "plain" else ():
        layer = make_linear(part.weight.detach(), None if part.bias is None else part.bias.detach(), how)
        if isinstance(layer, Plain):
            continue
        part.forward = layer.__call__  # type: ignore[assignment, method-assign]
        if users[id(part.weight)] == 1:
            part.weight.data = part.weight.data.new_empty(0)
        made.append(layer)
    return made


def _sizes(module: PreTrainedModel, replaced: list[Linear]) -> tuple[int, int]:
    """Bytes of all matrices, ``replaced`` layers included, and of those that one row reads: not the embedding, unless
    the module's own output layer uses it."""
    total = sum(part.nbytes for part in module.parameters() if part.dim() > 1) + sum(part.nbytes for part in replaced)
    embedding: Any = module.get_input_embeddings()
    table, head = embedding.weight, module.get_output_embeddings()
    shared = head.weight is table and "forward" not in vars(head)
    return total, total if shared else total - table.nbytes


def _run(module: PreTrainedModel, device: torch.device) -> tuple[_MaskProbe, torch.Tensor]:
    """A forward of some rows: the probe and the logits."""
    probe = _MaskProbe()
    with checkpoint.library(f"{type(module).__name__} cannot run with this checkpoint's config"):
        out = module(
            input_ids=torch.zeros(1, _MaskProbe.rows, dtype=torch.long, device=device),
            position_ids=torch.arange(_MaskProbe.rows, device=device)[None],
            use_cache=False,
            output_hidden_states=True,  # their collector keeps to the layers of its first call
            forerun=probe,
        )
    return probe, out.logits


class HFModel(TiledModel):
    """A transformers causal LM behind the engine's protocol."""

    fused: None = None

    def __init__(self, module: PreTrainedModel, requested: LoadRequest) -> None:
        self.module = module.eval()
        self.invariant = bool(requested.invariant)
        config = module.config.get_text_config()
        activations.make_row_independent(module)
        device, dtype = module.device, module.dtype
        vocab_size = module.get_output_embeddings().weight.shape[0]
        how = choose(dtype, device, requested.weights)
        kv_shapes, called = self._probe(module, device)
        layers = replace_linears(module, called, how)
        weight_bytes, token_bytes = _sizes(module, layers)
        self.info = ModelInfo(
            name=requested.name,
            architecture=type(module).__name__,
            path=f"hf, {describe(layers, dtype)}" if layers else "hf",
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            max_len=int(getattr(config, "max_position_embeddings", 0) or 1 << 20),
            kv_shapes=kv_shapes,
            dtype=dtype,
            device=device,
            eos_ids=requested.eos_ids,
            weight_bytes=weight_bytes,
            token_bytes=token_bytes,
        )
        if self.invariant:
            self.tiles = self.find()

    def signature(self) -> str:
        sizes = {name: value for name, value in self.module.config.to_dict().items() if name not in NAMES}
        return repr((self.info.path, self.info.dtype, self.info.device.type, sorted(sizes.items(), key=str), VERSION))

    def kinds(self) -> list[tuple[int, ...] | None]:
        """One layer for each combination of shapes and settings."""
        layers = getattr(self.module.get_decoder(), "layers", None)
        if not isinstance(layers, torch.nn.ModuleList):
            return [None]
        result: dict[str, int] = {}
        for index, layer in enumerate(layers):
            result.setdefault(_settings(layer), index)
        return [(index,) for index in result.values()]

    @staticmethod
    @inference
    def _probe(module: PreTrainedModel, device: torch.device) -> tuple[tuple[KVShape, ...], list[torch.nn.Linear]]:
        """Each layer's KV shape, and the linear layers that are called. Raises ModelError where a module mixes tokens
        or counts positions outside of the attention interface."""
        name = type(module).__name__
        called: dict[torch.nn.Linear, None] = {}
        readers: list[str] = []

        def record_reader(part: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any], out: Any) -> None:
            if _MaskProbe.spread(out) and not _MaskProbe.spread((args, given)):
                readers.append(type(part).__name__)

        def mark(part: torch.nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
            return out.index_fill(1, torch.tensor([_MaskProbe.marked], device=out.device), math.nan)

        linears = [part for part in module.modules() if type(part) is torch.nn.Linear]
        hooks = [part.register_forward_hook(lambda part, *_: called.update({part: None})) for part in linears]
        probe, whole = _run(module, device)
        for hook in hooks:
            hook.remove()
        hooks = [module.get_input_embeddings().register_forward_hook(mark)]
        own = (part for part in module.modules() if not type(part).__module__.startswith("torch."))
        hooks += [part.register_forward_hook(record_reader, with_kwargs=True) for part in own]
        marked = _run(module, device)[1]
        for hook in hooks:
            hook.remove()
        if not whole.isnan().any() and (_MaskProbe.spread(marked) or not marked[0, _MaskProbe.marked].isnan().any()):
            raise ModelError(
                f"{name} does not use transformers' attention interface wherever tokens meet: its "
                f"{readers[0] if readers else 'decoder'} reads other tokens than its own (as states, convolutions and "
                "attention of a model's own do), so forerun cannot run it"
            )
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            raise ModelError(
                f"{name} does not use transformers' attention interface in every layer; forerun cannot run it"
            )
        if "position_ids" not in inspect.signature(module.forward).parameters:
            raise ModelError(f"{name} counts positions by itself (it takes no position_ids); forerun cannot run it")
        if module._is_stateful and getattr(module.config.get_text_config(), "layer_types", None) is None:
            raise ModelError(f"{name} keeps state beside its keys and values; forerun cannot run it")
        return tuple(probe.shapes[layer] for layer in range(len(probe.shapes))), list(called)

    def feed(self, batch: Batch, attention: Attention) -> Output:
        """One call of the module, padded to one of ``tiles``' row counts."""
        metadata = attention.begin(batch)
        ids, positions = self.pad(batch.input_ids), self.pad(batch.positions)
        inputs: dict[str, Any] = {"input_ids": ids[None]}
        if batch.embeds is not None:
            embeds = self.embed(ids)
            embeds[batch.embed_rows] = batch.embeds.to(embeds.dtype)
            inputs = {"inputs_embeds": embeds[None]}
        keep = self.pad_logits(batch.logit_rows) if batch.num_logits else batch.positions[:0]
        with self._only(batch.layers):
            out = self.module(
                **inputs,
                position_ids=positions[None],
                use_cache=False,
                output_hidden_states=bool(batch.hidden),
                logits_to_keep=keep,
                forerun=_HFContext(attention, metadata),
            )
        attention.finish(metadata)
        last = self.info.num_layers
        hidden = {
            layer: out.hidden_states[-1 if layer == last else layer][0, : batch.num_rows] for layer in batch.hidden
        }
        return Output(out.logits[0, : batch.num_logits].float(), hidden)

    @contextmanager
    def _only(self, layers: tuple[int, ...] | None) -> Iterator[None]:
        """Limit the decoder to some layers, which keep their own indices."""
        if layers is None:
            yield
            return
        decoder = self.module.get_decoder()
        every = getattr(decoder, "layers", None)
        if not isinstance(every, torch.nn.ModuleList):
            raise ModelError(f"{self.info.architecture} keeps its layers where forerun cannot choose among them")
        decoder.layers = torch.nn.ModuleList([every[index] for index in layers])
        try:
            yield
        finally:
            decoder.layers = every

    @inference
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.module.get_input_embeddings()(ids)
        return rows.clone()

    @inference
    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module.get_output_embeddings()(hidden)
        return logits.float()


def read_module(
    opened: Checkpoint, dtype: torch.dtype, *, attention: str | None = NAME, lora: Sequence[str] | str | None = None
) -> PreTrainedModel:
    """The checkpoint as a transformers module, LoRA adapters merged. Weights come from safetensors files, or
    dequantized from a GGUF file. Raises ModelError."""
    adapters = adapter.read(lora)
    read = _checkpoint_module if opened.gguf is None else _gguf_module
    module = read(opened, opened.transformers_config(), dtype, attention)
    adapter.merge_into(module, adapters, str(opened.path))
    return module


def _checkpoint_module(opened: Checkpoint, config: Any, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    folder = opened.path
    packed = getattr(config, "quantization_config", None)
    if packed is not None:
        raise ModelError(
            f"{folder} holds weights quantized with {sanity.scheme(packed)}, which only the native path reads: that "
            "is not used here: take the checkpoint they were made from"
        )
    sanity.check_fit(config, opened.files().tensors, folder / checkpoint.CONFIG)
    hf_logging.disable_progress_bar()
    kind: Any = AutoModelForSeq2SeqLM if sanity.has_encoder(config) else AutoModelForCausalLM
    with checkpoint.library(f"{folder} cannot be loaded"), quiet():
        module: PreTrainedModel
        module, info = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise ModelError(f"{folder}: {name} has shape {list(shape)}; its config asks for {list(expected)}")
    parameters = (name for name, _ in module.named_parameters())
    sanity.check_names(folder, sorted(info["missing_keys"]), info["unexpected_keys"], parameters, config)
    return module


def _gguf_module(opened: Checkpoint, config: Any, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    path, file = opened.path, opened.gguf
    assert file is not None
    if getattr(config, TILED_HEADS, False) or ARCHITECTURES[config.model_type].latent is not None:
        raise ModelError(f"{file.path} has its heads in an order of its own, which only the native path computes with")
    packed = GGUFWeights(file, config)
    weights = {name: packed.values(name)[:].to(dtype) for name in (*packed.parts, *packed.lists)}
    with checkpoint.library(f"{path} cannot be loaded"), quiet():
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        keys = module.load_state_dict(weights, strict=False)
    unknown = [*keys.unexpected_keys, *(name for name in keys.missing_keys if name != "lm_head.weight")]  # if tied
    if unknown:
        raise ModelError(f"{path}: transformers calls {len(unknown)} of its weights otherwise, {unknown[0]} among "
                         "them: only the native path runs it")  # fmt: skip
    module.eval()
    return module
