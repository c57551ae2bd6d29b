"""Models of modules in memory, without files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from forerun.models.architectures.spec import applies, bind
from forerun.models.formats.gguf_blocks import Blocks
from forerun.models.native import NativeModel
from forerun.models.weights import unstacked


class ModuleWeights:
    """A module's, by their names in a checkpoint."""

    nbytes = 0

    def __init__(self, module: PreTrainedModel) -> None:
        result = dict(module.named_parameters(remove_duplicate=False))
        self.found = unstacked(result, bind(module.config)) if applies(module.config) is None else result

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def values(self, name: str) -> torch.Tensor:
        return self.found[name].detach()

    def blocks(self, name: str) -> Blocks | None:
        return None

    def release(self) -> int:
        return 0


def native(module: PreTrainedModel, **options: Any) -> NativeModel:
    return NativeModel(module.config, ModuleWeights(module), dtype=module.dtype, device=module.device, **options)
