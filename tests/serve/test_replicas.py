"""Replicas on Ray Serve, where that is installed: killed, replaced, and started wrongly."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import httpx2
import pytest

from forerun import SamplingParams

pytestmark = [] if importlib.util.find_spec("ray") else [pytest.mark.elsewhere("ray is not installed: forerun[ray]")]
COMMAND = [sys.executable, "-u", "-m", "forerun", "serve", "--port", "0", "--threads", "1", "--no-request-log"]
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 300, "temperature": 0.9, "ignore_eos": True}


@contextmanager
def serving(*options):
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = " "
        while line and not line.startswith("listening on "):
            line = server.stdout.readline()
        assert line, server.stderr.read() if server.stderr else ""
        try:
            yield server, line.split()[-1]
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=120)


def replicas(server):
    """The processes of a server's replicas."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {pid: parent for pid, parent, _ in rows}
    result = []
    for pid, _, args in rows:
        above = pid
        while above in parents and above != str(server):
            above = parents[above]
        if above == str(server) and "ray::" in args and "engine" in args:
            result.append(int(pid))
    return result


def answers(url, seeds, on_first=lambda: None):
    """Streamed answers, all at once; ``on_first`` when one has begun."""
    texts = {}
    begun = threading.Event()

    def ask(seed):
        text = ""
        body = {**BODY, "seed": seed, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    begun.set()
        texts[seed] = text

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    on_first()
    for thread in threads:
        thread.join(120)
    return texts


def test_a_killed_replica_costs_no_token(model_folder, plain):
    seeds = list(range(6))
    params = [SamplingParams(max_tokens=300, temperature=0.9, seed=seed, ignore_eos=True) for seed in seeds]
    expected = {p.seed: plain({"prompt_token_ids": BODY["prompt"]}, p).text for p in params}
    options = ["--replicas", "2", "--model", str(model_folder), "--spec-method", "ngram", "--max-num-seqs", "4"]
    with serving(*options) as (server, url):
        assert httpx2.get(f"{url}/health").status_code == 200
        alive = replicas(server.pid)
        assert len(alive) == 2
        assert answers(url, seeds, lambda: os.kill(alive[0], signal.SIGKILL)) == expected
        assert "forerun:num_requests_running" in httpx2.get(f"{url}/metrics").text
        wrong = httpx2.post(f"{url}/v1/completions", json={"prompt": [10**6]}).json()["error"]
        assert wrong["param"] == "prompt"
    assert server.returncode == -signal.SIGTERM


def lines(out):
    """The whole answers in a file that may still be written."""
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]] if out.exists() else []


def test_a_batch_by_replicas(model_folder, plain, tmp_path):
    """A replica is killed, then the command itself, which then goes on; bad lines have an error each, once."""
    seeds = range(40)
    params = [SamplingParams(max_tokens=200, temperature=0.9, seed=seed, ignore_eos=True) for seed in seeds]
    expected = {str(p.seed): plain({"prompt_token_ids": BODY["prompt"]}, p).text for p in params}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = [{"custom_id": str(s), "body": {**BODY, "max_tokens": 200, "seed": s}} for s in seeds]
    beams = {"custom_id": "beams", "body": {"prompt": [5], "max_tokens": 4, "n": 2, "use_beam_search": True}}
    wrong = {"custom_id": "wrong", "body": {"prompt": [10**6]}}
    written = [json.dumps({"method": "POST", "url": "/v1/completions", **line}) for line in [*asked, beams, wrong]]
    source.write_text("\n".join(["no JSON", *written]) + "\n")
    options = ["--out", str(out), "--replicas", "2", "--threads", "1", "--max-num-seqs", "2", "--spec-method", "ngram"]
    command = [sys.executable, "-m", "forerun", "batch", str(source), *options, "--model", str(model_folder)]

    def until(count):
        while len(lines(out)) < count:
            assert process.poll() is None
            time.sleep(0.01)

    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        until(3)
        os.kill(replicas(process.pid)[0], signal.SIGKILL)
        until(12)
        os.killpg(process.pid, signal.SIGKILL)
    assert len(lines(out)) < len(seeds)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stderr
    result = lines(out)
    assert Counter(line["custom_id"] for line in result) == Counter([*expected, "beams", "wrong", None])
    by_name = {line["custom_id"]: line for line in result}
    assert by_name[None]["error"]["message"].startswith("line 1 is not valid JSON")
    assert by_name["wrong"]["response"]["status_code"] == 400
    assert len(by_name["beams"]["response"]["body"]["choices"]) == 2
    assert {name: by_name[name]["response"]["body"]["choices"][0]["text"] for name in expected} == expected


WAIT = """
import os, sys
import ray
from ray import serve
from forerun.core.errors import ConfigError
from forerun.scale import cluster
from forerun.scale.cluster import Replicas

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
serve.start(proxy_location="Disabled")
cluster.STARTUP_TIMEOUT = float(sys.argv[2])
try:
    cluster.deploy(Replicas({"model": sys.argv[1]}, threads=2), "forerun")
except ConfigError as error:
    print("told:", error, flush=True)
os._exit(0)  # threads of Ray's that serve the handles would keep the process
"""


