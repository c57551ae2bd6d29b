"""Answers many prompts at once, with and without drafts: the tokens are the same.

python examples/batch.py [MODEL]
"""

import sys

from forerun import LLM, SamplingParams

PROMPTS = [f"def {name}(values):\n" for name in ("largest", "smallest", "average", "median")]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=40)

with LLM(*sys.argv[1:2]) as llm:
    drafted, plain = (llm.generate(PROMPTS, PARAMS, speculate=speculate) for speculate in (True, False))
    for one, other in zip(drafted, plain):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        print(one.prompt, one.outputs[0].text, one.metrics.tokens_per_round, sep="")
