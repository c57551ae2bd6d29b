"""The path of a GPU on a CPU: kernels under Triton's interpreter, and the rounds around them without a graph."""

import logging

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.attention import triton as attention
from forerun.attention.triton import TritonAttention
from forerun.core.batch import Batch, Span
from forerun.kernels import gpu
from forerun.models import graphs
from forerun.models.base import new_attention
from forerun.models.invariance import self_test
from forerun.models.load import load_model
from tiny import save_checkpoint, tiny_llama

ON_GPU = pytest.mark.elsewhere("the interpreter: lab/benchmarks/gpu_check.py runs on the GPU itself")
pytestmark = [ON_GPU] if torch.cuda.is_available() else []
PROMPTS = [[9, 3, 8, 6, 3, 8], [20, 11]]
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_checkpoint(tiny_llama(**SIZES), tmp_path_factory.mktemp("gpu") / "target")


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("FORERUN_INTERPRET", "1")


def answers(target, **options):
    llm = LLM(target, device="cpu", dtype="float32", max_model_len=64, **options)
    shared = {"seed": 7, "max_tokens": 5, "ignore_eos": True}
    filters = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    params = [SamplingParams(temperature=0.0, **shared), SamplingParams(temperature=0.9, **filters, **shared)]
    result = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.engine.check()
    return llm, [list(ids) for ids in result]


@pytest.mark.parametrize(
    "way", [None, {"method": "draft_model", "tree": [2, 1], "accept": "coupled"}], ids=["plain", "tree"]
)
def test_tokens_are_those_of_the_cpu(target, way, monkeypatch):
    if way is not None and way["method"] == "draft_model":
        way = {**way, "model": target}
    _, expected = answers(target)
    monkeypatch.setenv("FORERUN_INTERPRET", "1")
    llm, got = answers(target, speculative_config=way, page_size=16)
    assert got == expected
    assert llm.engine.model.info.path == "native, triton float32"
    assert isinstance(llm.engine.target.attention, TritonAttention)
    assert llm.engine.identity
    assert llm.engine.model.graphs._graphs


def test_every_row_has_the_bits_of_decoding(target, interpreted):
    model = load_model(target, device="cpu", dtype="float32", invariant=None)
    assert model.invariant
    assert self_test(model, page_size=16, rows=6, chunks=(3,)) == []


@pytest.mark.parametrize("larger", [1, 4], ids=["its bucket", "a larger bucket"])
def test_padding_and_garbage_in_it_change_no_bit(target, interpreted, monkeypatch, larger):
    model = load_model(target, device="cpu", dtype="float32")

    def forward():
        over = new_attention(model, max_seqs=3, max_len=40, page_size=16)
        model.forward(Batch([Span(0, 0, [4, 5, 6, 7]), Span(1, 0, [8])]), over)
        spans = [Span(0, 4, [9, 1, 2], [-1, -1, 0], logits=[0, 1, 2]), Span(1, 1, [3, 2], logits=[0, 1])]
        out = model.forward(Batch(spans, hidden=(1,)), over)
        return [out.logits.clone(), out.hidden[1], *over.pool.keys, *over.pool.values]

    model.graphs.enabled = False
    expected = forward()
    model.graphs.enabled = True
    write, bucket = attention.write_numbers, graphs.bucket

    def spoil(to, batch, tables, sizes):
        generator = torch.Generator().manual_seed(0)
        to[:] = torch.randint(0, 9, (len(to),), generator=generator).numpy()
        kept = to.copy()
        write(to, batch, tables, sizes)
        rows = batch.num_rows
        for name in ("input_ids", "positions"):
            first = [*sizes.fields()].index(name) * sizes.rows
            to[first + rows : first + sizes.rows] = kept[first + rows : first + sizes.rows]

    def wide(sizes):
        return attention.Sizes(*(larger * each for each in vars(bucket(sizes)).values()))

    monkeypatch.setattr(graphs, "write_numbers", spoil)
    monkeypatch.setattr(graphs, "bucket", wide)
    got = forward()
    assert [key[0].rows for key in next(iter(model.graphs._graphs.values()))] == [8 * larger]
    assert all(map(torch.equal, got, expected))


def test_no_memory_for_a_graph_is_said_once_and_loses_nothing(target, interpreted, monkeypatch, caplog):
    def fail(self, body):
        raise torch.OutOfMemoryError("CUDA out of memory")

    expected = answers(target)[1]
    monkeypatch.setattr(graphs.Graphs, "_record", fail)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert answers(target)[1] == expected
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message] == [
        "no GPU memory for CUDA graphs: rounds run without them, slower; "
        "lower gpu_memory_utilization or kv_cache_memory"
    ]


def test_enforce_eager(target, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "forerun"):
        LLM(target, device="cpu", enforce_eager=True)
    assert "enforce_eager says nothing here: no round uses CUDA graphs" in caplog.messages
    monkeypatch.setenv("FORERUN_INTERPRET", "1")
    assert not LLM(target, device="cpu", enforce_eager=True).engine.model.graphs.enabled


@pytest.mark.parametrize("kind", ["int8_rows", "q4_0"])
def test_quantized_while_it_is_loaded(target, kind, monkeypatch):
    def logits():
        model = load_model(target, device="cpu", dtype="float32", quantization=kind)
        batch = Batch([Span(0, 0, [4, 5, 6], logits=[2])])
        return model.info.path, model.forward(batch, new_attention(model, max_seqs=1, max_len=20)).logits

    _, expected = logits()
    monkeypatch.setenv("FORERUN_INTERPRET", "1")
    path, got = logits()
    assert path == f"native, {'int8 by rows' if kind == 'int8_rows' else 'Q4_0'}"
    assert (got - expected).norm() < 0.05 * expected.norm()  # on a CPU, activations have 8 bits too


@pytest.mark.parametrize(
    ("has_triton", "capability", "reason"),
    [
        (True, (8, 0), None),
        (True, (7, 5), "need compute capability 8.0, and this GPU has 7.5"),
        (False, (9, 0), "pip install triton"),
    ],
)
def test_gpus_that_our_kernels_do_not_serve(has_triton, capability, reason):
    got = gpu.refusal(has_triton, capability)
    assert got is None if reason is None else reason in got
