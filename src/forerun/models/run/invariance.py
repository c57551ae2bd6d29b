"""A test whether a row's bits depend on the rows beside it.

Same-seed identity needs verification to give the bits of plain decoding. ``tiling.py`` and our kernels ensure that by
the order of sums. This test compares hundreds of rows in every way that the engine feeds tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from forerun.core.batch import Batch, Span
from forerun.models.run.base import Model, ModelInfo, new_attention

ROWS = 330
SUMS, PER_LAYER, MOST_RUNS = 20e6, 7, 16
"""Where torch computes, this many of a model's sums are compared, in at most this many runs: one of millions may
differ. A layer has about seven times as many sums as its rows have numbers."""
CHUNKS = (2, 5, 17, 33, 64, 65, 200)
"""Rows a call."""
BRANCHES = 9
TARGET, MATE, OTHER, CROWD = 0, 1, 2, 3


@dataclass(frozen=True)
class Finding:
    """How many rows differed from decoding one by one, when fed in one ``way``."""

    way: str
    differing: int
    rows: int
    largest: float

    def __str__(self) -> str:
        return f"{self.way}: {self.differing} of {self.rows} rows differ from decoding, by up to {self.largest:.1e}"


class _Probe:
    """A model with a new cache, and random tokens to feed."""

    def __init__(self, model: Model, rows: int, page_size: int | None, seqs: int, seed: int) -> None:
        self.model = model
        self.rows = max(0, min(rows, model.info.max_len - BRANCHES))
        self.attention = new_attention(
            model, max_seqs=seqs, max_len=self.rows + 1, page_size=page_size, slack=2 * BRANCHES + max(CHUNKS)
        )
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(model.info.vocab_size, (self.rows,), generator=generator).tolist()
        self.sources: dict[int, tuple[int, ...]] = {}
        if model.info.encoder is not None:  # sources of different lengths, one for each sequence
            longest = min(self.rows, model.info.encoder.max_len)
            self.sources = {key: tuple(self.tokens[: 1 + (longest // 2 + 29 * key) % longest]) for key in range(seqs)}

    def feed(self, *spans: Span) -> torch.Tensor:
        """Feed spans. Returns logits of every row of the first one."""
        spans[0].logits = list(range(spans[0].count))
        for span in spans:
            span.source = self.sources.get(span.key)
        return self.model.forward(Batch(list(spans), self.model.info.device), self.attention).logits

    def chunk(self, start: int, end: int, key: int = TARGET) -> Span:
        return Span(key, start, self.tokens[start:end])

    def truncate(self, length: int, key: int = TARGET) -> None:
        if key in self.attention.pool.block_tables:
            self.attention.pool.truncate(key, length)

    def forget(self) -> None:
        """Free everything, so that sources are encoded again."""
        for key in list(self.attention.pool.block_tables):
            self.attention.pool.free(key)
        if self.attention.pool.sources is not None:
            self.attention.pool.sources.clear()


def runs_of(info: ModelInfo) -> int:
    """Runs that compare ``SUMS`` of a model that torch computes."""
    return min(MOST_RUNS, math.ceil(SUMS / (ROWS * PER_LAYER * info.num_layers * info.hidden_size)))


def self_test(
    model: Model, *, page_size: int | None = None, rows: int | None = None, chunks: Sequence[int] = CHUNKS
) -> list[Finding]:
    """Feed tokens in equal and in ragged chunks, beside other sequences and as a path of a tree. Returns every way in
    which some row's logits differ from decoding one by one. ``rows`` tokens in one run; None: ``ROWS`` in as many
    runs as compare ``SUMS``. A short context means fewer rows."""
    runs = runs_of(model.info) if rows is None and getattr(model, "tiles", None) is not None else 1
    found: dict[str, Finding] = {}
    for seed in range(runs):
        for each in _run(_Probe(model, ROWS if rows is None else rows, page_size, CROWD + 5, seed), chunks):
            before = found.get(each.way, Finding(each.way, 0, 0, 0.0))
            largest = max(before.largest, each.largest)
            found[each.way] = Finding(each.way, before.differing + each.differing, before.rows + each.rows, largest)
    return [each for each in found.values() if each.differing]


def _run(probe: _Probe, chunks: Sequence[int]) -> list[Finding]:
    """What every way found, in one run."""
    if not probe.rows:
        return []
    decoded = torch.cat([probe.feed(probe.chunk(at, at + 1)) for at in range(probe.rows)])
    result: list[Finding] = []

    def compare(way: str, got: torch.Tensor, first: int = 0) -> None:
        expected = decoded[first : first + len(got)]
        differing = int((expected != got).any(dim=-1).sum())
        result.append(Finding(way, differing, len(got), float((expected - got).abs().max())))

    n = probe.rows
    for size in [chunk for chunk in chunks if chunk < n]:
        compare(f"{size} rows a call", _in_chunks(probe, [*range(0, n, size), n]))
    compare("all rows in one call", _in_chunks(probe, [0, n]))
    ragged = sorted({0, n // 9, n // 9 + 1, n // 4, n // 2 - 1, n // 2, n * 5 // 6, n})
    compare("ragged calls", _in_chunks(probe, ragged))
    compare("beside other sequences", _beside_others(probe, ragged))
    for first in sorted({0, n // 3, max(0, n - BRANCHES)}):
        compare(f"a tree after {first} tokens", _in_a_tree(probe, first), first)
    return result


def _in_chunks(probe: _Probe, cuts: list[int]) -> torch.Tensor:
    probe.truncate(0)
    return torch.cat([probe.feed(probe.chunk(start, end)) for start, end in pairwise(cuts)])


def _beside_others(probe: _Probe, cuts: list[int]) -> torch.Tensor:
    """Each chunk beside a decode, a verification, a short prompt and, every other time, many decodes; sources, too."""
    probe.forget()
    rows, fed = [], {MATE: 0, OTHER: 0}
    for index, (start, end) in enumerate(pairwise(cuts)):
        mates = []
        for key, count in ((MATE, 1), (OTHER, 3 + index)):
            first = fed[key] if fed[key] + count <= probe.rows else 0
            probe.truncate(first, key)
            mates.append(probe.chunk(first, min(first + count, probe.rows), key))
            fed[key] = first + count
        for key in range(CROWD, CROWD + 5) if index % 2 else ():
            probe.truncate(0, key)
            mates.append(probe.chunk(0, 1, key))
        rows.append(probe.feed(probe.chunk(start, end), *mates))
    return torch.cat(rows)


def _in_a_tree(probe: _Probe, first: int) -> torch.Tensor:
    """The true continuation as one branch, with a sibling at every depth, beside another sequence."""
    probe.truncate(0)
    if first:
        probe.feed(probe.chunk(0, first))
    tokens, parents, path = [], [], []
    parent = -1
    for token in probe.tokens[first : first + BRANCHES]:
        tokens += [(token + 1) % probe.model.info.vocab_size, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
        path.append(parent)
    probe.truncate(0, MATE)
    return probe.feed(Span(TARGET, first, tokens, parents), probe.chunk(0, 2, MATE))[path]
