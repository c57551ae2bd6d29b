"""Models with state behind HTTP, on too few pages: whoever leaves in the middle of a round, loses its pages or begins
with a kept state, answers are those of decoding each alone and plainly."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from running import run_server, wait_idle

from forerun import LLM, SamplingParams
from hybrids import save_hybrid

PATIENCE = 300.0
METHODS = [{"method": "draft_model"}, {"method": "ngram"}, {"enabled": False}]
STEMS = ["the cat sat on the mat and ", "if x == 1: return ", "the cat sat on the mat and looked at the "]


def ask(server, request):
    """What a reader gets; of one who leaves, the beginning."""
    body, events = request
    if not body["stream"]:
        return server.post("/v1/completions", body, timeout=PATIENCE).json()["choices"][0]["text"]
    text, seen = "", 0
    with server.http.stream("POST", "/v1/completions", json=body, timeout=PATIENCE) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                seen += 1
            if seen == events:
                break
    return text


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_answers_are_those_of_plain_decoding(tmp_path, kind):
    folder = save_hybrid(kind, tmp_path)
    drafters = [
        {"method": "draft_model", "model": folder, "quantization": "q8_0", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3},
    ]
    llm = LLM(
        folder, speculative_config=drafters, page_size=4, num_pages=44, max_num_seqs=4, max_model_len=120,
        enable_prefix_caching=True,
    )  # fmt: skip
    plain = LLM(folder, speculative_config=None, max_model_len=120)
    with run_server(llm) as server:
        prompts = [f"{stem}{index}" for index, stem in enumerate(STEMS * 4)]
        for _ in range(2):
            asked = []
            for index, prompt in enumerate(prompts):
                body = {
                    "prompt": prompt, "max_tokens": 28, "ignore_eos": True, "seed": index, "stream": index % 3 > 0,
                    "temperature": (0.0, 0.9)[index % 2], "speculative": METHODS[index % 3],
                }  # fmt: skip
                asked.append((body, 2 if index % 6 == 1 else None))
            with ThreadPoolExecutor(len(asked)) as pool:
                texts = list(pool.map(lambda request: ask(server, request), asked))
            for (body, events), text in zip(asked, texts):
                params = SamplingParams(
                    max_tokens=28, ignore_eos=True, seed=body["seed"], temperature=body["temperature"]
                )
                expected = plain.generate([body["prompt"]], params)[0].outputs[0].text
                assert text == expected if events is None else expected.startswith(text)
            prompts = [f"{body['prompt']}{text}"[:60] for (body, _), text in zip(asked, texts)]
        wait_idle(server)
        llm.engine.check()
    stats = llm.engine.stats
    assert stats.preemptions
    assert stats.state_hits
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
