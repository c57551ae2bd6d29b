"""Rows that see all rows of their span, in every attention that serves them, against softmax in float64."""

import pytest
import torch

from forerun.attention.base import Query
from forerun.attention.kernel import KernelAttention, can_attend
from forerun.attention.sdpa import SdpaAttention
from forerun.attention.tiled import TiledAttention
from forerun.attention.triton import TritonAttention
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span
from here import where
from refusals import refused

pytestmark = pytest.mark.usefixtures("interpreted")

SHAPE, HEADS = KVShape(2, 16, 16), 4
STARTS = {0: 0, 1: 3, 2: 21, 3: 70}
CPU, GPU = torch.device("cpu"), torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [SdpaAttention, TritonAttention, *where(can_attend(torch.float32, CPU, (SHAPE,)), [KernelAttention])]


def batch_and_rows(attention, device, count):
    """A cache of ``STARTS`` entries, and spans of ``count`` rows."""
    generator = torch.Generator().manual_seed(count)
    pool = attention.pool
    past = {}
    for key, start in STARTS.items():
        pool.reserve(key, start + count)
        pool.advance(key, start)
        past[key] = [torch.randn(start, 2, 16, generator=generator).to(device) for _ in range(2)]
        if start:
            pool.write(0, pool.slot_mapping(key, range(start)), *past[key])
    rows = [torch.randn(len(STARTS) * count, heads, 16, generator=generator).to(device) for heads in (HEADS, 2, 2)]
    return Batch([Span(key, start, [1] * count) for key, start in STARTS.items()], device), rows, past


def expected(batch, rows, past, window):
    q, k, v = (side.cpu().double() for side in rows)
    out = []
    for span, offset in zip(batch.spans, batch.offsets):
        here = slice(offset, offset + span.count)
        keys, values = (torch.cat([old.cpu().double(), new[here]]) for old, new in zip(past[span.key], (k, v)))
        for row in range(span.count):
            first = 0 if window is None else max(0, span.start + row - window + 1)
            for head in range(HEADS):
                scores = keys[first:, head // 2] @ q[offset + row, head] / 4
                out.append(scores.softmax(0) @ values[first:, head // 2])
    return torch.stack(out).view(len(q), -1)


@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("count", [1, 5, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_sees_its_whole_span(kind, count, window):
    device = GPU if kind is TritonAttention else CPU
    attention = kind(Pool([SHAPE], 64, 16, torch.float32, device))
    batch, rows, past = batch_and_rows(attention, device, count)
    metadata = attention.begin(batch)
    query = Query(0, *rows, 0.25, window, causal=False)
    if window is not None and kind is KernelAttention:
        refused(TypeError, "no sliding window for rows that see later rows", attention.run, query, metadata)
        return
    out = attention.run(query, metadata)
    torch.testing.assert_close(out.cpu().double(), expected(batch, rows, past, window), rtol=2e-5, atol=2e-5)
    causal = attention.run(Query(0, *rows, 0.25, window), metadata)
    assert torch.equal(causal, out) == (count == 1)


def test_attention_in_tiles_refuses_it():
    attention = TiledAttention(Pool([SHAPE], 64, 16, torch.float32))
    batch, rows, _ = batch_and_rows(attention, torch.device("cpu"), 3)
    query = Query(0, *rows, 0.25, causal=False)
    refused(TypeError, "does not show a row the rows after it", attention.run, query, attention.begin(batch))
