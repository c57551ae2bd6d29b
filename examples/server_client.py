"""OpenAI's client and a server: first `forerun serve`, then

python examples/server_client.py [http://localhost:8000/v1]
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="unused")
model = client.models.list().data[0].id
answer = client.completions.create(model=model, prompt="def add(a, b):\n", max_tokens=24, temperature=0)
print(answer.choices[0].text)
print(answer.metrics["speculative_decoding"])
for chunk in client.completions.create(model=model, prompt="import ", max_tokens=8, stream=True):
    print(chunk.choices[0].text, end="", flush=True)
print()
