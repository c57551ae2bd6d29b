"""OpenAI's batch files: one request in each line, and one answer to each, however often the batch is started again.

An answer's ``id`` names its line and is a hash of the line's content, so that the file of answers says what is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
from starlette.types import ASGIApp

from forerun.core.errors import ConfigError
from forerun.core.folders import lock

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
NAMED = "batch_req_"
BEGINS = f'{{"id": "{NAMED}'.encode()
"""How an answer's line begins."""
BUSY = (429, 503)
"""Statuses after which a request is sent again."""
WAIT = 0.5
"""Seconds before that."""

Ask = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Posts a body to a URL of the API, and returns the status and the body of the answer."""


@dataclass
class Tally:
    """How many lines were answered by earlier runs, by this one, and by this one with an error."""

    before: int = 0
    answered: int = 0
    failed: int = 0


@dataclass
class BatchLine:
    """One line of a batch: a request, or why it is none."""

    id: str
    custom_id: str | None = None
    url: str = ""
    body: Any = None
    error: str | None = None


def parse(number: int, raw: bytes, seen: set[str]) -> BatchLine:
    """Returns line ``number``, counted from 1. ``seen`` are the ``custom_id`` so far; its own is added."""
    line = BatchLine(f"{NAMED}{number}_{hashlib.sha256(raw).hexdigest()[:16]}")
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
    line.custom_id, line.url, line.body = name, given.get("url", ""), given.get("body")
    unknown = sorted(set(given) - {"custom_id", "method", "url", "body"})
    faults = {
        f"custom_id {name!r} is another line's already": name in seen,
        "method must be 'POST'": given.get("method") != "POST",
        f"url must be one of {', '.join(URLS)}": line.url not in URLS,
        "body must be a JSON object": not isinstance(line.body, dict),
        "a batch does not stream: remove stream from body": isinstance(line.body, dict) and line.body.get("stream"),
        **{f"unknown field {key!r}: remove it": True for key in unknown},
    }
    line.error = next((f"line {number}: {fault}" for fault, applies in faults.items() if applies), None)
    seen.add(name)
    return line


def lines(path: Path) -> Iterator[BatchLine]:
    """Yields the lines of a batch that are not empty. Raises ConfigError for a file that cannot be read."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield parse(number, raw.strip(), seen)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


BINARY = getattr(os, "O_BINARY", 0)
"""Windows' flag of files without converted line ends."""


class Answers:
    """The file of answers to the lines of ``source``. Only one process at a time may have it open.

    Whole answers in it stay. Raises ConfigError for a file that cannot be opened, or holds anything else.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        if not source.is_file():
            raise ConfigError(f"cannot read {source}: there is no such file")
        if path.exists() and path.samefile(source):
            raise ConfigError(f"{path} is the input file: choose another --out")
        try:
            self.file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o644), "r+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        try:
            lock(self.file.fileno())
        except BlockingIOError:
            self.file.close()
            raise ConfigError(f"{path} is being written by another process: wait for it") from None
        self.answered: set[str] = set()
        """The ids of answered lines."""
        try:
            self._read(path, source)
        except ConfigError:
            self.file.close()
            raise

    def _read(self, path: Path, source: Path) -> None:
        """Reads which lines are answered, and cuts off an answer that is not whole."""
        end = 0
        for raw in self.file:
            if not raw.endswith(b"\n") and raw[: len(BEGINS)] == BEGINS[: len(raw)]:
                break
            try:
                name = json.loads(raw)["id"]
            except (ValueError, KeyError, TypeError):
                name = None
            if not isinstance(name, str) or not raw.endswith(b"\n"):
                raise ConfigError(f"{path} does not contain batch answers: choose another --out")
            self.answered.add(name)
            end += len(raw)
        others = self.answered - {line.id for line in lines(source)}
        if others:
            raise ConfigError(
                f"{path} has {len(others)} answers to lines that are not in {source}: choose another --out"
            )
        self.file.seek(end)
        self.file.truncate()

    def write(self, line: BatchLine, status: int, body: dict[str, Any] | None) -> None:
        """Appends one answer; without ``body``, the line itself is wrong. Raises ConfigError if the disk is full."""
        response = None
        if body is not None:
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
        error = {"code": "invalid_line", "message": line.error} if line.error is not None else None
        answer = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
        try:
            self.file.write(json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            self.file.flush()
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; the same command resumes") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # ``write`` has reported it
            self.file.close()


async def run(source: Path, answers: Answers, ask: Ask, *, concurrency: int) -> Tally:
    """Answers the lines that are not answered yet, ``concurrency`` at a time. If it is stopped early, the next call
    continues. Raises ConfigError if an answer cannot be written."""
    tally = Tally()
    slots = asyncio.Semaphore(concurrency)

    async def answer(line: BatchLine) -> None:
        try:
            status, body = await ask(line.url, line.body)
            while status in BUSY:
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
                if line.id in answers.answered:
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


def in_process(app: ASGIApp) -> Ask:
    """Returns an ``Ask`` of an ASGI application in this process."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)

    async def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = await client.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})
        return answer.status_code, answer.json()

    return ask
