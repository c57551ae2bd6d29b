"""From a name to a running model, in three stages: open its files, transform what they hold into weights, lay these out
for the kernels. ``load_shard`` takes them in turn; ``load_model`` reads the options before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from forerun.core.errors import ConfigError, ModelError, one_line, shown
from forerun.core.tiles import ENOUGH
from forerun.models import lora as adapter
from forerun.models import sanity
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import bind, is_sized, keeps_state, refusal
from forerun.models.base import LoadRequest, Model
from forerun.models.formats import kept
from forerun.models.kinds import FLOATS, UNQUANTIZED
from forerun.models.native import NativeModel
from forerun.models.open import eos_ids, files, fingerprint, open_files, quick_config, read_config, resolve
from forerun.models.ranks import split
from forerun.models.ranks.leader import Leader
from forerun.models.ranks.team import Team
from forerun.models.rotary import is_constant
from forerun.models.transform import Weights, transform

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
PATHS = ("auto", "native", "hf")


def parse_dtype(dtype: str | torch.dtype | None, config: Any) -> torch.dtype:
    """``auto`` is the checkpoint's own dtype (float32 where it names none). Raises ConfigError for any other kind of
    numbers than those that models run in."""
    result: Any = dtype
    if dtype in (None, "auto"):
        result = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if isinstance(result, str):
        result = DTYPES.get(result)
    if result not in DTYPES.values():
        own = f" (it is the checkpoint's: {shown(result)})" if dtype in (None, "auto") else ""
        raise ConfigError(f"unknown dtype {shown(dtype)}{own}: choose auto, float32, bfloat16 or float16")
    return result


def _check_rope(config: Any, max_model_len: int | None) -> None:
    """Refuse frequencies that depend on the longest position in the call, where they could differ between calls."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    bad = {each.get("rope_type") for each in sets} & {"dynamic", "longrope"}
    if not bad or is_constant(rope):
        return
    original: int = (
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or getattr(text, "max_position_embeddings", None)
        or 0
    )
    if max_model_len is None or max_model_len > original:
        raise ModelError(
            f"rope type {bad.pop()!r} changes its frequencies with the length of the text; "
            f"set max_model_len to at most {original} to use this model"
        )


