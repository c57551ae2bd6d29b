"""Child processes by ``fork`` (multiprocessing's default on Linux up to Python 3.13, gunicorn's preload) of a parent
that has used an ``LLM`` on two threads. Each child has a time limit, and tells what it found."""

import json

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import asyncio, json, multiprocessing, os, signal, sys, threading
import torch
from forerun import LLM, ForerunError, SamplingParams
from forerun.engine.async_engine import AsyncEngine
from forerun.serve.text import TextService

torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)  # starts OpenMP's second thread, as loading a larger model does
folder, results = sys.argv[1], {}
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

def ids(llm):
    return llm.generate(["abab"], params)[0].outputs[0].token_ids

def mine():
    return ids(llm)

def new(**options):
    return LLM(folder, threads=2, speculative_config=None, **options)

def child(name, work):
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        signal.alarm(60)
        try:
            result = work()
        except ForerunError as error:
            result = str(error)
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    text = os.read(reader, 1 << 16)
    results[name] = json.loads(text) if text else f"ended with {status}"

def large():
    x = torch.ones(600, 600)
    return [float((x @ x).sum()), torch.get_num_threads()]

async def ask(engine):
    stream = await engine.submit([5, 9, 12], params)
    return [delta async for delta in stream]

def in_use():
    began, ended = threading.Event(), threading.Event()
    def call():
        llm.generate(["abab"], params, on_update=lambda update: (began.set(), ended.wait(60)))
    thread = threading.Thread(target=call)
    thread.start()
    began.wait(60)
    child("in use", lambda: ids(llm))
    child("in use, and another is made", lambda: ids(new()))
    ended.set()
    thread.join()

def within():
    updates = []
    def once(update):
        if not updates:
            updates.append(update)
            child("of on_update", lambda: True)
    llm.generate(["abab"], params, on_update=once)

llm = new()
results["parent"] = ids(llm)
child("uses", lambda: ids(llm))
child("makes", lambda: ids(new()))
child("makes with transformers", lambda: ids(new(model_path="hf")))
child("torch", large)
def grandchild():
    child("grandchild", lambda: ids(llm))
    return results["grandchild"]
child("child of a child", grandchild)
with multiprocessing.get_context("fork").Pool(1) as pool:
    results["multiprocessing"] = pool.apply_async(mine).get(60)
in_use()
within()
engine = AsyncEngine(new().engine)
child("a server's engine", lambda: asyncio.run(ask(engine)))
text = TextService(llm.tokenizer, 256)
asyncio.run(text.run(4, lambda tokenizer: 0))
child("a server's texts", lambda: asyncio.run(text.run(4, lambda tokenizer: tokenizer.encode("abab"))))
engine.close()
ranks = new(tensor_parallel_size=2)
def lose():
    global ranks
    try:
        return ids(ranks)
    finally:
        del ranks
child("ranks", lose)
results["ranks of the parent"] = ids(ranks)
results["parent at last"] = ids(llm)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(warm, tiny_target):
    ended = warm.run(tiny_target, code=SCRIPT, seconds=280)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


SAME = [
    "uses", "makes", "makes with transformers", "child of a child", "multiprocessing", "in use, and another is made",
    "ranks of the parent", "parent at last",
]  # fmt: skip


@pytest.mark.parametrize("which", SAME)
def test_a_child_gives_its_parents_tokens(results, which):
    assert len(results["parent"]) == 12
    assert results[which] == results["parent"]


@pytest.mark.parametrize(("which", "says"), [
    ("in use", "another thread was using this LLM when this process was forked: make another one"),
    ("a server's engine", "make the AsyncEngine after the fork"),
    ("ranks", "load the model again"),
])  # fmt: skip
def test_what_stayed_with_the_parent_is_one_clear_error(results, which, says):
    assert says in results[which]


def test_torch_and_texts_in_a_child(results):
    assert results["torch"] == [600.0**3, 2]
    assert len(results["a server's texts"]) == 4
    assert results["of on_update"] is True
