"""Prints an answer as it comes. Drafted tokens that were accepted are underlined.

python examples/stream.py [MODEL]
"""

import sys

from forerun import LLM, SamplingParams

with LLM(*sys.argv[1:2]) as llm:
    for piece in llm.stream("def fibonacci(n):\n", SamplingParams(temperature=0, max_tokens=60)):
        print(f"\x1b[4m{piece.text}\x1b[0m" if piece.drafted else piece.text, end="", flush=True)
    print(f"\n{piece.output.metrics.mean_acceptance_length:.2f} tokens per drafted round")