def parse_device(device: str | torch.device | None) -> torch.device:
    """None: the GPU if there is one. Raises ConfigError for a device that is unknown or not here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"device {str(device)!r} cannot be used: {one_line(error)}") from error


def _wished(
    quantization: str | None, dtype: str | torch.dtype | None
) -> tuple[str | None, str | torch.dtype | None, bool]:
    """The kind of quantized weights, the dtype, and whether weights are to be numbers. Raises ConfigError."""
    if quantization not in FLOATS:
        return None if quantization == UNQUANTIZED else quantization, dtype, False
    asked = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and asked is not DTYPES[quantization]:
        raise ConfigError(f"quantization {quantization!r} is weights in {quantization}: leave dtype out, or set it so")
    return None, quantization, True


def _goes_native(config: Any, folder: Path, model_path: str, wish: str | None) -> bool:
    """Whether the native path runs a model; ``wish``: what only that can do. Raises ConfigError."""
    if model_path not in PATHS:
        raise ConfigError(f"unknown model_path {model_path!r}: choose one of {', '.join(PATHS)}")
    reason = refusal(config)
    if model_path == "native" and reason is not None:
        raise ConfigError(f"the native path does not run {folder}: {reason}")
    if reason is not None and config.model_type in ARCHITECTURES:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            other = f"transformers' AutoModelForCausalLM has no {config.model_type}"
            raise ConfigError(f"the native path does not run {folder}: {reason}; {other}")
    native = model_path != "hf" and reason is None
    wish = wish or ("a model with state" if keeps_state(config) else None)
    wish = wish or ("a model whose layers differ in size" if is_sized(config) else None)
    if wish and not native:
        raise ConfigError(f"{wish} needs the native path: {reason or 'model_path is hf'}")
    return native


_shared: dict[Any, Model] | None = None


@contextmanager
def sharing() -> Iterator[dict[Any, Model]]:
    """Drafts that are loaded with ``load_shared`` again and in the same way meanwhile are one object. Gives them by how
    they were asked for; who forgets one there frees it."""
    global _shared
    before, _shared = _shared, {}
    try:
        yield _shared
    finally:
        _shared = before


def load_shared(path_or_id: str | Path, *, outputs: torch.Tensor | None = None, **options: Any) -> Model:
    """``load_model``, or what it gave for the same while ``sharing``."""
    if _shared is None:
        return load_model(path_or_id, outputs=outputs, **options)
    names = None if outputs is None else tuple(outputs.tolist())
    key = (str(path_or_id), names, tuple(sorted((name, str(value)) for name, value in options.items())))
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
) -> Model:
    """Load a decoder or an encoder-decoder.

    ``invariant`` True asks for logits whose bits do not depend on how rows are batched; None does so on CPU, unless
    only single rows keep their bits, which it warns of; False does not pad. ``model_path``
    is ``native`` (the lean path of ``architectures``), ``hf`` or ``auto``; ``weights`` is ``streamed``, ``packed``,
    ``plain`` or ``auto``; ``quantization`` is a form's name in ``formats``, a dtype (numbers in it, whatever the
    checkpoint holds), ``none`` or None. ``lora``: adapters to merge, ``FOLDER`` or ``FOLDER=WEIGHT``.
    ``tensor_parallel_size``: processes that share the layers, this one among them. ``outputs`` int64: the tokens that
    the output layer predicts, in ascending order (None: all). Both are the native path's alone.
    """
    quantization, dtype, numbers = _wished(quantization, dtype)
    folder = resolve(path_or_id)
    config = quick_config(folder)
    _check_rope(config, max_model_len)
    where = parse_device(device)
    requested = LoadRequest(
        folder=folder, name=str(path_or_id), dtype=parse_dtype(dtype, config), device=where,
        eos_ids=eos_ids(folder, config), invariant=invariant, weights=weights, quantization=quantization,
        numbers=numbers, lora=lora, outputs=outputs, max_model_len=max_model_len,
    )  # fmt: skip
    if sanity.has_encoder(config):
        from forerun.models import encdec  # modules of transformers' take as long to import as torch

        return encdec.load_encoder_decoder(requested, config, model_path=model_path, ranks=tensor_parallel_size)
    wish = f"tensor_parallel_size {tensor_parallel_size}" if tensor_parallel_size != 1 else None
    wish = f"quantization {quantization!r} of {path_or_id}" if quantization else wish
    wish = f"a smaller output layer of {path_or_id}" if outputs is not None else wish
    native = _goes_native(config, folder, model_path, wish)
    requested = replace(requested, invariant=where.type == "cpu" if invariant is None else invariant)
    model: Model
    if native:
        model = _shard(requested, config, tensor_parallel_size)
    else:
        from forerun.models import hf

        module: Any = hf.read_module(folder, read_config(folder), requested.dtype, lora=lora)
        model = hf.HFModel(module.to(where), requested)
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


def load_shard(requested: LoadRequest, config: Any, team: Team | None = None) -> NativeModel:
    """The native model, or a rank's part of it: opened, transformed, laid out. Raises ModelError and ConfigError."""
    packed = getattr(config, "quantization_config", None) is not None
    opened = open_files(requested.folder, packed=packed)
    weights = transform(opened, config, numbers=requested.numbers, adapters=adapter.read(requested.lora))
    keeps = requested.device.type == "cpu" and team is None
    with _keeping(requested, config, weights) if keeps else nullcontext():
        return NativeModel(config, weights, requested, team)  # lays out a layer at a time: ``layout.Maker``


def _keeping(requested: LoadRequest, config: Any, weights: Weights) -> AbstractContextManager[None]:
    """What is laid out for the kernels is kept for the next start, where that takes long."""
    if weights.nbytes < kept.LARGE:
        return nullcontext()
    chosen = None if requested.outputs is None else sha256(requested.outputs.numpy().tobytes()).hexdigest()
    options = repr(
        (requested.dtype, requested.weights, requested.quantization, requested.numbers, requested.lora, chosen)
    )
    about = [path.stat() for path in files(requested.folder, requested.lora)]
    changed = [(each.st_mtime_ns, each.st_ctime_ns) for each in about]
    state = repr((fingerprint(requested.folder, requested.lora), changed, config.to_json_string()))
    return kept.keeping(requested.folder, options, state)


def of_rank(requested: LoadRequest, rank: int) -> LoadRequest:
    """Each rank has a GPU of its own."""
    kind = requested.device.type
    return replace(requested, device=torch.device(kind, rank) if kind == "cuda" else torch.device(kind))


def _shard(requested: LoadRequest, config: Any, size: int) -> NativeModel:
    """Rank 0's part, once all ranks have theirs."""
    if size == 1:
        return load_shard(requested, config)
    if requested.quantization is not None:
        raise ConfigError(f"tensor_parallel_size splits weights that are numbers: leave {requested.quantization} out")
    if requested.device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(f"tensor_parallel_size {size} needs as many GPUs; there are {torch.cuda.device_count()}")
    split.check(bind(config), config, size)
    requested = of_rank(requested, 0)
    team = Leader(size, requested, requested.device)
    model = load_shard(requested, config, team)
    team.ready()
    return model
