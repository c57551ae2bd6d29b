"""An agent of ``openai-agents`` with a tool, through the server's APIs. Prints JSON: by door, its calls and answers."""

import asyncio
import json
import os
import sys
from typing import Annotated, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch it
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.extensions.models.litellm_model import LitellmModel
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

Digit = Annotated[int, Field(ge=0, le=99)]
called = []


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool


@function_tool
def add(a: Digit, b: Digit) -> str:
    """Add two numbers."""
    called.append([a, b])
    return str(a + b)


async def met(door, model, call, streams):
    called.clear()
    ollama = door == "ollama_chat"  # Ollama's API cannot ask for a call: a format makes the model write one
    settings = {"extra_args": {"format": call}} if ollama else {"tool_choice": "required"}
    agent = Agent(
        "adder", instructions="be brief", model=model, tools=[add], output_type=None if ollama else City,
        model_settings=ModelSettings(temperature=0, max_tokens=300, **settings),
        tool_use_behavior="stop_on_first_tool" if ollama else "run_llm_again",
    )  # fmt: skip
    if streams:
        run = Runner.run_streamed(agent, "hi", max_turns=2)
        kinds = {event.type async for event in run.stream_events()}
        assert "raw_response_event" in kinds
    else:
        run = await Runner.run(agent, "hi", max_turns=2)
    said = run.final_output if ollama else run.final_output.model_dump()
    return {"called": [*called], "said": said, "items": [item.type for item in run.new_items]}


async def main(url, call):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    models = {
        "chat": OpenAIChatCompletionsModel("tiny", client),
        "responses": OpenAIResponsesModel("tiny", client),
        **{kind: LitellmModel(f"{kind}/tiny", base_url=url, api_key="unused") for kind in ("ollama_chat", "anthropic")},
    }
    answers = {}
    for door, model in models.items():
        answers[door] = [await met(door, model, call, streams) for streams in (False, True)]
    return answers


set_tracing_disabled(True)
print(json.dumps(asyncio.run(main(sys.argv[1], json.load(sys.stdin)["call"]))))
