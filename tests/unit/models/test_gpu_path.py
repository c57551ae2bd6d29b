"""The path of a GPU on a CPU: kernels under Triton's interpreter, and the rounds around them without a graph."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.attention import triton as attention
from forerun.attention.triton import TritonAttention
from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError, ModelError
from forerun.kernels import gpu
from forerun.models.load import load_model, parse_device
from forerun.models.run import graphs
from forerun.models.run.base import new_attention
from forerun.models.run.fused import RAW
from forerun.models.run.invariance import self_test
from forerun.speculate.draft import drafters
from refusals import refused
from tiny import save_checkpoint, tiny_llama
from tiny_seq2seq import save_seq2seq

ON_GPU = pytest.mark.elsewhere("the interpreter: lab/benchmarks/gpu_check.py runs on the GPU itself")
pytestmark = [ON_GPU] if torch.cuda.is_available() else []
PROMPTS = [[9, 3, 8, 6, 3, 8], [20, 11]]
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_checkpoint(tiny_llama(**SIZES), tmp_path_factory.mktemp("gpu") / "target")


def answers(target, **options):
    llm = LLM(target, device="cpu", dtype="float32", max_model_len=64, **options)
    shared = {"seed": 7, "max_tokens": 5, "ignore_eos": True}
    filters = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    params = [SamplingParams(temperature=0.0, **shared), SamplingParams(temperature=0.9, **filters, **shared)]
    result = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.engine.check()
    return llm, [list(ids) for ids in result]


def test_every_row_has_the_bits_of_decoding(target, interpreted):
    model = load_model(target, device="cpu", dtype="float32", invariant=None)
    assert model.invariant
    assert self_test(model, page_size=16, rows=6, chunks=(3,)) == []


@pytest.mark.parametrize("last", [[0, 1], [1]], ids=["all logits", "some logits"])
@pytest.mark.parametrize("larger", [1, 4], ids=["its bucket", "a larger bucket"])
def test_padding_and_garbage_in_it_change_no_bit(target, interpreted, monkeypatch, larger, last):
    model = load_model(target, device="cpu", dtype="float32")

    def forward():
        over = new_attention(model, max_seqs=3, max_len=40, page_size=16)
        model.forward(Batch([Span(0, 0, [4, 5, 6, 7]), Span(1, 0, [8])]), over)
        spans = [Span(0, 4, [9, 1, 2], [-1, -1, 0], logits=[0, 1, 2]), Span(1, 1, [3, 2], logits=last)]
        out = model.forward(Batch(spans, hidden=(1, RAW)), over)
        return [out.logits.clone(), out.hidden[1], out.hidden[RAW], *over.pool.keys, *over.pool.values]

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
    ((_, kept),) = model.graphs._graphs.values()
    assert [sizes.rows for sizes, *_ in kept] == [8 * larger]
    assert all(map(torch.equal, got, expected))


@pytest.fixture
def said(caplog):
    """The log; nothing was said in it before."""
    gpu.warn.cache_clear()
    gpu._check.cache_clear()
    with caplog.at_level(logging.WARNING, "forerun"):
        yield caplog
    gpu._check.cache_clear()


@pytest.mark.parametrize(("method", "captured"), [("draft_model", 0), ("draft_model", 2), ("mtp", 0), ("mtp", 5)])
def test_no_memory_for_graphs_is_said_once_and_loses_nothing(target, tmp_path, monkeypatch, said, method, captured):
    made = []

    def fail(self, body):
        if len(made) == captured:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(body)
        return body

    way = {"method": method, "num_speculative_tokens": 2, **drafters[method].example(Path(target), tmp_path)}
    expected = answers(target)[1]
    monkeypatch.setenv("FORERUN_INTERPRET", "1")
    monkeypatch.setattr(graphs.Graphs, "_record", fail)  # the target's, then a draft model's own
    llm, got = answers(target, speculative_config=way)
    assert got == expected
    assert not llm.engine.model.graphs.enabled
    assert said.messages == [
        "no GPU memory for CUDA graphs: rounds run without them, slower; "
        "lower gpu_memory_utilization or kv_cache_memory"
    ]


def test_a_capture_that_cannot_end_is_a_lack_of_memory(monkeypatch):
    """torch's own context does not leave the stream of a capture whose end fails. Other threads may load a model
    meanwhile, and a body runs before on no stream of its own, beside which others could use the same counters."""
    streams = []

    class Capture:
        def __init__(self, graph, pool, capture_error_mode):
            assert capture_error_mode == "thread_local"

        def __enter__(self):
            streams.append("the capture's")

        def __exit__(self, *_):
            raise RuntimeError("operation failed due to a previous error during capture")

    def body():
        if streams:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for name in ("CUDAGraph", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "stream", Mock(side_effect=AssertionError("a stream of its own")))
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    refused(torch.OutOfMemoryError, None, graphs.Graphs(torch.device("cuda"))._record, body)
    assert streams == ["the capture's", torch.cuda.current_stream()]


def test_a_rounds_seconds_are_the_devices_own(monkeypatch):
    """Calls return at once; the device is behind, and its clock is read when it has verified. Nothing later is waited
    for: the round's end is the host's."""
    done, ends, clock = [0.0], iter([10.0, 14.0, 34.0]), iter([5.0, 5.025])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = next(ends)

        def synchronize(self):
            done[0] = self.at

        def elapsed_time(self, later):
            assert later.at <= done[0]
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu, "perf_counter", lambda: next(clock))
    laps = gpu.Laps(torch.device("cuda"))
    laps.mark()
    laps.mark()
    assert laps.seconds() == pytest.approx([0.004, 0.02, 0.001])


@pytest.mark.parametrize("path", ["native", "hf"])
def test_no_memory_for_weights(target, monkeypatch, path):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has more to say")
    fail = Mock(side_effect=full)
    monkeypatch.setattr("forerun.models.load.NativeModel", fail)
    monkeypatch.setattr("forerun.models.run.hf.HFModel", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**29, 2**33))
    refused(ModelError, r"no room for the weights of .*target \(0\.5 GiB of 8\.0 GiB are left\): use quant",
            load_model, target, device="cpu", model_path=path)  # fmt: skip


def test_no_memory_for_caches(target, monkeypatch):
    fail = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("forerun.cache.pool.zeros", fail)
    refused(ConfigError, "the GPU does not give .* MB for KV caches: lower .* or set gpu_memory_utilization",
            LLM, target, device="cpu", speculative_config=None)  # fmt: skip


def test_a_driver_older_than_torchs_cuda(monkeypatch, said):
    old = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver"

    def is_available():
        warnings.warn(f"CUDA initialization: {old}", UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "_lazy_init", Mock(side_effect=RuntimeError(old)))
    assert parse_device(None) == torch.device("cpu")
    assert said.messages == ["runs on the CPU: CUDA initialization: " + old.replace("\n", " ")]
    refused(ConfigError, "device 'cuda' cannot be used: The NVIDIA driver .* too old", parse_device, "cuda")


def test_a_gpu_that_is_not_the_current_one(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda size, device: Mock(device=torch.device(device)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert parse_device("cuda:0") == torch.device("cuda:0")
    refused(ConfigError, "device 'cuda:1' cannot be used: kernels run on GPU 0; choose a GPU with CUDA_VISIBLE",
            parse_device, "cuda:1")  # fmt: skip


@pytest.mark.parametrize(
    ("has_triton", "capability", "reason"),
    [
        (True, (8, 0), None),
        (True, (7, 5), "Forerun's kernels for GPUs need compute capability 8.0, and this GPU has 7.5"),
        (False, (9, 0), "Forerun's kernels for GPUs need Triton: pip install triton"),
    ],
)
def test_gpus_that_our_kernels_do_not_serve(has_triton, capability, reason, monkeypatch, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gpu, "find_spec", lambda name: "there" if has_triton else None)
    for number in (0, 1, 0):
        assert gpu.serves(torch.device("cuda", number)) is (reason is None)
    end = "; torch's own run instead, slower and not the same at every number of rows"
    assert said.messages == ([] if reason is None else [reason + end])


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_and_add_in_one_order():
    """By Triton and ptxas. A chain's and a tree's attention have one order, and so have products with every tile."""
    script = Path(__file__).parents[3] / "lab" / "benchmarks" / "gpu_compile.py"
    ran = subprocess.run([sys.executable, script, "quick", "86"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len({line.split()[0] for line in ran.stdout.splitlines() if line.startswith("_")}) == 8


def no_graphs(asks):
    return f"no CUDA graphs, so that launches take most of the time: {asks} ask the host"


def in_torch(lacks):
    return f"attention runs in torch, slower, since our kernel for GPUs does not serve {lacks}"


@pytest.mark.parametrize(
    ("family", "messages"),
    [
        ("gemma2", []),  # softcaps and windows
        ("gpt_oss", [no_graphs("experts")]),  # sinks and windows
        ("gemma4", [no_graphs("embeddings of layers")]),  # heads of two widths, layers that read others' keys
        ("lfm2", [no_graphs("layers with state")]),
        ("deepseek_v3", [no_graphs("experts and latent attention"), in_torch("latent attention (MLA)")]),
    ],
)
def test_families_as_their_parts_serve(described, monkeypatch, said, family, messages):
    """A prompt and a tree behind it have the CPU's logits, and what is slower is said once."""

    def made():
        model = load_model(described(family), device="cpu", dtype="float32")
        return model, new_attention(model, max_seqs=1, max_len=40, page_size=8)

    def logits():
        model, over = made()
        first = model.forward(Batch([Span(0, 0, [*range(4, 17)], logits=[12], settled=13)]), over).logits.clone()
        tree = Span(0, 13, [7, 8, 9], [-1, -1, 0], logits=[0, 1, 2])
        return over, torch.cat([first, model.forward(Batch([tree]), over).logits])

    _, expected = logits()
    monkeypatch.setenv("FORERUN_INTERPRET", "1")
    over, got = logits()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    made()
    assert [record.message for record in said.records if record.name == "forerun"] == messages
    assert isinstance(over, TritonAttention) is (in_torch("latent attention (MLA)") not in messages)


def test_encoder_decoders_attend_in_torch(tmp_path, monkeypatch, said):
    folder = save_seq2seq("t5", tmp_path / "t5")
    _, expected = answers(folder, invariant=False)
    assert not said.messages
    monkeypatch.setenv("FORERUN_INTERPRET", "1")
    assert answers(folder, invariant=False)[1] == expected
    assert said.messages == [in_torch("encoder-decoders")]


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
