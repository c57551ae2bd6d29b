"""What a GPU would answer, under Triton's interpreter: the tokens and drafts of the engine on a CPU in float32."""

from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from forerun import LLM, SamplingParams, StructuredOutputsParams
from forerun.attention.triton import TritonAttention
from forerun.engine.trials import trials
from forerun.speculate.draft import drafters
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.dflash import TrainedDFlash
from harness import answers, check_idle, run, until_idle
from tiny import ALPHABET, save_checkpoint, tiny_llama
from waits import HostWaits

ON_GPU = pytest.mark.elsewhere("the interpreter: lab/benchmarks/gpu_check.py runs on the GPU itself")
pytestmark = [pytest.mark.slow, *([ON_GPU] if torch.cuda.is_available() else [])]
ON_DEVICE = ("draft_model", "eagle", "mtp", "dflash")
BLOCK = {"heads": 2, "kv_heads": 1, "width": 16, "inner_size": 48}
BLOCKS = {
    "dflash": {**BLOCK, "draft_vocab_size": 70},
    "dflash of Domino": {**BLOCK, "domino": {"state": 8, "inner": 8, "first": 1}},
}
"""Options of blocks in which no choice depends on another, and in which one reads all before."""
WAITS = {
    "plain": 1, **dict.fromkeys((*ON_DEVICE, "suffix", "cascade", "eagle without graphs"), 1),
    "dflash of all parts": 1, "dflash of Domino": 1, "dflash with a threshold": 2, "draft_model with a threshold": 2,
}  # fmt: skip
"""How often the host waits for the GPU in a round of two requests, at most, by drafter."""
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}


def options(**given):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "seed": 5, **given})


