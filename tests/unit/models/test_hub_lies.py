"""Hubs that lie: whatever one answers, files are written in the cache alone, and an error is one line."""

import json
import random
import re
from http.server import BaseHTTPRequestHandler

import httpx2
import pytest
from huggingface_hub import close_session, get_hf_file_metadata, get_session, set_client_factory
from huggingface_hub.utils import _http
from test_hub import ask

from forerun.core.errors import ModelError
from forerun.models.files.hub import ModelSource, download
from hub import serving
from refusals import refused

pytestmark = pytest.mark.slow
COUNT = 110
SHA = "0123456789abcdef" * 2 + "01234567"
PATHS = ["../../x", "../../../../x", "OUTSIDE/x", "..", ".", "", "a/b", "a\\..\\b", "x" * 3000, "C:x", "%2e%2fx", "~"]
TAGS = [*(f'"{each}"' for each in PATHS), *(f'W/"{each}"' for each in PATHS), *PATHS, "a, b", "\xe9"]
LOCATIONS = ["file:///etc/passwd", "http://[::1", "//", "http://127.0.0.1:99999/x", "ftp://x/", "?", "http://a\tb/"]
SIZES = ["-1", "x", "", str(2**60), str(2**200), "1e3"]
NAMES = [f"{each}{end}" for each in [*PATHS, "a\0b", "a\nb", "\x1b[2J", "\ud800"] for end in (".gguf", "/m.gguf")]
FILES = ['"x"', "[5]", "[{}]", '[{"rfilename": 5}]', '[{"rfilename": null}]']
LISTINGS = [
    "", "[]", "null", "[" * 5000, '{"id": 5}', "\xff", *(f'{{"id": "a/b", "siblings": {each}}}' for each in FILES),
]  # fmt: skip


class Lie:
    """What one repository answers, mostly as a hub should."""

    def __init__(self, seed, outside):
        draw = random.Random(seed)
        kinds = ["etag", "linked", "commit", "gone", "location", "size", "name", "listing", "sha", "xet", "range"]
        self.kinds = {kinds[seed % len(kinds)], *draw.sample(kinds, draw.randint(0, 1))}
        choices = {"tag": TAGS, "path": PATHS, "location": LOCATIONS, "size": SIZES, "name": NAMES}
        take = {key: draw.choice(values).replace("OUTSIDE", outside) for key, values in choices.items()}
        self.name = take["name"] if "name" in self.kinds else "m-Q4_K_M.gguf"
        siblings = [{"rfilename": self.name}, {"rfilename": "../README.md"}]
        sha = take["path"] if "sha" in self.kinds else SHA
        listing = json.dumps({"id": "own/x", "sha": sha, "siblings": siblings})
        self.listing = draw.choice(LISTINGS) if "listing" in self.kinds else listing
        self.status = 404 if "gone" in self.kinds else 302 if "location" in self.kinds else 200
        self.headers = {"ETag": '"abc"', "X-Repo-Commit": SHA, "Content-Length": "4"}
        lies = {"etag": {"ETag": take["tag"]}, "linked": {"X-Linked-Etag": take["tag"]},
                "commit": {"X-Repo-Commit": take["path"]}, "size": {"X-Linked-Size": take["size"]},
                "gone": {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": take["path"]},
                "location": {"Location": take["location"]}, "range": {"Content-Range": f"bytes 0-3/{take['size']}"},
                "xet": {"X-Xet-Hash": take["path"], "X-Xet-Refresh-Route": "/refresh"}}  # fmt: skip
        for kind in sorted(self.kinds & lies.keys()):
            self.headers |= lies[kind]


def answering(lies):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_): ...

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            lie = lies[int(re.search(r"lie-(\d+)", self.path)[1])] if "lie-" in self.path else None
            if lie is None:
                self.send_response(401)
                headers, body = {"Content-Length": "0"}, b""
            elif self.path.startswith("/api/"):
                self.send_response(200)
                body = lie.listing.encode("utf-8", "surrogatepass")
                headers = {"Content-Length": str(len(body))}
            else:
                self.send_response(lie.status)
                headers, body = lie.headers, b"GGUF" if lie.status == 200 else b""
            for name, value in {**headers, "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def test_nothing_is_written_outside_the_cache(warm, tmp_path):
    home, outside = tmp_path / "a/b/home", tmp_path / "outside"
    home.mkdir(parents=True)
    outside.mkdir()
    lies = [Lie(seed, str(outside)) for seed in range(COUNT)]
    with serving(answering(lies)) as url:
        answers = ask(warm, url, home, *(f"hf:own/lie-{each}" for each in range(COUNT)), HF_HUB_DISABLE_TELEMETRY="1")
    for seed, answer in enumerate(answers):
        said = answer.get("error", "")
        assert said.isprintable(), (seed, said)
        assert said or not lies[seed].kinds & {"etag", "linked", "commit", "gone", "sha"}, (seed, lies[seed].kinds)
    assert sum("path" in answer for answer in answers) > 3
    assert {path.name for path in home.iterdir()} <= {"hub", "xet"}
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()} <= {"a"}
    assert [path.name for path in (tmp_path / "a").rglob("*") if path.is_file() and not path.is_relative_to(home)] == []
    for path in (home / "hub").iterdir():
        assert re.fullmatch(r"models--own--lie-\d+|\.locks|CACHEDIR\.TAG|version\.txt", path.name), path
        if path.name.startswith("models--"):
            assert {each.name for each in path.iterdir()} <= {"blobs", "refs", "snapshots", ".no_exist"}, path
            assert {each.name for each in path.glob("snapshots/*")} <= {SHA}


