"""Cached prefixes over ZeroMQ: decoded as vLLM 0.32 declares its events, and compared with what the cache holds."""

from __future__ import annotations

import sys
import threading

import msgspec
import pytest
import zmq

from forerun import LLM, SamplingParams
from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun.serve.kv_events import KVEvents
from refusals import refused


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def heard(socket):
    """All that has come, in the order of its numbers."""
    result, decoder = [], msgspec.msgpack.Decoder(EventBatch)
    while socket.poll(300):
        topic, number, payload = socket.recv_multipart()
        assert topic == b"kv"
        assert int.from_bytes(number, "big") == len(result)
        (event,) = decoder.decode(payload).events
        result.append(event)
    return result


@pytest.fixture
def told(tiny_target):
    llm = LLM(tiny_target, dtype="float32", page_size=4, prefix_caching=True, max_num_seqs=2)
    events = KVEvents("tcp://127.0.0.1:*", "kv")
    events.publish(llm.engine.scheduler.tree)
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"kv")
    socket.connect(events.endpoint)
    assert not socket.poll(300)  # until the subscription has arrived
    yield llm, socket
    socket.close(0)
    events.close()


def test_what_is_stored_and_removed_is_reported(told):
    llm, socket = told
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 20, 21, 22, 23, 24]]
    for prompt in prompts:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    first, second = heard(socket)
    assert (first.token_ids, first.parent_block_hash, first.block_size) == (prompts[0][:8], None, 4)
    assert second.token_ids == prompts[1][4:8]
    assert second.parent_block_hash == first.block_hashes[0]
    assert len({*first.block_hashes, *second.block_hashes}) == 3
    llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=1))
    assert heard_nothing(socket)
    llm.engine.scheduler.tree.clear()
    assert llm.engine.scheduler.tree.lru == {}
    (removed,) = (event for event in late(socket, 2))
    assert set(removed.block_hashes) == {*first.block_hashes, *second.block_hashes}
    llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=1))
    (again,) = late(socket, 3)
    assert again.block_hashes == first.block_hashes  # the same tokens have the same hashes


def heard_nothing(socket):
    return not socket.poll(300)


def late(socket, number):
    assert socket.poll(5000)
    _, count, payload = socket.recv_multipart()
    assert int.from_bytes(count, "big") == number
    return msgspec.msgpack.decode(payload, type=EventBatch).events


def test_endpoints_that_cannot_be_had_are_one_line(tiny_target, monkeypatch, capsys):
    llm = LLM(tiny_target, dtype="float32")
    events = KVEvents("tcp://127.0.0.1:*")
    refused(ConfigError, "KV events need prefix caching", events.publish, llm.engine.scheduler.tree)
    events.close()
    refused(ConfigError, "cannot be published at 'nonsense'", KVEvents, "nonsense")
    threads = set(threading.enumerate())
    told = ["serve", "--port", "0", "--model", tiny_target, "--kv-events", "tcp://127.0.0.1:*"]
    assert run([*told, "--no-prefix-caching"]) == 2
    assert "KV events need prefix caching" in capsys.readouterr().err
    assert {thread for thread in threading.enumerate() if thread.name == "forerun-engine"} <= threads
    monkeypatch.setattr("forerun.engine.llm.LLM.__init__", lambda *given, **options: pytest.fail("a model was loaded"))
    assert run(["serve", "--port", "0", "--model", tiny_target, "--kv-events", "nonsense"]) == 2
    assert "cannot be published at 'nonsense'" in capsys.readouterr().err
    assert run(["serve", "--port", "0", "--model", tiny_target, "--kv-events", "x", "--replicas", "2"]) == 2
    assert "does not support --replicas" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "zmq", None)
    refused(ConfigError, r"zmq: pip install 'forerun\[kv-events\]'", KVEvents, "tcp://127.0.0.1:*")
