"""From a name to a running model in three stages: open its files, transform their tensors into weights, and lay these
out for the kernels. ``load_model`` parses the options, then ``load_shard`` runs the stages.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from forerun import kernels
from forerun.core.errors import ConfigError, ModelError, one_line, shown
from forerun.core.tiles import ENOUGH
from forerun.kernels import gpu
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import bind, is_sized, keeps_state, refusal
from forerun.models.files.gguf import GGUFFile
from forerun.models.files.open import Checkpoint
from forerun.models.formats import weight_cache
from forerun.models.formats.gguf_types import forms, larger_in_memory
from forerun.models.kinds import FLOATS, UNQUANTIZED
from forerun.models.ranks import split
from forerun.models.ranks.leader import Leader
from forerun.models.ranks.team import Team
from forerun.models.run.base import LoadRequest, Model
from forerun.models.run.native import NativeModel
from forerun.models.run.rotary import is_constant
from forerun.models.weights import lora as adapter
from forerun.models.weights import sanity
from forerun.models.weights.transform import transform

log = logging.getLogger("forerun")
DTYPES = {name: getattr(torch, name) for name in ("float32", "float", "bfloat16", "float16", "half")}
PATHS = ("auto", "native", "hf")


def parse_dtype(dtype: str | torch.dtype | None, config: Any) -> torch.dtype:
    """The torch dtype; ``auto``: the checkpoint's, or else float32. Raises ConfigError for one no model runs in."""
    result: Any = dtype
    if dtype in (None, "auto"):
        result = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if isinstance(result, str):
        result = DTYPES.get(result)
    if result not in DTYPES.values():
        own = f" (it is the checkpoint's: {shown(result)})" if dtype in (None, "auto") else ""
        raise ConfigError(f"unknown dtype {shown(dtype)}{own}: choose auto, float32, bfloat16 or float16")
    assert isinstance(result, torch.dtype)
    return result


