"""``litellm`` and ``openai-agents`` through every API, in a process of their own: warnings of theirs are not ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import ASK, chatted
from test_ollama import CALL, DIGIT, closed

SCRIPTS = Path(__file__).parent / "clients"
DOORS = ("openai/tiny", "ollama_chat/tiny", "anthropic/tiny")
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Add two numbers.", "parameters": closed({"a": DIGIT, "b": DIGIT}, "a", "b"),
}}]  # fmt: skip


BOTH = """
import io, json, runpy, sys
told = sys.stdin.read()
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv, sys.stdin = [script, *arguments], io.StringIO(told)
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def said(hermes):
    """What each script prints, one behind the other: to import ``litellm`` takes longer than all that they do."""
    given = ("litellm_doors", hermes.url, *DOORS), ("agents_doors", hermes.url)
    todo = json.dumps([(str(SCRIPTS / f"{script}.py"), *arguments) for script, *arguments in given])
    told = json.dumps({"tools": TOOLS, "call": CALL})
    run = subprocess.run([sys.executable, "-c", BOTH, todo], input=told, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(zip((script for script, *_ in given), map(json.loads, run.stdout.splitlines()[-2:]), strict=True))


@pytest.mark.slow
def test_litellm(hermes, said):
    """Ollama's and Anthropic's doors give what OpenAI's gives, and that is the server's chat."""
    answers = said["litellm_doors"]
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
def test_openai_agents(said):
    """An agent calls its tool, gets the result, and answers by a schema, in a stream or not."""
    answers = said["agents_doors"]
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
