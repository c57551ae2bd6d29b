"""From transformers' module of an encoder-decoder to ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from forerun.core.errors import ConfigError, ModelError, shown
from forerun.models import checkpoint
from forerun.models.architectures import seq2seq
from forerun.models.encdec import EncoderDecoder
from forerun.models.formats.base import Rows
from forerun.models.modules import read_module


class ModuleWeights:
    """A module's parameters by their names, tied ones under each of theirs; ``Weights``."""

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


def check_wishes(folder: Path, config: Any, dtype: torch.dtype, *, model_path: str, lora: Any, ranks: int) -> None:
    """Raise ConfigError for what cannot be had of an encoder-decoder."""
    if model_path == "hf":
        raise ConfigError(f"{folder} is an encoder-decoder, which the native path alone runs: leave model_path out")
    if lora:
        raise ConfigError(f"{folder} is an encoder-decoder: adapters (lora) are merged into decoders")
    if ranks != 1:
        raise ConfigError(
            f"tensor_parallel_size {ranks} splits decoders: encoder-decoders such as {folder} run in one process"
        )
    if dtype is torch.float16 and config.model_type != "bart":
        raise ConfigError(f"{config.model_type} overflows float16: use float32 or bfloat16")


def load_encoder_decoder(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    name: str,
    eos_ids: frozenset[int],
    invariant: bool | None,
    weights: str,
    quantization: str | None,
    max_model_len: int | None,
) -> EncoderDecoder:
    """``invariant`` None: bit-equal logits on CPU where they can be had, and a warning where they cannot; True raises
    ConfigError instead. Raises ModelError."""
    module: Any = read_module(folder, config, dtype, attention="sdpa").to(device)  # type: ignore[arg-type]
    on_cpu = module.device.type == "cpu"
    bias = getattr(module, "final_logits_bias", None)
    model = EncoderDecoder(
        seq2seq.bind(module.config, max_model_len),
        ModuleWeights(module),
        bias if isinstance(bias, torch.Tensor) and bool(bias.any()) else None,
        dtype=module.dtype,
        device=module.device,
        name=name,
        eos_ids=eos_ids,
        start=_start(folder, module.config),
        invariant=False if invariant is None and not on_cpu else invariant,
        weights=weights,
        quantization=quantization,
    )
    if invariant is None and on_cpu and not model.invariant:
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
