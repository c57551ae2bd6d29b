"""The CPU attention kernel against softmax in float64 over each row's own keys, and its bits."""

import math
from itertools import pairwise

import pytest
import torch

from built import torch_threads
from forerun.attention.base import Query
from forerun.attention.kernel import KernelAttention, can_attend
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span
from here import where
from refusals import refused

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = where(lambda d: can_attend(d, CPU, (KVShape(1, 64, 64),)), TYPES)
"""What this processor runs."""


class Case:
    """A pool, and beside it every entry that was ever written, by sequence and place."""

    def __init__(self, dtype, heads, kv_heads, width, page_size, seed=0, rank=None):
        """``rank``: values are so many first numbers of keys."""
        self.heads, self.kv_heads, self.width, self.dtype, self.rank = heads, kv_heads, width, dtype, rank
        pages = 6 if page_size > 100 else 90
        self.pool = Pool([KVShape(kv_heads, width, rank or width, shared=bool(rank))], pages, page_size, dtype, CPU)
        for side in (self.pool.keys[0], self.pool.values[0]):
            side.fill_(float("nan"))  # what nobody wrote must not be read
        self.attention = KernelAttention(self.pool)
        self.generator = torch.Generator().manual_seed(seed)
        self.entries = {}

    def rows(self, count):
        """q, k and v side by side in memory, as a fused projection leaves them."""
        total = self.heads + 2 * self.kv_heads
        together = torch.randn(count, total, self.width, generator=self.generator).mul_(2).to(self.dtype)
        q, k, v = together.split((self.heads, self.kv_heads, self.kv_heads), 1)
        return q, k, v if self.rank is None else k[..., : self.rank]

    def run(self, spans, q, k, v, **options):
        batch = Batch(spans)
        metadata = self.attention.begin(batch)
        out = self.attention.run(Query(0, q, k, v, self.width**-0.5, **options), metadata)
        self.attention.finish(metadata)
        for span, offset in zip(spans, batch.offsets):
            for row in range(span.count):
                index = span.key, span.start + span.stored + row
                self.entries[index] = k[offset + row].double(), v[offset + row].double()
        return out

    def wanted(self, spans, q, window=None, softcap=None, sinks=None, sink_tokens=0):
        """Row by row: the entries it sees, listed in words of the protocol."""
        out, index = [], 0
        for span in spans:
            positions = span.positions()
            for row in range(span.count):
                node = span.stored + row
                seen = [(entry, entry) for entry in range(span.start)]
                if span.parents is None:
                    seen += [(span.start + n, span.start + n) for n in range(node + 1)]
                else:
                    depths, path = span.depths(), []
                    while node >= 0:
                        path.append((span.start + node, span.start + depths[node]))
                        node = span.parents[node]
                    seen += reversed(path)
                if window is not None:
                    last = positions[row] - window
                    seen = [(entry, where) for entry, where in seen if where > last or where < sink_tokens]
                k = torch.stack([self.entries[span.key, entry][0] for entry, _ in seen])
                v = torch.stack([self.entries[span.key, entry][1] for entry, _ in seen])
                heads = []
                for head in range(self.heads):
                    mine = head * self.kv_heads // self.heads
                    scores = k[:, mine] @ q[index, head].double() / math.sqrt(self.width)
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    more = scores[:0] if sinks is None else sinks[head : head + 1].double()
                    heads.append(torch.softmax(torch.cat([scores, more]), 0)[: len(v)] @ v[:, mine])
                out.append(torch.cat(heads))
                index += 1
        return torch.stack(out)

    def check(self, spans, **options):
        q, k, v = self.rows(sum(span.count for span in spans))
        got = self.run(spans, q, k, v, **options)
        expected = self.wanted(spans, q, **options)
        unit = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[self.dtype]
        assert ((got - expected).abs() <= unit * expected.abs() + 2e-5).all()
        return got


SIZES = [(4, 4, 16), (6, 2, 64), (4, 1, 80), (8, 2, 128), (4, 2, 100), (5, 1, 40), (2, 2, 2), (2, 1, 512)]