def _check_rope(config: Any, max_model_len: int | None) -> None:
    """Raise ModelError where rotary frequencies would change with the longest position of a call."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    changing = {each.get("rope_type") for each in sets} & {"dynamic", "longrope"}
    if not changing or is_constant(rope):
        return
    original: int = (
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or getattr(text, "max_position_embeddings", None)
        or 0
    )
    if max_model_len is None or max_model_len > original:
        raise ModelError(
            f"rope type {changing.pop()!r} changes its frequencies with the length of the text; "
            f"set max_model_len to at most {original} to use this model"
        )


def parse_device(device: str | torch.device | None) -> torch.device:
    """The device; None is the GPU if there is one. Raises ConfigError for one that is unknown or not available."""
    if device is None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = torch.cuda.is_available()
        for each in caught:  # such as a driver that is older than torch's CUDA
            log.warning("runs on the CPU: %s", one_line(Warning(each.message)))
        return torch.device("cuda" if found else "cpu")
    try:
        asked = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"device {str(device)!r} cannot be used: {one_line(error)}") from error
    if asked.type == "cuda" and asked.index != (current := torch.cuda.current_device()):
        other = "choose a GPU with CUDA_VISIBLE_DEVICES, and device cuda"
        raise ConfigError(f"device {str(device)!r} cannot be used: kernels run on GPU {current}; {other}")
    return asked


def _parse_quantization(
    quantization: str | None, dtype: str | torch.dtype | None
) -> tuple[str | None, str | torch.dtype | None, bool]:
    """The form to quantize to or None, the dtype, and whether quantized weights become numbers. Raises ConfigError."""
    if quantization not in FLOATS:
        return None if quantization == UNQUANTIZED else quantization, dtype, False
    requested = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and requested is not DTYPES[quantization]:
        raise ConfigError(
            f"quantization={quantization} conflicts with dtype={dtype}: remove dtype or set it to {quantization}"
        )
    return None, quantization, True


def _uses_native(config: Any, folder: Path, model_path: str, feature: str | None) -> bool:
    """Whether the native path runs a model. ``feature`` is an option that only that path has. Raises ConfigError."""
    if model_path not in PATHS:
        raise ConfigError(f"unknown model_path {model_path!r}: choose one of {', '.join(PATHS)}")
    reason = refusal(config)
    if model_path == "native" and reason is not None:
        raise ConfigError(f"the native path does not support {folder}: {reason}")
    if reason is not None and config.model_type in ARCHITECTURES:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            other = f"transformers' AutoModelForCausalLM has no {config.model_type}"
            raise ConfigError(f"the native path does not run {folder}: {reason}; {other}")
    native = model_path != "hf" and reason is None
    feature = feature or ("a model with state" if keeps_state(config) else None)
    feature = feature or ("a model whose layers differ in size" if is_sized(config) else None)
    if feature and not native:
        raise ConfigError(f"{feature} needs the native path: {reason or 'model_path is hf'}")
    return native


_shared: dict[Any, Model] | None = None


@contextmanager
def sharing() -> Iterator[dict[Any, Model]]:
    """Within this context, ``load_shared`` returns one object for equal arguments. Yields the models by these
    arguments; deleting an entry frees its model."""
    global _shared
    before, _shared = _shared, {}
    try:
        yield _shared
    finally:
        _shared = before


def load_shared(path_or_id: str | Path, *, outputs: torch.Tensor | None = None, **options: Any) -> Model:
    """``load_model``, which runs once for equal arguments within ``sharing``."""
    if _shared is None:
        return load_model(path_or_id, outputs=outputs, **options)
    tokens = None if outputs is None else tuple(outputs.tolist())
    key = (str(path_or_id), tokens, tuple(sorted((name, str(value)) for name, value in options.items())))
    if key not in _shared:
        _shared[key] = load_model(path_or_id, outputs=outputs, **options)
    return _shared[key]


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    invariant: bool | None = False,
    model_path: str = "auto",
    weights: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    lora: Sequence[str] | str | None = None,
    tensor_parallel_size: int = 1,
    outputs: torch.Tensor | None = None,
    window: int | None = None,
) -> Model:
    """Load a decoder or an encoder-decoder.

    Args:
        path_or_id: what ``open.resolve`` takes.
        dtype: of activations and of weights that are not quantized; ``auto`` is the checkpoint's.
        device: None is the GPU if there is one.
        invariant: True asks for logits whose bits do not depend on how rows are batched, and False does not. None asks
            for them on CPU, and warns where only single rows keep their bits.
        model_path: ``native`` (descriptions in ``architectures``), ``hf`` (transformers) or ``auto``.
        weights: ``streamed``, ``packed``, ``plain`` or ``auto``.
        quantization: a form in ``formats``; a dtype, to which quantized weights are expanded; ``none`` or None.
        max_model_len: the longest sequence.
        lora: adapters to merge, ``FOLDER`` or ``FOLDER=WEIGHT``.
        tensor_parallel_size: processes that share the layers, this one among them (native path only).
        outputs: int64, ascending: the tokens that the output layer predicts (native path only); None is all.
        window: ``spec.with_window`` (native path only).

    Raises:
        ModelError: the checkpoint cannot be read or run.
        ConfigError: an option cannot be honoured.
    """
    quantization, dtype, numbers = _parse_quantization(quantization, dtype)
    checkpoint = Checkpoint.open(path_or_id)
    config = checkpoint.config
    _check_rope(config, max_model_len)
    device = parse_device(device)
    requested = LoadRequest(
        folder=checkpoint.path, name=str(path_or_id), dtype=parse_dtype(dtype, config), device=device,
        eos_ids=checkpoint.eos_ids, invariant=invariant, weights=weights, quantization=quantization,
        numbers=numbers, lora=lora, outputs=outputs, max_model_len=max_model_len, window=window,
    )  # fmt: skip
    if sanity.has_encoder(config):
        if window is not None:
            raise ConfigError(f"a window of {window} tokens is for decoders, and {path_or_id} is none")
        from forerun.models.run import encdec  # modules of transformers' take as long to import as torch

        return encdec.load_encoder_decoder(requested, checkpoint, model_path=model_path, ranks=tensor_parallel_size)
    feature = f"tensor_parallel_size {tensor_parallel_size}" if tensor_parallel_size != 1 else None
    feature = f"quantization {quantization!r} of {path_or_id}" if quantization else feature
    feature = f"a smaller output layer of {path_or_id}" if outputs is not None else feature
    feature = f"a window for {path_or_id}" if window is not None else feature
    native = _uses_native(config, checkpoint.path, model_path, feature)
    if invariant is None and not (native and gpu.serves(device)):  # there the model finds out itself
        requested = replace(requested, invariant=device.type == "cpu")
    model: Model
    with _room_for_weights(requested):
        if native:
            model = _load_ranks(requested, checkpoint, tensor_parallel_size)
        else:
            from forerun.models.run import hf

            module: Any = hf.read_module(checkpoint, requested.dtype, lora=lora)
            model = hf.HFModel(module.to(device), requested)
    model.info = replace(model.info, lora=(lora,) if isinstance(lora, str) else tuple(lora or ()))
    if invariant is None and model.tiles is not None and model.tiles.together < ENOUGH:
        warnings.warn(
            f"invariant mode is off: in {model.info.architecture} ({model.info.path}) at most {model.tiles.together} "
            "rows keep their bits side by side, so that drafts could not pay; invariant=True runs it so",
            RuntimeWarning,
            stacklevel=2,
        )
        model.invariant, model.tiles = False, None
    return model


@contextmanager
def _room_for_weights(requested: LoadRequest) -> Iterator[None]:
    """Raises ModelError where the GPU has too little memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (f"{each / 2**30:.1f} GiB" for each in torch.cuda.mem_get_info(requested.device))
        raise ModelError(
            f"the GPU has no room for the weights of {requested.name} ({free} of {total} are left): use "
            "quantization='q4_0', a smaller model, or device='cpu'"
        ) from error


