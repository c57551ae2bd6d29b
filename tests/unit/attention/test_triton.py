"""The Triton kernel under Triton's interpreter, against the reference backend on the same cache contents."""

import pytest
import torch

from forerun.attention.base import Query
from forerun.attention.sdpa import SdpaAttention
from forerun.attention.triton import TritonAttention
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("interpreted")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    (4, 2, 16, 16, 16, None, None, False),
    (6, 2, 24, 24, 512, None, None, True),
    (3, 1, 64, 32, 16, None, None, True),
    (2, 1, 16, 16, 16, 4, None, False),
    (2, 1, 16, 16, 16, None, 3.0, False),
    (2, 2, 16, 16, 512, 8, 5.0, True),
    (2, 1, 256, 256, 16, 4, None, True),
]


def spans():
    """A prefill chunk, a decode, a chain, a tree, and a tree grown behind stored nodes."""
    return [
        Span(0, 0, list(range(19))),
        Span(1, 540, [5]),
        Span(2, 17, [1, 2, 3, 4]),
        Span(3, 9, [1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 2]),
        Span(4, 5, [7, 8], [-1, -1, 0, 1], stored=2),
    ]


def filled(pool):
    generator = torch.Generator().manual_seed(1)
    for span in spans():
        length = span.start + span.stored
        pool.reserve(span.key, max(length, 1))
        pool.advance(span.key, length)
        if length:
            slot_mapping = pool.slot_mapping(span.key, range(length))
            for layer, shape in enumerate(pool.layers):
                k = torch.randn(length, shape.heads, shape.key_dim, generator=generator)
                v = torch.randn(length, shape.heads, shape.value_dim, generator=generator)
                pool.write(layer, slot_mapping, k.to(pool.device), v.to(pool.device))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "page_size", "window", "softcap", "sinks", "sink_tokens"),
    [*((*case, 0) for case in CASES), *((*case, 3) for case in (CASES[0], *(case for case in CASES if case[5])))],
)
def test_matches_the_reference(heads, kv_heads, width, value_width, page_size, window, softcap, sinks, sink_tokens):
    shape = KVShape(kv_heads, width, value_width)
    generator = torch.Generator().manual_seed(0)
    rows = sum(span.count for span in spans())
    q = torch.randn(rows, heads, width, generator=generator).to(DEVICE)
    k = torch.randn(rows, kv_heads, width, generator=generator).to(DEVICE)
    v = torch.randn(rows, kv_heads, value_width, generator=generator).to(DEVICE)
    sinks = torch.randn(heads, generator=generator).to(DEVICE) if sinks else None
    results = []
    for kind in (SdpaAttention, TritonAttention):
        pool = Pool([shape], 64 if page_size == 16 else 12, page_size, torch.float32, DEVICE)
        filled(pool)
        attention = kind(pool)
        metadata = attention.begin(Batch(spans(), DEVICE))
        query = Query(0, q, k, v, width**-0.5, window, softcap, sinks=sinks, sink_tokens=sink_tokens)
        results.append(attention.run(query, metadata))
        attention.finish(metadata)
        assert [pool.length(span.key) for span in spans()] == [span.end for span in spans()]
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)


def test_a_row_has_the_same_bits_alone_and_in_company():
    shape = KVShape(2, 16, 16)
    generator = torch.Generator().manual_seed(3)
    rows = sum(span.count for span in spans())
    q, k, v = (torch.randn(rows, n, 16, generator=generator).to(DEVICE) for n in (4, 2, 2))
    together = None
    for chosen in (range(5), [2], [1, 2]):
        pool = Pool([shape], 64, 16, torch.float32, DEVICE)
        filled(pool)
        attention = TritonAttention(pool)
        every = spans()
        starts = Batch(every).offsets
        part = [every[i] for i in chosen]
        index = [starts[i] + row for i in chosen for row in range(every[i].count)]
        metadata = attention.begin(Batch(part, DEVICE))
        out = attention.run(Query(0, q[index], k[index], v[index], 0.25), metadata)
        mine = out[[index.index(starts[2] + row) for row in range(4)]]
        together = mine if together is None else together
        assert torch.equal(mine, together)


@pytest.mark.parametrize(("start", "window"), [(3, None), (61, 30), (130, None), (130, 30)])
def test_a_tree_node_has_the_bits_of_its_chain(start, window):
    """Nodes in any order, some of them fed earlier, against chains of their paths."""
    shape, heads = KVShape(2, 16, 16), 6
    parents = [-1, -1, 0, 1, 2, 2, 3, 5]
    generator = torch.Generator().manual_seed(start)
    past_k, past_v = (torch.randn(start, 2, 16, generator=generator).to(DEVICE) for _ in range(2))
    q, k, v = (torch.randn(len(parents), n, 16, generator=generator).to(DEVICE) for n in (heads, 2, 2))

    def attend(*calls):
        """Feeds calls of (nodes, span); returns the last one's outputs."""
        pool = Pool([shape], 40, 16, torch.float32, DEVICE)
        pool.reserve(0, start)
        pool.advance(0, start)
        pool.write(0, pool.slot_mapping(0, range(start)), past_k, past_v)
        attention = TritonAttention(pool)
        for nodes, span in calls:
            metadata = attention.begin(Batch([span], DEVICE))
            out = attention.run(Query(0, q[nodes], k[nodes], v[nodes], 0.25, window), metadata)
            attention.finish(metadata)
        return out

    nodes = list(range(len(parents)))
    tree = attend((nodes, Span(0, start, nodes, parents)))
    later = attend(
        (nodes[:3], Span(0, start, nodes[:3], parents[:3])), (nodes[3:], Span(0, start, nodes[3:], parents, 3))
    )
    assert torch.equal(later, tree[3:])
    for node in nodes:
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert torch.equal(attend((path, Span(0, start, path)))[-1], tree[node])
