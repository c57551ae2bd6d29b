"""A drafter of one's own, which guesses that the text repeats itself. The output is the model's, whatever it guesses.

python examples/own_drafter.py [MODEL]
"""

import sys
from dataclasses import dataclass

from forerun import LLM, Draft, Drafter, DrafterConfig, SamplingParams, drafters


@dataclass(frozen=True)
class EchoConfig(DrafterConfig):
    distance: int = 8
    """How many tokens back to copy from."""


@drafters.register("echo")
class Echo(Drafter[EchoConfig]):
    name = "echo"
    config_class = EchoConfig

    def propose(self, sequences, budgets):
        result = []
        for sequence, budget in zip(sequences, budgets):
            draft, node = Draft(), -1
            for token in sequence.tokens[-self.config.distance :][:budget]:
                node = draft.add(token, node)
            result.append(draft)
        return result


with LLM(*sys.argv[1:2], speculative_config={"method": "echo", "num_speculative_tokens": 4}) as llm:
    (output,) = llm.generate("x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1,", SamplingParams(temperature=0, max_tokens=40))
    print(output.outputs[0].text)
    print(output)
