"""Real clients against a real server, by hand, each in an environment of its own:

    forerun serve --model smollm2 &
    python -m venv litellm && litellm/bin/pip install litellm mcp
    litellm/bin/python lab/benchmarks/clients.py litellm

Each check says what came back where that is not what the client promises. What a model of 135M parameters says is not
judged; calls that were asked for, objects and streams must be whole and valid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel, Field

QUESTION = "What is the weather in Paris, in celsius?"
Checks = dict[str, Callable[[], None]]


class GetWeather(BaseModel):
    """The present weather of a city."""

    city: str = Field(description="the city's name", max_length=40)
    unit: Literal["celsius", "fahrenheit"]


class City(BaseModel):
    name: str = Field(max_length=40)
    country: str = Field(max_length=40)
    population: int = Field(ge=1, le=100_000_000)


class Cities(BaseModel):
    cities: list[City] = Field(min_length=1, max_length=2)


WEATHER = {
    "type": "function",
    "function": {"name": "GetWeather", "description": GetWeather.__doc__, "parameters": GetWeather.model_json_schema()},
}
NAMED = {"type": "function", "function": {"name": "GetWeather"}}


def asked(text: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def openai_checks(url: str, model: str) -> Checks:
    import openai

    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=300)
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 200, "seed": 1}
    create = client.chat.completions.create

    def called(**more: Any) -> Any:
        answer = create(messages=asked(), tools=[WEATHER], **{"tool_choice": "required", **options, **more})
        assert answer.choices[0].finish_reason == "tool_calls", answer
        return answer.choices[0].message

    def tools() -> None:
        for choice in ("required", NAMED):
            for call in called(tool_choice=choice).tool_calls:
                GetWeather.model_validate_json(call.function.arguments)

    def a_conversation() -> None:
        message = called(parallel_tool_calls=False)
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'}
        answer = create(messages=[*asked(), message, result], tools=[WEATHER], tool_choice="none", **options)
        assert answer.choices[0].message.content, answer

    def auto() -> None:
        message = create(messages=asked(), tools=[WEATHER], **options).choices[0].message
        assert message.content or message.tool_calls, message

    def streamed_tools() -> None:
        whole = called(tool_choice=NAMED).tool_calls[0].function
        chosen = {**options, "tool_choice": NAMED}
        pieces = [
            call
            for chunk in create(messages=asked(), tools=[WEATHER], stream=True, **chosen)
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        assert pieces[0].id, pieces[0]
        assert pieces[0].function.name == "GetWeather", pieces[0]
        assert "".join(piece.function.arguments for piece in pieces) == whole.arguments, pieces

    def stream_helper() -> None:
        tool = openai.pydantic_function_tool(GetWeather)
        with client.chat.completions.stream(messages=asked(), tools=[tool], tool_choice=NAMED, **options) as stream:
            kinds = {event.type for event in stream}
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.done" in kinds, kinds
        assert isinstance(call.function.parsed_arguments, GetWeather), call

    return {
        "tools": tools,
        "a conversation with a tool": a_conversation,
        "tools that may be called": auto,
        "streamed tools": streamed_tools,
        "stream helper, pydantic_function_tool": stream_helper,
        **openai_parsed(client, options),
    }


def openai_parsed(client: Any, options: dict[str, Any]) -> Checks:
    import openai

    create = client.chat.completions.create

    def parse_tools() -> None:
        answer = client.chat.completions.parse(
            messages=asked(), tools=[openai.pydantic_function_tool(GetWeather)], tool_choice=NAMED, **options
        )
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetWeather), call

    def parse_response_format() -> None:
        answer = client.chat.completions.parse(messages=asked("Describe Paris."), response_format=City, **options)
        assert isinstance(answer.choices[0].message.parsed, City), answer

    def effort() -> None:
        raw = client.chat.completions.with_raw_response.create(messages=asked(), reasoning_effort="low", **options)
        assert raw.headers["forerun-ignored"] == "reasoning_effort", raw.headers
        assert raw.parse()._request_id, raw.headers

    def error() -> None:
        told = ""
        try:
            create(messages=asked(), functions=[{"name": "a"}], **options)
        except openai.BadRequestError as refused:
            told = str(refused)
        assert "send tools" in told, told

    return {
        "parse, pydantic_function_tool": parse_tools,
        "parse, response_format": parse_response_format,
        "reasoning_effort": effort,
        "an error": error,
    }


def instructor_checks(url: str, model: str) -> Checks:
    import instructor
    import openai

    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 200, "max_retries": 0}

    def client(mode: Any) -> Any:
        return instructor.from_openai(openai.OpenAI(base_url=url, api_key="unused", timeout=300), mode=mode)

    def of(mode: Any) -> Callable[[], None]:
        def check() -> None:
            city = client(mode).chat.completions.create(
                messages=asked("Describe Paris."), response_model=City, **options
            )
            assert isinstance(city, City), city

        return check

    def partial() -> None:
        parts = list(
            client(instructor.Mode.TOOLS).chat.completions.create_partial(
                messages=asked("Describe Paris."), response_model=City, **options
            )
        )
        assert len(parts) > 1, parts
        City.model_validate(parts[-1].model_dump())

    def several() -> None:
        result = client(instructor.Mode.TOOLS).chat.completions.create(
            messages=asked("Name two cities."), response_model=Cities, **options
        )
        assert 1 <= len(result.cities) <= 2, result

    return {
        "Mode.TOOLS": of(instructor.Mode.TOOLS),
        "Mode.TOOLS_STRICT": of(instructor.Mode.TOOLS_STRICT),
        "Mode.JSON_SCHEMA": of(instructor.Mode.JSON_SCHEMA),
        "partial, streamed": partial,
        "a list": several,
    }


def langchain_checks(url: str, model: str) -> Checks:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="unused", model=model, temperature=0, max_tokens=200, seed=1, max_retries=0)

    def invoke() -> None:
        assert chat.invoke(QUESTION).content

    def bind_tools() -> None:
        for choice in ("required", "any", "GetWeather", True):
            answer = chat.bind_tools([GetWeather], tool_choice=choice).invoke(QUESTION)
            assert answer.tool_calls, answer
            assert not answer.invalid_tool_calls, answer
            for call in answer.tool_calls:
                GetWeather.model_validate(call["args"])

    def loop() -> None:
        bound = chat.bind_tools([GetWeather])
        must = chat.bind_tools([GetWeather], tool_choice="required", parallel_tool_calls=False)
        message = must.invoke(QUESTION)
        result = ToolMessage("21 degrees, clear", tool_call_id=message.tool_calls[0]["id"])
        answer = bound.invoke([HumanMessage(QUESTION), message, result])
        assert answer.content or answer.tool_calls, answer

    def stream() -> None:
        bound = chat.bind_tools([GetWeather], tool_choice="GetWeather")
        chunks = list(bound.stream(QUESTION))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert len(chunks) > 2, chunks
        (call,) = total.tool_calls
        GetWeather.model_validate(call["args"])

    def structured(method: str) -> Callable[[], None]:
        def check() -> None:
            city = chat.with_structured_output(City, method=method).invoke("Describe Paris.")
            assert isinstance(city, City), city

        return check

    return {
        "invoke": invoke,
        "bind_tools": bind_tools,
        "a conversation with a tool": loop,
        "stream with tools": stream,
        "with_structured_output, json_schema": structured("json_schema"),
        "with_structured_output, function_calling": structured("function_calling"),
    }


def litellm_checks(url: str, model: str) -> Checks:
    import litellm

    options: dict[str, Any] = {
        "model": f"openai/{model}", "api_base": url, "api_key": "unused", "temperature": 0, "max_tokens": 200,
        "num_retries": 0, "timeout": 300,
    }  # fmt: skip

    def plain() -> None:
        assert litellm.completion(messages=asked(), **options).choices[0].message.content

    def tools() -> None:
        wish = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        answer = litellm.completion(messages=asked(), **wish, **options)
        assert answer.choices[0].finish_reason == "tool_calls", answer
        for call in answer.choices[0].message.tool_calls:
            GetWeather.model_validate_json(call.function.arguments)

    def loop() -> None:
        first = litellm.completion(messages=asked(), tools=[WEATHER], tool_choice=NAMED, **options)
        message = first.choices[0].message
        result = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "name": "GetWeather",
            "content": "21 degrees",
        }
        answer = litellm.completion(messages=[*asked(), message, result], tools=[WEATHER], **options)
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls, answer

    def stream() -> None:
        text = ""
        for chunk in litellm.completion(messages=asked(), stream=True, **options):
            text += chunk.choices[0].delta.content or ""
        assert text == litellm.completion(messages=asked(), **options).choices[0].message.content, text

    def stream_tools() -> None:
        chunks: Iterable[Any] = litellm.completion(
            messages=asked(), tools=[WEATHER], tool_choice=NAMED, stream=True, **options
        )
        whole = litellm.stream_chunk_builder(list(chunks), messages=asked())
        (call,) = whole.choices[0].message.tool_calls
        assert whole.choices[0].finish_reason == "tool_calls", whole
        GetWeather.model_validate_json(call.function.arguments)

    def response_format() -> None:
        answer = litellm.completion(messages=asked("Describe Paris."), response_format=City, **options)
        City.model_validate_json(answer.choices[0].message.content)

    return {
        "completion": plain,
        "tools": tools,
        "a conversation with a tool": loop,
        "stream": stream,
        "stream with tools": stream_tools,
        "response_format": response_format,
    }


CLIENTS: dict[str, Callable[[str, str], Checks]] = {
    "openai": openai_checks,
    "instructor": instructor_checks,
    "langchain-openai": langchain_checks,
    "litellm": litellm_checks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    failed = 0
    for client in given.clients or CLIENTS:
        try:
            print(f"{client} {version(client)}", flush=True)
        except PackageNotFoundError:
            print(f"{client} is not in this environment")
            continue
        for name, check in CLIENTS[client](given.url, given.model).items():
            try:
                check()
            except Exception as error:  # noqa: BLE001 - whatever a client raises is this check's result
                failed += 1
                print(f"  FAIL  {name}: {type(error).__name__}: {error}", flush=True)
            else:
                print(f"  pass  {name}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