@pytest.mark.parametrize("page_size", [128, 5, 16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_trees_and_mixed_batches(dtype, sizes, page_size):
    case = Case(dtype, *sizes, page_size)
    case.check([Span(0, 0, [1] * 37)])
    case.check([Span(0, 37, [1]), Span(1, 0, [1] * 18)])
    tree = [-1, 0, 0, 1, 1, 3, 2]
    case.check([Span(1, 18, [1] * 5), Span(0, 38, [1] * 7, tree), Span(2, 0, [1] * 2)])
    case.check([Span(0, 38, [1] * 2, [*tree, 6, 6], stored=7), Span(2, 2, [1])])
    case.pool.keep(0, 38, [0, 2, 6])
    for new, old in enumerate((0, 2, 6)):
        case.entries[0, 38 + new] = case.entries[0, 38 + old]
    case.check([Span(2, 3, [1] * 3), Span(0, 41, [1] * 4)])


@pytest.mark.parametrize("sizes", [(19, 576, 512), (3, 20, 12), (8, 70, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_parts_of_keys(dtype, sizes):
    """Of latents: one entry of a key for all heads, which a rollback moves once."""
    heads, width, rank = sizes
    case = Case(dtype, heads, 1, width, 16, rank=rank)
    assert case.pool.page_bytes == 16 * width * dtype.itemsize
    assert case.pool.values[0].data_ptr() == case.pool.keys[0].data_ptr()
    case.check([Span(0, 0, [1] * 140), Span(1, 0, [1] * 5)])
    case.check([Span(1, 5, [1]), Span(0, 140, [1] * 7, [-1, 0, 0, 1, 1, 3, 2])])
    case.pool.keep(0, 140, [0, 2, 6])
    for new, old in enumerate((0, 2, 6)):
        case.entries[0, 140 + new] = case.entries[0, 140 + old]
    case.pool.fork(0, 2, 143)
    case.entries |= {(2, place): entry for (key, place), entry in [*case.entries.items()] if key == 0 and place < 143}
    case.check([Span(0, 143, [1] * 3), Span(2, 143, [1])])


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [512, 16])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_of_several_blocks(dtype, window, page_size):
    """Rows that end before, at and behind the end of a block of 128 keys, sequences of unlike lengths one after
    another, and trees that begin inside a block."""
    case = Case(dtype, 6, 2, 64, page_size)
    case.check([Span(0, 0, [1] * 126), Span(1, 0, [1] * 20), Span(2, 0, [1] * 254)], window=window)
    for _ in range(2):
        lengths = [max(e for s, e in case.entries if s == key) + 1 for key in range(3)]
        case.check([Span(key, length, [1] * 4) for key, length in enumerate(lengths)], window=window)
    tree = [-1, 0, 0, 1, 1, 3, 2]
    case.check([Span(1, 28, [1] * 3), Span(2, 262, [1] * 7, tree), Span(0, 134, [1] * 130)], window=window)


@pytest.mark.parametrize("options", [{"window": 7}, {"window": 33}, {"softcap": 3.0}, {"window": 12, "softcap": 1.0}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_and_soft_caps(dtype, options):
    case = Case(dtype, 4, 2, 32, 16)
    case.check([Span(0, 0, [1] * 50)], **options)
    case.check([Span(0, 50, [1] * 6, [-1, 0, 1, 1, 0, 3])], **options)
    case.check([Span(0, 51, [1] * 3)], **options)


@pytest.mark.parametrize(("window", "sink_tokens"), [(12, 4), (1, 1), (3, 60), (130, 4)])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_and_the_first_tokens(dtype, width, window, sink_tokens):
    case, options = Case(dtype, 4, 2, width, 16), {"window": window, "sink_tokens": sink_tokens, "softcap": 2.0}
    case.check([Span(0, 0, [1] * 150), Span(1, 0, [1] * 2)], **options)
    case.check([Span(0, 150, [1] * 6, [-1, 0, 1, 1, 0, 3]), Span(1, 2, [1] * 5, [-1, 0, 1, 1, 0])], **options)
    case.check([Span(1, 3, [1]), Span(0, 151, [1] * 3)], **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype):
    case, options = Case(dtype, 4, 2, 32, 16), {"sinks": torch.tensor([-3.0, 0.5, 9.0, 2.0]), "window": 12}
    case.check([Span(0, 0, [1] * 50)], **options)
    case.check([Span(0, 50, [1] * 6, [-1, 0, 1, 1, 0, 3])], **options)
    refused(ValueError, "for 4 heads", case.run, [Span(1, 0, [1] * 2)], *case.rows(2), sinks=torch.zeros(3))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("window", "width"), [(None, 64), (21, 64), (150, 64), (None, 32), (None, 100), (21, 46)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_row_alone(dtype, window, width, threads):
    """Decoded one by one, in ragged chunks, beside others, in pages or not, as a path of a tree: the same bits."""
    count, start = 300, 250
    whole = Case(dtype, 6, 2, width, 128)
    q, k, v = whole.rows(count)

    def feed(case, begin, end, *more, **span):
        mates = [case.rows(mate.count) for mate in more]
        sides = [torch.cat([side[begin:end], *others]) for side, *others in zip((q, k, v), *mates)]
        return case.run([Span(0, begin, [1] * (end - begin), **span), *more], *sides, window=window)[: end - begin]

    expected = feed(whole, 0, count)
    with torch_threads(threads):
        singly, ragged = Case(dtype, 6, 2, width, 128), Case(dtype, 6, 2, width, 5, seed=1)
        assert torch.equal(torch.cat([feed(singly, at, at + 1) for at in range(count)]), expected)
        cuts = [0, 3, 4, 40, 57, 58, 126, 130, 257, 258, count]
        parts = [feed(ragged, a, b, Span(1, at * 2, [1] * 2)) for at, (a, b) in enumerate(pairwise(cuts))]
        assert torch.equal(torch.cat(parts), expected)
        tree = Case(dtype, 6, 2, width, 16, seed=2)
        feed(tree, 0, start)
        order = [0, 0, 1, 1, 2, 2, 3, 3, 4]  # each row of the path, and a sibling of all but the last
        parents = [-1, -1, 0, 0, 2, 2, 4, 4, 6]
        sides = [side[start:][order].clone() for side in (q, k, v)]
        for side in sides:
            side[1::2] += 1
        got = tree.run([Span(0, start, [1] * 9, parents)], *sides, window=window)
        assert torch.equal(got[0::2], expected[start : start + 5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_shows_and_stays_in_its_row(dtype):
    case = Case(dtype, 4, 2, 32, 16)
    case.check([Span(0, 0, [1] * 20), Span(1, 0, [1] * 20)])
    case.pool.keys[0][case.pool.block_tables[0][0], 0, 3] = float("nan")
    q, k, v = case.rows(2)
    out = case.run([Span(0, 20, [1]), Span(1, 20, [1])], q, k, v).view(2, 4, 32)
    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


def test_what_the_kernel_does_not_serve():
    assert not can_attend(torch.float64, CPU, (KVShape(2, 64, 64),))
    assert not can_attend(torch.float32, CPU, (KVShape(2, 64, 64), KVShape(2, 13, 13)))
    assert not can_attend(torch.float32, CPU, (KVShape(2, 1026, 1026),))
    assert not can_attend(torch.float32, CPU, (KVShape(2, 32, 64),))
    assert not can_attend(torch.float32, torch.device("cuda"), (KVShape(2, 64, 64),))
