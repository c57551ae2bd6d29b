"""What rows of a forward cost in models with state and in Gemma 4, at known models' shapes with random weights.

python lab/benchmarks/hybrids.py [lfm2 qwen3_5 granite-h gemma4] [--quantization q8_0 q4_0] [--threads 1 2] [--apart]

One row reads the weights once, and reads and writes the state. Its share of the read bandwidth counts the weights
alone. Each round's rows but the first are taken back, as after a draft of which nothing was kept. ``--apart``: the same
kernels layer by layer as well, in turns with the compiled call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.attention.base import Attention
from forerun.core.batch import Batch, Span
from forerun.core.inference import inference
from forerun.measure.environment import read_bandwidth
from forerun.models.load import load_model
from forerun.models.run.base import Model, new_attention

FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
ENDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 6656,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "conv_L_cache": 3,
        "layer_types": [FULL if index in (2, 5, 8, 10, 12, 14) else CONV for index in range(16)],
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": True,
        "layer_types": [FULL if index % 4 == 3 else LINEAR for index in range(24)],
    },
    "granite-h": {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 768, "intermediate_size": 2048,
        "shared_intermediate_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4,
        "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "num_local_experts": 0,
        "position_embedding_type": "nope", "tie_word_embeddings": True,
        "layer_types": [FULL if index in (10, 13, 17, 27) else LINEAR for index in range(32)],
    },
    "gemma4": {
        "model_type": "gemma4_text", "vocab_size": 32768, "vocab_size_per_layer_input": 32768, "hidden_size": 1536,
        "intermediate_size": 6144, "num_hidden_layers": 15, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 8,
        "use_double_wide_mlp": True, "sliding_window": 512, "final_logit_softcapping": 30.0,
        "layer_types": [FULL if index % 5 == 4 else "sliding_attention" for index in range(15)],
    },
}  # fmt: skip
"""Those of LFM2-350M, Qwen3.5-0.8B and Granite-4.0-H-350M; and 15 of the 35 layers of Gemma 4 E2B, with an
eighth of its vocabulary."""
ROWS = (1, 5, 8)


def save(shape: str, folder: Path) -> None:
    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **ENDS, **options)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.save_pretrained(folder)


@inference
def rounds(model: Model, attention: Attention, rows: int, prompt: int = 64) -> Iterator[float]:
    """Seconds of one forward after another."""
    ids = torch.randint(1, model.info.vocab_size, (prompt + rows,), generator=torch.Generator().manual_seed(1)).tolist()
    pool = attention.pool
    model.forward(Batch([Span(0, 0, ids[:prompt], settled=prompt)]), attention)
    while True:
        start = pool.length(0)
        if start > prompt + 200:
            pool.free(0)
            model.forward(Batch([Span(0, 0, ids[:prompt], settled=prompt)]), attention)
            continue
        span = Span(0, start, ids[-rows:], logits=list(range(rows)), settled=start + 1)
        began = time.perf_counter()
        model.forward(Batch([span]), attention)
        yield time.perf_counter() - began
        pool.truncate(0, start + 1)


def measure(model: Model, seconds: float) -> dict[int, float]:
    """Median seconds of a forward by rows, measured in turns."""
    every = {rows: rounds(model, new_attention(model, max_seqs=1, max_len=512), rows) for rows in ROWS}
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for rows in ROWS:
        next(every[rows])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for rows in ROWS:
            times[rows] += [next(every[rows]) for _ in range(4)][1:]
    return {rows: median(seconds) for rows, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--quantization", nargs="*", default=["q8_0", "q4_0"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept")
    given = parser.parse_args()
    print(f"| shape | weights | threads | bandwidth, GB/s | one row, ms | share | 5 rows | 8 rows |\n{'|---' * 8}|")
    with TemporaryDirectory() as made:
        for shape in given.shapes:
            folder = (given.folder or Path(made)) / shape
            if not folder.exists():
                save(shape, folder)
            for quantization in given.quantization:
                model = load_model(folder, quantization=quantization)
                for threads in given.threads:
                    torch.set_num_threads(threads)
                    bandwidth = read_bandwidth(torch.device("cpu"))
                    for fused in (model.fused, None, model.fused, None) if given.apart else (model.fused,):
                        kept, model.fused = model.fused, fused
                        times = measure(model, given.seconds)
                        model.fused = kept
                        share = model.info.token_bytes / times[1] / bandwidth
                        over = [f"{times[rows] / times[1]:.2f}" for rows in ROWS[1:]]
                        cells = [f"{bandwidth / 1e9:.1f}", f"{times[1] * 1e3:.2f}", f"{share:.2f}", *over]
                        name = shape if fused is not None else f"{shape}, layer by layer"
                        print("|", " | ".join([name, quantization, str(threads), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
