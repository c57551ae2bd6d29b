"""The models that a server answers with: one, or all that ``forerun ls`` lists, loaded when requests name them."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from asyncio import TimerHandle
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from fastapi import Request

from forerun.core.errors import ForerunError
from forerun.engine.async_engine import AsyncEngine, Turns
from forerun.engine.auto import choose
from forerun.engine.client import SHUTTING_DOWN, ClosedError, EngineClient
from forerun.engine.llm import LLM
from forerun.engine.memory import megabytes, parse_bytes, spare_bytes
from forerun.models.files.inventory import StoredModel, here, on_disk
from forerun.models.files.open import Checkpoint, resolve
from forerun.models.text.infill import Infill
from forerun.models.text.tokenizer import load_tokenizer
from forerun.serve.errors import ApiError
from forerun.serve.metrics import Recorder
from forerun.serve.options import ServerOptions, model_names, seconds_of
from forerun.serve.responses import ResponseStore
from forerun.serve.schema import Body
from forerun.serve.server import Server

log = logging.getLogger("forerun")

LATEST = ":latest"
"""Ollama's clients add it to a name without a tag."""
CACHES = 8
"""A model's KV caches take one of this many parts of the memory for models."""
SIZES = {"kv_cache_memory", "num_pages", "gpu_memory_utilization"}
"""Options of engines that say how large KV caches are."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What lists of models say, whether they are loaded or not."""

    name: str
    size: int
    """Bytes of its files or, where they are not known, of its weights."""
    modified: float
    quantization: str
    architecture: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts(Listed):
    """What more there is to know of a model without loading it."""

    max_model_len: int
    chat_template: Any
    fills: bool
    """Whether it has tokens to fill in the middle."""
    thinks: bool
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A model in memory, and when it will leave it (None: never)."""

    server: Server
    size: int
    expires: float | None


class Models(ABC):
    """What the routes see. ``several``: requests must name a model, which may have to be loaded."""

    several = False
    drafters: Mapping[str, int] | None = None
    """Which drafters a request may choose, and how many tokens each drafts; None: that depends on the model."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.recorder = Recorder(options.metrics_names)
        self.stored = ResponseStore(options.response_memory)
        self._draining = False
        self._limits: set[asyncio.Timeout] = set()

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._draining

    async def served(self, request: Request, body: Any, keep_alive: float | None = None) -> Server:
        """Returns what answers ``body``, which stays until ``request`` has been answered.

        Raises ApiError for an unknown model or, if the server is strict, an unknown field, before anything is loaded.
        """
        name = await self.find(body.model)
        if self.options.strict and isinstance(body, Body):
            for unknown in body.unknown():
                raise ApiError(400, f"unknown field {unknown!r}: remove it", param=unknown, code="unknown_field")
        return await self.open(request, name, keep_alive)

    def serving(self, engine: EngineClient, options: ServerOptions) -> Server:
        server = Server(engine, options, self.stored)
        self.recorder.follow(engine, server.name)
        return server

    @abstractmethod
    async def find(self, name: str | None) -> str:
        """Returns the name by which a model is known here. Raises ApiError."""

    @abstractmethod
    async def open(self, request: Request, name: str, keep_alive: float | None = None) -> Server:
        """Returns a known model's server, and keeps it until the request has been answered. Raises ApiError."""

    @abstractmethod
    async def listed(self) -> list[Listed]:
        """All models."""

    @abstractmethod
    async def facts(self, name: str) -> Facts:
        """What is known of one model. Raises ApiError and ForerunError."""

    @abstractmethod
    def loaded(self) -> dict[str, Loaded]: ...

    @abstractmethod
    async def put_away(self, name: str) -> None:
        """Takes a model out of memory once nobody uses it."""

    @asynccontextmanager
    async def limited(self, seconds: float | None) -> AsyncIterator[None]:
        """Ends what waits in it: after ``seconds`` with TimeoutError, and with ClosedError once the server drains."""
        try:
            async with asyncio.timeout(0 if self._draining else seconds) as limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            if self._draining:
                raise ClosedError(SHUTTING_DOWN) from None
            raise
        finally:
            self._limits.discard(limit)

    @abstractmethod
    def close(self) -> None:
        """Ends all engines."""

    @property
    @abstractmethod
    def ready(self) -> bool: ...

    async def drain(self, seconds: float) -> None:
        """As ``EngineClient.drain``, of all engines."""
        self._draining = True
        for limit in [each for each in self._limits if not each.expired()]:
            limit.reschedule(0)
        await asyncio.gather(*(each.server.engine.drain(seconds) for each in self.loaded().values()))


