"""Small GGUF files of llama.cpp's own converter and quantizer, and llama.cpp's logits of them: the test data in
``tests/oracle``.

python lab/tools/llama_oracle.py LLAMA_CPP BUILD [--only CASE,...] [--out tests/oracle]

LLAMA_CPP: its sources; BUILD: where they were built (``bin/libllama.so``). The checkpoints are random, of few different
weights, so that the files can be packed. Of most cases there is a file in float32, one in Q8_0 and one in Q4_K_M, and
of the last two also what llama.cpp computes from their numbers in float32.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4ForCausalLM, Mistral4ForCausalLM

ROOT = Path(__file__).parents[2]
WORDS = ["<end>", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'", "ab", *(f"w{index}" for index in range(21))]
IDS = np.random.default_rng(0).integers(1, len(WORDS), 40).tolist()
ROWS = [0, 5, 18, 39]
"""Of whose logits are kept."""
KINDS = {"f32": (0, 64), "q8_0": (7, 64), "q4_k_m": (15, 256)}
"""llama.cpp's number of a kind of file, and the width of its model: rows of Q4_K have at least 256 numbers."""
CLASSES = {"mistral4": Mistral4ForCausalLM, "gemma4_text": Gemma4ForCausalLM}
"""Which ``AutoModelForCausalLM`` does not find."""
FULL, SLIDING, STATE = "full_attention", "sliding_attention", "linear_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
WHOLE = 10764.71
"""The base with which YaRN's range of a head of 32 ends at a whole number: llama.cpp rounds it, gpt-oss does not."""
FREE = {"head_dim": 32}
"""Heads that are wider, or narrower, than an equal share of the hidden state."""
WINDOW = {"sliding_window": 9}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "layer_types": [STATE, FULL], "full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, **FREE,
    "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}  # fmt: skip
