"""Which prefixes are cached, told over ZeroMQ in vLLM's form, for routers that send requests where theirs lie."""

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

    A block is a page of tokens; its hash, 63 bits, is of its tokens and its parent's hash. Encoder-decoders' prefixes
    begin with their source in the first hash. What a slow or absent subscriber misses is gone. Raises ConfigError for
    an endpoint that cannot be had.
    """

    def __init__(self, endpoint: str, tree: PrefixTree | None, topic: str = "") -> None:
        try:
            import msgspec
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(f"KV events need {error.name}: pip install 'forerun[kv-events]'") from None
        if tree is None:
            raise ConfigError("there are no cached prefixes to tell of: leave prefix_caching on")
        self.topic = topic.encode()
        self.number = 0
        self.size = tree.pages.page_size
        self.hashes: dict[Any, int] = {}
        self._encode = msgspec.msgpack.encode
        self._nonblocking = zmq.NOBLOCK
        context: Any = zmq.Context.instance()
        self._socket = context.socket(zmq.PUB)
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"KV events cannot be told at {endpoint!r}: {error}") from None
        self.endpoint: str = self._socket.last_endpoint.decode()
        tree.listener = self

    def stored(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            parent = self.hashes.get(node.parent)
            before = struct.pack(">q", -1 if parent is None else parent)
            said = b"".join(
                struct.pack(">q", token) for token in (*(node.parent.tokens if parent is None else ()), *node.tokens)
            )
            (number,) = struct.unpack(">q", blake2b(before + said, digest_size=8).digest())
            self.hashes[node] = number & (1 << 63) - 1
        first = nodes[0]
        self._tell(
            {
                "type": "BlockStored",
                "block_hashes": [self.hashes[node] for node in nodes],
                "parent_block_hash": self.hashes.get(first.parent),
                "token_ids": [token for node in nodes for token in node.tokens],
                "block_size": self.size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
            }
        )

    def removed(self, nodes: Sequence[Any]) -> None:
        hashes = [result for node in nodes if (result := self.hashes.pop(node, None)) is not None]
        if hashes:
            self._tell({"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM})

    def _tell(self, event: dict[str, Any]) -> None:
        payload = self._encode([time(), [event]])
        self._socket.send_multipart([self.topic, self.number.to_bytes(8, "big"), payload], self._nonblocking)
        self.number += 1

    def close(self) -> None:
        self._socket.close()
