"""Text to token ids and back, away from the event loop and from the engine's own tokenizer."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, TypeVar

from forerun.core.errors import ContextLengthError, RequestError
from forerun.engine.client import Delta
from forerun.engine.jobs import TokenLogprobs, finite
from forerun.models.text.chat import knows_tools, render_chat
from forerun.models.text.infill import Hole, Infill
from forerun.models.text.reasoning import HARMONY, PARSERS, Boundary
from forerun.models.text.tokenizer import BYTE_LETTERS, REPLACEMENT, Detokenizer, encode, token_text
from forerun.serve.reasoning import AnswerParser, ReasoningParser
from forerun.serve.schema import ChatRequest
from forerun.serve.tools import ToolFormat, format_of, formats

T = TypeVar("T")


SHORT = 16384
"""Characters of a text that counts as short: it takes at most 20 ms. A token counts as four characters."""
PER_TOKEN = 8
"""Characters per token of the context. A longer prompt hardly fits, so that it is counted in pieces first."""
PIECE = 16384
AROUND_A_CUT = 64
"""Tokens that a cut between two pieces may add, at most: it may split the longest token."""
MAX_CHARACTERS = 1 << 20
"""Of a text whose tokens are only counted, unless ``PER_TOKEN`` times the context is more."""


class Lane:
    """A thread with a copy of the tokenizer: fast tokenizers must not be used from two threads at once."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self._new = partial(ThreadPoolExecutor, 1, thread_name_prefix=f"forerun-{name}")
        self._thread, self._process = self._new(), os.getpid()

    @property
    def thread(self) -> ThreadPoolExecutor:
        if self._process != os.getpid():  # a child process does not have it
            self._thread, self._process = self._new(), os.getpid()
        return self._thread