class OneModel(Models):
    """One model, loaded for as long as the server runs."""

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        super().__init__(options)
        self.engine = engine
        self.server = self.serving(engine, options)
        self.drafters = engine.facts.drafters

    @property
    def draining(self) -> bool:
        return self.engine.draining

    @property
    def ready(self) -> bool:
        return self.engine.ready

    async def find(self, name: str | None) -> str:
        known = self.server.name
        names = (known, *self.options.aliases)
        if name is None or self.options.any_model_name or name in names or name.removesuffix(LATEST) in names:
            return known
        raise ApiError(
            404, f"there is no model {name!r} here; there is {known!r}", param="model", code="model_not_found"
        )

    async def open(self, request: Request, name: str, keep_alive: float | None = None) -> Server:
        return self.server

    async def listed(self) -> list[Listed]:
        facts = self.engine.facts
        return [Listed(
            name=self.server.name, size=facts.weight_bytes, modified=self.server.started,
            architecture=facts.architecture, quantization=facts.quantization,
        )]  # fmt: skip

    async def facts(self, name: str) -> Facts:
        (listed,), server = await self.listed(), self.server
        return Facts(
            **vars(listed), max_model_len=server.max_model_len, sampling=server.defaults, fills=server.text.fills,
            chat_template=server.text.chat_template, thinks=self.engine.facts.reasoning_parser is not None,
        )  # fmt: skip

    def loaded(self) -> dict[str, Loaded]:
        return {self.server.name: Loaded(self.server, self.engine.facts.weight_bytes, None)}

    async def put_away(self, name: str) -> None:
        """It stays."""

    def close(self) -> None:
        self.engine.close()
        self.server.text.close()


class Entry:
    """A model that is loaded, or is being loaded. ``size`` is expected until it is loaded, then counted."""

    def __init__(self, name: str, size: int, keep_alive: float) -> None:
        self.name, self.size, self.keep_alive = name, size, keep_alive
        self.users = 0
        """Requests that have not been answered."""
        self.expires: float | None = None
        self.timer: TimerHandle | None = None
        self.server: Server | None = None
        self.loading: asyncio.Task[Server]


