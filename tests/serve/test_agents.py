"""``litellm`` and ``openai-agents`` through every API, in processes of their own: warnings of theirs are not ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import ASK, chatted
from test_ollama import CALL, DIGIT, closed

SCRIPTS = Path(__file__).parent / "clients"
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Add two numbers.", "parameters": closed({"a": DIGIT, "b": DIGIT}, "a", "b"),
}}]  # fmt: skip


def ran(script, *arguments):
    told = json.dumps({"tools": TOOLS, "call": CALL})
    command = [sys.executable, SCRIPTS / f"{script}.py", *arguments]
    run = subprocess.run(command, input=told, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_litellm(hermes):
    """Ollama's and Anthropic's doors give what OpenAI's gives, and that is the server's chat."""
    answers = ran("litellm_doors", hermes.url, "openai/tiny", "ollama_chat/tiny", "anthropic/tiny")
    whole = chatted(hermes, max_tokens=24, temperature=0)
    text, usage = whole["choices"][0]["message"]["content"], whole["usage"]
    for door, met in answers.items():
        assert met["text"] == met["streamed"] == text, door
        assert (met["reason"], met["counts"]) == ("length", [usage["prompt_tokens"], 24]), door
        assert met["calls"], door
        assert met["calls"] == met["streamed_calls"], door
        assert all(name == "add" and set(arguments) == {"a", "b"} for name, arguments in met["calls"]), door
        made = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments) in enumerate(met["calls"])
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": str(n)} for n, call in enumerate(made)]
        history = [*ASK, {"role": "assistant", "tool_calls": made}, *results]
        after = chatted(hermes, history, tools=TOOLS, max_tokens=24, temperature=0)
        assert met["after"] == [after["choices"][0]["message"]["content"], after["usage"]["prompt_tokens"]], door
    assert answers["openai/tiny"] == answers["anthropic/tiny"]


@pytest.mark.slow
def test_openai_agents(hermes):
    """An agent calls its tool, gets the result, and answers by a schema, in a stream or not."""
    answers = ran("agents_doors", hermes.url)
    assert set(answers) == {"chat", "responses", "ollama_chat", "anthropic"}
    for door, (whole, streamed) in answers.items():
        assert whole == streamed, door
        assert whole["called"], door
        assert {"tool_call_item", "tool_call_output_item"} <= set(whole["items"]), door
        if door == "ollama_chat":
            a, b = whole["called"][0]
            assert whole["said"] == str(a + b)
        else:
            assert whole["said"]["name"] in ("Paris", "Rome"), door