class TextService:
    """Tokenizes in two threads, one for short texts and one for long ones, so that no request waits for another's long
    text. The event loop uses the given tokenizer, for single tokens.

    Args:
        tokenizer: the model's.
        limit: the longest prompt, in tokens.
        chat_template: replaces the checkpoint's. Templates run in transformers' sandbox.
        reasoning_parser: separates the reasoning of chat answers from the rest.
    """

    def __init__(
        self, tokenizer: Any, limit: int, chat_template: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        self.reasoning_parser = reasoning_parser
        self.boundary = None if reasoning_parser is None else Boundary(tokenizer, reasoning_parser)
        self.tokenizer = tokenizer
        self.limit = limit
        self.short, self.long = Lane(tokenizer, "short-text"), Lane(tokenizer, "long-text")
        self._infill: Infill | None = None
        self.own_template = chat_template
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.token_text = lru_cache(maxsize=1 << 17)(self._token_text)
        self.token_name = lru_cache(maxsize=1 << 17)(self._token_name)

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Calls ``function`` with a tokenizer and ``arguments`` in the thread for texts of ``size`` characters."""
        lane = self.short if size <= SHORT else self.long
        work = partial(function, lane.tokenizer, *arguments)
        return await asyncio.get_running_loop().run_in_executor(lane.thread, work)

    async def encode(self, text: str, *, special: bool = True, counted: bool = False) -> list[int]:
        """Returns the tokens of a prompt, or of any text if they are only ``counted``.

        Raises:
            ContextLengthError: the prompt cannot fit, which may be found before all of it is tokenized.
            RequestError: the text is too long to be counted.
        """
        return await self.run(len(text), self._encode, text, special, counted)

    def _encode(self, tokenizer: Any, text: str, special: bool, counted: bool) -> list[int]:
        most = max(MAX_CHARACTERS, PER_TOKEN * self.limit)
        if counted and len(text) > most:
            message = f"the text has {len(text)} characters, more than {most}: send it in parts"
            raise RequestError(message, param="prompt")
        if not counted and len(text) > max(PIECE, PER_TOKEN * self.limit):
            self._check_length(tokenizer, text)
        return _tokens(tokenizer, text, special)

    async def predicted(self, text: str) -> list[int]:
        """Returns the tokens of what an answer may be, as far as an answer may go."""
        longest = PER_TOKEN * self.limit
        return (await self.run(min(longest, len(text)), _tokens, text[:longest], False))[: self.limit]

    async def fill(self, hole: Hole, room: int | None = None) -> list[int]:
        """Returns the tokens of a prompt with text after the cursor, as ``Infill.prompt`` does. Raises RequestError."""
        size = sum(map(len, (hole.prefix, hole.suffix, hole.begun, *(text for _, text in hole.files))))
        return await self.run(size, self._fill, hole, room)

    def _fill(self, tokenizer: Any, hole: Hole, room: int | None) -> list[int]:
        if self._infill is None:
            self._infill = Infill(tokenizer)
        around = hole.prefix + hole.suffix
        if len(around) > max(PIECE, PER_TOKEN * self.limit):
            self._check_length(tokenizer, around)
        infill = copy.copy(self._infill)
        infill.tokenizer = tokenizer
        return infill.prompt(hole, room)

    @property
    def fill_ends(self) -> list[int]:
        """Tokens that end what fills in the middle, once ``fill`` was called."""
        return [] if self._infill is None else self._infill.ends

    def _check_length(self, tokenizer: Any, text: str) -> None:
        """Refuses a text with twice as many tokens as fit. Cuts change the tokens beside them, but never that many."""
        tokens = 0
        for start in range(0, len(text), PIECE):
            tokens += max(0, len(_tokens(tokenizer, text[start : start + PIECE], False)) - AROUND_A_CUT)
            if tokens >= 2 * self.limit:
                message = f"the prompt has more than {self.limit} tokens; max_model_len {self.limit} leaves no room"
                raise ContextLengthError(message, param="prompt")

    async def decode(self, tokens: Sequence[int], *, param: str = "tokens") -> str:
        """Returns the text of ``tokens``. Raises RequestError, about ``param``, for an id beyond the tokenizer."""
        size = len(self.tokenizer)
        largest = max(tokens, default=0)
        if largest >= size:
            raise RequestError(f"token id {largest} is outside the tokenizer's {size}", param=param)
        return await self.run(4 * len(tokens), lambda tokenizer: tokenizer.decode(list(tokens)))

    async def offsets(self, prompt: Sequence[int], text: str) -> list[int]:
        """Returns where a prompt's tokens begin in its text, which may lack the special tokens before it."""
        return await self.run(4 * len(prompt), self._offsets, prompt, text)

    def _offsets(self, tokenizer: Any, prompt: Sequence[int], text: str) -> list[int]:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        offsets = [*accumulate(map(len, detokenizer.spell(prompt, last=True)), initial=0)][:-1]
        before = max(0, detokenizer.text.find(text))
        return [min(max(0, offset - before), len(text)) for offset in offsets]

    async def encode_chat(self, conversation: Mapping[str, Any], *, counted: bool = False) -> list[int]:
        """Returns a conversation's tokens, as ``encode`` does, of the arguments of ``render_chat``. Raises RequestError
        also without a chat template, or if it refuses the messages."""
        size, render = self._rendering(conversation)
        return await self.run(size, self._encode_chat, render, counted)

    async def render(self, conversation: Mapping[str, Any]) -> str:
        """Returns a conversation's prompt. The rest is as in ``encode_chat``."""
        size, render = self._rendering(conversation)
        return await self.run(size, render)

    def _rendering(self, conversation: Mapping[str, Any]) -> tuple[int, Callable[..., str]]:
        """Returns the size of a conversation, and what renders it with a tokenizer."""
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
            )
        parts = [conversation["tools"], conversation.get("chat_template_kwargs")]
        for name in ("content", "reasoning_content", "tool_calls"):
            parts += [message.get(name) for message in conversation["messages"]]
        return sum(map(_length, parts)), partial(render_chat, chat_template=self.own_template, **conversation)

    def _encode_chat(self, tokenizer: Any, render: Callable[..., str], counted: bool) -> list[int]:
        text = render(tokenizer)
        try:
            return self._encode(tokenizer, text, False, counted)
        except RequestError as error:
            error.param = "messages"
            raise

    @cached_property
    def fills(self) -> bool:
        """Whether the model has tokens to fill in the middle."""
        return Infill(self.tokenizer).usable

    @cached_property
    def tool_format(self) -> ToolFormat:
        return format_of(self.tokenizer, self.own_template)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template describes tools itself."""
        return knows_tools(self.tokenizer.get_chat_template(self.own_template, [{}]))

    def has_variable(self, name: str) -> bool:
        """Whether the chat template mentions ``name``."""
        return name in self._names

    @cached_property
    def _names(self) -> set[str]:
        template = self.chat_template or ""
        texts = [template] if isinstance(template, str) else template.values()
        return {name for text in texts for name in re.findall(r"\w+", text)}

    def special_markers(self, *, tools: bool) -> dict[str, int]:
        """Returns the ids of markers of reasoning and, with ``tools``, of calls that are special tokens here. Texts
        leave special tokens out unless told otherwise."""
        markers: set[str] = set()
        if tools:
            markers |= {*formats["hermes"].markers, *formats["llama3"].markers, *self.tool_format.markers}
        if self.reasoning_parser == HARMONY:
            markers |= set(formats["harmony"].markers)
        elif self.reasoning_parser is not None:
            markers |= {PARSERS[self.reasoning_parser].start, PARSERS[self.reasoning_parser].end}
        return {marker: id for marker, id in self._special.items() if marker in markers}

    @cached_property
    def _special(self) -> dict[str, int]:
        return {token.content: id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def answer_parser(self, prompt: Sequence[int], body: ChatRequest) -> AnswerParser | None:
        """Returns a parser of one answer to a chat's ``prompt``; None if the answer is plain text."""
        tools, parser = body.offered(), None
        harmony = self.reasoning_parser == HARMONY  # whose parser of calls separates the reasoning, too
        if tools or harmony:
            parser = (formats["harmony"] if harmony else self.tool_format).parser(
                {tool.function.name: tool.function.parameters for tool in tools},
                parallel=body.parallel_tool_calls,
                calls_only=body.must_call,
                fenced=bool(tools) and self.knows_tools,
            )
        if self.reasoning_parser is None or harmony or (tools and self.tool_format.grammar_has_reasoning):
            return parser
        assert self.boundary is not None
        return ReasoningParser(PARSERS[self.reasoning_parser], self.boundary.opened(prompt), parser)

    def _token_text(self, token: int) -> tuple[str, list[int] | None]:
        """Returns one token's text and its bytes (None: unknown). Half a character has no text of its own."""
        text = token_text(self.tokenizer, token)
        return text, token_bytes(self.tokenizer, token, text)

    def _token_name(self, token: int) -> str:
        """Returns one token's text or, if it is not whole characters, its bytes as OpenAI's completions write them."""
        encoded = self.token_text(token)[1]
        if encoded is None:
            return f"token_id:{token}"
        try:
            return bytes(encoded).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)

    def close(self) -> None:
        for lane in (self.short, self.long):
            lane.thread.shutdown(wait=False, cancel_futures=True)


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """Returns the bytes of a token whose text is ``text``; None: unknown."""
    if REPLACEMENT not in text:
        return list(text.encode())
    letters = tokenizer.convert_ids_to_tokens(token)
    if letters is None:
        return None
    if REPLACEMENT in letters:
        return list(text.encode())
    if letters.startswith("<0x") and letters.endswith(">"):
        return [int(letters[3:-1], 16)]
    encoded = [BYTE_LETTERS[letter] for letter in letters if letter in BYTE_LETTERS]
    return encoded if len(encoded) == len(letters) else None


