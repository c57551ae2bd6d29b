"""OpenAI's batch files: a request on each line in, one answer for each out, however often it is begun again.

An answer's ``id`` names its line and the line's content: what has been answered is known from the answers alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
from starlette.types import ASGIApp

from forerun.core.errors import ConfigError
from forerun.core.folders import lock

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LATER = (429, 503)
"""Statuses that answer nothing: the request is asked again."""
WAIT = 0.5
"""Seconds before that."""

Ask = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Posts a body to a URL of the API: the status and the body that come back."""


@dataclass
class Tally:
    """How many lines were answered before, now, and now with an error."""

    before: int = 0
    answered: int = 0
    failed: int = 0


@dataclass
class BatchLine:
    """One line of a batch: a request, or why it is none."""

    id: str
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def parse(number: int, raw: bytes, known: set[str]) -> BatchLine:
    """The request on line ``number``, from 1. ``known`` is each ``custom_id`` before it, and then this one's too."""
    line = BatchLine(f"batch_req_{number}_{hashlib.sha256(raw).hexdigest()[:16]}")
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError) as error:
        line.error = f"line {number} is not valid JSON: {error}"
        return line
    if not isinstance(given, dict):
        line.error = f"line {number} must be a JSON object"
        return line
    name = given.get("custom_id")
    if not isinstance(name, str) or not name:
        line.error = f"line {number} has no custom_id: give each line a text of its own"
        return line
    line.custom_id = name
    line.url, line.body = given.get("url", ""), given.get("body", {})
    line.error = _wrong(number, given, name in known)
    known.add(name)
    return line


def _wrong(number: int, given: dict[str, Any], repeated: bool) -> str | None:
    """What keeps a line from being asked, if anything does."""
    if repeated:
        return f"line {number}: custom_id {given['custom_id']!r} is another line's already"
    if given.get("method") != "POST":
        return f"line {number}: method must be 'POST'"
    if given.get("url") not in URLS:
        return f"line {number}: url must be one of {', '.join(URLS)}"
    if not isinstance(given.get("body"), dict):
        return f"line {number}: body must be a JSON object"
    if given["body"].get("stream"):
        return f"line {number}: a batch does not stream: remove stream from body"
    unknown = sorted(set(given) - {"custom_id", "method", "url", "body"})
    return f"line {number}: unknown field {unknown[0]!r}: remove it" if unknown else None


def lines(path: Path) -> Iterator[BatchLine]:
    """The lines of a batch that are not empty. Raises ConfigError for a file that cannot be read."""
    known: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield parse(number, raw.strip(), known)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


BINARY = getattr(os, "O_BINARY", 0)
"""Windows has text files too."""


class Answers:
    """The file of answers to the lines of ``source``. One process at a time may have it open; what it holds then stays,
    up to an answer that was cut off. Raises ConfigError for a file that cannot be had, or holds anything else."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        if not source.is_file():
            raise ConfigError(f"cannot read {source}: there is no such file")
        if path.exists() and path.samefile(source):
            raise ConfigError(f"{path} is the file of requests: give another --out")
        try:
            self.file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o644), "r+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        try:
            lock(self.file.fileno())
        except BlockingIOError:
            self.file.close()
            raise ConfigError(f"{path} is being written by another process: wait for it") from None
        self.known: set[str] = set()
        try:
            self._look(path, source)
        except ConfigError:
            self.file.close()
            raise

    def _look(self, path: Path, source: Path) -> None:
        """Note whose answers there are, and go to behind the last one."""
        end = 0
        for raw in self.file:
            if not raw.endswith(b"\n"):
                break
            try:
                name = json.loads(raw)["id"]
            except (ValueError, KeyError, TypeError):
                name = None
            if not isinstance(name, str):
                raise ConfigError(f"{path} holds something else than answers: give another --out")
            self.known.add(name)
            end += len(raw)
        others = self.known - {line.id for line in lines(source)}
        if others:
            raise ConfigError(f"{path} has {len(others)} answers to lines that are not in {source}: give another --out")
        self.file.seek(end)
        self.file.truncate()

    def write(self, line: BatchLine, status: int, body: dict[str, Any] | None) -> None:
        """Append one answer, whole; ``body`` None: the line itself is wrong. Raises ConfigError where the disk is full;
        what is cut off then is removed when the file is opened again."""
        response = None
        if body is not None:
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
        error = {"code": "invalid_line", "message": line.error} if line.error is not None else None
        answer = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
        try:
            self.file.write(json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            self.file.flush()
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; the same command goes on") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of what could not be written, as ``write`` has said
            self.file.close()


async def run(source: Path, answers: Answers, ask: Ask, *, together: int) -> Tally:
    """Answer what is not answered yet, ``together`` lines at a time. Whatever ends it early leaves whole answers, and
    the same call goes on behind them. Raises ConfigError where an answer cannot be written."""
    tally = Tally()
    slots = asyncio.Semaphore(together)

    async def answer(line: BatchLine) -> None:
        try:
            status, body = await ask(line.url, line.body)
            while status in LATER:
                await asyncio.sleep(WAIT)
                status, body = await ask(line.url, line.body)
            answers.write(line, status, body)
            tally.answered += 1
            tally.failed += status != 200
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for line in lines(source):
                if line.id in answers.known:
                    tally.before += 1
                elif line.error is not None:
                    answers.write(line, 400, None)
                    tally.answered += 1
                    tally.failed += 1
                else:
                    await slots.acquire()
                    tasks.create_task(answer(line))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return tally


def asking(app: ASGIApp) -> Ask:
    """Asks an ASGI application in this process."""
    here = httpx2.ASGITransport(app, raise_app_exceptions=False)
    client = httpx2.AsyncClient(transport=here, base_url="http://localhost", timeout=None)

    async def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = await client.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})
        return answer.status_code, answer.json()

    return ask
