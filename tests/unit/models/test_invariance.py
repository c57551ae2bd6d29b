"""A row's bits do not depend on what it is computed beside."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from built import torch_threads
from forerun.core import tiles
from forerun.core.batch import Batch, Output, Span
from forerun.models.formats import plain
from forerun.models.formats.plain import can_pack
from forerun.models.formats.tiled import can_tile
from forerun.models.load import load_model
from forerun.models.run import invariance
from forerun.models.run.base import new_attention
from forerun.models.run.hf import HFModel
from forerun.models.run.invariance import self_test
from forerun.models.weights import tiling
from here import NO_PACKING, where
from modules import native, requested

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 352, "max_position_embeddings": 1024,
}  # fmt: skip
CHUNKS = (5, 33, 65)
"""Rows a call; the command's self-test has more."""
ROWS = 90
FAR = 275
"""Past the end of a block of keys, with room for a tree behind it."""


def build(kind="llama", dtype=torch.float32, invariant=True, width=64, **options):
    torch.manual_seed(0)
    if kind == "qwen3":
        module = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))
    else:
        config = LlamaConfig(**SIZES, head_dim=width)
        module = LlamaForCausalLM._from_config(config, attn_implementation="forerun" if kind == "hf" else "sdpa")
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    module, options = module.to(dtype).eval(), {"invariant": invariant, **options}
    return HFModel(module, requested(dtype, **options)) if kind == "hf" else native(module, **options)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [(kind, dtype, how) for kind in ("llama", "hf") for dtype in DTYPES for how in ("plain", "packed", "streamed")]
CASES += [("qwen3", dtype, "auto") for dtype in DTYPES]
PACKED, STREAMED = ([case for case in CASES if case[2] == how] for how in ("packed", "streamed"))
CASES = [case for case in CASES if case[2] in ("plain", "auto")]
CASES += where(lambda case: can_pack(case[1]), PACKED, NO_PACKING) + where(lambda case: can_tile(case[1]), STREAMED)


def name_of(value):
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("kind", "dtype", "how"), CASES, ids=name_of)
def test_every_way_of_feeding_gives_the_bits_of_decoding(kind, dtype, how):
    assert self_test(build(kind, dtype, weights=how), page_size=16, rows=ROWS, chunks=CHUNKS) == []


