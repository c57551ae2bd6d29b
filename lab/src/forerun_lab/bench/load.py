"""A load on a completions server, with the standard library alone, as a process of its own.

It reads one JSON object with ``host``, ``port``, ``first``, ``bodies`` and ``streams`` from stdin, sends ``first``,
which makes the server ready, then every body, ``streams`` at a time, and prints the seconds from the first of these to
the last answer and the tokens that their answers count.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections import deque
from typing import Any


def read(connection: http.client.HTTPConnection, body: dict[str, Any]) -> int:
    """Send one request and read its answer to the end; returns its completion tokens."""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.read()[:300]!r}")
    if not body.get("stream"):
        return int(json.loads(answer.read())["usage"]["completion_tokens"])
    last = b""
    for line in answer:
        if line.startswith(b"data: {"):
            last = line
    return int(json.loads(last[6:])["usage"]["completion_tokens"])


def load(host: str, port: int, first: dict[str, Any], bodies: list[dict[str, Any]], streams: int) -> dict[str, float]:
    """Send all bodies; raises what the first failed request raised."""
    opening = http.client.HTTPConnection(host, port, timeout=600)
    read(opening, first)
    opening.close()
    todo = deque(bodies)
    tokens: list[int] = []
    errors: list[Exception] = []

    def work() -> None:
        connection = http.client.HTTPConnection(host, port, timeout=600)
        try:
            while todo and not errors:
                tokens.append(read(connection, todo.popleft()))
        except IndexError:  # another thread took the last one
            pass
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {"seconds": time.perf_counter() - began, "tokens": sum(tokens)}


if __name__ == "__main__":
    print(json.dumps(load(**json.load(sys.stdin))))
