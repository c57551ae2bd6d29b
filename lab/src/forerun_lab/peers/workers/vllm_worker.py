"""vLLM: plain decoding of a checkpoint folder."""

import json
import os
import sys
from time import perf_counter
from typing import Any

KV_CACHE = 2 << 30
"""Bytes; by default vLLM takes nearly all memory."""


def answer(engine: Any, params: Any, request: dict[str, Any], number: int) -> dict[str, Any]:
    names = [f"{number}-{i}" for i in range(len(request["prompts"]))]
    for name, prompt, seed in zip(names, request["prompts"], request["seeds"]):
        options = params(
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            seed=seed,
            ignore_eos=not request["ends"],
            stop_token_ids=request["ends"],
            detokenize=False,
        )
        engine.add_request(name, {"prompt_token_ids": prompt}, options)
    answers: dict[str, list[int]] = {}
    began, before = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        if not began and len(answers) == len(names):
            began, before = perf_counter(), sum(map(len, answers.values()))
    seconds, tokens = perf_counter() - began, sum(map(len, answers.values())) - before
    return {"answers": [answers[name] for name in names], "tokens": tokens, "seconds": seconds}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard error, not among the answers
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    about = json.loads(sys.stdin.readline())
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{about['threads'] - 1}")
    model = vllm.LLM(
        about["model"],
        max_model_len=about["context"],
        max_num_seqs=about["sequences"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_CACHE,
    )
    reported = {"version": vllm.__version__, "rows": ["vllm"], "about": f"vLLM {model.llm_engine.model_config.dtype}"}
    print(json.dumps(reported), file=replies, flush=True)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        print(json.dumps(answer(model.llm_engine, vllm.SamplingParams, request, number)), file=replies, flush=True)


main()
