"""From a path or hub id to a running model. Only safetensors and GGUF files are read; remote code never runs."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from forerun import pretrained
from forerun.core.errors import ConfigError, ModelError, one_line, shown
from forerun.core.folders import Record, expanded
from forerun.core.tiles import ENOUGH
from forerun.models import checkpoint, gguf_config, gguf_model, hub, sanity
from forerun.models import lora as adapter
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import TILED_HEADS, applies, bind, is_sized, keeps_state
from forerun.models.base import Model
from forerun.models.fingerprint import files, fingerprint
from forerun.models.formats import kept
from forerun.models.kinds import FLOATS, UNQUANTIZED
from forerun.models.known import KNOWN, fetched
from forerun.models.mapped import CheckpointWeights
from forerun.models.native import NativeModel
from forerun.models.ranks import split
from forerun.models.ranks.leader import Leader
from forerun.models.ranks.team import Team
from forerun.models.rotary import is_constant
from forerun.models.weights import Weights

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
BUNDLED = "forerun:"
PATHS = ("auto", "native", "hf")


def resolve(path_or_id: str | Path, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The checkpoint's folder, or a model's GGUF file: a local one (a folder that holds a GGUF file and no config is
    that file), a bundled one (``forerun:target``), a fetched one (``smollm2``; a folder of that name is ``./smollm2``),
    or a hub's (``hf:OWNER/NAME[:QUANTIZATION or FILE]``, or the bare id of a repository), of a ``revision`` and to a
    folder where those are given. Raises ModelError, and ConfigError for a revision of what is here already."""
    text = str(path_or_id)
    if text.startswith(hub.PREFIX):
        return _found(hub.download(hub.parse(text), revision, download_dir))
    here = text.startswith(BUNDLED) or text in KNOWN or text.endswith(gguf_model.SUFFIX)
    here = here or ("\0" not in text and expanded(text).is_dir())
    if here and (revision or download_dir):
        raise ConfigError(f"revision and download_dir are for models of the hub; {text} is here: leave them out")
    if text.startswith(BUNDLED):
        return pretrained.path(text.removeprefix(BUNDLED))
    if text in KNOWN:
        return fetched(text)
    if "\0" in text:
        raise ModelError(f"{text!r} is not the name of a folder")
    folder = expanded(text)
    if folder.is_file() and gguf_model.is_gguf(folder):
        return folder
    if not folder.is_dir():
        gguf = gguf_model.is_gguf(folder)
        if gguf or folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
            what = "GGUF file" if gguf else "checkpoint folder"
            raise ModelError(f"no {what} at {text}")
        folder = _download(text, revision, download_dir)
    return _found(folder)


def _found(path: Path) -> Path:
    return path if gguf_model.is_gguf(path) else checkpoint.find(path)


def _download(name: str, revision: str | None, download_dir: str | None) -> Path:
    try:
        return hub.download(hub.ModelSource(name, None), revision, download_dir)
    except ModelError as error:
        meant = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f" (did you mean {meant[0]}?)" if meant else ""
        raise ModelError(f"no folder {name!r} here{hint}, and {error}") from error