def test_what_is_refused_is_named(warm, tmp_path):
    lies = [Lie(0, "") for _ in range(4)]
    for lie in lies:
        lie.listing = json.dumps({"id": "own/x", "sha": SHA, "siblings": [{"rfilename": "m.gguf"}]})
        lie.status, lie.headers = 200, {"ETag": '"abc"', "X-Repo-Commit": SHA, "Content-Length": "4"}
    lies[0].headers["ETag"] = '"../../x"'
    lies[1].headers["X-Repo-Commit"] = "../../x"
    lies[2].listing = lies[2].listing.replace("m.gguf", "../../m.gguf")
    lies[3].headers["X-Linked-Size"] = str(2**60)
    with serving(answering(lies)) as url:
        answers = ask(warm, url, tmp_path, *(f"hf:own/lie-{each}" for each in range(4)))
    tail = "which is not made of letters, digits and hyphens: it is not used"
    assert [each["error"] for each in answers[:3]] == [
        f"the hub {url} answers with the ETag '\"../../x\"', {tail}",
        f"the hub {url} answers with the X-Repo-Commit '../../x', {tail}",
        f"the hub {url} answers with a file called '../../m.gguf', which is no name inside a repository: it is not "
        "used",
    ]
    assert "Not enough free disk space" in answers[3]["error"]


def test_a_programs_own_client_is_checked_too(monkeypatch):
    """A client set up by the program around Forerun stays, and is checked as huggingface_hub's own is. So is the next
    one of its factory, as after a failed connection. Fails if a new huggingface_hub keeps the factory elsewhere."""
    clients = []

    def factory():
        clients.append(httpx2.Client())
        return clients[-1]

    monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", None)  # what was there comes back afterwards
    set_client_factory(factory)
    for _ in range(2):
        refused(ModelError, "names no repository", download, ModelSource("", None))
    lie = Lie(1, "")
    lie.headers = {"ETag": '"../../x"'}
    with serving(answering([lie])) as url:
        for _ in range(2):
            refused(ModelError, "not made of letters", get_hf_file_metadata, f"{url}/own/lie-0/resolve/main/m.gguf")
            assert get_session() is clients[-1]
            assert len(clients[-1].event_hooks["response"]) == 1
            close_session()
    assert len(clients) == 2
