"""Other implementations in the benchmark's turns."""

import os
import sys
import textwrap

import pytest

from forerun import SamplingParams
from forerun.core.errors import ConfigError
from forerun.measure.rounds import EngineContender
from forerun_lab.peers import outside, peer_contenders

pytestmark = pytest.mark.slow


def test_peers_answer_the_same_prompts_with_the_same_counts(llm, tiny_draft):
    target = llm()
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10, 11]]
    params = [SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)] * 2
    mine = EngineContender(target, {"method": "none"}, max_num_seqs=1).run(prompts, params).answers
    peers = peer_contenders(["transformers"], target, tiny_draft, 1, 32)
    assert [peer.name for peer in peers] == ["transformers", "transformers_prompt_lookup", "transformers_assisted"]
    for peer in peers:
        result = peer.run(prompts, params)
        assert result.answers == mine
        assert result.seconds > 0
        assert 0 < result.tokens <= 18


STUB = """
import json, os, sys
about = json.loads(sys.stdin.readline())
if not os.path.isfile(about["model"]):
    sys.exit("no file")
print(json.dumps({"version": "1", "rows": ["stub"], "about": f"{about['threads']} threads"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    assert asked["row"] == "stub" and set(asked["seeds"]) == {7}, "asked for something else"
    assert len(asked["prompts"]) <= about["sequences"], "too many"
    count = asked["max_tokens"] if not asked["ends"] else 2
    answers = [[prompt[-1]] * count for prompt in asked["prompts"]]
    print(json.dumps({"answers": answers, "tokens": sum(map(len, answers)) - len(answers), "seconds": 0.5}), flush=True)
"""


@pytest.mark.parametrize("together", [1, 2])
def test_a_peer_runs_in_a_python_of_its_own(llm, monkeypatch, tmp_path, together):
    monkeypatch.setattr(outside, "WORKERS", tmp_path)
    (tmp_path / "llama_cpp_worker.py").write_text(STUB)
    (peer,) = peer_contenders([f"llama-cpp={sys.executable}"], llm(), None, together, 32)
    result = peer.run([[1, 2], [3]], [SamplingParams(max_tokens=4, seed=7, ignore_eos=True)] * 2)
    assert (result.answers, result.tokens, result.seconds) == ([[2] * 4, [3] * 4], 6, 1.0 / together)
    assert peer.run([[5]], [SamplingParams(max_tokens=4, seed=7)]).answers == [[5, 5]]
    assert peer.facts()["model_path"] == "1 threads (llama_cpp 1)"
    with pytest.raises(
        ConfigError, match="the llama-cpp peer ended with status 1: AssertionError: asked for something"
    ):
        peer.run([[5]], [SamplingParams(max_tokens=4, seed=8)])
    peer.close()


@pytest.mark.parametrize(
    ("python", "why"),
    [("/no/python", "cannot be started"), (sys.executable, r"status 1: ModuleNotFoundError.*see docs/bench\.md")],
)
def test_a_peer_that_is_not_there_is_named(llm, python, why):
    with pytest.raises(ConfigError, match=f"the openvino peer.*{why}"):
        peer_contenders([f"openvino={python}"], llm(), None, 1, 32)


SERVER = """
    import json, os, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    if sys.argv[1:] == ["--version"]:
        sys.exit("version: 12 (abc)")
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    print("CPU : AVX = 1 | AVX2 = 1 |", flush=True)
    if "--fail" in options:
        sys.exit("unable to load model")
    assert os.path.isfile(options["-m"]) and (options["-c"], options["-np"]) == ("32", "1")
    assert options["-t"] == options["-tb"] == os.environ["OMP_NUM_THREADS"]
    open(options["--pid"], "w").write(str(os.getpid()))
    open("llama.log", "w").close()
    waits = 2

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status, found):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def do_GET(self):
            global waits
            waits -= self.path == "/health"
            self.reply(503 if waits > 0 else 200, {})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                return self.reply(200, {"tokens": [int(word) for word in asked["content"].split()]})
            if asked["seed"] != 7:
                return self.reply(400, {"error": "another seed"})
            assert not asked["cache_prompt"] and (asked["temperature"], asked["top_k"]) in [(0.5, 0), (0.0, 1)], asked
            count = asked["n_predict"] if asked["ignore_eos"] else 2
            tokens = [asked["prompt"][-1]] * count
            found = {"timings": {"predicted_n": count, "predicted_ms": 250.0}}
            if "--ids" in options:
                found["tokens"] = tokens
            else:
                ended = not asked["ignore_eos"]
                found |= {"content": " ".join(map(str, tokens[: count - ended])), "stopped_eos": ended}
            self.reply(200, found)

    HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    path = tmp_path / "llama server"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(SERVER)}")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("options", ["--ids yes", "--spec-type ngram:n=4,m=3"])
def test_a_server_is_started_with_its_options_and_ended(llm, server, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    pid = tmp_path / "pid"
    (peer,) = peer_contenders([f"llama-server='./{server.name}' --pid {pid} {options}"], llm(), None, 1, 32)
    assert peer.name == f"llama_server --pid {pid} {options}"
    assert peer.facts()["model_path"] == (
        f"llama-server --pid {pid} {options} [AVX = 1 | AVX2 = 1 |] (llama_server 12 (abc))"
    )
    params = SamplingParams(max_tokens=4, seed=7, temperature=0.5, ignore_eos=True)
    result = peer.run([[1, 2], [3]], [params] * 2)
    assert (result.answers, result.tokens, result.seconds) == ([[2] * 4, [3] * 4], 6, 0.5)
    first, end = int(pid.read_text()), min(peer.eos_ids)
    after = (lambda token: [[token, token]]) if "--ids" in options else (lambda token: [[token, end]])
    assert peer.run([[5]], [SamplingParams(max_tokens=4, seed=7, temperature=0.0)]).answers == after(5)
    assert int(pid.read_text()) == first
    assert peer.run([[3]], [SamplingParams(max_tokens=4, seed=7, temperature=0.0)]).answers == after(3)
    assert int(pid.read_text()) != first  # what a server has answered before, it might recite
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    with pytest.raises(ConfigError, match=r"llama-server peer ended with status 1: /completion answered 400.*another"):
        peer.run([[5]], [SamplingParams(max_tokens=4, seed=8, temperature=0.5)])
    peer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama server", "pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("/no/server -rtr", "there is no program '/no/server' that can be run"),
        ("'{server}' --fail yes", "llama server has not come up: unable to load model"),
        ("'{server}' --pid /no/pid", "has not come up: FileNotFoundError"),
        ("'open", "cannot be read: No closing quotation"),
    ],
)
def test_a_server_that_does_not_come_up_says_why(llm, server, command, why):
    with pytest.raises(ConfigError, match=f"the llama-server peer.*{why}"):
        peer_contenders([f"llama-server={command.format(server=server)}"], llm(), None, 1, 32)


def test_one_server_answers_one_at_a_time(llm):
    assert peer_contenders(["llama-server=/no/server"], llm(), None, 2, 32) == []
