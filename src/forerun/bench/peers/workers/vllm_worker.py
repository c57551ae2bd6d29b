"""vLLM: plain decoding of a checkpoint folder."""

import json
import os
import sys
from time import perf_counter
from typing import Any


def answer(engine: Any, params: Any, asked: dict[str, Any], number: int) -> dict[str, Any]:
    options = params(
        max_tokens=asked["max_tokens"],
        temperature=asked["temperature"],
        seed=asked["seed"],
        ignore_eos=not asked["ends"],
        stop_token_ids=asked["ends"],
        detokenize=False,
    )
    engine.add_request(str(number), {"prompt_token_ids": asked["prompt"]}, options)
    first, tokens = 0.0, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = first or perf_counter()
            tokens = list(output.outputs[0].token_ids)
    return {"tokens": tokens, "seconds": perf_counter() - first}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes beside the answers
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    about = json.loads(sys.stdin.readline())
    model = vllm.LLM(about["model"], max_model_len=about["context"], max_num_seqs=1, skip_tokenizer_init=True)
    told = {"version": vllm.__version__, "rows": ["vllm"], "about": f"vLLM {model.llm_engine.model_config.dtype}"}
    print(json.dumps(told), file=replies, flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        print(json.dumps(answer(model.llm_engine, vllm.SamplingParams, asked, number)), file=replies, flush=True)


main()
