"""The files in ``docs/examples/editors``: what each editor sends with them is taken, field by field."""

import json
import re
from pathlib import Path

import pytest
import yaml
from running import HERMES, run_server
from test_code_completion import AFTER, BEFORE, EXTRA, coder, coder_folder, expected  # noqa: F401 - three are fixtures

from forerun.serve.app import ServerOptions

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "examples" / "editors"
NAME = "qwen2.5-coder-1.5b"
HOLE = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
SAID = ["content", "timings/prompt_n", "timings/prompt_ms", "timings/predicted_n", "truncated", "tokens_cached"]
LLAMA = {
    "input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": EXTRA, "prompt": "wid", "n_indent": 4,
    "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "id_slot": 0, "stop": [], "response_fields": SAID,
}  # fmt: skip
"""What llama.vim and llama.vscode send, beside what their settings say."""
WARMING = {
    "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0, "temperature": 0.0,
    "samplers": [], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1, "id_slot": 0, "response_fields": [""],
}  # fmt: skip
"""What they send to read other files ahead."""
CONTINUE = [
    "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```",
]  # fmt: skip
ZED = ["<|endoftext|>", "<|file_sep|>", "<|fim_pad|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
TOOL = {"type": "function", "function": {"name": "read_file", "description": "Read a file.", "parameters": {
    "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}  # fmt: skip


@pytest.fixture(scope="module")
def server(coder, expected):  # noqa: F811
    with run_server(coder, ServerOptions(served_model_name=NAME, chat_template=HERMES)) as running:
        yield running


def text_of(name):
    return (FILES / name).read_text(encoding="utf-8")


def sent(server, url, body, ignored=()):
    """What the server answers to this at the address in the file; it ignores these fields and no others."""
    path = re.fullmatch(r"http://(?:localhost|127\.0\.0\.1):8000(/.*)", url)
    answer = server.http.post(path[1], json=body, headers={"Authorization": "Bearer unused"})
    assert answer.status_code == 200, answer.text
    told = answer.headers.get("forerun-ignored")
    assert set(told.split(", ") if told else ()) == set(ignored)
    return answer


def pieces(answer, of):
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(of(event["choices"][0]) or "" for event in events if event["choices"])


def chats(server, url, **more):
    """An editor's chat: a stream, with tools."""
    body = {"model": NAME, "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12, **more}  # fmt: skip
    assert pieces(sent(server, url, body), lambda choice: choice["delta"].get("content"))


def test_all_are_tried():
    assert {path.name for path in FILES.iterdir()} == {"continue.yaml", "llama.vim", "vscode.json", "zed.json"}
    page = (ROOT / "docs/cookbook/editors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(\.\./examples/editors/([\w.]+)\)", page)) == {path.name for path in FILES.iterdir()}


def test_continue(server, expected):  # noqa: F811
    completion, chat = yaml.safe_load(text_of("continue.yaml"))["models"]
    for model in (completion, chat):
        assert (model["provider"], model["model"]) == ("openai", NAME)
    assert completion["roles"] == ["autocomplete"]
    assert completion["useLegacyCompletionsEndpoint"]
    body = {"model": completion["model"], "prompt": HOLE, "temperature": 0.0, "max_tokens": 24, "stop": CONTINUE,
            "stream": True, "ignore_eos": True, "frequency_penalty": 0, "presence_penalty": 0}  # fmt: skip
    answer = sent(server, f"{completion['apiBase']}/completions", body)
    assert pieces(answer, lambda choice: choice["text"]) == expected["hole"]
    chats(server, f"{chat['apiBase']}/chat/completions", temperature=0.5, tools=[TOOL], parallel_tool_calls=False)


def test_zed(server, expected):  # noqa: F811
    told = json.loads(text_of("zed.json"))["edit_predictions"]
    about = told[told["provider"]]
    assert (about["model"], about["prompt_format"]) == (NAME, "qwen")
    body = {"model": about["model"], "prompt": HOLE, "max_tokens": about["max_output_tokens"], "stop": ZED}
    answer = sent(server, about["api_url"], {**body, "temperature": 0.2}).json()
    assert answer["usage"]["completion_tokens"] <= about["max_output_tokens"]
    answer = sent(server, about["api_url"], {**body, "temperature": 0, "max_tokens": 24, "ignore_eos": True}).json()
    assert answer["choices"][0]["text"] == expected["hole"]


def infilled(server, url, settings, expected):  # noqa: F811
    unused = ["id_slot", "samplers", "t_max_predict_ms", "t_max_prompt_ms"]
    answer = sent(server, url, {**LLAMA, **settings}, unused).json()
    assert list(answer) == SAID
    assert answer["timings/predicted_n"] <= settings["n_predict"]
    cold = {**LLAMA, **settings, "temperature": 0, "n_predict": 24, "ignore_eos": True, "n_indent": 0}
    assert sent(server, url, cold, unused).json()["content"] == expected["begun"]
    sent(server, url, WARMING, [name for name in unused if name in WARMING])


def test_llama_vim(server, expected):  # noqa: F811
    text = re.sub(r"^\s*\\", "", text_of("llama.vim").partition("g:llama_config = ")[2], flags=re.MULTILINE)
    settings = json.loads(re.sub(r",\s*}", "}", text.replace("'", '"')))
    assert settings["endpoint"] == settings["endpoint_fim"]
    assert settings["ring_n_chunks"] > 0
    infilled(server, settings["endpoint_fim"], {"n_predict": settings["n_predict"]}, expected)


def test_vscode(server, expected):  # noqa: F811
    settings = json.loads(text_of("vscode.json"))
    infilled(server, f"{settings['llama-vscode.endpoint']}/infill", {"n_predict": settings["llama-vscode.n_predict"]},
             expected)  # fmt: skip
    chats(server, f"{settings['llama-vscode.endpoint_chat']}/v1/chat/completions")
    ((name, model),) = settings["github.copilot.chat.customOAIModels"].items()
    assert name == NAME
    assert model["toolCalling"] is not model["vision"] is False
    chats(server, model["url"], tools=[TOOL], tool_choice="auto", n=1, temperature=0.1, top_p=1)
