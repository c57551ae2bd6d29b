"""What an ``LLM`` holds is given back: by ``close`` and ``with`` at once, and without them once nobody refers to it."""

import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from forerun import LLM, BeamSearchParams, ConfigError, SamplingParams, StructuredOutputsParams
from forerun.engine import auto
from forerun.speculate.draft import drafters
from forerun.speculate.length.adaptive import Adaptive
from gguf_files import write_model
from held import held, new_block
from refusals import refused

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["abab the cat", [5, 9, 12, 5, 9]]


@contextmanager
def uncollected():
    """Only what nothing refers to is freed within: cycles stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parts(llm):
    """Weak references to what takes memory."""
    engine = llm.engine
    large = [engine, *(model for model in (llm.model, *engine.router.models())), *engine.pools]
    tensors = [tensor for pool in engine.pools for tensor in (*pool.keys, *pool.values)]
    return [weakref.ref(each) for each in (*large, *tensors)]


def alive(references):
    return [type(reference()).__name__ for reference in references if reference() is not None]


def used(model, prompts=PROMPTS, **options):
    llm = LLM(model, **options)
    llm.generate(prompts, PARAMS)
    return llm


def left(*arguments, **options):
    with uncollected():
        llm = used(*arguments, **options)
        references = parts(llm)
        del llm
        return alive(references)


@pytest.mark.parametrize("method", sorted(drafters))
def test_a_deleted_llm_is_gone_at_once(method, tiny_target, tmp_path):
    config = {"method": method, **drafters[method].example(Path(tiny_target), tmp_path), "length": "adaptive"}
    assert left(tiny_target, speculative_config=config) == []


@pytest.mark.parametrize("options", [{"model_path": "hf"}, {"page_size": 16}, {"invariant": False}])
def test_whatever_runs_the_model(options, tiny_target):
    assert left(tiny_target, speculative_config=None, **options) == []


@pytest.mark.parametrize(("fixture", "kind"), [("seq2seq", "t5"), ("hybrid", "lfm2")])
@pytest.mark.parametrize("page_size", [None, 16])
def test_other_kinds_of_models(fixture, kind, page_size, request):
    folder = str(request.getfixturevalue(fixture)(kind))
    assert left(folder, [[5, 9, 12]], speculative_config=None, page_size=page_size) == []


@pytest.mark.slow
def test_processes_of_other_ranks_end(tiny_target):
    with uncollected():
        llm = used(tiny_target, speculative_config=None, tensor_parallel_size=2)
        processes = [rank.process for rank in llm.model.team.others]
        assert [process.poll() for process in processes] == [None]
        del llm
        assert [process.poll() for process in processes] == [0]


def test_beams_grammars_and_what_auto_remembers(tiny_target, tmp_path, monkeypatch):
    """The policy is remembered when the engine ends, and so it must not keep the engine until then."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(auto, "LARGE", 0)
    monkeypatch.setattr(Adaptive, "state", lambda policy: {"kept": True})
    chosen = StructuredOutputsParams(choice=["the cab", "abba"])
    model = str(write_model(tmp_path / "model.gguf"))
    with uncollected():
        llm = LLM(model, speculative_config={"method": "suffix", "length": "adaptive"})
        llm.generate(["the"], SamplingParams(structured_outputs=chosen, max_tokens=8))
        llm.beam_search(["the"], BeamSearchParams(beam_width=3, max_tokens=8))
        references = parts(llm)
        assert not list(tmp_path.glob("lengths/*.json"))
        del llm
        assert alive(references) == []
    assert [json.loads(path.read_text())["value"] for path in tmp_path.glob("lengths/*.json")] == [{"kept": True}]


def test_what_is_learnt_about_the_bundled_pair_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(Adaptive, "state", lambda policy: {"kept": True})
    with LLM() as llm:
        llm.generate(PROMPTS, PARAMS)
    assert [json.loads(path.read_text())["value"] for path in tmp_path.glob("lengths/*.json")] == [{"kept": True}]


def test_close_frees_at_once_whoever_still_has_the_llm(tiny_target):
    with uncollected():
        with used(tiny_target, speculative_config={"method": "ngram"}) as llm:
            references = parts(llm)
            assert llm.generate(PROMPTS, PARAMS)
        assert alive(references) == []
    for work in (lambda: llm.generate(PROMPTS, PARAMS), lambda: llm.model, lambda: llm.engine):
        refused(ConfigError, "this LLM is closed", work)
    llm.close()
    assert llm.encode("abab")[0] == "abab"


def test_an_error_within_closes_too(tiny_target):
    with pytest.raises(ZeroDivisionError), LLM(tiny_target, speculative_config=None) as llm:
        raise ZeroDivisionError
    refused(ConfigError, "this LLM is closed", llm.generate, PROMPTS)


def test_close_waits_for_a_call_of_another_thread(tiny_target):
    llm = LLM(tiny_target, speculative_config=None)
    began = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        results = threads.submit(llm.generate, PROMPTS, PARAMS, on_update=lambda update: began.set())
        assert began.wait(60)
        llm.close()
    assert [len(output.outputs[0].token_ids) for output in results.result()] == [12, 12]
    refused(ConfigError, "on_update must not call its own", _close_within, tiny_target)


def _close_within(folder):
    llm = LLM(folder, speculative_config=None)
    llm.generate(PROMPTS, PARAMS, on_update=lambda update: llm.close())


def test_many_in_turn_take_the_memory_of_one(tiny_target, monkeypatch):
    """By objects and bytes of each; an LLM that stays has 300 and 2.6 million here."""
    config = {"method": "draft_model", "model": tiny_target, "length": "adaptive"}
    new_block(monkeypatch)
    sizes = []
    for count in (2, 12):
        for _ in range(count):
            used(tiny_target, speculative_config=config, page_size=16)
        sizes.append(held())
    grown = sizes[1].growth(sizes[0], 12)
    assert grown.objects < 40
    assert grown.allocated < 50_000
