"""llama.cpp through llama-cpp-python: plain decoding and prompt lookup of a GGUF file as it lies."""

import json
import os
import sys
from time import perf_counter
from typing import Any

LOOKUP_TOKENS = 2
"""What llama-cpp-python recommends for machines without a GPU."""


def answer(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    model.reset()
    model.set_seed(asked["seed"])
    stream = model.generate(asked["prompt"], temp=asked["temperature"], top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1)
    tokens = [next(stream)]
    began = perf_counter()
    while len(tokens) < asked["max_tokens"] and tokens[-1] not in asked["ends"]:
        tokens.append(next(stream))
    return {"tokens": tokens, "seconds": perf_counter() - began}


def score(model: Any, ids: list[int]) -> dict[str, Any]:
    import numpy

    model.reset()
    model.eval(ids)
    logits = model.scores[: len(ids)].astype(numpy.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - numpy.log(numpy.exp(logits).sum(axis=-1, keepdims=True))
    text = logprobs[numpy.arange(len(ids) - 1), ids[1:]]
    return {"logprobs": text.tolist(), "choices": logits.argmax(axis=-1).tolist()}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes beside the answers
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    about = json.loads(sys.stdin.readline())
    options = {"n_ctx": about["context"], "n_threads": about["threads"], "n_threads_batch": about["threads"]}
    load = {"model_path": about["model"], "verbose": False, **options}
    scores = about.get("scores", False)
    rows = {"llama_cpp": llama_cpp.Llama(**load, logits_all=scores)}
    if not scores:
        rows["llama_cpp_lookup"] = llama_cpp.Llama(**load, draft_model=LlamaPromptLookupDecoding(LOOKUP_TOKENS))
    flags = llama_cpp.llama_print_system_info().decode().strip()
    told = {"version": llama_cpp.__version__, "rows": list(rows), "about": f"llama.cpp [{flags}]"}
    print(json.dumps(told), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = score(rows["llama_cpp"], asked["score"]) if scores else answer(rows[asked["row"]], asked)
        print(json.dumps(found), file=replies, flush=True)


main()
