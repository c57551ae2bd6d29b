"""What clients of vLLM and llama.cpp ask beside texts: tokens, prompts of conversations, and facts of the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field, RootModel, model_validator

from forerun import __version__
from forerun.models.text.tokenizer import token_text
from forerun.serve.answering import naming
from forerun.serve.answers import Answer, sometimes
from forerun.serve.models import Models
from forerun.serve.openapi import BODY, responses
from forerun.serve.schema import Body, ChatRequest, Messages, Text, TokenId, Tools
from forerun.serve.text import token_bytes

FILES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path", "chat_template_file")
"""Settings of tokenizers that name files of this machine."""


class TokenizeRequest(Body):
    model: str | None = None
    prompt: Text | None = Field(None, description="a text; vLLM's form")
    content: Text | None = Field(None, description="a text; llama.cpp's form")
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = Field(True, description="goes with prompt")
    return_token_strs: bool = Field(False, description="add token_strs, the tokens as the tokenizer writes them")
    add_special: bool = Field(False, description="goes with content")
    parse_special: Literal[True] = Field(True, description="special tokens in a text are always read as such")
    with_pieces: bool = Field(False, description="goes with content: each token with its text")

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise ValueError("send prompt, content or messages, and only one of them")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools go with messages")
        if self.content is None and (self.add_special or self.with_pieces):
            raise ValueError("add_special and with_pieces go with content")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]


class TokenPiece(Answer):
    id: int
    piece: str | list[int] = Field(description="its text, or its bytes if they are no whole characters")


class Tokens(Answer):
    tokens: list[int] | list[TokenPiece] = Field(description="with their pieces if with_pieces asked for them")
    count: int
    max_model_len: int
    token_strs: list[str] = sometimes("if return_token_strs asked for them")


class DecodedText(Answer):
    prompt: str = Field(description="vLLM's name")
    content: str = Field(description="llama.cpp's name")


class RenderedChat(Answer):
    prompt: str


class TokenizerInfo(RootModel[dict[str, Any]]):
    """The tokenizer's settings."""


class Generating(Answer):
    n_ctx: int
    params: dict[str, Any] = Field(description="sampling options of requests that leave them open")


class Props(Answer):
    """llama.cpp's facts of a server."""

    default_generation_settings: Generating
    total_slots: int
    model_alias: str
    model_path: str = Field(description="the model's name: files of this machine are not told")
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[Literal["vision", "audio"], Literal[False]]
    build_info: str


def _pieces(tokenizer: Any, tokens: Sequence[int]) -> list[TokenPiece]:
    def piece(token: int) -> str | list[int]:
        text = token_text(tokenizer, token)
        whole = token_bytes(tokenizer, token, text)
        return text if whole is None or text.encode() == bytes(whole) else whole

    return [TokenPiece(id=token, piece=piece(token)) for token in tokens]


def _settings(tokenizer: Any, template: Any) -> dict[str, Any]:
    """Returns a tokenizer's settings as JSON; other values as text."""
    given = {name: value for name, value in getattr(tokenizer, "init_kwargs", {}).items() if name not in FILES}
    given["tokenizer_class"] = type(tokenizer).__name__
    if template is not None:
        given["chat_template"] = template
    result: dict[str, Any] = json.loads(json.dumps(given, default=str, skipkeys=True))
    return result


def install(app: FastAPI, models: Models) -> None:
    """Adds the routes."""

    @app.post("/tokenize", responses=responses(*BODY, 503, answer=Tokens), response_model_exclude_unset=True)
    async def tokenize(body: TokenizeRequest, request: Request, response: Response) -> dict[str, Any]:
        server = await models.served(request, body)
        response.headers.update(naming(body.ignored(server.text.has_variable), server, request))
        text = server.text
        if body.messages is not None:
            messages, tools = [[item.plain() for item in items or ()] for items in (body.messages, body.tools)]
            tokens = await text.encode_chat({"messages": messages, "tools": tools}, counted=True)
        elif body.content is not None:
            tokens = await text.encode(body.content, special=body.add_special, counted=True)
        else:
            tokens = await text.encode(body.prompt or "", special=body.add_special_tokens, counted=True)
        answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": server.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = await text.run(4 * len(tokens), _strings, tokens)
        if body.with_pieces:
            answer["tokens"] = await text.run(4 * len(tokens), _pieces, tokens)
        return answer

    @app.post("/detokenize", responses=responses(*BODY, 503, answer=DecodedText))
    async def detokenize(body: DetokenizeRequest, request: Request, response: Response) -> dict[str, Any]:
        server = await models.served(request, body)
        response.headers.update(naming(body.ignored(server.text.has_variable), server, request))
        decoded = await server.text.decode(body.tokens)
        return {"prompt": decoded, "content": decoded}

    @app.post("/apply-template", responses=responses(*BODY, 503, answer=RenderedChat))
    async def apply_template(body: ChatRequest, request: Request, response: Response) -> dict[str, Any]:
        server = await models.served(request, body)
        text = server.text
        response.headers.update(naming(body.ignored(text.has_variable), server, request))
        return {"prompt": await text.render(body.conversation(text.has_variable))}

    @app.get("/tokenizer_info", responses=responses(*BODY, 503, answer=TokenizerInfo))
    async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
        text = (await models.open(request, await models.find(model))).text
        return _settings(getattr(text.tokenizer, "full", text.tokenizer), text.chat_template)

    @app.get("/props", responses=responses(*BODY, 503, answer=Props))
    async def props(request: Request, model: str | None = None) -> Props:
        server = await models.open(request, await models.find(model))
        text = server.text
        template, tokenizer = text.chat_template, text.tokenizer
        return Props(
            default_generation_settings=Generating(n_ctx=server.max_model_len, params=dict(server.defaults)),
            total_slots=server.engine.facts.max_num_seqs, model_alias=server.name, model_path=server.name,
            chat_template=template if isinstance(template, str) else "",
            bos_token=tokenizer.bos_token or "", eos_token=tokenizer.eos_token or "",
            modalities={"vision": False, "audio": False}, build_info=f"forerun {__version__}",
        )  # fmt: skip


def _strings(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    return [letters or "" for letters in tokenizer.convert_ids_to_tokens(list(tokens))]
