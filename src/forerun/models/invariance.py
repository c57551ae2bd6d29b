"""Does a row's result depend, to the last bit, on what it was computed beside?

Same-seed identity needs verification to give the bits of plain decoding. Padding rows and keys brings that about
on most backends; this test says whether it does here, with this model, on this processor and thread count.
"""

from __future__ import annotations

import torch

from forerun.core.batch import Batch, Span
from forerun.models.base import Model, new_cache

PROMPT = 64
DECODES = 5
CROSSING = 3
TARGET, MATE, OTHER = 0, 1, 2


class _Probe:
    """A model, a cache of its own and random tokens to feed."""

    def __init__(self, model: Model, page_size: int | None) -> None:
        self.model = model
        self.prompt = min(PROMPT, model.info.max_len - DECODES)
        edge = model.key_multiple + CROSSING
        self.crosses = model.key_multiple > 1 and edge <= model.info.max_len
        longest = edge if self.crosses else self.prompt + DECODES
        self.cache = new_cache(model, max_seqs=3, max_len=longest + 8, page_size=page_size)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(model.info.vocab_size, (longest + 8,), generator=generator).tolist()
        self.generator = generator

    def feed(self, *spans: Span) -> torch.Tensor:
        """Logits of every row of the first span."""
        spans[0].logits = list(range(spans[0].count))
        return self.model.forward(Batch(list(spans), self.model.info.device), self.cache).logits

    def chunk(self, start: int, end: int, key: int = TARGET) -> Span:
        return Span(key, start, self.tokens[start:end])

    def chunks(self, *ends: int) -> torch.Tensor:
        """Feed the target's tokens up to each of ``ends`` in turn; the logits of the last ``DECODES`` rows."""
        self.back(0)
        rows = []
        start = 0
        for end in ends:
            rows.append(self.feed(self.chunk(start, end)))
            start = end
        return torch.cat(rows)[-DECODES:]

    def back(self, length: int, key: int = TARGET) -> None:
        if key in self.cache.pool.tables:
            self.cache.pool.truncate(key, length)

    def fill(self, length: int) -> None:
        """Give the target ``length`` entries of random keys and values, as if it had been fed so much."""
        pool = self.cache.pool
        self.back(0)
        pool.reserve(TARGET, length)
        places = pool.places(TARGET, range(length))
        for layer, shape in enumerate(pool.layers):
            sides = []
            for width in (shape.key_dim, shape.value_dim):
                values = torch.randn(length, shape.heads, width, generator=self.generator)
                sides.append(values.to(self.model.info.device, self.model.info.dtype))
            pool.write(layer, places, sides[0], sides[1])
        pool.advance(TARGET, length)


def self_test(model: Model, *, page_size: int | None = None) -> list[str]:
    """Failures, in words; none means that every way of feeding tokens gave the bits of decoding them singly."""
    probe = _Probe(model, page_size)
    failures: list[str] = []

    def compare(wanted: torch.Tensor, got: torch.Tensor, what: str) -> None:
        if not torch.equal(wanted, got):
            rows = int((wanted != got).any(dim=-1).sum())
            failures.append(f"{what}: {rows} of {len(wanted)} rows differ, by up to {(wanted - got).abs().max():.1e}")

    n, end = probe.prompt, probe.prompt + DECODES
    wanted = probe.chunks(n, *range(n + 1, end + 1))
    compare(wanted, probe.chunks(end), "prefill in one chunk against decoding")
    compare(wanted, probe.chunks(n // 8 + 1, n // 4 * 3, end), "prefill in ragged chunks against decoding")
    compare(wanted, probe.chunks(n, end), f"verification of {DECODES} rows against decoding")
    compare(wanted, _beside_others(probe, n, end), "verification beside other sequences against decoding")
    compare(wanted, _in_a_tree(probe, n, end), "verification of a tree against decoding")
    if probe.crosses:
        compare(*_across_the_padding(probe), "verification across a key padding boundary against decoding")
    return failures


def _beside_others(probe: _Probe, n: int, end: int) -> torch.Tensor:
    probe.back(n)
    first = probe.feed(probe.chunk(n, n + 2), probe.chunk(0, 11, MATE), probe.chunk(0, 2, OTHER))
    rest = probe.feed(probe.chunk(n + 2, end), probe.chunk(2, 3, OTHER), probe.chunk(11, 17, MATE))
    return torch.cat([first, rest])


def _in_a_tree(probe: _Probe, n: int, end: int) -> torch.Tensor:
    """The true continuation as one branch, with a sibling at every depth."""
    probe.back(n)
    tokens, parents, path = [], [], []
    parent = -1
    for token in probe.tokens[n:end]:
        tokens += [(token + 1) % probe.model.info.vocab_size, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
        path.append(parent)
    return probe.feed(Span(TARGET, n, tokens, parents))[path]


def _across_the_padding(probe: _Probe) -> tuple[torch.Tensor, torch.Tensor]:
    last = probe.model.key_multiple + CROSSING
    first = last - 2 * CROSSING + 1
    probe.fill(first)
    singly = torch.cat([probe.feed(probe.chunk(at, at + 1)) for at in range(first, last)])
    probe.back(first)
    return singly, probe.feed(probe.chunk(first, last))
