"""Publishes over ZeroMQ which prefixes are cached, in vLLM's form, for routers of requests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from time import time
from typing import Any

from forerun.cache.prefix import PrefixTree
from forerun.core.errors import ConfigError

MEDIUM = "CPU"


class KVEvents:
    """A publisher (vLLM 0.32, ``vllm.distributed.kv_events``): each message is topic, number (8 bytes, big-endian) and
    msgpack of ``[time, [event]]``, an event being ``BlockStored`` or ``BlockRemoved`` as a map.

    A block is a page of tokens. Its hash, 63 bits, is of its tokens and its parent's hash; that of an encoder-decoder's
    first block is of the source, too. Messages that a subscriber misses are not repeated.

    Raises:
        ConfigError: the endpoint cannot be bound, or ZeroMQ is not installed.
    """

    def __init__(self, endpoint: str, topic: str = "") -> None:
        try:
            import msgspec
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(f"KV events need {error.name}: pip install 'forerun[kv-events]'") from None
        self.topic = topic.encode()
        self.number = 0
        self.hashes: dict[Any, int] = {}
        """Of the cached nodes of the prefix tree."""
        self._encode = msgspec.msgpack.encode
        self._nonblocking = zmq.NOBLOCK
        context: Any = zmq.Context.instance()
        self._socket = context.socket(zmq.PUB)
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"KV events cannot be published at {endpoint!r}: {error}") from None
        self.endpoint: str = self._socket.last_endpoint.decode()

    def publish(self, tree: PrefixTree | None) -> None:
        """Publish from now on what enters and leaves ``tree``. Raises ConfigError if prefixes are not cached."""
        if tree is None:
            raise ConfigError("KV events need prefix caching: remove --no-prefix-caching")
        self.block_size = tree.pages.page_size
        tree.listener = self

    def stored(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            parent = self.hashes.get(node.parent)
            tokens = (*(node.parent.tokens if parent is None else ()), *node.tokens)
            hashed = struct.pack(f">{1 + len(tokens)}q", -1 if parent is None else parent, *tokens)
            (number,) = struct.unpack(">q", blake2b(hashed, digest_size=8).digest())
            self.hashes[node] = number & (1 << 63) - 1
        self._send(
            {
                "type": "BlockStored",
                "block_hashes": [self.hashes[node] for node in nodes],
                "parent_block_hash": self.hashes.get(nodes[0].parent),
                "token_ids": [token for node in nodes for token in node.tokens],
                "block_size": self.block_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
            }
        )

    def removed(self, nodes: Sequence[Any]) -> None:
        hashes = [number for node in nodes if (number := self.hashes.pop(node, None)) is not None]
        if hashes:
            self._send({"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM})

    def _send(self, event: dict[str, Any]) -> None:
        payload = self._encode([time(), [event]])
        self._socket.send_multipart([self.topic, self.number.to_bytes(8, "big"), payload], self._nonblocking)
        self.number += 1

    def close(self) -> None:
        self._socket.close()