class KeptConfig(SimpleNamespace):
    """A described decoder's config with the defaults that transformers filled in at an earlier start. It stands in for
    transformers' own, whose import takes longer than loading a small model."""

    def get_text_config(self) -> KeptConfig:
        return self

    def to_json_string(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def quick_config(folder: Path) -> Any:
    """``read_config``, or a ``KeptConfig`` with the same values where the native path runs the model. Raises
    ModelError."""
    given = _given_config(folder)
    record = Record("configs", json.dumps(given, sort_keys=True), version("transformers"), version("forerun"))
    kept = record.read()
    if not isinstance(kept, dict):
        config = read_config(folder)
        kept = _values(config) if applies(config) is None else None
        if kept is None:
            return config
        record.write(kept)
    config = KeptConfig(**kept)
    if gguf_model.is_gguf(folder):
        _check_gguf_fit(config, folder)
    return config


def _values(config: Any) -> dict[str, Any] | None:
    """A config's values by all names that they have, as JSON holds them; None if it cannot hold them."""
    if (
        config.get_text_config() is not config
        or is_sized(config)
        or not _plain_rope(getattr(config, "rope_parameters", None) or {})
    ):
        return None
    names = {*config.to_dict(), *config.attribute_map, "num_hidden_layers"} - {
        "id2label",
        "label2id",
        "transformers_version",
    }
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    values["dtype"] = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    try:
        same = json.loads(json.dumps(values)) == values
    except (TypeError, ValueError):
        return None
    return values if same else None


def _plain_rope(rope: Mapping[str, Any]) -> bool:
    """Whether frequencies are computed here, without transformers' functions of the config."""
    return all(
        _plain_rope(v) if isinstance(v, Mapping) else k != "rope_type" or v == "default" for k, v in rope.items()
    )


def _given_config(folder: Path) -> dict[str, Any]:
    """What a checkpoint or a GGUF file says itself. Raises ModelError."""
    if gguf_model.is_gguf(folder):
        return gguf_config.read_config(gguf_model.open_gguf(folder))
    path = folder / checkpoint.CONFIG
    given = checkpoint.read_object(path)
    sanity.check_given(given, path)
    sanity.check_depth(given, path)
    return given


def read_config(folder: Path) -> Any:
    """The config of a checkpoint or a GGUF file, as transformers has it. Raises ModelError."""
    from transformers import AutoConfig

    given = _given_config(folder)
    if gguf_model.is_gguf(folder):
        config = as_config(folder, given)
        _check_gguf_fit(config, folder)
        return config
    path = folder / checkpoint.CONFIG
    with checkpoint.library(f"{path} cannot be used"), quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        sanity.check_config(config, path)
    return _decoder(config)


def _decoder(config: Any) -> Any:
    """The config of the decoder alone, where one is described that stands in models which read pictures too."""
    text = config.get_text_config()
    described = ARCHITECTURES.get(text.model_type)
    if text is config or described is None or not described.within:
        return config
    text.dtype = text.dtype or config.dtype
    if getattr(config, "tie_word_embeddings", False):
        text.tie_word_embeddings = True  # an output layer in the files is read all the same
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def as_config(path: Path, given: dict[str, Any]) -> Any:
    """What ``gguf_config.read_config`` says of a GGUF file, as transformers has it. Raises ModelError."""
    from transformers import CONFIG_MAPPING

    with checkpoint.library(f"{path} cannot be used"), quiet():
        config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
        sanity.check_config(config, path)
    return config


def _check_gguf_fit(config: Any, path: Path) -> None:
    parts = gguf_model.open_gguf(path).tensors
    held = {name: checkpoint.Tensor(shard.kind.name, shard.shape, path) for name, shard in parts.items()}
    sanity.check_fit(config, held, path)


def weight_sizes(folder: Path) -> tuple[int, int]:
    """Bytes of a checkpoint's weights, and how many numbers its tensors hold. Raises ModelError."""
    if gguf_model.is_gguf(folder):
        parts = gguf_model.open_gguf(folder).tensors.values()
        return sum(shard.size for shard in parts), sum(prod(shard.shape) for shard in parts)
    tensors = checkpoint.read_headers(checkpoint.weight_files(folder), packed=True).values()
    return sum(tensor.nbytes for tensor in tensors), sum(tensor.numel for tensor in tensors)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from remarking on what is checked, and refused, here."""
    from transformers import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


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


def eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Every id that ends a text: the generation config's, else the model config's. Raises ModelError."""
    text = config.get_text_config()
    if gguf_model.is_gguf(folder):
        return sanity.check_ids(text.eos_token_id, text.vocab_size, folder)
    path = folder / "generation_config.json"
    result = checkpoint.read_object(path).get("eos_token_id") if path.is_file() else None
    if result is None:
        path, result = folder / checkpoint.CONFIG, getattr(text, "eos_token_id", None)
    return sanity.check_ids(result, text.vocab_size, path)


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
    reason = applies(config)
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
    kind, ids, name = parse_dtype(dtype, config), eos_ids(folder, config), str(path_or_id)
    if sanity.has_encoder(config):
        from forerun.models import encdec  # modules of transformers' take as long to import as torch

        encdec.check_wishes(folder, config, kind, model_path=model_path, lora=lora, ranks=tensor_parallel_size)
        return encdec.load_encoder_decoder(
            folder, config, kind, where, name=name, eos_ids=ids, invariant=invariant, weights=weights,
            quantization=quantization, max_model_len=max_model_len,
        )  # fmt: skip
    wish = f"tensor_parallel_size {tensor_parallel_size}" if tensor_parallel_size != 1 else None
    wish = f"quantization {quantization!r} of {path_or_id}" if quantization else wish
    wish = f"a smaller output layer of {path_or_id}" if outputs is not None else wish
    native = _goes_native(config, folder, model_path, wish)
    requested = invariant if invariant is not None else where.type == "cpu"

    model: Model
    if native:
        shard = LoadRequest(
            folder, kind, where.type, name, ids, requested, weights, quantization, numbers, lora, outputs
        )
        model = _shard(shard, config, where, tensor_parallel_size)
    else:
        from forerun.models import modules

        module: Any = modules.read_module(folder, read_config(folder), kind, lora=lora)
        model = modules.HFModel(module.to(where), name=name, eos_ids=ids, invariant=requested, weights=weights)
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


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What every rank must know to load its part."""

    folder: Path
    dtype: torch.dtype
    device: str
    name: str
    eos_ids: frozenset[int]
    invariant: bool
    weights: str
    quantization: str | None
    numbers: bool
    lora: Sequence[str] | str | None
    outputs: torch.Tensor | None = None


def load_shard(requested: LoadRequest, config: Any, device: torch.device, team: Team | None = None) -> NativeModel:
    """The native model, or a rank's part of it."""
    tensors = _tensors(requested.folder, config, numbers=requested.numbers, lora=requested.lora)
    with _keeping(requested, config, tensors) if device.type == "cpu" and team is None else nullcontext():
        return NativeModel(
            config, tensors, dtype=requested.dtype, device=device, name=requested.name, eos_ids=requested.eos_ids,
            invariant=requested.invariant, weights=requested.weights, quantization=requested.quantization, team=team,
            outputs=requested.outputs,
        )  # fmt: skip


def _keeping(requested: LoadRequest, config: Any, tensors: Weights) -> AbstractContextManager[None]:
    """What is laid out for the kernels is kept for the next start, where that takes long."""
    if tensors.nbytes < kept.LARGE:
        return nullcontext()
    chosen = None if requested.outputs is None else sha256(requested.outputs.numpy().tobytes()).hexdigest()
    options = repr(
        (requested.dtype, requested.weights, requested.quantization, requested.numbers, requested.lora, chosen)
    )
    about = [path.stat() for path in files(requested.folder, requested.lora)]
    changed = [(each.st_mtime_ns, each.st_ctime_ns) for each in about]
    state = repr((fingerprint(requested.folder, requested.lora), changed, config.to_json_string()))
    return kept.keeping(requested.folder, options, state)


def rank_device(kind: str, rank: int) -> torch.device:
    """Each rank has a GPU of its own."""
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def _shard(requested: LoadRequest, config: Any, where: torch.device, size: int) -> NativeModel:
    """Rank 0's part, once all ranks have theirs."""
    if size == 1:
        return load_shard(requested, config, where)
    if requested.quantization is not None:
        raise ConfigError(f"tensor_parallel_size splits weights that are numbers: leave {requested.quantization} out")
    if where.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(f"tensor_parallel_size {size} needs as many GPUs; there are {torch.cuda.device_count()}")
    split.check(bind(config), config, size)
    team = Leader(size, requested, rank_device(where.type, 0))
    model = load_shard(requested, config, rank_device(where.type, 0), team)
    team.ready()
    return model


def _tensors(folder: Path, config: Any, *, numbers: bool, lora: Sequence[str] | str | None) -> Weights:
    adapters = [adapter.read(*each) for each in adapter.parse(lora)]
    if adapters and getattr(config, TILED_HEADS, False):
        raise ModelError(f"{folder} orders its heads as GGUF does: merge an adapter into the checkpoint it was made of")
    tensors: Weights
    if gguf_model.is_gguf(folder):
        tensors = gguf_model.GGUFWeights(gguf_model.open_gguf(folder), config, numbers=numbers)
    else:
        tensors = CheckpointWeights(folder, config, numbers=numbers)
    return adapter.MergedWeights(tensors, adapters, str(folder)) if adapters else tensors
