"""Completes a line of code between two texts, as an editor would ask.

python examples/completion.py [MODEL]

A model without tokens to fill in the middle, such as the bundled one, reads only what is before the cursor.
"""

import sys

from forerun import LLM, RequestError, SamplingParams

BEFORE = "import json\n\ndef read(path):\n    with open(path) as file:\n        return "
AFTER = "\n\nprint(read('settings.json'))\n"
LINE = SamplingParams(temperature=0, max_tokens=24, stop="\n")


def line(llm):
    """Return what stands between the two texts."""
    try:
        (output,) = llm.generate({"prompt": BEFORE, "suffix": AFTER}, LINE)
    except RequestError as error:
        print(f"{error}\n", file=sys.stderr)
        (output,) = llm.generate(BEFORE, LINE)
    return output.outputs[0].text


if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        print(BEFORE + line(llm) + AFTER)
