"""What ``litellm`` makes of the server's APIs. Prints JSON: by door, texts, calls and token counts."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch it
import litellm


def called(answer):
    return [[call.function.name, json.loads(call.function.arguments)] for call in answer.choices[0].message.tool_calls]


def met(door, url, tools, call):
    """What one API's door gives: a text, the same in a stream, calls, and the text after their results."""
    base = url if door.partition("/")[0] in ("ollama_chat", "anthropic") else f"{url}/v1"
    about = {"model": door, "api_base": base, "api_key": "unused", "temperature": 0, "max_tokens": 24}
    about["messages"] = [{"role": "user", "content": "hi"}]
    whole = litellm.completion(**about)
    parts = list(litellm.completion(**about, stream=True))
    wish = {**about, "tools": tools, "max_tokens": 300}
    if door.startswith("ollama_chat/"):  # Ollama's API cannot ask for a call
        wish["response_format"] = {"type": "json_schema", "json_schema": {"name": "call", "schema": call}}
    else:
        wish["tool_choice"] = "required"
    calling = litellm.completion(**wish)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**wish, stream=True)))
    asked = calling.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": each.id, "name": each.function.name, "content": str(number)}
        for number, each in enumerate(asked.tool_calls)
    ]
    history = [*about["messages"], asked.model_dump(exclude_none=True), *results]
    last = litellm.completion(**{**about, "messages": history, "tools": tools})
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(part.choices[0].delta.content or "" for part in parts),
        "reason": whole.choices[0].finish_reason,
        "counts": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "calls": called(calling),
        "streamed_calls": called(streamed),
        "after": [last.choices[0].message.content, last.usage.prompt_tokens],
    }


url, *doors = sys.argv[1:]
told = json.load(sys.stdin)
litellm.suppress_debug_info = True
print(json.dumps({door: met(door, url, told["tools"], told["call"]) for door in doors}))
