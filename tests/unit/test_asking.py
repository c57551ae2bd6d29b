"""From how many rows weights are asked for far ahead: measured once, and of no consequence for any bit."""

from __future__ import annotations

import pytest
import torch

from forerun import kernels
from forerun.core import tiles
from forerun.kernels import structs
from forerun.models.formats import FLOATS, ON_CPU, asking
from forerun.models.formats.compiled import Compiled, Joined
from here import where

COMPILED = where(kernels.library() is not None, ["streamed", *ON_CPU])
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))


@pytest.fixture(autouse=True)
def as_before():
    yield
    library = kernels.library()
    for kind in range(len(structs.KINDS) if library is not None else 0):
        library.ask_far(kind, 6)


def layer(form: str, outputs: int = 96, inputs: int = 512) -> Compiled:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = (FLOATS[form] if form in FLOATS else ON_CPU[form]).make(weight, None)
    assert isinstance(made, Compiled)
    return made


def kind_of(made: Compiled) -> int:
    return made.fields().kind


@pytest.mark.parametrize("form", COMPILED)
def test_no_bits_depend_on_it(form):
    made, x = layer(form), torch.randn(ROWS[-1], 512).bfloat16()
    found = []
    for rows in (1, 4, asking.NEVER):
        kernels.library().ask_far(kind_of(made), rows)
        found.append([made(x[:count]) for count in ROWS])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def test_one_disturbed_count_does_not_decide():
    near = {2: 1.0, 4: 1.0, 6: 1.5, 8: 2.0, 16: 4.0}
    far = {2: 1.3, 4: 1.1, 6: 1.2, 8: 1.4, 16: 2.8}
    assert asking.first_far(near, far) == 6
    assert asking.first_far({**near, 8: 1.3}, far) == 6
    assert asking.first_far(near, {**far, 2: 0.95}) == 6
    assert asking.first_far(near, {count: 2 * seconds for count, seconds in near.items()}) == asking.NEVER
    assert asking.first_far(near, {count: seconds / 2 for count, seconds in near.items()}) == 2
    assert asking.first_far(near, near) == asking.NEVER


@pytest.mark.parametrize("form", COMPILED[:2])
def test_it_is_measured_once_for_each_kind(form, monkeypatch):
    made, asked = layer(form), []
    monkeypatch.setattr(asking, "ENOUGH", made.nbytes)
    monkeypatch.setattr(asking, "COUNTS", (2, 3))
    measure = asking._measure

    def counted(kind, parts, dtype):
        asked.append((kind, len(parts)))
        return measure(kind, parts, dtype)

    monkeypatch.setattr(asking, "_measure", counted)
    both = Joined([made, layer(form, 64)])
    for _ in range(2):
        asking.settle([both, made], torch.bfloat16)
    assert asked == [(kind_of(made), 3)]
    if made.dtype is None:
        asking.settle([made], torch.float32)
        assert len(asked) == 2


@pytest.mark.parametrize("form", COMPILED[:1])
def test_what_may_stay_in_a_cache_is_left_alone(form, monkeypatch):
    monkeypatch.setattr(tiles, "remembered", lambda *_: pytest.fail("measured"))
    asking.settle([layer(form)], torch.bfloat16)


@pytest.mark.parametrize("text", ["", "[[1]]", "5", "true", '"6"', "-1", "1e3"])
@pytest.mark.parametrize("form", COMPILED[:1])
def test_a_damaged_memory_is_made_anew(form, text, monkeypatch, tmp_path):
    made = layer(form)
    monkeypatch.setattr(asking, "ENOUGH", 1)
    monkeypatch.setattr(asking, "_measure", lambda *_: 12)
    asking.settle([made], torch.bfloat16)
    (path,) = (tmp_path / "tiles").iterdir()
    path.write_text(text)
    monkeypatch.setattr(asking, "COUNTS", (4, 12))
    asking.settle([made], torch.bfloat16)
    assert path.read_text() == "12"
