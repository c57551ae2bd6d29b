"""``docs/serving.md``: what it names exists, what exists it names, and what it asks is answered."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun.cli.main import load
from forerun.engine.scheduler import LONGEST_WAIT, PATIENCE
from forerun.serve.app import create_app
from forerun.serve.errors import STATUSES
from forerun.serve.schema import ChatRequest, CompletionRequest, Generation, Speculative
from here import where

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
PYTHON = os.environ.get("FORERUN_CLIENTS")
CURL = re.compile(
    r"curl -sN? localhost:8000(\S+) -H 'Content-Type: application/json' -d '(\{.*?\})'(?: \||$)", re.S | re.M
)


def first_column(heading, number=0):
    """The first cells of a section's table."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"^\|[^\n]*\|\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", section, re.M)
    return [row.split("|")[1].strip().strip("`") for row in tables[number].splitlines()]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


def serve_options():
    """Flags of ``forerun serve``, by the panel of its help."""
    panels = {}
    for option in load("serve").params:
        panels.setdefault(getattr(option, "rich_help_panel", None) or "", set()).update(
            [*option.opts, *option.secondary_opts]
        )
    return panels


def test_endpoints(server):
    routes = create_app(server.engine).routes
    known = {f"{method} {route.path}" for route in routes for method in getattr(route, "methods", ())}
    known = {name.replace("{name:path}", "{name}") for name in known if not name.startswith("HEAD ")}
    assert set(first_column("Endpoints")) == known - {"GET /page/{name}"}


def test_every_client_of_the_other_page_is_tested():
    """Some test imports the client of each row, or asks each of its endpoints by hand."""
    page = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (`/.*) \| (.*) \|$", page, re.M)
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/serve").glob("**/*.py"))
    assert [row[0] for row in rows] == ["OpenAI", "Ollama", "Anthropic", "llama.cpp", "vLLM"]
    for _, endpoints, client in rows:
        packages = [name.replace("openai-agents", "agents") for name in re.findall(r"`([\w-]+)`", client)]
        assert packages or client == "by hand"
        for package in packages:
            assert re.search(rf"^(import|from) {package}\b", tests, re.M), package
        for path in [] if packages else re.findall(r"`(/\S+)`", endpoints):
            assert f'{path}"' in tests, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "client",
    where(lambda name: PYTHON or find_spec(name.replace("-", "_")), first_column("Clients"), "needs FORERUN_CLIENTS"),
)
def test_clients(hermes, client):
    command = [PYTHON or sys.executable, "lab/benchmarks/clients.py", client, "--url", f"{hermes.url}/v1"]
    done = subprocess.run([*command, "--model", "tiny"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("\n  pass  ") >= 5


def test_options():
    panels = serve_options()
    assert set(first_column("Limits and safety")) == panels[""]
    everywhere = set().union(*panels.values())
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--help"} <= everywhere


def test_request_fields():
    assert set(first_column("Speculation, request by request")) == set(Speculative.model_fields)
    listed = PAGE.split("there are vLLM's:")[1].split("(lower")[0]
    assert set(re.findall(r"`(\w+)`", listed)) <= set(Generation.model_fields)
    for path, body in CURL.findall(PAGE):
        model = ChatRequest if "chat" in path else CompletionRequest
        assert set(json.loads(body)) <= set(model.model_fields)


def test_metrics_of_an_answer(server):
    metrics = server.post("/v1/completions", {"prompt": "a = ", "max_tokens": 4}).json()["metrics"]
    assert first_column("Speculation, request by request", 1) == [*metrics, *metrics["speculative_decoding"]]


def test_metric_names(server):
    server.post("/v1/completions", {"prompt": "a = ", "max_tokens": 4})
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    known = {f.name + ("_total" if f.type == "counter" else "") for f in families if not f.name.endswith("_created")}
    assert set(first_column("Metrics")) == known
    assert set(re.findall(r"forerun:[a-z_]+[a-z]", PAGE)) - {"forerun:target"} <= known


def test_limits_are_the_codes():
    assert f"by {PATIENCE} rounds" in PAGE
    assert f"moves it by {LONGEST_WAIT:,} rounds or" in PAGE
    assert f"{LONGEST_WAIT} rounds" in (Generation.model_fields["priority"].description or "")
    statuses = {int(code) for row in first_column("Limits and safety", 1) for code in row.split(", ")}
    assert statuses == set(STATUSES)


def test_curl_examples(server):
    result = CURL.findall(PAGE)
    assert len(result) == PAGE.count("curl -s") == 7
    for path, body in result:
        answer = server.post(path, json.loads(body))
        assert answer.status_code == (400 if "3000" in body else 200), answer.text


@pytest.mark.parametrize("code", blocks("python"), ids=["complete", "stream", "respond"])
def test_python_examples(code, server, capsys):
    code = code.replace("http://localhost:8000", server.url).replace("forerun:target", "tiny")
    scope = {"__name__": "example"}
    exec(compile(code, "docs/serving.md", "exec"), scope)
    assert isinstance(scope["client"], openai.OpenAI)
    said = capsys.readouterr().out
    expected = r"True\n(?s:.*)|(?s:.*)\[\d+ tokens in \d+ rounds\]\n|(in)?complete(d)? \d+ draft_model\n"
    assert re.fullmatch(expected, said)


def test_it_is_linked():
    assert "(docs/serving.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(serving.md)" in (ROOT / "docs/tour.md").read_text(encoding="utf-8")
