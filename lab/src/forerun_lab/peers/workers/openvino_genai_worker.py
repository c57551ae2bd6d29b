"""OpenVINO GenAI: a GGUF file, which it reads itself, plain and with its prompt lookup."""

import json
import os
import sys
from time import perf_counter
from typing import Any

PLAIN = "openvino"
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}


def answer(genai: Any, models: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    import numpy
    import openvino

    config = genai.GenerationConfig()
    config.max_new_tokens = request["max_tokens"]
    config.ignore_eos = not request["ends"]
    config.stop_token_ids = set(request["ends"])
    config.apply_chat_template = False
    config.do_sample = request["temperature"] > 0
    if config.do_sample:
        config.temperature, config.rng_seed, config.top_p = request["temperature"], request["seeds"][0], 1.0
    if request["row"] != PLAIN:
        for name, value in LOOKUP.items():
            setattr(config, name, value)
    times: list[float] = []

    class Clock(genai.StreamerBase):
        def write(self, token: Any) -> Any:
            times.append(perf_counter())
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    (prompt,) = request["prompts"]
    result = models[request["row"]].generate(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config, Clock())
    tokens = list(result.tokens[0])
    return {"answers": [tokens], "tokens": len(tokens) - 1, "seconds": perf_counter() - times[0]}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard error, not among the answers
    import openvino_genai as genai

    about = json.loads(sys.stdin.readline())
    options = {"INFERENCE_NUM_THREADS": about["threads"]}
    models = {
        PLAIN: genai.LLMPipeline(about["model"], "CPU", **options),
        f"{PLAIN} prompt_lookup": genai.LLMPipeline(about["model"], "CPU", prompt_lookup=True, **options),
    }
    reported = {"version": genai.__version__, "rows": list(models), "about": "OpenVINO GenAI"}
    print(json.dumps(reported), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(genai, models, json.loads(line))), file=replies, flush=True)


main()