LATENT = {
    **EXPERTS, "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
SCALED = {"embedding_multiplier": 1.3, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.5}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 16}
GRANITE_H = {
    **SCALED,
    **MAMBA,
    "layer_types": [STATE, FULL],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "intermediate_size": 32,
    "shared_intermediate_size": 32,
    "position_embedding_type": None,
    "tie_word_embeddings": True,
}
GRANITE_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
FALCON = {
    "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_groups": 2, **FREE,
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, **FREE, "time_step_min": 1e-30,
}  # fmt: skip
GEMMA4 = {
    "layer_types": [SLIDING, FULL] * 2, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": len(WORDS), "global_head_dim": 64, "num_kv_shared_layers": 2, **FREE, **WINDOW,
    "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
}  # fmt: skip
CASES: dict[str, tuple[Any, ...]] = {
    "llama": ("llama", {**FREE, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**FREE, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {**FREE, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**FREE, **EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "gemma2": ("gemma2", {**FREE, **WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**FREE, **WINDOW, "num_hidden_layers": 6, "intermediate_size": 32,
                               "query_pre_attn_scalar": 32}),
    "gemma4": ("gemma4_text", {**GEMMA4, "enable_moe_block": False}),
    "gemma4-experts": ("gemma4_text", {
        **GEMMA4, "layer_types": [SLIDING, FULL], "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 32, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
    }),
    "phi3": ("phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**WINDOW, "layer_types": [SLIDING] * 3 + [FULL],
                        "rope_parameters": {FULL: {**YARN, "attention_factor": 1.2}, SLIDING: PLAIN}}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "intermediate_size": 32}),
    "granite": ("granite", {**SCALED, "tie_word_embeddings": True}),
    "granitemoe": ("granitemoe", {**SCALED, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": [FULL, FULL], "rope_parameters": LLAMA3}),
    "exaone4-windows": ("exaone4", {**WINDOW, "hidden_size": 32, "head_dim": 8, "intermediate_size": 32,
                                    "layer_types": ([SLIDING] * 3 + [FULL]) * 16, "rope_parameters": LLAMA3}),
    "glm4": ("glm4", {**FREE, "attention_bias": True, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "hunyuan": ("hunyuan_v1_dense", {**FREE, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": False}),
    "seed_oss": ("seed_oss", {**FREE, "attention_bias": True}),
    "apertus": ("apertus", {"num_hidden_layers": 2, "rope_parameters": LLAMA3}),
    "cohere2": ("cohere2", {**WINDOW, "rotary_pct": 1.0, "intermediate_size": 32, "logit_scale": 0.3,
                            "layer_types": [SLIDING] * 3 + [FULL]}),
    "gpt_oss": ("gpt_oss", {**FREE, **WINDOW, "layer_types": [SLIDING, FULL], "intermediate_size": 32,
                            "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
                            "rope_parameters": {**YARN, "rope_theta": WHOLE, "truncate": False}}),
    "ministral3": ("ministral3", {**FREE, "sliding_window": None, "rope_parameters": {
        **YARN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 11, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }}),
    "starcoder2": ("starcoder2", {**WINDOW, "use_bias": True}),
    "lfm2": ("lfm2", {"layer_types": ["conv", FULL], "block_auto_adjust_ff_dim": False,
                      "tie_word_embeddings": True}),
    "lfm2_moe": ("lfm2_moe", {**EXPERTS, "layer_types": ["conv", FULL], "num_experts": 4, "num_dense_layers": 1,
                              "tie_word_embeddings": True}),
    "qwen3_5": ("qwen3_5_text", {**DELTA, "linear_num_key_heads": 4}),
    "qwen3_5-grouped": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "granite-4": ("granitemoehybrid", {**GRANITE_H, "layer_types": [FULL, FULL], "position_embedding_type": "rope"}),
    "granite-4-experts": ("granitemoehybrid", {**GRANITE_H, **GRANITE_EXPERTS, "layer_types": [FULL, FULL],
                                               "position_embedding_type": "rope"}),
    "granite-h": ("granitemoehybrid", GRANITE_H),
    "granite-h-experts": ("granitemoehybrid", {**GRANITE_H, **GRANITE_EXPERTS}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {
        **FALCON, "embedding_multiplier": 1.7, "lm_head_multiplier": 0.6, "key_multiplier": 0.4,
        "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.9, "mlp_multipliers": [0.6, 1.5], "ssm_multipliers": [0.7, 1.1, 0.5, 1.4, 0.8],
    }),
    "falcon_h1-normed": ("falcon_h1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h": ("nemotron_h", {**NEMOTRON, "layers_block_type": [STATE, "mlp", FULL]},
                   {"hybrid_override_pattern": "M-*", "num_experts_per_tok": None, "n_routed_experts": None,
                    "n_group": None}),
    "nemotron_h-experts": ("nemotron_h", {
        **NEMOTRON, **EXPERTS, "layers_block_type": ["moe", FULL, STATE], "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 2.5,
    }),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4,
                                    "topk_group": 2, "first_k_dense_replace": 1,
                                    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                                    "scoring_func": "sigmoid"}),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
                                        "first_k_dense_replace": 1, "scoring_func": "sigmoid"}),
    "mistral4": ("mistral4", {**LATENT, "head_dim": 48, "n_group": 1, "topk_group": 1, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 11,
    }}, {"architectures": ["Ministral3ForCausalLM"]}),
}  # fmt: skip
"""``model_type``, what differs from ``sizes``, and what published configs have that transformers writes otherwise."""

F32_ONLY = {"exaone4-windows", "bamba", "llama-biases", "falcon_h1-normed", "granite-4-experts"}
DEEP = {"gemma4", "gemma4-experts", "apertus"}
"""Whose wider model has all layers, beside those with state; others have one."""


def sizes(case: str, hidden: int) -> dict[str, Any]:
    _, options, *_ = CASES[case]
    heads = 4 if hidden == 64 or "head_dim" in options else 8
    types, inner = options.get("layer_types"), 96 if hidden == 64 else 32
    if hidden == 256 and not {"conv", STATE} & {*(types or ())} and case not in DEEP:
        options = {**options, "num_hidden_layers": 1, **({"layer_types": types[:1]} if types else {})}
    return {
        "vocab_size": len(WORDS), "hidden_size": hidden, "num_hidden_layers": len(types or "12"),
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": hidden // heads, "intermediate_size": inner,
        "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 0,
        "pad_token_id": None, **options,
    }  # fmt: skip


def make(case: str, hidden: int) -> Any:
    """A model whose weights are few different numbers."""
    torch.manual_seed(0)
    kind, *_ = CASES[case]
    config = AutoConfig.for_model(kind, **sizes(case, hidden))
    module = CLASSES.get(kind, AutoModelForCausalLM.from_config)(config).eval()
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        if name.endswith(("inv_freq", "embed_scale", "softcap")) or not weight.is_floating_point():
            continue
        step = 1.2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
        one = weight.dim() == 1 and not name.endswith("bias") and kind not in ("gemma2", "gemma3_text")
        weight.data = torch.randn(weight.shape).round().clamp(-1, 1) * step + float(one)
    module.tie_weights()
    return module


def publish(folder: Path, changes: dict[str, Any] | None = None) -> None:
    """The files beside the weights, as the model's makers write them; a change to None leaves a key out."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = ["mamba" if kind == STATE else "attention" for kind in config["layer_types"]]
    for key, value in (changes or {}).items():
        config.pop(key, None)
        config |= {key: value} if value is not None else {}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {"model": {"vocab": dict.fromkeys(WORDS)}, "added_tokens": []}  # counted by Gemma's converter
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


class LlamaCpp:
    def __init__(self, sources: Path, build: Path, folder: Path) -> None:
        self.sources, self.program, libraries = sources, folder / "oracle", build / "bin"
        headers = [f"-I{sources}/include", f"-I{sources}/ggml/include"]
        linked = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O1", "-o", self.program, source, *headers, *linked], check=True)

    def run(self, *arguments: object) -> bytes:
        return subprocess.run([self.program, *map(str, arguments)], check=True, stdout=subprocess.PIPE).stdout

    def convert(self, folder: Path, to: Path) -> None:
        """By the converter, but for the vocabulary, which is ``WORDS``."""
        import gguf
        from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

        def vocabulary(self: Any) -> None:
            self.gguf_writer.add_tokenizer_model("gpt2")
            self.gguf_writer.add_tokenizer_pre("gpt-2")
            self.gguf_writer.add_token_list(WORDS)
            self.gguf_writer.add_token_types([1] * len(WORDS))
            self.gguf_writer.add_token_merges(["a b"])
            self.gguf_writer.add_eos_token_id(0)

        def hparams(folder: Path, *_: Any, **__: Any) -> Any:  # else transformers adds its defaults to them
            return json.loads((Path(folder) / "config.json").read_text())

        ModelBase.load_hparams = hparams
        named = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
        converter = get_model_class(named)
        for each in (converter, *(part for part in vars(converter).values() if isinstance(part, type))):
            each.set_vocab = vocabulary
        converter.no_mtp = True
        with torch.inference_mode():
            converter(folder, gguf.LlamaFileType.ALL_F32, to, eager=True).write()

    def quantize(self, path: Path, to: Path, kind: int) -> None:
        self.run("quantize", path, to, kind)

    def logits(self, path: Path) -> np.ndarray:
        given = np.frombuffer(self.run("logits", path, *IDS), np.float32)
        return given.reshape(len(IDS), -1)[ROWS]


def keep(case: str, llama: LlamaCpp, folder: Path, out: Path) -> None:
    found = {"ids": np.array(IDS), "rows": np.array(ROWS)}
    kinds = {name: KINDS[name] for name in ("f32", *({*KINDS} - {"f32"} if case not in F32_ONLY else ()))}
    for hidden in {hidden for _, hidden in kinds.values()}:
        make(case, hidden).save_pretrained(folder / f"{hidden}")
        publish(folder / f"{hidden}", *CASES[case][2:])
        llama.convert(folder / f"{hidden}", folder / f"{hidden}.gguf")
    for name, (number, hidden) in kinds.items():
        path = source = folder / f"{hidden}.gguf"
        if number:
            path = folder / f"{name}.gguf"
            llama.quantize(source, path, number)
            llama.quantize(path, folder / "numbers.gguf", 0)
            found[f"{name}-numbers"] = llama.logits(folder / "numbers.gguf")
        found[name] = llama.logits(path)
        packed = lzma.compress(path.read_bytes(), preset=9)
        (out / f"{case}-{name}.gguf.xz").write_bytes(packed)
        print(case, name, path.stat().st_size, len(packed), flush=True)
    np.savez_compressed(out / f"{case}.npz", **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=ROOT / "tests/oracle")
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(given.sources), str(given.sources / "gguf-py")]
    with tempfile.TemporaryDirectory() as made:
        llama = LlamaCpp(given.sources, given.build, Path(made))
        for case in given.only.split(","):
            folder = Path(made) / case
            folder.mkdir()
            keep(case, llama, folder, given.out)


if __name__ == "__main__":
    main()