def _tokens(tokenizer: Any, text: str, special: bool) -> list[int]:
    return encode(tokenizer, text, add_special_tokens=special, verbose=False)


def _length(value: Any) -> int:
    """Characters of a text, or of calls, tools and the like in a prompt."""
    return len(value if isinstance(value, str) else json.dumps(value)) if value else 0


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token's log-probabilities, and how many characters of its answer come before the token."""

    offset: int
    item: TokenLogprobs


class PendingLogprobs:
    """Holds the log-probabilities of one answer's tokens until their text is sent.

    A text that may be part of a stop string is not sent yet. If a stop string cuts the text, the last listed token may
    go on after the cut. The tokens of a character that has several are all placed where it begins.
    """

    def __init__(self) -> None:
        self._end = 0
        """Characters of all tokens so far."""
        self._pending: list[PlacedToken] = []

    def push(self, delta: Delta, sent: int) -> list[PlacedToken]:
        """Adds a delta's tokens, and returns those that begin in the first ``sent`` characters of the answer."""
        offsets = list(accumulate(map(len, delta.texts), initial=self._end))
        self._pending += map(PlacedToken, offsets, delta.logprobs)
        self._end = offsets[-1]
        end: float = sent
        if delta.finish is not None:
            end = delta.finish.cut if delta.finish.cut is not None else math.inf
        count = sum(placed.offset < end for placed in self._pending)
        ready, self._pending = self._pending[:count], self._pending[count:]
        return ready


def top_by_name(item: TokenLogprobs, text: TextService) -> dict[str, float]:
    """Returns the likeliest tokens and the emitted one. Of two with the same text, the second goes by its id."""
    ids = {text.token_name(item.token): item.token}
    result: dict[str, float] = {}
    for token, value in {**item.top, item.token: item.logprob}.items():
        name = text.token_name(token)
        if ids.setdefault(name, token) != token:
            name = f"token_id:{token}"
        result[name] = finite(value)
    return result
