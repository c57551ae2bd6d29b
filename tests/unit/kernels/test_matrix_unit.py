"""Layers whose products the matrix unit makes, with that unit written out in plain code: it need not be here."""

import ctypes
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from built import kept, kernels_for, torch_threads
from forerun import kernels
from forerun.kernels import structs
from forerun.models.formats import ON_CPU, prefetch
from forerun.models.formats.blocks import Blocked
from forerun.models.formats.compiled import Compiled
from forerun.models.formats.gguf_types import sizes
from forerun.models.formats.tiled import TiledLinear
from forerun.models.load import load_model
from gguf_files import FORMS as FILES
from gguf_files import weights
from here import where
from modules import logits_of


def units():
    return kernels._cpu_features() if kernels.library() is not None else frozenset()


HAS_BFLOATS = units() >= {"avx512_vnni", "avx512_bf16"}
NO_BFLOATS = "no products of bfloat16 on this processor"
HERE = where(kernels.library() is not None, [1])
FORMS = [*ON_CPU]
BFLOATS = where(HAS_BFLOATS, ["bfloat16"], NO_BFLOATS)
ROWS = (0, 1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 40, 47, 49, 100, 300)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("here", HERE)]


@pytest.fixture(scope="module")
def written_out():
    return kernels_for("-march=native", "-DTILES_WRITTEN_OUT")


@pytest.fixture(autouse=True)
def unit(here, written_out, monkeypatch):
    assert written_out.tiles
    monkeypatch.setattr(kernels, "library", lambda: written_out)


def products():
    """Made by the unit so far."""
    return ctypes.c_int64.in_dll(kernels.library(), "tile_products").value


def use(layer, way):
    assert isinstance(layer, Compiled)
    prefetch.set_prefetch(layer.fields().kind, [way] * len(prefetch.COUNTS))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 512), (50, 100), (7, 1), (33, 90), (16, 260)])
def test_whole_numbers_add_up_to_the_same_bits(form, outputs, inputs):
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    layer, x = ON_CPU[form].make(weight, bias), torch.randn(ROWS[-1], inputs) * 3
    x[1], x[4] = 0, x[4].sign()
    for dtype in (torch.float32, torch.bfloat16):
        use(layer, prefetch.NEAR)
        before = products()
        expected = layer(x.to(dtype))
        assert products() == before
        use(layer, prefetch.TILED)
        for rows in ROWS:
            before = products()
            assert torch.equal(layer(x[:rows].to(dtype)), expected[:rows]), rows
            assert (products() > before) is (rows > 0)


@pytest.mark.parametrize("form", ["int8_rows", "q4_1", "q4_k"])
def test_what_is_not_finite_stays_in_its_row(form):
    layer, x = ON_CPU[form].make(torch.randn(40, 96), None), torch.randn(20, 96)
    use(layer, prefetch.TILED)
    expected = layer(x)
    x[3, 5], x[11, 90] = float("nan"), float("inf")
    got = layer(x)
    assert not got[[3, 11]].isfinite().any()
    kept = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(got[kept], expected[kept])


def as_the_manual_has_it(weight, x):
    """Sums of 32 products, those of even and those of odd inputs apart, rounded to float32 after each, where
    denormal numbers are zero. Products of bfloat16 are exact in float64, and so nearly always are their sums with a
    float32."""

    def rounded(sums):
        result = sums.astype(np.float32)
        return np.where(np.abs(result) < np.finfo(np.float32).tiny, np.float32(0), result)

    rows, outputs = len(x), len(weight)
    padded = -(-x.shape[1] // 32) * 32
    w, v = np.zeros((outputs, padded)), np.zeros((rows, padded))
    w[:, : weight.shape[1]], v[:, : x.shape[1]] = weight.double().numpy(), x.double().numpy()
    total = np.zeros((rows, outputs), np.float32)
    for start in range(0, padded, 32):
        parts = np.zeros((2, rows, outputs), np.float32)
        for i in range(start, start + 32):
            parts[i % 2] = rounded(parts[i % 2].astype(np.float64) + v[:, i, None] * w[:, i])
        total = rounded(total + rounded(parts[0] + parts[1]))
    return total


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 512), (50, 100), (7, 2), (33, 90), (5, 33)])
@pytest.mark.parametrize(
    "size", where(HAS_BFLOATS, [1, 2.0**-62], NO_BFLOATS)
)  # products of the latter are about the smallest normal number
def test_bfloat16_rounds_as_the_unit_does_for_every_number_of_rows(outputs, inputs, size):
    torch.manual_seed(0)
    weight, x = (size * torch.randn(rows, inputs).bfloat16() for rows in (outputs, ROWS[-1]))
    layer = TiledLinear(weight, None)
    expected = torch.from_numpy(as_the_manual_has_it(weight, x)).bfloat16()
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows
        assert torch.equal(layer(x[len(x) - rows :]), expected[len(x) - rows :]), rows


