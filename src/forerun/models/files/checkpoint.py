"""A checkpoint's folder: JSON and safetensors files, checked before any library reads them."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from forerun.core.errors import ForerunError, ModelError, one_line
from forerun.models.files.gguf import find_model, is_gguf, refuse_pointer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
LENGTH = 8
"""Bytes of a safetensors file that give the length of its header."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""By safetensors' names."""
NUMBERS = ("F64", "F32", "F16", "BF16")
"""The types that plain weights may have."""
PACKED = (
    ".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB", ".absmax", ".weight_format",
)  # fmt: skip
"""Suffixes of quantized weights' names, for checkpoints whose config does not say so."""


class Tensor(NamedTuple):
    """One tensor of a safetensors file, by its header."""

    kind: str
    shape: tuple[int, ...]
    file: Path
    start: int = 0
    """Byte of the file."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@contextmanager
def library(problem: str, kind: Callable[[str], ForerunError] = ModelError) -> Iterator[None]:
    """Turns whatever a library raises into one error of ours. Its message begins with ``problem``."""
    try:
        yield
    except ForerunError:
        raise
    except BaseException as error:  # transformers raises all kinds there are, tokenizers bare Exceptions
        panic = type(error).__name__ == "PanicException"  # Rust's, which are not even that
        if not panic and not isinstance(error, Exception):
            raise
        reason = one_line(error)
        if "trust_remote_code" in reason or "custom code" in reason:
            reason = "it needs code of its own (auto_map), which is never run"
        raise kind(f"{problem}: {reason}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if the file is missing, damaged, or holds anything else."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if path.is_file():
            refuse_pointer(path)
        raise ModelError(f"{path} cannot be used: {one_line(error)}") from error
    if not isinstance(result, dict):
        raise ModelError(f"{path} cannot be used: it holds {type(result).__name__}, not an object")
    return result


def find(folder: Path) -> Path:
    """A folder itself, or the GGUF file in it. Raises ModelError unless it holds one model: a checkpoint with a config,
    or one GGUF file, but not a LoRA adapter."""
    if is_gguf(folder):
        return folder
    if (folder / ADAPTER).is_file():
        base = read_object(folder / ADAPTER).get("base_model_name_or_path")
        raise ModelError(
            f"{folder} is a LoRA adapter, not a model: use {base or 'its base model'} as the model and this "
            "folder as --lora"
        )
    if (folder / CONFIG).is_file():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    model = find_model(ggufs)
    if model is not None:
        return model
    if ggufs:
        raise ModelError(f"{folder} holds {len(ggufs)} GGUF files: name one, such as {ggufs[0]}")
    raise ModelError(f"{folder} has no {CONFIG}: not a Hugging Face checkpoint, nor a folder with a GGUF file")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights. Raises ModelError if there are none, and for an index that names
    anything but safetensors files in the same folder: transformers would read whatever it names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        names = sorted(path.name for path in folder.iterdir())
        pickled = [name for name in names if name.endswith(PICKLED)]
        other = [name for name in names if name.endswith(".safetensors")]
        hint = f" (it has {', '.join(pickled[:3])}; pickled weights are not loaded, convert them)" if pickled else ""
        if other:
            hint = f" (it has {', '.join(other[:3])}, but no {WEIGHTS}, and no {INDEX} that names them)"
        raise ModelError(f"{folder} has no safetensors weights{hint}")
    index = read_object(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map or not isinstance(index.get("metadata"), Mapping):
        raise ModelError(f"{folder / INDEX} cannot be used: it lacks a weight_map or metadata")
    files = []
    for name in sorted({str(file_name) for file_name in weight_map.values()}):
        if not name.endswith(".safetensors") or "/" in name or "\\" in name:
            raise ModelError(
                f"{folder / INDEX} names {name[:80]!r}: only safetensors files in the same folder are loaded"
            )
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which its {INDEX} names")
        files.append(folder / name)
    return files


def read_headers(files: list[Path], *, packed: bool = False) -> dict[str, Tensor]:
    """Every tensor of the files, by name. Raises ModelError for a damaged file, a name that comes twice, and, unless
    ``packed``, for weights that are not floating-point numbers."""
    result: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in result:
                raise ModelError(f"{name} is in {result[name].file.name} and in {file.name} of {file.parent}")
            result[name] = tensor
            if packed:
                continue
            if name.endswith(PACKED):
                raise ModelError(f"{file} holds quantized weights ({name}), which forerun does not read")
            if name.endswith(".weight") and tensor.kind not in NUMBERS:
                known = f"{', '.join(NUMBERS[:-1])} or {NUMBERS[-1]}"
                raise ModelError(f"{file}: {name} holds {tensor.kind} numbers; weights are read from {known}")
    return result


class Safetensors:
    """The open safetensors files of a folder, each mapped on first use. ``tensors`` are descriptions by name.
    Raises ModelError as ``weight_files`` and ``read_headers`` do."""

    def __init__(self, folder: Path, *, packed: bool = False) -> None:
        self.path = folder
        self.tensors = read_headers(weight_files(folder), packed=packed)
        self._maps: dict[Path, mmap.mmap] = {}

    def values(self, name: str) -> torch.Tensor:
        """A view of a tensor in the mapped file. Raises ModelError for a file that cannot be read."""
        tensor = self.tensors[name]
        path = tensor.file
        if not tensor.numel:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        result = torch.frombuffer(self._maps[path], dtype=tensor.dtype, count=tensor.numel, offset=tensor.start)
        return result.view(tensor.shape)

    def release(self) -> None:
        """Drop the files' pages from memory; they are read again on demand."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)


def read_tensors(folder: Path, *, packed: bool = False) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a folder, by name. ``packed`` as in ``read_headers``. Raises ModelError."""
    files = Safetensors(folder, packed=packed)
    return {name: files.values(name).clone() for name in files.tensors}


def _header(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt"), file.open("rb") as opened:  # the library has checked every size
            length = int.from_bytes(opened.read(LENGTH), "little")
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            return {
                name: Tensor(part["dtype"], tuple(part["shape"]), file, LENGTH + length + part["data_offsets"][0])
                for name, part in header.items()
            }
    except (SafetensorError, OSError) as error:
        refuse_pointer(file)
        raise ModelError(f"{file.parent}: a safetensors file is truncated or damaged: {one_line(error)}") from error
