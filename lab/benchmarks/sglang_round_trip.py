"""An exported head in SGLang, on a CPU: its own config and classes, and the same first guesses.

    python -m venv sglang && sglang/bin/pip install --no-deps sglang==0.5.23   # and what its imports name as missing
    forerun export forerun:eagle --out exported --as sglang
    PYTHONPATH=src sglang/bin/python lab/benchmarks/sglang_round_trip.py exported head-folder target-folder

Feeds both modules the same random features and tokens, and compares the likeliest token at every place. SGLang's
kernels of attention want a GPU or a build of its own for CPUs: between its queries, keys and values and its output
matrix stands torch's attention. Nothing of SGLang's scheduler, server or speculation runs. torchvision, which it
imports for pictures, is an empty module here, because the registry's build of it is for CUDA.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from first_guess import LENGTH, said
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoProcessor  # noqa: F401 - before there seems to be a torchvision


class NoPictures(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision, with whatever is asked of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        result = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if result else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Attention:
    """In place of SGLang's backends: torch's, causal."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.view(LENGTH, -1, layer.head_dim).transpose(0, 1) for x in (q, k, v))
        made = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True
        )
        return made.transpose(0, 1).reshape(LENGTH, -1)


def theirs(exported: str, target: str, written: dict[str, torch.Tensor]) -> tuple[Any, list[int], list[str]]:
    """SGLang's module with the folder's weights, behind which of the target's layers it has the features taken, and the
    parameters that the folder did not fill."""
    sys.meta_path.insert(0, NoPictures())
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    settings = ServerArgs(
        model_path=target, device="cpu", attention_backend="torch_native",
        speculative_algorithm="EAGLE3", speculative_draft_model_path=exported,
    )  # fmt: skip
    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=0))
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        init_distributed_environment(1, 0, distributed_init_method=meeting, local_rank=0, backend="gloo")
        initialize_model_parallel(backend="gloo")
    config = ModelConfig(exported, is_draft_model=True, speculative_algorithm="EAGLE3").hf_config
    kind, _ = ModelRegistry.resolve_model_cls(config.architectures)
    module = kind(config).float().eval()
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))
    module.load_weights(written.items())
    lacking = [name for name, parameter in module.named_parameters() if parameter.isnan().any()]
    model = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace())
    LlamaForCausalLM.set_eagle3_layers_to_capture(model, config.eagle_config["eagle_aux_hidden_state_layer_ids"])
    return module, model.model.layers_to_capture, lacking


@torch.no_grad()
def main(exported: str, head: str, target: str) -> None:
    ours = said(head, target)
    written = load_file(Path(exported) / "model.safetensors")
    module, layers, lacking = theirs(exported, target, written)
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    vocabulary = ours.head.sizes.vocab_size
    module.model.embed_tokens.weight.data[:vocabulary] = ours.embedding  # as a server does: it is the target's
    mode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False)
    spec = SimpleNamespace(hidden_states=ours.features[0])
    batch = SimpleNamespace(spec_info=spec, forward_mode=mode, mm_input_embeds=None)
    with forward_context(ForwardContext(attn_backend=Attention())):
        normed, (recurrent,) = module.model(ours.tokens[0], torch.arange(LENGTH), batch)
    guesses = (normed @ module.lm_head.weight[:vocabulary].T).argmax(-1)
    same = int((guesses == ours.logits[0].argmax(-1)).sum())
    apart = float((recurrent - ours.finished[0]).abs().max() / ours.finished.abs().max())
    print(
        f"{len(written)} tensors, not filled: {lacking}; features behind layers {layers}, ours {list(ours.head.layers)}"
    )
    print(f"same first guess at {same} of {LENGTH}; next step's features apart by {apart:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
