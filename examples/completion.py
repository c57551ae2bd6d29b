"""Completes a line of code, as an editor would ask.

python examples/completion.py [MODEL]
"""

import sys

from forerun import LLM, SamplingParams

CODE = "import json\n\ndef read(path):\n    with open(path) as file:\n        return "

with LLM(*sys.argv[1:2]) as llm:
    (output,) = llm.generate(CODE, SamplingParams(temperature=0, max_tokens=24, stop="\n"))
    print(CODE + output.outputs[0].text)
