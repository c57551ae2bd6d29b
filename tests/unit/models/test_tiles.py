"""Row counts whose calls agree, and batches cut to fit them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.attention import tiled
from forerun.cache.pool import KVShape
from forerun.core import tiles
from forerun.core.batch import Batch, Span


def repeated(changes):
    """A run whose result is [1, 2] in every place, but for what ``changes[size]`` says: (place, value)."""

    def run(size):
        rows = torch.tensor([[1.0, 2.0]]).repeat(size, 1)
        if size in changes:
            index, value = changes[size]
            rows[index] = value
        return rows

    return run


def test_sizes_that_agree_are_found():
    everywhere = slice(None)
    assert tiles.compare([1, 2, 4, 8], repeated({})) == [[1, 2, 4, 8]]
    assert tiles.compare([1, 2, 4, 8], repeated({1: (everywhere, 3.0)})) == [[1], [2, 4, 8]]
    assert tiles.compare([1, 2, 4, 8], repeated({4: (3, 3.0)})) == [[1, 2, 8]]
    assert tiles.compare([1, 2, 4, 8], repeated({4: (everywhere, 3.0), 8: (everywhere, 3.0)})) == [[1, 2], [4, 8]]
    assert tiles.compare([2], repeated({2: (0, float("nan"))})) == []


def test_groups_in_common_and_the_one_to_use():
    assert tiles.intersect([[1, 2, 4], [8, 16]], [[1], [2, 4, 8, 16]]) == [[1], [2, 4], [8, 16]]
    assert tiles.best_group([[1], [2, 4, 8, 16]]) == (2, 4, 8, 16)
    assert tiles.best_group([[1, 2, 4], [8, 16]]) == (8, 16)
    assert tiles.best_group([[1], [2, 4]]) == (1,)
    assert tiles.best_group([[1, 2, 4, 8], [16, 32]]) == (1, 2, 4, 8)
    assert tiles.best_group([]) == ()


def test_calls():
    assert [tiles.call_size(rows, (2, 4, 8)) for rows in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, 8]
    assert list(tiles.split_rows(11, (2, 4, 8))) == [(0, 8, 8), (8, 11, 4)]
    assert list(tiles.split_rows(16, (2, 4, 8))) == [(0, 8, 8), (8, 16, 8)]


@st.composite
def batches(draw):
    spans = []
    for key in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 9))
        stored = draw(st.integers(0, 2))
        parents = None
        if draw(st.booleans()):
            parents = [draw(st.integers(-1, node - 1)) for node in range(stored + count)]
        logits = sorted(draw(st.sets(st.integers(0, count - 1))))
        spans.append(
            Span(key, draw(st.integers(0, 5)), list(range(10 * key, 10 * key + count)), parents, stored, logits)
        )
    total = sum(span.count for span in spans)
    rows = sorted(draw(st.sets(st.integers(0, total - 1)))) if draw(st.booleans()) else []
    embeds = torch.tensor([[float(row)] for row in rows]) if rows else None
    return Batch(spans, embeds=embeds, embed_rows=rows or None, hidden=(1,), layers=(0,))


def seen(batch):
    """Per row: sequence, token, position, what it sees behind the committed entries, whether its logits are wanted, and
    what is fed in the place of its token."""
    result = []
    for span, offset in zip(batch.spans, batch.offsets):
        for row, (token, position) in enumerate(zip(span.tokens, span.positions())):
            node, path = span.stored + row, []
            if span.parents is None:
                path = list(range(node + 1))
            else:
                while node >= 0:
                    path.append(node)
                    node = span.parents[node]
            given_rows = batch.embed_rows or []
            instead = float(batch.embeds[given_rows.index(offset + row)]) if offset + row in given_rows else None
            result.append((span.key, span.start, token, position, sorted(path), row in span.logits, instead))
    return result


@given(batches(), st.integers(1, 12), st.integers(1, 4))
def test_the_pieces_of_a_batch_are_its_rows(batch, rows, logits):
    pieces = batch.split(rows, logits)
    assert [row for piece in pieces for row in seen(piece)] == seen(batch)
    for piece in pieces:
        assert 1 <= piece.num_rows <= rows
        assert piece.num_logits <= logits
        assert (piece.hidden, piece.layers) == (batch.hidden, batch.layers)
    fed = {span.key: span.stored for span in batch.spans}
    for piece in pieces:
        for span in piece.spans:
            assert span.stored == fed[span.key]
            assert span.parents is None or len(span.parents) == span.stored + span.count
            fed[span.key] += span.count


@pytest.mark.parametrize("shape", [KVShape(1, 64, 64), KVShape(3, 100, 100), KVShape(2, 24, 16)])
def test_attention_s_products_have_row_counts_to_use(shape):
    sizes = tiled.row_sizes(shape, torch.device("cpu"), torch.get_num_threads())
    assert sizes
    assert set(sizes) <= set(tiled.SIZES)