@pytest.mark.parametrize("kind", FILES)
def test_what_files_hold_adds_up_to_the_same_bits(kind):
    torch.manual_seed(0)
    layer, x = Blocked(weights(kind, 50, 768), None), torch.randn(ROWS[-1], 768)
    use(layer, prefetch.NEAR)
    expected, before = layer(x), products()
    use(layer, prefetch.TILED)
    for rows in ROWS:
        assert torch.equal(layer(x[len(x) - rows :]), expected[len(x) - rows :]), rows
    assert products() > before


@pytest.mark.parametrize("kind", FILES)
def test_rows_of_any_length_are_multiplied_piece_by_piece(kind):
    size, _ = sizes(kind)
    for blocks in (1, 3, 9) if size == 256 else (1, 2, 3, 5, 31, 33, 66, 73):
        layer, x = Blocked(weights(kind, 20, blocks * size), None), torch.randn(50, blocks * size)
        use(layer, prefetch.NEAR)
        expected = layer(x)
        use(layer, prefetch.TILED)
        for rows in (1, 8, 9, 17, 50):
            assert torch.equal(layer(x[:rows]), expected[:rows]), (blocks, rows)


@pytest.mark.parametrize("form", ["int8_rows", "q4_0", "q4_k", *BFLOATS])
def test_threads_change_no_bit(form):
    torch.manual_seed(0)
    weight = torch.randn(200, 512)
    layer = TiledLinear(weight.bfloat16(), None) if form == "bfloat16" else ON_CPU[form].make(weight, None)
    use(layer, prefetch.NEAR if form == "bfloat16" else prefetch.TILED)
    x = torch.randn(70, 512).bfloat16()
    with torch_threads(1):
        expected = layer(x)
    with torch_threads(2):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("quantization", [*where(HAS_BFLOATS, [None], NO_BFLOATS), "q4_k"])
def test_a_whole_model_has_the_same_bits_in_any_chunks(quantization):
    model = load_model("forerun:target", dtype="bfloat16", invariant=True, quantization=quantization)
    assert model.fused is not None
    for kind in range(1, len(structs.KINDS)):
        prefetch.set_prefetch(kind, [prefetch.TILED] * len(prefetch.COUNTS))
    ids = [(31 * index + 7) % 1000 for index in range(24)]
    before = products()
    expected = logits_of(model, ids)
    assert products() > before
    assert torch.equal(logits_of(model, ids, [1, *range(20, 24)]), expected)
    assert torch.equal(logits_of(model, ids, [17]), expected)


def test_it_can_be_switched_off(written_out):
    command = [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({written_out._name!r}).forerun_tiles())"]
    for said, expected in (("0", "0"), ("1", "1"), ("", "1")):
        around = {**os.environ, "FORERUN_TILES": said}
        result = subprocess.run(command, check=True, capture_output=True, text=True, env=around)
        assert result.stdout.strip() == expected


def test_a_unit_that_adds_up_wrongly_is_not_used(monkeypatch, caplog):
    layer = ON_CPU["int8_rows"].make(torch.randn(64, 128), None)
    layer(torch.randn(1, 128))  # it looks its kernel up once
    kind, asked, run = layer.fields().kind, [], type(layer).run

    def wrong(self, x, y, add, rows, stride):
        run(self, x, y, add, rows, stride)
        if asked[-1] == prefetch.TILED:
            ctypes.c_float.from_address(y).value += 1

    class Library:
        tiles = True

        @staticmethod
        def set_prefetch(kind, rows, way):
            asked.append(way)

    monkeypatch.setattr(type(layer), "run", wrong)
    monkeypatch.setattr(kernels, "library", lambda: Library)
    monkeypatch.setattr(prefetch, "SECONDS", 0)
    assert prefetch.TILED not in prefetch._measure(kind, [layer], torch.float32)
    assert "matrix unit" in caplog.text


@pytest.mark.parametrize(("part", "word"), [("linear", "tdpbf16ps"), ("q4_0", "tdpbsud"), ("q4_k", "tdpbsud")])
def test_the_words_of_the_unit_itself_compile(part, word):
    around = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    flags = [*kernels.VARIANTS["avx512_amx"][1], "-O1", "-std=c++17", "-fopenmp", "-S"]
    unit = kernels.units_of(part)[0] if part in structs.QUANTS else [str(kernels.HERE / f"{part}.cpp")]
    command = [*kernels.compiler(), *flags, *unit]

    def make(to):
        subprocess.run([*command, "-o", str(to)], check=True, capture_output=True, env=around)

    assert {word, "tilerelease"} <= set(re.findall(r"\w+", kept(make, *flags, part).read_text(encoding="utf-8")))
