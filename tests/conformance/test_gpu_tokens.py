"""What a GPU would answer, under Triton's interpreter: the tokens and drafts of the engine on a CPU in float32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import answers, check_idle, run

from forerun import LLM, SamplingParams
from forerun.attention.triton import TritonAttention
from forerun.speculate.draft import drafters
from tiny import save_checkpoint, tiny_llama

ON_GPU = pytest.mark.elsewhere("the interpreter: lab/benchmarks/gpu_check.py runs on the GPU itself")
pytestmark = [pytest.mark.slow, *([ON_GPU] if torch.cuda.is_available() else [])]
METHODS = ("draft_model", "eagle", "mtp", "dflash", "cascade", "suffix")
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}


def options(**given):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "seed": 5, **given})


OPTIONS = [
    options(**PENALTIES), options(temperature=0.8, top_k=6), options(temperature=1.2, top_p=0.7),
    options(temperature=0.9, min_p=0.1, seed=6), options(temperature=0.9, logit_bias={40: 3.0, 41: -100.0, 3: 2.0}),
    options(temperature=0.7, top_k=30, top_p=0.9, min_p=0.02, **PENALTIES),
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
    """``on_gpu(way=None)``: an engine as on a GPU."""

    def get(way=None):
        monkeypatch.setenv("FORERUN_INTERPRET", "1")
        built = engine(target, way)
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


@pytest.mark.parametrize("method", METHODS)
def test_every_drafter(target, prompts, tmp_path, on_gpu, method):
    looped = {"logit_bias": {40: 100.0}, "max_tokens": 8} if method == "suffix" else {}
    requests = [(prompts[0], options(**looped)), (prompts[1], options(temperature=0.8, top_p=0.95))]
    way = {"method": method, "num_speculative_tokens": 2, **drafters[method].example(Path(target), tmp_path)}
    plain, expected = run(engine(target), requests), run(engine(target, way), requests)
    assert sum(map(sum, drafted(expected))) > 4
    got = run(on_gpu(way), requests)
    assert answers(got) == answers(plain)
    assert drafted(got) == drafted(expected)


def test_sampling_options(target, prompts, on_gpu):
    requests = [(prompts[1][-2:], replace(each, max_tokens=3)) for each in OPTIONS]
    got = run(on_gpu({"method": "random", "num_speculative_tokens": 1}), requests)
    assert answers(got) == answers(run(engine(target), requests))


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
    while engine.busy:
        engine.step()
    check_idle(engine, [first, third])
    texts = [first.output_ids, second.output_ids[:3], third.output_ids]
    return [*texts, *drafted([first, third])], third.metrics.num_cached_tokens


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_preemption_cancels_and_prefix_hits(target, prompts, tmp_path, on_gpu, method):
    way = {"method": method, "num_speculative_tokens": 2, **drafters[method].example(Path(target), tmp_path)}
    expected, hits = chat(engine(target, way), prompts)
    got, cached = chat(on_gpu(way), prompts)
    assert got == expected
    assert cached == hits >= 16
