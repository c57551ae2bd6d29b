"""vLLM's keywords, as this engine means them: those with another name here, those that say what is so anyway, and
what to do instead of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.core.errors import ConfigError
from forerun.models.load import resolve

RENAMED = {
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_pages",
}
BLOCK_SIZE = 16
"""vLLM's own, where prefix caching is asked for without a page size."""

_ONE = ((1,), "the layers' parts are split by tensor_parallel_size; forerun serve --replicas starts several engines")
SAID: dict[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_parallel_size": _ONE,
    "data_parallel_size": _ONE,
    "enforce_eager": ((True, False), ""),
    "trust_remote_code": ((False,), "remote code never runs: the model must be one that transformers knows"),
    "swap_space": ((0, 0.0), "nothing is swapped: requests that lose their pages are computed again"),
    "cpu_offload_gb": ((0, 0.0), "weights are on one device: use device='cpu' or quantization"),
    "enable_chunked_prefill": ((True,), "prompts are always read in chunks: max_num_batched_tokens bounds them"),
    "disable_log_stats": ((True,), "nothing is logged: figures are in each output's metrics"),
    "kv_cache_dtype": (("auto",), "the KV cache has the model's dtype"),
    "load_format": (("auto", "safetensors"), "only safetensors and GGUF are read"),
    "tokenizer_mode": (("auto",), "the checkpoint's own tokenizer is used"),
    "skip_tokenizer_init": ((False,), "a tokenizer is always loaded; prompts may be token ids all the same"),
    "scheduling_policy": (("fcfs", "priority"), "requests come in the order of arrival, moved by their priority"),
    "task": (("auto", "generate"), "models generate here"),
    "runner": (("auto", "generate"), "models generate here"),
    "tokenizer_revision": ((None,), "give revision, or the folder of a tokenizer as tokenizer"),
}
"""Values that change nothing here, and what to say of others. No step is ever captured, so ``enforce_eager`` asks for
nothing."""
INSTEAD = {
    "speculative_model": "speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "num_speculative_tokens": "speculative_config={'method': ..., 'num_speculative_tokens': ...}",
    "max_seq_len_to_capture": "leave it out: nothing is captured",
    "compilation_config": "leave it out: kernels are compiled when they are needed",
    "distributed_executor_backend": "leave it out: tensor_parallel_size starts processes of its own",
    "guided_decoding_backend": "leave it out: llguidance compiles grammars",
    "max_logprobs": "leave it out: logprobs may be any number",
    "hf_overrides": "change config.json in a copy of the checkpoint",
    "limit_mm_per_prompt": "leave it out: prompts are text",
    "served_model_name": "forerun serve --served-model-name",
    "chat_template": "forerun serve --chat-template",
}


def understood(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``EngineConfig`` for keywords of ``LLM``, vLLM's among them. With a ``revision`` or a
    ``download_dir``, ``model`` becomes the folder of the download. Raises ConfigError for what cannot be honoured,
    ModelError for a download that fails."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name in SAID:
            accepted, instead = SAID[name]
            if not any(value is each or (value == each and type(value) is type(each)) for each in accepted):
                raise ConfigError(f"{name}={value!r} cannot be honoured: {instead}")
            continue
        if name in INSTEAD:
            raise ConfigError(f"{name} is not an option here; instead: {INSTEAD[name]}")
        name = RENAMED.get(name, name)
        if name in result:
            raise ConfigError(f"{name} is given twice, once by vLLM's name: {result[name]!r} and {value!r}")
        result[name] = value
    if result.get("prefix_caching") is True and "enable_prefix_caching" in options:
        result.setdefault("page_size", BLOCK_SIZE)
    revision, folder = result.pop("revision", None), result.pop("download_dir", None)
    if revision is not None or folder is not None:
        result["model"] = str(resolve(result["model"], revision=revision, download_dir=folder))
    return result
