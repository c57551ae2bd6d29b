"""A conversation with a chat model; several questions are answered at the same time.

python examples/chat.py [MODEL]
"""

import asyncio
import sys

from forerun import AsyncLLM, SamplingParams

QUESTIONS = ["What is a prime number?", "Name three colours."]
PARAMS = SamplingParams(temperature=0.7, min_p=0.05, seed=1, max_tokens=60)


async def ask(llm: AsyncLLM, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return "".join([piece.text async for piece in llm.chat_stream(messages, PARAMS)])


async def main(model: str) -> None:
    async with AsyncLLM(model) as llm:
        for question, answer in zip(QUESTIONS, await asyncio.gather(*(ask(llm, each) for each in QUESTIONS))):
            print(f"{question}\n{answer}\n")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
