"""``python -m forerun_lab.bench.bits``: which architectures have bit-equal logits on this machine.

Tiny random checkpoints of many architectures and head widths are loaded in every dtype with ``invariant=True``, and
hundreds of rows are batched in every way that the engine has (``models/run/invariance.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from forerun import kernels
from forerun.core.errors import ForerunError
from forerun.measure.environment import processor
from forerun.measure.page import markdown
from forerun.models.load import load_model
from forerun.models.run.invariance import self_test

SIZES = {
    "vocab_size": 300, "hidden_size": 192, "intermediate_size": 352, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 150}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 96}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    **{f"llama, head width {w}": ("llama", {"head_dim": w, "num_key_value_heads": 1}) for w in (40, 64, 100, 120, 128)},
    "mistral": ("mistral", WINDOW),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gemma2": ("gemma2", {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("gemma3_text", MIXED),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", WINDOW),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {"n_embd": 192, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 352, "word_embed_proj_dim": 192}),
    "starcoder2": ("starcoder2", WINDOW),
    "cohere": ("cohere", {"logit_scale": 1.0}),
    "glm4": ("glm4", {}),
    "granite": ("granite", {"attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "exaone4": ("exaone4", MIXED),
    "ernie4_5": ("ernie4_5", {}),
    "seed_oss": ("seed_oss", {}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
}
DTYPES = ("float32", "bfloat16", "float16")
PATHS = ("auto", "hf")
PAGE = 16


@dataclass(frozen=True)
class BitsRow:
    """One checkpoint on one path: the number of ways of batching with other bits, and the first of them."""

    architecture: str
    dtype: str
    path: str
    rows_in_calls: str
    ways: int
    finding: str


def save(kind: str, options: dict[str, Any], folder: str) -> None:
    """Save a random checkpoint whose products are large enough for the order of sums to change bits."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            center = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            torch.nn.init.normal_(parameter, center, 0.1)
    module.tie_weights()
    module.save_pretrained(folder)


def measure(names: list[str], dtypes: list[str], paths: list[str]) -> Iterator[BitsRow]:
    with tempfile.TemporaryDirectory() as work:
        for index, name in enumerate(names):
            folder = str(Path(work) / str(index))
            save(*ARCHITECTURES[name], folder)
            for dtype in dtypes:
                seen = set()
                for path in paths:
                    model = load_model(folder, dtype=dtype, invariant=True, model_path=path)
                    if model.info.path in seen:
                        continue
                    seen.add(model.info.path)
                    result = [finding for size in (None, PAGE) for finding in self_test(model, page_size=size)]
                    sizes = "any" if model.tiles is None else ", ".join(map(str, model.tiles.rows))
                    yield BitsRow(name, dtype, model.info.path, sizes, len(result), str(result[0]) if result else "")


def _cell(rows: list[dict[str, Any]]) -> str:
    """The rows that calls may have, by path; in bold the number of ways of batching that changed bits."""
    parts = []
    for row in rows:
        sizes = row["rows_in_calls"].split(", ")
        text = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        text = f"**{row['ways']} ways differ**" if row["finding"] else text
        parts.append(("native " if row["path"].startswith("native") else "") + text)
    return ", ".join(parts) or "–"


def table(files: list[Path]) -> str:
    """A Markdown table of files that ``--out`` wrote, a block of columns for each. Raises OSError and ValueError."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    heads = ["architecture"]
    for run in runs:
        about = run["environment"]
        how = "our kernels" if about["kernels"] else "torch"
        heads += [f"{dtype}, {how}" for dtype in DTYPES]
    rows = []
    for name in dict.fromkeys(row["architecture"] for run in runs for row in run["rows"]):
        cells = [
            _cell([row for row in run["rows"] if (row["architecture"], row["dtype"]) == (name, dtype)])
            for run in runs
            for dtype in DTYPES
        ]
        rows.append([name, *cells])
    return markdown(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun_lab.bench.bits", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(ARCHITECTURES), help="architectures, comma-separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print such files as a table, and end")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    rows = []
    try:
        names = [name for name in ARCHITECTURES if name.split(",")[0] in args.only.split(",")]
        for row in measure(names, args.dtypes.split(","), args.paths.split(",")):
            rows.append(row)
            print(f"{row.architecture:24} {row.dtype:9} {row.path:28} {row.rows_in_calls:42} {row.finding or 'equal'}")
            sys.stdout.flush()
    except ForerunError as error:
        sys.exit(f"error: {error}")
    if args.out:
        about = {
            "processor": processor(), "threads": args.threads, "torch": torch.__version__,
            "transformers": transformers.__version__, "kernels": kernels.library() is not None,
        }  # fmt: skip
        args.out.write_text(json.dumps({"environment": about, "rows": [vars(row) for row in rows]}, indent=1))
    sys.exit(any(row.finding for row in rows))


if __name__ == "__main__":
    main()
