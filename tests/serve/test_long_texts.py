"""Long texts: nobody waits behind another's, and what cannot fit is not tokenised to its end."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from running import TEMPLATE, run_server

from forerun import RequestError
from forerun.core.errors import ContextLengthError
from forerun.serve import text as text_module
from forerun.serve.text import AROUND_A_CUT, PER_TOKEN, PIECE, SHORT, TextService

LONG = "def parse(value):\n    return value\n" * 4000
"""Some 140,000 characters; the context has 512 tokens."""


class Held:
    """A tokenizer whose work in long texts waits until it may go on."""

    def __init__(self, tokenizer, release, begun):
        self.tokenizer, self.release, self.begun = tokenizer, release, begun

    def __getattr__(self, name):
        def held(*arguments, **options):
            if name != "convert_ids_to_tokens":
                self.begun.set()
                assert self.release.wait(60)
            return getattr(self.tokenizer, name)(*arguments, **options)

        return held


@pytest.fixture
def service(served):
    made = TextService(served.tokenizer, 512, TEMPLATE)
    yield made
    made.close()


def asked(text):
    return {"messages": [{"role": "user", "content": text}], "tools": []}


CALLS = {
    "count": (lambda text: text.encode(LONG, counted=True), lambda text: text.encode("a = 1", counted=True)),
    "encode": (lambda text: text.encode(LONG), lambda text: text.encode("a = 1")),
    "decode": (lambda text: text.decode([5] * 9000), lambda text: text.decode([5] * 9)),
    "chat": (lambda text: text.encode_chat(asked(LONG)), lambda text: text.encode_chat(asked("hi"))),
    "offsets": (lambda text: text.offsets([5] * 9000, "x"), lambda text: text.offsets([5] * 9, "x")),
}


@pytest.mark.parametrize("first", CALLS)
@pytest.mark.parametrize("second", CALLS)
def test_short_texts_do_not_wait_for_long_ones(service, first, second):
    release, begun = threading.Event(), threading.Event()
    service.long.tokenizer = Held(service.long.tokenizer, release, begun)

    async def both():
        long = asyncio.ensure_future(CALLS[first][0](service))
        await asyncio.to_thread(begun.wait, 30)
        assert begun.is_set()
        await asyncio.wait_for(CALLS[second][1](service), 30)
        before = long.done()
        release.set()
        await asyncio.gather(long, return_exceptions=True)
        return before, long.done()

    try:
        assert asyncio.run(both()) == (False, True)
    finally:
        release.set()


def test_all_that_a_template_is_given_counts(service):
    said = {"role": "assistant", "content": "b"}
    for more in ({"messages": [{**said, "reasoning_content": LONG}]}, {"chat_template_kwargs": {"known": LONG}}):
        long = service.long.tokenizer = Counting(service.long.tokenizer)
        asyncio.run(service.encode_chat({**asked("a"), **more}))
        assert long.characters


def test_a_server_answers_while_a_long_text_is_held(served):
    release, begun = threading.Event(), threading.Event()
    with run_server(served) as server:
        service = next(
            cell.cell_contents.server.text
            for route in server.server.config.app.routes
            if getattr(route, "path", "") == "/tokenize"
            for cell in route.endpoint.__closure__
        )
        service.long.tokenizer = Held(service.long.tokenizer, release, begun)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.post, "/tokenize", {"prompt": LONG})
            try:
                assert begun.wait(30)
                for _ in range(3):
                    assert server.post("/v1/completions", {"prompt": "a = ", "max_tokens": 2}).status_code == 200
                    assert server.post("/tokenize", {"prompt": "a = "}).status_code == 200
                assert not waiting.done()
            finally:
                release.set()
        assert waiting.result().status_code == 200


class Counting:
    """Tells how many characters it was given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode(self, text, **options):
        self.characters += len(text)
        return self.tokenizer.encode(text, **options)


def test_what_cannot_fit_is_not_tokenised_to_its_end(service):
    counting = service.long.tokenizer = Counting(service.long.tokenizer)
    most = 4 * PIECE  # twice the limit, and what cuts might have added, comes of two or three of these texts
    for text in (LONG, "x " * 2_000_000, "日本🙂" * 500_000, "a" * 4_000_000):
        counting.characters = 0
        with pytest.raises(ContextLengthError, match="more than 512 tokens; max_model_len 512 leaves no room"):
            asyncio.run(service.encode(text))
        assert counting.characters <= most
        counting.characters = 0
        with pytest.raises(ContextLengthError) as caught:
            asyncio.run(service.encode_chat(asked(text)))
        assert caught.value.param == "messages"
        assert counting.characters <= most


@pytest.mark.parametrize("piece", ["a", " ", "word ", "日本", "🙂", "\n    return", "0123456789", "<|endoftext|>"])
def test_nothing_that_fits_is_refused(served, piece, monkeypatch):
    """Texts of just the tokens that there may be, however many characters they are: as much as tokenised whole."""
    source = random.Random(piece)
    monkeypatch.setattr(text_module, "PIECE", 1024)
    longest = 0
    for limit in (16, 100, 512):
        service = TextService(served.tokenizer, limit)
        for _ in range(5):
            text, count = "", 0
            grain = max(1, limit // 8)
            while True:
                longer = text + piece * source.randrange(1, 4 * grain)
                count = len(served.tokenizer.encode(longer))
                if count > limit or len(longer) > 200 * limit:
                    break
                text = longer
            longest = max(longest, len(text) / max(1024, PER_TOKEN * limit))
            assert asyncio.run(service.encode(text)) == served.tokenizer.encode(text)
        service.close()
    if piece in (" ", "<|endoftext|>"):  # more than eight characters a token: counted in pieces
        assert longest > 1
    assert max(map(len, served.tokenizer.get_vocab())) < AROUND_A_CUT


def test_a_text_to_be_counted_has_its_bound(service, monkeypatch):
    monkeypatch.setattr(text_module, "MAX_CHARACTERS", 50_000)
    assert len(asyncio.run(service.encode("a" * 50_000, counted=True))) > service.limit
    counting = service.long.tokenizer = Counting(service.long.tokenizer)
    for refused in (
        lambda: service.encode("a" * 50_001, counted=True),
        lambda: service.encode_chat(asked("a" * 50_001), counted=True),
    ):
        with pytest.raises(RequestError, match="more than 50000: send it in parts"):
            asyncio.run(refused())
    assert counting.characters == 0
    assert SHORT < 50_000


def test_over_http(server):
    body = {"prompt": LONG}
    answer = server.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert server.post("/tokenize", body).json()["count"] > 512
    large = server.post("/tokenize", {"prompt": "a" * ((1 << 20) + 1)})
    assert (large.status_code, large.json()["error"]["param"]) == (400, "prompt")
    chat = {"messages": [{"role": "user", "content": LONG}]}
    answer = server.post("/v1/chat/completions", chat)
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("context_length_exceeded", "messages")
    assert server.post("/tokenize", chat).json()["count"] > 512
    ids = server.post("/v1/completions", {"prompt": [5] * 100_000, "echo": True, "logprobs": 1})
    assert ids.json()["error"]["message"] == "the prompt has 100000 tokens; max_model_len 512 leaves no room"
