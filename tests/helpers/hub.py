"""A Hugging Face hub of our own on loopback: the endpoints that huggingface_hub calls, and hubs that fail."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_ours"
STALL = 60.0
"""Seconds that a hub takes which does not answer; longer than any client waits."""


@dataclass
class Repository:
    files: dict[str, bytes]
    asks: str = ""
    """What it fails by: token, gated, slow, down, absent, cut."""

    @property
    def commit(self):
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()


@dataclass
class Hub:
    repositories: dict[str, Repository]
    asked: Counter[str] = field(default_factory=Counter)
    """Requests so far, as ``METHOD path``, and ``range`` for those that go on in the middle of a file."""
    url: str = ""


@contextlib.contextmanager
def serving(handler):
    """A server on loopback; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def hub(**repositories):
    """Repositories of ``own``, by name."""
    state = Hub({f"own/{name.replace('_', '-')}": each for name, each in repositories.items()})
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_): ...

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            state.asked[f"{self.command} {self.path}"] += 1
            listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/?]+))?(?:\?.*)?", self.path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
            match = listed or file
            result = state.repositories.get(match[1]) if match else None
            if match is None or result is None:
                return self.refuse(401, "RepoNotFound" if match and match[1].endswith("private") else None)
            if result.asks == "token" and self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.refuse(401, "RepoNotFound")
            if result.asks == "gated" and file and self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.refuse(403, "GatedRepo")
            if result.asks == "down":
                return self.refuse(503, None)
            if result.asks == "absent":
                return self.refuse(404, None)
            if result.asks == "slow":
                ended.wait(STALL)
                return None
            if match[2] not in (None, "main", result.commit):
                return self.refuse(404, "RevisionNotFound")
            if listed:
                names = [{"rfilename": name} for name in result.files]
                return self.send(
                    json.dumps({"id": match[1], "sha": result.commit, "siblings": names}).encode(), {}, body
                )
            content = result.files.get(match[3])
            if content is None:
                return self.refuse(404, "EntryNotFound")
            about = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": result.commit}
            return self.send(content, about, body, cut=result.asks == "cut")

        def send(self, content, about, body, cut=False):
            start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
            state.asked["range"] += start > 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            for name, value in {**about, "Content-Length": str(len(content) - start)}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                end = start + (len(content) - start) // 2 if cut and not start and len(content) > 5000 else len(content)
                self.wfile.write(content[start:end])
                if end < len(content):
                    self.wfile.flush()
                    time.sleep(0.2)
                    self.close_connection = True

        def refuse(self, status, code):
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with serving(Handler) as state.url:
        try:
            yield state
        finally:
            ended.set()
