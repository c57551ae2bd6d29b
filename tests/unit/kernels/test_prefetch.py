"""How weights are prefetched, and whether the matrix unit multiplies: measured once, and no bits change."""

import ctypes
import random

import pytest
import torch

from forerun import kernels
from forerun.core import tiles
from forerun.kernels import structs
from forerun.models.formats import NUMBERS, ON_CPU, prefetch
from forerun.models.formats.compiled import Compiled, Joined
from forerun.models.load import load_model
from here import where

COMPILED = where(kernels.library() is not None, ["streamed", *ON_CPU])
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))


@pytest.fixture(autouse=True)
def as_before():
    yield
    for kind in range(len(structs.KINDS) if kernels.library() is not None else 0):
        prefetch.set_prefetch(kind, [prefetch.FAR if rows > 5 else prefetch.NEAR for rows in prefetch.COUNTS])


def layer(form, outputs=96, inputs=512):
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = (NUMBERS[form] if form in NUMBERS else ON_CPU[form]).make(weight, None)
    assert isinstance(made, Compiled)
    return made


def kind_of(made):
    return made.fields().kind


@pytest.mark.parametrize("form", COMPILED)
def test_no_bits_depend_on_it(form):
    made, x = layer(form), torch.randn(ROWS[-1], 512).bfloat16()
    result = []
    for way in prefetch.ways(kind_of(made)):
        prefetch.set_prefetch(kind_of(made), [way] * len(prefetch.COUNTS))
        result.append([made(x[:count]) for count in ROWS])
    for others in result[1:]:
        assert all(map(torch.equal, others, result[0]))


def timed(monkeypatch, made, seconds, *, tiled=False):
    """Kernels that take ``seconds(rows, way)`` of a clock of their own; returns the way of each row count."""
    now, asked = [0.0], {}

    class Library:
        tiles = tiled

        @staticmethod
        def set_prefetch(kind, rows, way):
            assert kind == kind_of(made)
            asked[rows] = way

    def run(self, x, y, add, rows, stride):
        assert x.shape == (rows, made.inputs)
        ctypes.memset(y, 0, rows * stride * x.element_size())  # all ways write the same bits
        now[0] += seconds(rows, asked[rows])

    monkeypatch.setattr(kernels, "library", Library)
    monkeypatch.setattr(type(made), "run", run)
    monkeypatch.setattr(prefetch, "perf_counter", lambda: now[0])
    return asked


@pytest.mark.parametrize("form", COMPILED[:1])
def test_the_fastest_way_is_taken_for_each_count(form, monkeypatch):
    made = layer(form)
    asked = timed(monkeypatch, made, lambda rows, way: 1 if way == rows % 3 else 2)
    assert prefetch._measure(kind_of(made), [made], torch.bfloat16) == [rows % 3 for rows in prefetch.COUNTS]
    prefetch.set_prefetch(kind_of(made), range(len(prefetch.COUNTS)))
    assert sorted(asked) == list(range(1, 33))
    assert [asked[rows] for rows in (1, 8, 9, 11, 12, 15, 16, 17, 31, 32)] == [0, 7, 7, 7, 8, 8, 9, 10, 10, 11]


@pytest.mark.parametrize(("many", "ways"), [(0.9, [prefetch.TILED] * 4), (0.98, [prefetch.NEAR] * 4)])
@pytest.mark.parametrize("form", COMPILED[1:2])
def test_a_matrix_unit_that_gains_at_32_rows_is_taken_in_a_tie_from_12_on(form, many, ways, monkeypatch):
    made = layer(form)
    timed(
        monkeypatch,
        made,
        lambda rows, way: (many if rows == 32 else 1.02) if way == prefetch.TILED else 1.0,
        tiled=True,
    )
    assert prefetch._measure(kind_of(made), [made], torch.bfloat16) == [prefetch.NEAR] * 8 + ways


@pytest.mark.parametrize("form", COMPILED[:1])
def test_what_a_busy_machine_decided_is_used_but_not_kept(form, monkeypatch, tmp_path):
    """One way was fast once, and is slow usually."""
    made, calls, told = layer(form), {}, []

    def seconds(rows, way):
        calls[rows, way] = calls.get((rows, way), 0) + 1
        return (0.5 if calls[rows, way] % 3 == 1 else 1.3) if way == prefetch.FAR and rows == 4 else 1.0

    timed(monkeypatch, made, seconds)
    monkeypatch.setattr(prefetch, "ENOUGH", 1)
    monkeypatch.setattr(prefetch, "set_prefetch", lambda kind, ways: told.append(list(ways)))
    for _ in range(2):
        prefetch.autotune([made], torch.bfloat16)
    assert told == [[prefetch.FAR if rows == 4 else prefetch.NEAR for rows in prefetch.COUNTS]] * 2
    assert not list(tmp_path.glob("tiles/*"))
    timed(monkeypatch, made, lambda rows, way: 1.0)
    prefetch.autotune([made], torch.bfloat16)
    assert list(tmp_path.glob("tiles/*"))


@pytest.mark.parametrize(("far", "way"), [(0.98, prefetch.NEAR), (0.9, prefetch.FAR)])
@pytest.mark.parametrize("form", COMPILED[:1])
def test_a_busy_machine_does_not_decide(form, far, way, monkeypatch):
    """Each call may take three times as long; a gain of 2 % is not believed."""
    made, draw = layer(form), random.Random(0)
    usual = {prefetch.NOTHING: 0.99, prefetch.NEAR: 1.0, prefetch.FAR: far}
    timed(monkeypatch, made, lambda rows, way: usual[way] * draw.choice([1, 1, 2, 3]))
    monkeypatch.setattr(prefetch, "SECONDS", 1000)
    assert prefetch._measure(kind_of(made), [made], torch.bfloat16) == [way] * len(prefetch.COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("form", COMPILED[:2])
def test_it_is_measured_once_for_each_kind(form, monkeypatch, listen):
    made, asked = layer(form), []
    monkeypatch.setattr(prefetch, "ENOUGH", made.nbytes)
    monkeypatch.setattr(prefetch, "COUNTS", (2, 3))
    listen(prefetch, "_measure", lambda kind, parts, dtype: asked.append((kind, len(parts))))
    both = Joined([made, layer(form, 64)])
    for _ in range(2):
        prefetch.autotune([both, made], torch.bfloat16)
    assert asked == [(kind_of(made), 3)]
    if made.dtype is None:
        prefetch.autotune([made], torch.float32)
        assert len(asked) == 2


@pytest.mark.parametrize("dtype", where(kernels.library() is not None, ["bfloat16", "float32"]))
def test_a_model_asks_as_was_found(dtype, monkeypatch):
    result, told = [rows % 3 for rows in prefetch.COUNTS], []
    monkeypatch.setattr(prefetch, "_measure", lambda *_: result)
    monkeypatch.setattr(prefetch, "set_prefetch", lambda kind, ways: told.append((structs.KINDS[kind], ways)))
    for _ in range(2):  # measured, remembered
        load_model("forerun:target", dtype=dtype)
    assert told == [("own", result)] * 2


@pytest.mark.parametrize("form", COMPILED[:1])
def test_what_may_stay_in_a_cache_is_left_alone(form, monkeypatch):
    monkeypatch.setattr(tiles, "measured_once", lambda *_: pytest.fail("measured"))
    prefetch.autotune([layer(form)], torch.bfloat16)
