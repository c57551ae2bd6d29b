"""llama.cpp through llama-cpp-python: plain decoding and prompt lookup of an unchanged GGUF file."""

import json
import os
import sys
from time import perf_counter
from typing import Any

LOOKUP_TOKENS = 2
"""What llama-cpp-python recommends for machines without a GPU."""


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    model.reset()
    model.set_seed(request["seeds"][0])
    (prompt,) = request["prompts"]
    stream = model.generate(prompt, temp=request["temperature"], top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1)
    tokens = [next(stream)]
    began = perf_counter()
    while len(tokens) < request["max_tokens"] and tokens[-1] not in request["ends"]:
        tokens.append(next(stream))
    return {"answers": [tokens], "tokens": len(tokens) - 1, "seconds": perf_counter() - began}


class Batched:
    """Decodes several sequences, each of which adds a token to every batch."""

    def __init__(self, model: Any, context: int, sequences: int, threads: int) -> None:
        import llama_cpp

        self.lib, self.model = llama_cpp, model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context * sequences, sequences
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(model.model, params)
        self.size = params.n_batch
        self.batch = llama_cpp.llama_batch_init(self.size, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows are (token, position, sequence, whether logits are needed)."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, needed) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, needed
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
        if self.lib.llama_decode(self.context, self.batch):
            sys.exit(f"llama_decode of {len(rows)} rows failed")

    def sampler(self, temperature: float, seed: int) -> Any:
        if temperature == 0:
            return self.lib.llama_sampler_init_greedy()
        chain = self.lib.llama_sampler_chain_init(self.lib.llama_sampler_chain_default_params())
        self.lib.llama_sampler_chain_add(chain, self.lib.llama_sampler_init_temp(temperature))
        self.lib.llama_sampler_chain_add(chain, self.lib.llama_sampler_init_dist(seed))
        return chain

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        samplers = [self.sampler(request["temperature"], seed) for seed in request["seeds"]]
        answers: list[list[int]] = []
        for sequence, prompt in enumerate(request["prompts"]):
            rows = [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)]
            for first in range(0, len(rows), self.size):
                self.decode(rows[first : first + self.size])
            answers.append([self.lib.llama_sampler_sample(samplers[sequence], self.context, -1)])
        began, tokens = perf_counter(), 0
        while busy := [
            i
            for i, result in enumerate(answers)
            if len(result) < request["max_tokens"] and result[-1] not in request["ends"]
        ]:
            lengths = [len(request["prompts"][i]) + len(answers[i]) - 1 for i in busy]
            self.decode([(answers[i][-1], length, i, True) for i, length in zip(busy, lengths)])
            for row, i in enumerate(busy):
                answers[i].append(self.lib.llama_sampler_sample(samplers[i], self.context, row))
            tokens += len(busy)
        seconds = perf_counter() - began
        for sampler in samplers:
            self.lib.llama_sampler_free(sampler)
        return {"answers": answers, "tokens": tokens, "seconds": seconds}


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
    os.dup2(2, 1)  # libraries print to standard error, not among the answers
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    about = json.loads(sys.stdin.readline())
    context, threads, sequences = about["context"], about["threads"], about["sequences"]
    options = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads}
    load = {"model_path": about["model"], "verbose": False, **options}
    scores = about.get("scores", False)
    rows = {"llama_cpp": llama_cpp.Llama(**load, logits_all=scores)}
    batched = Batched(rows["llama_cpp"], context, sequences, threads) if sequences > 1 else None
    if not scores and batched is None:
        rows["llama_cpp_lookup"] = llama_cpp.Llama(**load, draft_model=LlamaPromptLookupDecoding(LOOKUP_TOKENS))
    flags = llama_cpp.llama_print_system_info().decode().strip()
    reported = {"version": llama_cpp.__version__, "rows": list(rows), "about": f"llama.cpp [{flags}]"}
    print(json.dumps(reported), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if scores:
            result = score(rows["llama_cpp"], request["score"])
        elif batched is not None:
            result = batched.answer(request)
        else:
            result = answer(rows[request["row"]], request)
        print(json.dumps(result), file=replies, flush=True)


main()