@pytest.mark.parametrize(("attention", "page_size"), [("torch's", None), ("torch's", 16), ("ours", None)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_of_feeding_through_torchs_attention_and_without_pages(monkeypatch, dtype, attention, page_size):
    """Torch's knows nothing of how the weights are held."""
    if attention == "torch's":
        monkeypatch.setattr("forerun.models.run.base.can_attend", lambda *_: False)
    assert self_test(build("qwen3", dtype), page_size=page_size, rows=ROWS, chunks=CHUNKS) == []


@pytest.mark.usefixtures("cpu_attention")
@pytest.mark.parametrize("page_size", [None, 16])
def test_across_blocks_of_keys(page_size):
    assert self_test(build("qwen3"), page_size=page_size, rows=FAR, chunks=CHUNKS) == []


@pytest.mark.parametrize(("dtype", "width"), [*zip(DTYPES, (40, 100, 120))])
def test_head_widths_that_are_no_power_of_two(dtype, width):
    assert self_test(build("llama", dtype, width=width), rows=ROWS, chunks=CHUNKS) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_whatever_the_number_of_threads_when_it_was_loaded(threads):
    model = build(weights="plain")
    with torch_threads(threads):
        assert self_test(model, rows=20, chunks=(5,)) == []
        assert model.tiles.threads == threads


def test_the_self_test_reports_a_dependence():
    class Leaky:
        """Adds to every row something that depends on how many rows there are."""

        def __init__(self, model):
            self.model, self.info = model, model.info
            self.invariant, self.tiles = True, model.tiles

        def forward(self, batch, attention):
            out = self.model.forward(batch, attention)
            return Output(out.logits + (1e-6 * (batch.num_rows > 64)))

    result = {finding.way: finding for finding in self_test(Leaky(build()), rows=150)}
    assert {"65 rows a call", "all rows in one call"} <= set(result)
    assert result["65 rows a call"].differing == 130
    assert "64 rows a call" not in result
    assert "130 of 150 rows differ" in str(result["65 rows a call"])


def test_the_self_test_sees_one_row_of_hundreds(monkeypatch):
    class Leaky:
        """Changes a row of few texts, unless it is fed alone."""

        def __init__(self, model):
            self.model, self.info, self.invariant, self.tiles = model, model.info, True, model.tiles

        def forward(self, batch, attention):
            logits, span = self.model.forward(batch, attention).logits.clone(), batch.spans[0]
            for index, token in enumerate(span.tokens if batch.num_rows > 1 and span.parents is None else ()):
                if (31 * token + 17 * (span.start + index)) % 499 == 1:
                    logits[index] += 1e-6
            return Output(logits)

    model = Leaky(small(torch.float32, biases=False))
    monkeypatch.setattr(invariance, "ROWS", 60)
    assert self_test(model, rows=60) == []
    found = {finding.way: finding for finding in self_test(model)}["all rows in one call"]
    assert (found.rows, 0 < found.differing < 10) == (16 * 60, True)


@pytest.mark.parametrize("longest", [1, 2, 3, 9, 32])
def test_a_context_shorter_than_the_probe(longest):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": longest})
    assert self_test(native(LlamaForCausalLM(config), invariant=True)) == []


def summed(x, weight):
    """A matrix product that adds up every number by itself, in an order that no other row changes, on any processor."""
    return (x[:, None] * weight).sum(-1)


class Depends(plain.Plain):
    """A layer that adds up in another order from so many rows on, or only in the last of its rows."""

    def __call__(self, x, add=None):
        y = summed(x, self.numbers)
        some = x.shape[1] * 3 // 7
        other = summed(x[:, :some], self.numbers[:, :some]) + summed(x[:, some:], self.numbers[:, some:])
        if self.where == "many rows" and len(x) >= 24:
            y = other
        elif self.where == "the last row" and len(x) >= 24:
            y[-1] = other[-1]
        return y if add is None else y.add_(add)

    where = "nowhere"


@pytest.mark.parametrize(("dtype", "index"), [(torch.float32, "many rows"), (torch.float16, "the last row")])
def test_row_counts_that_disagree_are_not_used(monkeypatch, tmp_path, dtype, index):
    """Where sizes from 24 on would change bits, they are found out and left alone, and what is left holds."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(plain, "Plain", Depends)
    usual = small(dtype, biases=False)
    assert usual.tiles.rows[-1] == tiles.SIZES[-1]
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(Depends, "where", index)
    model = small(dtype, biases=False)
    assert model.tiles.rows == tuple(size for size in usual.tiles.rows if size < 24)
    assert self_test(model, rows=40, chunks=(5, 33)) == []


@torch.library.custom_op("forerun_tests::folded", mutates_args=())
def folded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product as processors with 16-bit dot products compute it: numbers 32 places apart go to one lane, and lanes
    are added in one order for a single row, in another for several."""
    lanes = (x.float()[:, None] * weight.float()).unflatten(-1, (-1, 32)).sum(-2)
    total = torch.zeros(lanes.shape[:-1])
    for lane in range(32) if len(x) == 1 else reversed(range(32)):
        total += lanes[..., lane]
    return (total if bias is None else total + bias.float()).to(x.dtype)


class Folded(plain.Plain):
    def __call__(self, x, add=None):
        y = folded(x, self.numbers, self.bias)
        return y if add is None else y.add_(add)


def small(dtype, *, biases, seed=0):
    torch.manual_seed(seed)
    sizes = {**SIZES, "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=16, attention_bias=biases, mlp_bias=biases))
    for name, parameter in module.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=1.0 if name.endswith("bias") else 0.3)
    return native(module.to(dtype).eval(), invariant=True, weights="plain")


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_order_in_a_single_row_is_found(monkeypatch, tmp_path, dtype, biases):
    """Where results in 16 bits seldom tell, whatever is added to them."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(plain, "Plain", Folded)
    monkeypatch.setitem(tiling.PRODUCTS, "folded", (0, 1, -1, 2))
    model = small(dtype, biases=biases)
    assert 1 not in model.tiles.rows
    assert model.tiles.rows[-1] == tiles.SIZES[-1]


def test_what_was_found_holds_for_the_same_weights_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    counts = []
    for biases, seed in ((False, 0), (False, 0), (False, 1), (True, 0), (False, 1)):
        small(torch.float16, biases=biases, seed=seed)
        counts.append(len([*(tmp_path / "tiles").iterdir()]))
    assert [count - counts[0] for count in counts] == [0, 0, 2, 4, 4]  # layers and output layer


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("experts"))
    torch.manual_seed(0)
    config = AutoConfig.for_model("olmoe", **SIZES, num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_mixture_of_experts_of_transformers_keeps_the_bits_of_single_rows_only(experts):
    with pytest.warns(RuntimeWarning, match="invariant mode is off: in OlmoeForCausalLM"):
        model = load_model(experts, invariant=None)
    assert not model.invariant
    model = load_model(experts, invariant=True)
    assert model.tiles.together == 1
    assert self_test(model, rows=60, chunks=CHUNKS) == []


def test_what_was_found_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    expected = build(weights="plain").tiles
    assert len([*(tmp_path / "tiles").iterdir()]) >= 2
    monkeypatch.setattr(tiles, "compare", lambda *_: pytest.fail("found again"))
    assert build(weights="plain").tiles == expected


def test_off_by_request_nothing_is_padded():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(invariant=False, weights="plain")
    assert model.tiles is None
    attention, met = new_attention(model, max_seqs=1, max_len=16), []
    layer = model._layers[0].qkv
    model._layers[0].qkv = lambda x: (met.append(len(x)), layer(x))[1]
    model.forward(Batch([Span(0, 0, [1, 2, 3], logits=[2])]), attention)
    model.forward(Batch([Span(0, 3, [4], logits=[0])]), attention)
    assert met == [3, 1]