def test_replicas_that_find_no_place(model_folder, tmp_path):
    """Two threads each, on a cluster with one core."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    command = [sys.executable, str(script), str(model_folder), "20"]
    settings = {**os.environ, "SERVE_SLOW_STARTUP_WARNING_S": "1", "SERVE_SLOW_STARTUP_WARNING_PERIOD_S": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=settings)
    assert ended.returncode == 0, ended.stderr
    (told,) = [line for line in ended.stdout.splitlines() if line.startswith("told: ")]
    assert told.startswith("told: the replicas have not come up within 20 seconds: ")
    assert '{"CPU": 2' in told
    assert "the replicas are not up yet: " in ended.stderr


def test_replicas_that_do_not_come_up(tmp_path):
    command = [*COMMAND, "--replicas", "1", "--model", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: the replicas do not come up: ")
    assert "config.json" in ended.stderr.splitlines()[-1]


SCALE = """
import asyncio, json, os, sys, time
from forerun import SamplingParams
from forerun.scale import cluster as ours
from forerun.scale.cluster import Cluster, Replicas, cluster

ours.UPSCALE_DELAY, ours.DOWNSCALE_DELAY = 1.0, 3.0

async def answers(way, handle):
    pool = await way.pool(1024)
    numbers, began = [], time.monotonic()

    async def ask(seed):
        params = SamplingParams(max_tokens=300, temperature=0.9, seed=seed, ignore_eos=True)
        stream = await pool.submit([5, 6, 7, 8], params)
        return "".join([delta.text async for delta in stream])

    async def until(number):
        while way.num_replicas != number:
            assert time.monotonic() - began < 400, way.num_replicas
            await asyncio.sleep(0.1)
        numbers.append(number)

    await until(1)
    texts, seed, asked = {}, 0, {}
    grown = asyncio.create_task(until(2))
    while not grown.done() or asked:  # requests keep waiting until there are two replicas
        while not grown.done() and len(asked) < 12:
            asked[asyncio.create_task(ask(seed % 12))] = seed
            seed += 1
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            texts.setdefault(asked.pop(task) % 12, set()).add(task.result())
    await until(1)
    texts["last"] = [await ask(0)]
    return numbers, {str(seed): sorted(found) for seed, found in texts.items()}

engine = {"model": sys.argv[1], "max_num_seqs": 2, "page_size": 64}
wanted = Replicas(engine, num_replicas=1, max_replicas=2)
with cluster(wanted) as (handle,):
    print(json.dumps(asyncio.run(answers(Cluster(handle), handle))), flush=True)
os._exit(0)  # threads of Ray's that serve the handles would keep the process
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_as_many_replicas_as_the_load_wants(model_folder, plain, tmp_path):
    """Requests wait: a second replica comes. They are done: it goes. Nothing is lost by either."""
    script = tmp_path / "scale.py"
    script.write_text(SCALE)
    command = [sys.executable, str(script), str(model_folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=560)
    assert ended.returncode == 0, ended.stderr
    (told,) = [line for line in ended.stdout.splitlines() if line.startswith("[[")]
    numbers, texts = json.loads(told)
    params = [SamplingParams(max_tokens=300, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(12)]
    expected = {str(p.seed): [plain({"prompt_token_ids": BODY["prompt"]}, p).text] for p in params}
    assert numbers == [1, 2, 1]
    assert texts == {**expected, "last": expected["0"]}


UPDATE = """
import json, os, sys, threading, time
import httpx2, ray
from ray import serve
from forerun.scale.app import Arguments, build

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": int(sys.argv[2]), "host": "127.0.0.1"})
given = {"model": sys.argv[1], "engine": {"max_num_seqs": 4}, "replicas": 1}
serve.run(build(Arguments(**given, max_queue=1024)), route_prefix="/")
url = f"http://127.0.0.1:{sys.argv[2]}"
texts = {}

def ask(seed):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 300, "temperature": 0.9, "ignore_eos": True, "seed": seed}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=120)
    texts[seed] = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

def opened(seed):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 400, "temperature": 0.9, "ignore_eos": True, "seed": seed}
    asked = client.build_request("POST", f"{url}/v1/completions", json={**body, "stream": True})
    answer = client.send(asked, stream=True)
    lines = answer.iter_lines()
    return answer, next(lines), lines

client = httpx2.Client(timeout=120)
first, _, _ = opened(100)  # with it, the API begins to listen to the replica
other, begun, rest = opened(101)
first.close()
events = [json.loads(line[6:]) for line in [begun, *rest] if line.startswith("data: {")]
texts[101] = "".join(event["choices"][0]["text"] for event in events)

threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
updating = threading.Thread(target=lambda: serve.run(build(Arguments(**given, max_queue=1025)), route_prefix="/"))
updating.start()
for thread in threads:
    thread.start()
    time.sleep(1)
for thread in threads:
    thread.join()
updating.join()
print(json.dumps(texts), flush=True)
serve.shutdown()
ray.shutdown()
os._exit(0)  # threads of Ray's that serve the handles would keep the process
"""


def test_an_update_loses_no_answer(model_folder, plain, tmp_path):
    """Both deployments are replaced, one after the other, while requests come. Before, whoever came first leaves."""
    script = tmp_path / "update.py"
    script.write_text(UPDATE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, str(script), str(model_folder), port]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stderr
    (told,) = [line for line in ended.stdout.splitlines() if line.startswith('{"')]
    texts = json.loads(told)
    lengths = {**dict.fromkeys(range(12), 300), 101: 400}
    params = [SamplingParams(max_tokens=n, temperature=0.9, seed=s, ignore_eos=True) for s, n in lengths.items()]
    expected = {str(p.seed): plain({"prompt_token_ids": BODY["prompt"]}, p).text for p in params}
    assert texts == expected
