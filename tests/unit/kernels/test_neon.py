"""The kernels for ARM, under an emulator, give the bits of those for x86-64 by the same compiler."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch

import emulated
from built import bound
from forerun import kernels
from forerun.kernels import structs
from forerun.models.formats.blocks import Blocked
from forerun.models.formats.int8 import TiledInt8
from forerun.models.formats.tiled import TiledLinear
from forerun.models.load import load_model
from forerun.sampling import compiled
from forerun.sampling.params import SamplingParams
from gguf_files import weights
from here import where
from modules import logits_of
from refusals import refused

ROWS, OUTPUTS, INPUTS, WORDS = 33, 50, 768, 1003
KINDS = ("float32", "bfloat16", "float16", "int8", *structs.QUANTS)
FORMS = where(emulated.can_emulate(), emulated.PROCESSORS, emulated.LACKING)
NEEDS = {"neon_dotprod": ("neon", 1), "neon_i8mm": ("neon_dotprod", 2)}
"""By form: another one whose processor lacks what this form is for, and from how many rows on layers need that."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.parametrize("form", FORMS, scope="module")]


@pytest.fixture(scope="module")
def plain():
    return bound(emulated.build("avx2", "manylinux_2_28_x86_64"))


@pytest.fixture(scope="module")
def arm(form):
    result = emulated.emulate(form)
    yield result
    result.close()


@pytest.fixture
def both(plain, arm, monkeypatch):
    """What a function gives with the kernels for x86-64, and with those for ARM."""

    def run(make):
        results = []
        for library in (plain, arm):
            monkeypatch.setattr(kernels, "library", lambda library=library: library)
            torch.manual_seed(0)
            results.append(make())
        return results[0], results[1]

    return run


def same(expected, got):
    """Every bit but a NaN's, which has another sign."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def layer(kind):
    if kind in structs.QUANTS:
        return Blocked(weights("iq3_s" if kind == "codes" else kind, OUTPUTS, INPUTS), torch.randn(OUTPUTS))
    weight, bias = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    if kind == "int8":
        return TiledInt8(weight, bias, kind)
    dtype = getattr(torch, kind)
    return TiledLinear(weight.to(dtype), bias.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_for_every_number_of_rows(both, kind):
    own = getattr(torch, kind, None)
    for dtype in [own] if isinstance(own, torch.dtype) and own.is_floating_point else [torch.float32, torch.bfloat16]:
        x, parts = torch.randn(ROWS, INPUTS).mul(3).to(dtype), []
        x[1], x[7, 5], x[9, 700], x[11] = 0, torch.nan, torch.inf, 1e-35

        def run(dtype=dtype, x=x, parts=parts):
            made, ids = layer(kind), torch.tensor([0, 17, OUTPUTS - 1])
            parts.append([made(x[:rows]) for rows in range(1, ROWS + 1)])
            rows = [] if kind == "int8" else [made.rows(ids, dtype)]
            return [made(x), made(x, torch.ones(ROWS, OUTPUTS, dtype=dtype)), *rows]

        expected, got = both(run)
        same(expected, got)
        for rows, part in enumerate(parts[1], 1):
            same(expected[0][:rows], part)


@pytest.mark.parametrize("kind", ["int8", *structs.QUANTS])
def test_layers_use_what_a_form_is_for(form, kind, monkeypatch):
    """``sdot``, and ``smmla`` for two rows and more: an illegal instruction where there is none."""
    processor, rows = NEEDS.get(form, (form, 3))
    library = emulated.emulate(form, processor)
    monkeypatch.setattr(kernels, "library", lambda: library)
    made, x = layer(kind), torch.randn(rows, INPUTS)
    for fewer in range(1, rows):
        made(x[:fewer])
    if form in NEEDS:
        refused(pytest.fail.Exception, f"ended with -{signal.SIGILL}", made, x)
    library.close()


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(both, threads):
    def run(count):
        made, x = layer("q4_0"), torch.randn(ROWS, INPUTS)
        with kernels.on_threads(count):
            result = [made(x) for _ in range(10)]
        kernels.library().stop_threads()
        return result

    expected, _ = both(lambda: run(1))
    same(expected, both(lambda: run(threads))[1])


def test_thousands_of_starts_and_forks(form):
    program = emulated.program("c++", Path(emulated.__file__).with_name("threads.cpp"), kernels.HERE / "threads.cpp")
    subprocess.run(emulated.command(emulated.PROCESSORS[form], program, 1000), check=True, timeout=600)


MODELS = {
    "neon": [("float32", None), ("bfloat16", "q4_k")], "neon_dotprod": [("bfloat16", None), ("float32", "int8_rows")],
    "neon_i8mm": [("float32", "int8_rows"), ("bfloat16", "q4_k")],
}  # fmt: skip
"""By form, dtypes and forms of the weights: what no form is for is compiled alike in all."""


@pytest.mark.parametrize("which", [0, 1])
def test_a_whole_model(form, both, which):
    dtype, quantization = MODELS[form][which]
    ids = [(31 * index + 7) % 1000 for index in range(20)]

    def run():
        model = load_model("forerun:target", dtype=dtype, invariant=True, quantization=quantization)
        assert model.fused is not None
        return [logits_of(model, ids, cuts) for cuts in ([], [*range(1, 6), 12])]

    (expected, _), got = both(run)
    for result in got:
        same(expected, result)


def test_sampling(both):
    scores, other = torch.randn(7, WORDS) * 4, torch.randn(7, WORDS)
    scores[2, 5], scores[3, :900], scores[4] = torch.nan, -torch.inf, 0.25
    words, q = torch.arange(WORDS, dtype=torch.int32) * 0x2545F491, other.softmax(1)
    shares = [0.05, 1, 0, 0.9, 0, 1] + [0, 0.3] * 4
    text, params = [5, 9, 9, 700, 5], SamplingParams(repetition_penalty=1.3, presence_penalty=0.4)
    trials, tokens = [0, 1, 5], [3, 4, 5]

    def run():
        sampling, row = compiled.CompiledSampling(words), other[0].clone()
        compiled.penalise(row, text, 2, params)
        ids, logs = torch.empty(3, 6, dtype=torch.int32), torch.empty(3, 6)
        sampling.rank(other, trials, [2, 0, 1], ids, logs)
        at = [q[2].data_ptr(), 0, q[4].data_ptr()]
        weighed = sampling.weigh(other, [row == 5 for row in range(7)], trials, tokens, at, [False, True, False], 0.9)
        return [
            sampling.noise([1, 2**63 + 5], WORDS),
            *sampling.choose(scores, [1, None, 7, 8, None, 1 << 40, 3], True),
            sampling.draw(scores.softmax(1).nan_to_num(), [0.1, 0.5, 0.5, 0.999999, 0.25, 0.0, 1.0]),
            compiled.restrict(other, [0.7, 1, 2, 0, 0.1, 1, 1], shares, [0, 20, 0, 5] + [WORDS] * 3),
            sampling.overlaps(other, trials, tokens, [q[1], None, q[3]]),
            *[row, ids, logs, weighed.residual, weighed.tops, weighed.weights, weighed.left, weighed.shared],
        ]

    expected, got = both(run)
    same(expected, got)
