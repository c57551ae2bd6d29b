"""Makes a model call a function, and gives it the result: first `forerun serve --model smollm2`, then

python examples/tools.py [http://localhost:8000/v1]
"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="unused")
model = client.models.list().data[0].id
city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": city}}
messages = [{"role": "user", "content": "What is the weather in Rome?"}]
options = {"model": model, "tools": [tool], "max_tokens": 100, "parallel_tool_calls": False}
answer = client.chat.completions.create(messages=messages, tool_choice="required", **options)
called = answer.choices[0].message
call = called.tool_calls[0]
print(call.function.name, call.function.arguments)
result = {**json.loads(call.function.arguments), "weather": "sunny, 24 degrees"}
messages += [called, {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}]
answer = client.chat.completions.create(messages=messages, tool_choice="none", **options)
print(answer.choices[0].message.content)