def load_shard(requested: LoadRequest, checkpoint: Checkpoint, team: Team | None = None) -> NativeModel:
    """The native model, or with ``team`` a rank's shard: open, transform, lay out. Raises ModelError, ConfigError."""
    config = checkpoint.config
    opened = checkpoint.files(packed=getattr(config, "quantization_config", None) is not None)
    weights = transform(opened, config, adapters=adapter.read(requested.lora))
    on_gpu, keeps_blocks = requested.device.type != "cpu" or gpu.interpreted(), not requested.numbers
    if isinstance(opened, GGUFFile) and keeps_blocks and (larger := larger_in_memory(opened.types(), on_gpu=on_gpu)):
        log.warning("%s holds types that take more room in memory: %s", opened.path, larger)
    if requested.device.type == "cpu":
        types = opened.types() if isinstance(opened, GGUFFile) and keeps_blocks and not requested.quantization else ()
        kernels.load(kernels.dtype_name(requested.dtype), *forms([*types, requested.quantization or ""]))
    caches = not on_gpu and team is None and weights.nbytes >= weight_cache.LARGE
    with _cache(requested, checkpoint) if caches else nullcontext():
        return NativeModel(config, weights, requested, team)  # lays out a layer at a time: ``layout.Maker``


def _cache(requested: LoadRequest, checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """The cache of laid-out weights for this model, these options, and this state of its files."""
    outputs = None if requested.outputs is None else sha256(requested.outputs.numpy().tobytes()).hexdigest()
    options = repr(
        (requested.dtype, requested.weights, requested.quantization, requested.numbers, requested.lora, outputs)
    )
    stats = [path.stat() for path in checkpoint.weight_files(requested.lora)]
    times = [(each.st_mtime_ns, each.st_ctime_ns) for each in stats]
    state = repr((checkpoint.fingerprint(requested.lora), times, checkpoint.config.to_json_string()))
    return weight_cache.caching(requested.folder, options, state)


def of_rank(requested: LoadRequest, rank: int) -> LoadRequest:
    """The request with a rank's own GPU."""
    kind = requested.device.type
    return replace(requested, device=torch.device(kind, rank) if kind == "cuda" else torch.device(kind))


def _load_ranks(requested: LoadRequest, checkpoint: Checkpoint, size: int) -> NativeModel:
    """Rank 0's shard of a model over ``size`` processes, once all of them have theirs."""
    if size == 1:
        return load_shard(requested, checkpoint)
    if requested.quantization is not None:
        raise ConfigError(
            f"tensor parallelism does not support quantized weights: remove quantization={requested.quantization}"
        )
    if requested.device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(f"tensor_parallel_size {size} needs as many GPUs; there are {torch.cuda.device_count()}")
    config = checkpoint.config
    split.check(bind(config), config, size)
    requested = of_rank(requested, 0)
    team = Leader(size, requested, requested.device)
    model = load_shard(requested, checkpoint, team)
    team.ready()
    return model