ON_THE_GPU = [
    options(temperature=0.8, top_k=6, n=2), options(temperature=1.2, top_p=0.7, logprobs=2),
    options(temperature=0.9, min_p=0.1, seed=6), options(temperature=0.7, top_k=30, top_p=0.9, min_p=0.02, seed=7),
    options(logprobs=0),
]  # fmt: skip
ON_THE_HOST = [
    options(**PENALTIES), options(temperature=0.9, logit_bias={40: 3.0, 41: -100.0, 3: 2.0}),
    options(temperature=0.7, top_k=30, top_p=0.9, min_p=0.02, **PENALTIES),
    options(temperature=0.8, structured_outputs=StructuredOutputsParams(regex="[a-f]{9}")),
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = tiny_llama(layers=1, num_attention_heads=2, num_key_value_heads=1)
    return save_checkpoint(model, tmp_path_factory.mktemp("gpu") / "target")


def engine(target, way=None, **more):
    limits = {"max_model_len": 96, "page_size": 8, "max_num_seqs": 6, **more}
    return LLM(target, device="cpu", dtype="float32", speculative_config=way, **limits).engine


@pytest.fixture
def on_gpu(target, monkeypatch):
    """``on_gpu(way=None, **more)``: an engine as on a GPU."""

    def get(way=None, **more):
        monkeypatch.setenv("FORERUN_INTERPRET", "1")
        built = engine(target, way, **more)
        assert isinstance(built.target.attention, TritonAttention)
        assert built.identity
        return built

    return get


@pytest.fixture(scope="module")
def prompts(target):
    """What the model says and would go on with, so that its text can be looked up."""
    return [job.text for job in run(engine(target), [("hello", options(max_tokens=16)), ("a", options(max_tokens=12))])]


def drafted(jobs):
    return [(job.metrics.num_draft_tokens, job.metrics.num_accepted_draft_tokens) for job in jobs]


def way_of(method, target, folder):
    if method == "plain":
        return None
    name, *more = method.split()
    way = {"method": name, "num_speculative_tokens": 2, **drafters[name].example(Path(target), folder)}
    if method in BLOCKS:
        torch.manual_seed(0)
        TrainedDFlash(Sizes(32, len(ALPHABET), 1, 4, BLOCKS[method])).save(folder)
    return {**way, "confidence_threshold": 0.88 if name == "dflash" else 0.02} if "threshold" in more else way


@pytest.mark.parametrize("method", WAITS)
def test_every_drafter_and_its_waits(target, prompts, tmp_path, on_gpu, monkeypatch, method):
    looped = {"logit_bias": {40: 100.0}} if method == "suffix" else {}
    requests = [
        (prompts[0], options(max_tokens=9, **looped)),
        (prompts[1], options(temperature=0.8, top_p=0.95, max_tokens=9)),
    ]
    way = way_of(method, target, tmp_path)
    plain, expected = run(engine(target), requests), run(engine(target, way), requests)
    assert method == "plain" or sum(map(sum, drafted(expected))) > 4
    built, waits, found = on_gpu(way, enforce_eager="without graphs" in method), HostWaits(monkeypatch), []

    def see(result):
        if len(built.jobs) == 2 and (way is None or any(map(len, result.drafts))):  # nobody reads a prompt or ends
            found.append([*waits.found])
        waits.found.clear()

    built.on_round = see
    with waits:
        got = run(built, requests)
    assert answers(got) == answers(plain)
    assert drafted(got) == drafted(expected)
    assert max(map(len, found)) == WAITS[method], found


@pytest.mark.parametrize("method", ["draft_model", "eagle with a threshold", "dflash with a threshold"])
def test_rounds_that_are_timed_wait_as_others(target, tmp_path, on_gpu, monkeypatch, method):
    """Also where a verification has more rows than the drafter drafts. With a threshold the host reads the draft."""
    built, waits = on_gpu(way_of(method, target, tmp_path)), HostWaits(monkeypatch)
    with waits, trials(built, 2) as (time_round, _):
        for depth, rows in ((0, 1), (2, 3), (1, 4)):
            waits.found.clear()
            timed = time_round(method.partition(" ")[0], depth, rows)
            assert (timed.rows, timed.depth) == (2 * rows, depth)
            assert len(waits.found) == 1 + (depth > 0 and "threshold" in method)


@pytest.fixture
def compiled(monkeypatch):
    """What Triton would compile on a GPU for the calls so far."""
    found, binders, interpret = set(), {}, InterpretedFunction.run

    def run(kernel, *given, grid, warmup, **options):
        if kernel not in binders:
            jitted = JITFunction(kernel.fn, **kernel.kwargs)
            backend = CUDABackend(GPUTarget("cuda", 90, 32))
            binders[kernel] = create_function_from_signature(jitted.signature, jitted.params, backend)
        found.add((kernel.__name__, *map(str, binders[kernel](*given, **options)[1:])))
        return interpret(kernel, *given, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


@pytest.mark.parametrize("method", ["draft_model", "dflash of all parts"])
def test_other_lengths_and_more_requests_need_no_other_kernel(target, tmp_path, on_gpu, compiled, method):
    built = on_gpu(way_of(method, target, tmp_path))
    run(built, [("hello, hello", options(temperature=0.8))])
    known = {*compiled}
    for lengths in ([5, 7], [11, 9, 2], [3], [8]):
        run(built, [("hello, hello"[:length], options(temperature=0.8)) for length in lengths])
    assert compiled == known
    assert len({name for name, *_ in known}) >= 7


@pytest.mark.parametrize(
    "method",
    [
        "eagle", "dflash of all parts",  # a chain step by step, and a block
        *(pytest.param(method, marks=pytest.mark.full) for method in ("draft_model", "mtp", "dflash")),
    ],
)  # fmt: skip
def test_sampling_options(target, prompts, tmp_path, on_gpu, method):
    sets = [[(prompts[1][-2:], each) for each in chosen] for chosen in (ON_THE_GPU, ON_THE_HOST)]
    plain = engine(target)
    expected = [run(plain, requests) for requests in sets]
    built = on_gpu(way_of(method, target, tmp_path))
    for jobs, requests in zip(expected, sets):
        got = run(built, requests)
        assert answers(got) == answers(jobs)
        assert sum(map(sum, drafted(got))) > 4
        for mine, its in zip([e for job in got for e in job.logprobs], [e for job in jobs for e in job.logprobs]):
            assert (mine.token, mine.rank, [*mine.top]) == (its.token, its.rank, [*its.top])
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


def chat(engine, prompts):
    """Two answers, one of which is preempted and the other cancelled, then a second turn; its engine is idle again."""
    encode = engine.tokenizer.encode
    first, second = (engine.add(encode(text), options(max_tokens=7, temperature=0.8))[0] for text in prompts)
    preempted = False
    while engine.busy:
        engine.step()
        if first.sequence.num_output > 1 and not preempted:
            preempted = True
            engine.scheduler.preempt(first.sequence)
        if second.sequence.num_output > 2 and second.finish is None:
            engine.abort(second)
    assert first.metrics.preemptions == 1
    (third,) = engine.add(first.sequence.tokens + encode(" b"), options(max_tokens=3))
    until_idle(engine)
    check_idle(engine, [first, third])
    texts = [first.output_ids, second.output_ids[:3], third.output_ids]
    return [*texts, *drafted([first, third])], third.metrics.num_cached_tokens


@pytest.mark.parametrize("method", [*ON_DEVICE, "dflash of all parts"])
def test_preemption_cancels_and_prefix_hits(target, prompts, tmp_path, on_gpu, method):
    way = way_of(method, target, tmp_path)
    expected, hits = chat(engine(target, way), prompts)
    got, cached = chat(on_gpu(way), prompts)
    assert got == expected
    assert cached == hits >= 16
