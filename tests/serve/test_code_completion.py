"""Completions with text after the cursor: ``suffix`` by OpenAI's client, and llama.cpp's ``/infill``."""

import json

import openai
import pytest
from running import client_of, run_server

from forerun import LLM, SamplingParams
from tiny import byte_tokenizer, tiny_llama

BEFORE, AFTER = "def area(width):\n    return ", " * width\n\n\nprint(area(3))\n"
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
EXTRA = [{"filename": "a.py", "text": "import b\n"}, {"filename": "b.py", "text": "width = 3\n"}]
HEAD = "<|repo_name|>myproject\n<|file_sep|>a.py\nimport b\n<|file_sep|>b.py\nwidth = 3\n<|file_sep|>filename\n"
COLD = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ASKED = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def coder_folder(tmp_path_factory):
    """A random model with Qwen's tokens, in a byte-level vocabulary."""
    folder = tmp_path_factory.mktemp("coder")
    fast = byte_tokenizer([(BEFORE + AFTER) * 4], 300, ["<|endoftext|>", *QWEN])
    tiny_llama(vocab_size=len(fast), eos_token_id=0).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def coder(coder_folder):
    return LLM(str(coder_folder), speculative_config={"method": "ngram"}, max_num_seqs=4, page_size=16)


def documented(coder, *texts):
    """What the model says after the strings that Qwen's document and llama.cpp's code give, encoded one by one."""
    tokens = [token for text in texts for token in coder.get_tokenizer().encode(text)]
    return coder.generate([tokens], COLD, speculate=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def expected(coder):
    hole = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    return {
        "hole": documented(coder, hole),
        "files": documented(coder, HEAD.replace("myproject", "repository").replace("filename", "file") + hole),
        "infill": documented(coder, f"<|repo_name|>myproject\n<|file_sep|>filename\n{hole}"),
        "begun": documented(coder, f"{HEAD}<|fim_prefix|>{BEFORE}", "wid", f"<|fim_suffix|>{AFTER}<|fim_middle|>"),
    }


@pytest.fixture(scope="module")
def server(coder, expected):
    with run_server(coder) as running:
        yield running


def infill(server, **body):
    answer = server.post("/infill", {"input_prefix": BEFORE, "input_suffix": AFTER, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_suffix_of_a_completion(server, expected):
    with client_of(server) as client:
        ask = {"model": "tiny", "prompt": BEFORE, "suffix": AFTER, "temperature": 0, "max_tokens": 24}
        whole = client.completions.create(**ask, extra_body={"ignore_eos": True})
        assert whole.choices[0].text == expected["hole"]
        stream = client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].text for chunk in stream) == expected["hole"]
        beside = client.completions.create(**ask, extra_body={"ignore_eos": True, "input_extra": EXTRA})
        assert beside.choices[0].text == expected["files"]


def test_ollamas_suffix(server):
    assert server.post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["completion", "tools", "insert"]
    options = {"temperature": 0, "num_predict": 24}
    asked = {"model": "tiny", "prompt": BEFORE, "suffix": AFTER, "stream": False, "options": options}
    body = {"prompt": BEFORE, "suffix": AFTER, "temperature": 0, "max_tokens": 24}
    expected = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert server.post("/api/generate", asked).json()["response"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_completion(server, coder, stream):
    newline = coder.get_tokenizer().encode("\n")[0]
    body = {"prompt": BEFORE, "suffix": AFTER, "seed": 5, "max_tokens": 48, "logit_bias": {str(newline): 9}}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert "\n" in whole
    answer = server.post("/v1/completions", {**body, "stop_at": "line", "stream": stream})
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == whole.partition("\n")[0]


def test_infill_as_llama_cpp_documents_it(server, expected):
    answer = infill(server, n_predict=24, ignore_eos=True)
    assert answer["content"] == expected["infill"]
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["tokens_predicted"], answer["truncated"], answer["model"]) == (24, False, "tiny")
    assert answer["has_new_line"] == ("\n" in answer["content"])
    assert answer["timings"]["predicted_n"] == 24
    begun = infill(server, n_predict=24, ignore_eos=True, input_extra=EXTRA, prompt="wid")
    assert begun["content"] == expected["begun"]


def test_infill_in_a_stream(server, expected):
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, **ASKED, "stream": True}
    answer = server.post("/infill", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert "".join(event["content"] for event in events) == expected["infill"]
    assert [event["stop"] for event in events] == [*[False] * (len(events) - 1), True]
    assert events[-1]["tokens_predicted"] == 24


def test_the_cursors_line_grows_after_what_was_read(server):
    """What precedes ``prompt`` stays in the prefix cache while the line grows."""
    prefix = infill(server, n_predict=0, input_prefix=BEFORE * 8, input_suffix="")["tokens_evaluated"] - 2
    infill(server, n_predict=2, input_prefix=BEFORE * 8, prompt="wi")
    again = infill(server, n_predict=2, input_prefix=BEFORE * 8, prompt="width +")
    assert again["tokens_evaluated"] > again["tokens_cached"] >= prefix // 16 * 16 > 0


def test_infill_reads_ahead(server):
    """Editors fill the cache with ``n_predict`` 0."""
    answer = infill(server, n_predict=0, input_extra=EXTRA)
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert infill(server, n_predict=1, input_extra=EXTRA)["tokens_cached"] > 0


def test_infill_with_chosen_fields(server):
    """As llama.vim asks."""
    fields = ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached", "nothing/here"]
    answer = infill(server, n_predict=3, response_fields=fields, samplers=["top_k"], cache_prompt=True, stop=[])
    assert list(answer) == ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached"]
    assert answer["timings/predicted_n"] == 3


def test_files_give_way_in_infill(server, coder):
    """The first ones go; that the answer says so."""
    long = [{"filename": f"{number}.py", "text": "width = 3\n" * 8} for number in range(12)]
    answer = infill(server, n_predict=8, input_extra=long)
    assert answer["truncated"] is True
    assert answer["tokens_evaluated"] + 8 <= coder.engine.max_model_len
    assert infill(server, n_predict=8, input_extra=long[:1])["truncated"] is False


def second_line(text):
    """Where the first line with text after another one with text begins; None if there is none."""
    lines = text.split("\n")
    found = [n for n, line in enumerate(lines) if n and line.strip() and "".join(lines[:n]).strip()]
    return found[0] if found else None


def test_infill_ends_with_its_word_or_its_block(server, coder):
    body = {"n_predict": 64, "temperature": 0.8, "ignore_eos": True}
    body["logit_bias"] = {str(coder.get_tokenizer().encode("\n")[0]): 5}
    whole = {seed: infill(server, seed=seed, **body)["content"] for seed in range(12)}
    seed = next(seed for seed, text in whole.items() if second_line(text) is not None)
    ended = infill(server, seed=seed, **body, n_indent=90)
    assert ended["content"] == "\n".join(whole[seed].split("\n")[: second_line(whole[seed])]).rstrip()
    assert (ended["stop_type"], ended["stopping_word"]) == ("limit", "")
    letter = next(each for each in whole[seed] if each.isascii() and each.isalpha())
    stopped = infill(server, seed=seed, **body, stop=[letter])
    assert stopped["content"] == whole[seed].partition(letter)[0]
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", letter)


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/completions", {"prompt": [[5]], "suffix": "a"}, None),
    ("/v1/completions", {"prompt": ["a", "b"], "stop_at": "line"}, None),
    ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, None),
    ("/v1/completions", {"prompt": "a", "suffix": "b", "stop_at": "word"}, "stop_at"),
    ("/v1/completions", {"prompt": "a", "suffix": "b", "use_beam_search": True}, "suffix"),
    ("/infill", {"input_prefix": "a"}, "input_suffix"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"name": "c"}]}, "input_extra.0.text"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 3, "max_tokens": 3}, None),
])  # fmt: skip
def test_mistakes(server, path, body, param):
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "\n" not in error["message"]


def test_a_model_without_tokens_says_so(served):
    with run_server(served) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError, match="no tokens to fill in the middle") as caught:
            client.completions.create(model="tiny", prompt="a", suffix="b")
        assert caught.value.param == "suffix"
        answer = running.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_suffix")
