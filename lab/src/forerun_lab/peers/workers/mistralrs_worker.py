"""mistral.rs: plain decoding of a GGUF file. Its Python package takes text and returns text, which its tokenizer
encodes again, and drafts by MTP modules alone."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def answer(mistralrs: Any, runner: Any, request: dict[str, Any]) -> dict[str, Any]:
    (prompt,), temperature = request["prompts"], request["temperature"]
    options = {"temperature": temperature, "top_p": 1.0} if temperature else {"temperature": 0.0, "top_k": 1}
    asked = mistralrs.CompletionRequest(
        runner.detokenize_text(prompt, False), "default", max_tokens=request["max_tokens"],
        ignore_eos=not request["ends"], **options,
    )  # fmt: skip
    reply = runner.send_completion_request(asked)
    usage = reply.usage
    tokens = runner.tokenize_text(reply.choices[0].text, False, None)
    return {"answers": [tokens], "tokens": usage.completion_tokens - 1, "seconds": usage.total_completion_time_sec}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard error, not among the answers
    about = json.loads(sys.stdin.readline())
    os.environ["RAYON_NUM_THREADS"] = str(about["threads"])
    import mistralrs

    file = Path(about["model"])
    which = mistralrs.Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name)
    runner = mistralrs.Runner(which, max_seqs=1, prefix_cache_n=0)
    reported = {"version": version("mistralrs"), "rows": ["mistralrs"], "about": "mistral.rs"}
    print(json.dumps(reported), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(mistralrs, runner, json.loads(line))), file=replies, flush=True)


main()