class Library(Models):
    """The models that ``forerun ls`` lists.

    A model is loaded when a request names it, one at a time. It leaves memory when it was idle for ``keep_alive``, or
    when another one needs the memory: then the one goes that was used least recently. A model with unanswered requests
    stays. Whoever needs memory that is in use waits, and requests that came later wait behind.

    Args:
        engine: the options of ``LLM`` for each of them. KV caches take a part of the memory unless they say how large
            these are.
        client: options of ``AsyncEngine``.
    """

    several = True

    def __init__(self, engine: Mapping[str, Any], options: ServerOptions, **client: Any) -> None:
        super().__init__(options)
        self.engine = engine
        self.client = {"turns": Turns(), **client}
        self.memory = memory_of(options.model_memory, engine.get("device"))
        self.kept = options.keep_alive or "5m"
        self.keep_alive = seconds_of(self.kept)
        self.entries: dict[str, Entry] = {}
        """By name; the one that was used last is the last."""
        self.leaving: dict[Entry, int] = {}
        """Models that are being closed, and their bytes."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forerun-models")
        self._door = asyncio.Lock()
        """Of requests that need a model, in the order in which they came."""
        self._changed = asyncio.Event()
        """Memory may have become free."""
        self._known: dict[str, Facts] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------------------------------------------ names

    async def stored_models(self) -> dict[str, StoredModel]:
        """The models on disk, by name."""
        return {each.name: each for each in await asyncio.to_thread(on_disk) if each.whole}

    @property
    def described(self) -> str:
        """For whoever starts it."""
        memory = "as much memory as they need" if self.memory == inf else megabytes(int(self.memory))
        return f"the models of forerun ls, loaded on request: in {memory}, until {self.kept} idle"

    async def find(self, name: str | None) -> str:
        if name in self.entries:
            return name
        models = await self.stored_models()
        if name is None and len(models) == 1:
            return next(iter(models))
        if name is None:
            message = "this server has several models: name one of them in 'model'"
            raise ApiError(400, message, param="model", code="model_missing")
        for given in (name, name.removesuffix(LATEST)):
            if given in models:
                return given
            fit = [each for each in models if given in model_names(each)]
            if len(fit) == 1:
                return fit[0]
        message = f"there is no model {name!r} here: GET /v1/models lists those that there are"
        raise ApiError(404, message, param="model", code="model_not_found")

    async def listed(self) -> list[Listed]:
        return [_listed(each) for each in (await self.stored_models()).values()]

    async def facts(self, name: str) -> Facts:
        model = (await self.stored_models()).get(name)
        known = self._known.get(name)
        if model is not None and (known is None or known.modified != model.path.stat().st_mtime):
            known = self._known[name] = await asyncio.to_thread(self._facts, model)
        if known is None:
            raise ApiError(404, f"the model {name!r} was removed", param="model", code="model_not_found")
        return known

    def _facts(self, model: StoredModel) -> Facts:
        opened, tokenizer = Checkpoint.at(model.path), load_tokenizer(str(model.path))
        config = opened.config
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        return Facts(
            **vars(_listed(model, (config.architectures or [config.model_type])[0])),
            max_model_len=self.engine.get("max_model_len") or context or 0,
            chat_template=getattr(tokenizer, "chat_template", None), fills=Infill(tokenizer).usable,
            thinks="reasoning_parser" in self.engine, sampling=opened.sampling,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ in memory

    @property
    def ready(self) -> bool:
        return not self.draining

    def loaded(self) -> dict[str, Loaded]:
        result = {}
        for name, entry in self.entries.items():
            if entry.server is not None:
                expires = time.time() + entry.keep_alive if entry.users else entry.expires
                result[name] = Loaded(entry.server, entry.size, None if expires == inf else expires)
        return result

    async def open(self, request: Request, name: str, keep_alive: float | None = None) -> Server:
        if self.draining:
            raise ClosedError(SHUTTING_DOWN)
        try:
            async with self.limited(self.options.request_timeout):
                async with self._door:
                    entry = self.entries.get(name) or await self._begin(name)
                    self._use(entry, keep_alive)
                request.state.resources.callback(self._leave, entry)
                return await asyncio.shield(entry.loading)
        except TimeoutError:
            message = f"{name} could not be loaded within {self.options.request_timeout:g} seconds: others are in use"
            raise ApiError(503, message, code="no_memory") from None

    def _use(self, entry: Entry, keep_alive: float | None) -> None:
        entry.users += 1
        entry.keep_alive = entry.keep_alive if keep_alive is None else keep_alive
        self._stop_timer(entry)
        self.entries[entry.name] = self.entries.pop(entry.name)

    def _leave(self, entry: Entry) -> None:
        """A request has been answered."""
        entry.users -= 1
        if not entry.users and entry.server is not None and self.entries.get(entry.name) is entry:
            self._rest(entry)

    def _rest(self, entry: Entry) -> None:
        """Keeps an idle model for as long as it may stay."""
        self._changed.set()
        if entry.keep_alive <= 0 or self._used() > self.memory:
            self._drop(entry)
            return
        entry.expires = time.time() + entry.keep_alive
        if entry.keep_alive < inf:
            entry.timer = asyncio.get_running_loop().call_later(entry.keep_alive, self._drop, entry)

    def _stop_timer(self, entry: Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer = None

    async def put_away(self, name: str) -> None:
        entry = self.entries.get(name)
        if entry is not None:
            entry.keep_alive = 0.0
            if not entry.users:
                self._drop(entry)

    def _used(self) -> int:
        """Bytes of all models, those that are being loaded or closed included."""
        return sum(entry.size for entry in self.entries.values()) + sum(self.leaving.values())

    async def _begin(self, name: str) -> Entry:
        """Makes room for a model, and begins to load it. Raises ApiError if it is too large."""
        try:
            size = await asyncio.to_thread(expected_bytes, name)
        except ForerunError as error:
            raise not_loaded(name, error) from error
        given = self.engine.get("kv_cache_memory")
        caches: int | None = None
        if size <= self.memory < inf and not SIZES & set(self.engine):
            caches = int(min(self.memory // CACHES, self.memory - size))
        size += parse_bytes(given) if given is not None else caches or 0
        if size > self.memory:
            raise self._too_large(name, size)
        while self._used() + size > self.memory:
            self._changed.clear()
            idle = [entry for entry in self.entries.values() if not entry.users]
            if idle:
                self._drop(idle[0])
            await self._changed.wait()
        entry = self.entries[name] = Entry(name, size, self.keep_alive)
        entry.loading = self._run(self._load(entry, caches))
        entry.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # somebody has seen it
        return entry

    def _run(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, entry: Entry, caches: int | None) -> Server:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            engine = await loop.run_in_executor(self._thread, self._engine, entry.name, caches)
            entry.size = engine.facts.memory_bytes
            self._changed.set()
            if entry.size > self.memory:
                await loop.run_in_executor(self._thread, engine.close)
                raise self._too_large(entry.name, entry.size)
            server = self.serving(engine, replace(self.options, served_model_name=entry.name))
        except ForerunError as error:
            self._forget(entry)
            raise not_loaded(entry.name, error) from error
        except BaseException:
            self._forget(entry)
            raise
        entry.server = server
        log.info("%s: %s, loaded in %.1f s", entry.name, engine.facts.described, time.monotonic() - started)
        if not entry.users:  # whoever asked for it has left
            self._rest(entry)
        return server

    def _engine(self, name: str, caches: int | None) -> AsyncEngine:
        """Loads a model with this many bytes of KV caches; None: what the options say. Raises ForerunError."""
        here(name)  # nothing is downloaded
        sizes = {} if caches is None else {"kv_cache_memory": caches}
        return AsyncEngine(LLM(**{**self.engine, "model": name, **sizes}).engine, **self.client)

    def _forget(self, entry: Entry) -> None:
        if self.entries.get(entry.name) is entry:
            del self.entries[entry.name]
        self._changed.set()

    def _drop(self, entry: Entry) -> None:
        """Closes an idle model."""
        if entry.users or entry.server is None or self.entries.get(entry.name) is not entry:
            return
        self._stop_timer(entry)
        del self.entries[entry.name]
        self.leaving[entry] = entry.size
        self._run(self._close(entry))

    async def _close(self, entry: Entry) -> None:
        server, entry.server = entry.server, None
        assert server is not None
        del entry.loading  # it has the server as its result
        self.recorder.leave(server.engine, server.name)
        server.text.close()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, server.engine.close)
        finally:
            del server
            del self.leaving[entry]
            self._changed.set()
            log.info("%s was put away", entry.name)

    def _too_large(self, name: str, size: int) -> ApiError:
        message = (
            f"{name} takes {megabytes(size)}, and models may take {megabytes(int(self.memory))}: raise --model-memory"
        )
        return ApiError(400, message, param="model", code="model_too_large")

    def close(self) -> None:
        for entry in list(self.entries.values()):
            self._stop_timer(entry)
            if entry.server is not None:
                entry.server.engine.close()
                entry.server.text.close()
        self.entries.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)


def memory_of(given: str | None, device: str | None) -> float:
    """Bytes for all models: ``given``, or 80% of the free memory; infinity if that is not known. Raises ConfigError."""
    if given is not None:
        return parse_bytes(given, "model_memory")
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    spare = spare_bytes(torch.device("cuda" if on_gpu else "cpu"))
    return inf if spare is None else spare if on_gpu else 1.6 * spare  # of main memory that is half


def _listed(model: StoredModel, architecture: str = "") -> Listed:
    quantization = model.format.rpartition(" ")[2]  # or the kind of files
    modified = model.path.stat().st_mtime
    return Listed(
        name=model.name, size=model.size, modified=modified, quantization=quantization, architecture=architecture
    )


def not_loaded(name: str, error: ForerunError) -> ApiError:
    return ApiError(500, f"{name} cannot be loaded: {error}", param="model", code="model_not_loaded")


def expected_bytes(name: str) -> int:
    """Bytes of a stored model's weights, and of those that ``auto`` drafts with. Raises ModelError."""
    return sum(Checkpoint.at(path).weight_sizes()[0] for path in (here(name), *_drafts(choose(name))))


def _drafts(config: Mapping[str, Any]) -> list[Path]:
    found = [resolve(config["model"])] if config.get("model") else []
    return found + [path for inner in config.get("drafters", ()) for path in _drafts(inner)]
